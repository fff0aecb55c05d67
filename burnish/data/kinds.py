"""The registry of data that a recipe selects by ``kind`` (job ``rm``). The data of the other jobs
have one kind each."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from burnish.data.preferences.config import PairsDataConfig
from burnish.data.rated.config import ClassesDataConfig, ScoresDataConfig, recognized_kind
from burnish.data.steps.config import StepsDataConfig


def _with_kind(value: Any) -> Any:
    """Add the kind of rows to a data section without one."""
    if not isinstance(value, dict) or "kind" in value:
        return value
    return {"kind": recognized_kind(value), **value}


RewardRows = PairsDataConfig | StepsDataConfig | ScoresDataConfig | ClassesDataConfig


def kind_with_loss(loss: str) -> str:
    """Return the kind of rows that a loss of a reward model needs."""
    kinds = [rows for rows in get_args(RewardRows) if loss in rows.losses]
    return str(get_args(kinds[0].model_fields["kind"].annotation)[0])


RewardDataConfig = Annotated[
    Annotated[RewardRows, Field(discriminator="kind")], BeforeValidator(_with_kind)
]
