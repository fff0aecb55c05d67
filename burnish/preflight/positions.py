"""Lower the length limit of a data section to the number of positions of its model."""

from __future__ import annotations

import logging
from typing import TypeVar

from burnish.config.eval_section import EvalSection, eval_place
from burnish.config.model import ModelConfig
from burnish.data.config import DataConfig
from burnish.models.load import ModelError, describe, num_positions

log = logging.getLogger("burnish")

Data = TypeVar("Data", bound=DataConfig)


def within_positions(
    data: Data, model: ModelConfig, *, new_tokens: int = 0, field: str = "data"
) -> Data:
    """Return ``data`` with its length limit lowered to the number of positions of the model.
    ``overlong`` then handles longer rows at load time instead of an error in the middle of the run.
    ``field``: name of the data section in the recipe, for messages. Raises ModelError if
    ``new_tokens`` leaves no room for a prompt."""
    limit = num_positions(model)
    if limit is None or data.length_limit + new_tokens <= limit:
        return data
    if limit <= new_tokens:
        raise ModelError(
            f"responses of up to {new_tokens} tokens (generate_max_len; of episodes, "
            f"episodes.max_tokens) leave no room for a prompt: {describe(model)} supports rows of "
            f"at most {limit} tokens; lower that key, or use a model with more positions"
        )
    log.warning(
        "%s.%s is lowered to %d: %s supports rows of at most %d tokens",
        *(field, data.length_key, limit - new_tokens, describe(model), limit),
    )
    return data.model_copy(update={data.length_key: limit - new_tokens})


def held_out_sets(evaluation: EvalSection[Data] | None, *models: ModelConfig) -> dict[str, Data]:
    """Return the evaluation sets by name, with their length limits within the positions of all
    ``models``. The name of ``eval.data`` is empty."""
    sections = {} if evaluation is None else evaluation.by_name
    for model in models:
        for name, data in sections.items():
            sections[name] = within_positions(data, model, field=eval_place(name))
    return sections
