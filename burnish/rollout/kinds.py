"""The registry of rollout engines."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from burnish.rollout.local.config import LocalEngine
from burnish.rollout.servers.config import VllmServers
from burnish.rollout.vllm.config import VllmEngine


def _kind_left_out(value: Any) -> Any:
    """Expand a name to ``{kind: name}``; use the local engine if no kind is given."""
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "local", **value} if isinstance(value, dict) else value


RolloutEngineConfig = Annotated[
    Annotated[LocalEngine | VllmEngine | VllmServers, Field(discriminator="kind")],
    BeforeValidator(_kind_left_out),
]
