"""Limits of a model that its recipe must respect: the length limit of a data section is lowered to
the number of positions, and sampling parameters are checked against the vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeVar

from burnish.config import JobConfig
from burnish.config.eval_section import EvalSection, eval_place
from burnish.config.model import ModelConfig
from burnish.config.rollout import EvalConfig, SamplingConfig
from burnish.config.vllm_arguments import vllm_sampling_problems
from burnish.data.config import DataConfig
from burnish.models.load import ModelError, describe, hf_config, load_tokenizer, num_positions

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


def sampling_problems(config: JobConfig) -> Iterator[str]:
    """Yield an error for each sampling parameter that does not fit the vocabulary of the model."""
    vocab_size = vocab_size_of(config.model)
    if vocab_size is None:
        return
    sampling, evaluation = config.paths_of(SamplingConfig), config.paths_of(EvalConfig)
    stop_ids = {key: section.stop_token_ids for key, section in sampling}
    stop_ids |= {key: section.stop_token_ids or () for key, section in evaluation}
    for key, tokens in stop_ids.items():
        for token in tokens:
            if token >= vocab_size:
                yield (
                    f"{key}.stop_token_ids contains {token}, but the model has only the tokens 0 "
                    f"to {vocab_size - 1}, so it would end no response; remove it"
                )
    job = config.resolve()
    if job.rollout is None or job.trained is None or job.rollout.engine.uses_transformers:
        return
    problems = vllm_sampling_problems(
        job.rollout.temperature or 0.0, num_recorded=job.trained.kept_ids, max_recorded=vocab_size
    )
    yield from (f"rollout.{problem}" for key, problem in problems if key == "top_k")


def vocab_size_of(model: ModelConfig) -> int | None:
    """Return the number of tokens of a model; None if it cannot be read from its config alone."""
    if model.scratch is not None:
        return len(load_tokenizer(model))
    model_config = hf_config(model)
    text = {} if model_config is None else model_config.get_text_config().to_dict()
    size = text.get("vocab_size")
    return size if isinstance(size, int) else None
