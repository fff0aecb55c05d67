"""Checks of a recipe's sampling parameters against the vocabulary of its model, before a model is
loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from burnish.config import JobConfig
from burnish.config.model import ModelConfig
from burnish.config.rollout import EvalConfig, SamplingConfig
from burnish.config.vllm_arguments import vllm_sampling_problems
from burnish.models.load import hf_config, load_tokenizer


def sampling_problems(config: JobConfig) -> Iterator[str]:
    """Yield an error for each sampling parameter that does not fit the vocabulary of the model."""
    vocab_size = vocab_size_of(config.model)
    if vocab_size is None:
        return
    for key, tokens in _stop_tokens(config).items():
        for token in tokens:
            if token >= vocab_size:
                yield (
                    f"{key} contains {token}, but the model has only the tokens 0 to "
                    f"{vocab_size - 1}, so it would end no response; remove it"
                )
    job = config.resolve()
    if job.rollout is None or job.trained is None or job.rollout.engine.uses_transformers:
        return
    problems = vllm_sampling_problems(
        job.rollout.temperature or 0.0, num_recorded=job.trained.kept_ids, max_recorded=vocab_size
    )
    yield from (f"rollout.{problem}" for key, problem in problems if key == "top_k")


def _stop_tokens(config: JobConfig) -> Mapping[str, Sequence[int]]:
    """Return the token ids that end a response, by key."""
    sampling, evaluation = config.paths_of(SamplingConfig), config.paths_of(EvalConfig)
    ids = {key: section.stop_token_ids for key, section in sampling}
    ids |= {key: section.stop_token_ids or () for key, section in evaluation}
    return {f"{key}.stop_token_ids": tokens for key, tokens in ids.items()}


def vocab_size_of(model: ModelConfig) -> int | None:
    """Return the number of tokens of a model; None if it cannot be read from its config alone."""
    if model.scratch is not None:
        return len(load_tokenizer(model))
    model_config = hf_config(model)
    text = {} if model_config is None else model_config.get_text_config().to_dict()
    size = text.get("vocab_size")
    return size if isinstance(size, int) else None
