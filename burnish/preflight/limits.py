"""Limits of a model that its recipe must respect: the length limit of a data section is lowered to
the number of positions, and sampling parameters are checked against the vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeVar

from burnish.config import JobConfig
from burnish.config.eval_section import EvalSection, eval_place
from burnish.config.model import ModelConfig
from burnish.config.roles import readers_of_rows
from burnish.config.rollout import EvalConfig, SamplingConfig
from burnish.config.vllm_arguments import vllm_sampling_problems
from burnish.data.config import DataConfig
from burnish.models.load import ModelError, describe, hf_config, load_tokenizer, num_positions
from burnish.models.teacher import by_id

log = logging.getLogger("burnish")

OWN_IDS = ("reference", "critic")
"""Roles that read the policy's token ids and compare nothing over the vocabulary."""

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


def limited(config: JobConfig, data: Data, *, field: str = "data") -> Data:
    """Return a data section with its length limit within the positions of every model that reads
    its rows. ``field``: name of the section in the recipe. Raises ModelError, see
    :func:`within_positions`."""
    models, new_tokens, _ = config.section_limits(field)
    for model in models:
        data = within_positions(data, model, new_tokens=new_tokens, field=field)
    return data


def held_out_sets(config: JobConfig, evaluation: EvalSection[Data] | None) -> dict[str, Data]:
    """Return the evaluation sets by name, :func:`limited`. The name of ``eval.data`` is empty."""
    sections = {} if evaluation is None else evaluation.by_name
    return {name: limited(config, data, field=eval_place(name)) for name, data in sections.items()}


def vocabulary_problems(config: JobConfig) -> Iterator[str]:
    """Yield an error for each sampling parameter that does not fit the vocabulary of the model, and
    for each model that reads its token ids as other tokens."""
    yield from _sampling_problems(config)
    yield from _other_tokens(config)


def _other_tokens(config: JobConfig) -> Iterator[str]:
    """Yield an error for each reference or critic in which an id of the policy stands for another
    token, or has no embedding. (A teacher's vocabulary is compared where it is built.)"""
    roles = [role for role in readers_of_rows(config.roles()) if role.kind in OWN_IDS]
    roles = [role for role in roles if not _same_files(role.model, config.model)]
    if not roles:
        return
    tokenizer = load_tokenizer(config.model)
    tokens, special = by_id(tokenizer), set(tokenizer.get_added_vocab().values())
    for role in roles:
        key, name = f"{role.kind}.model", describe(role.model)
        size = vocab_size_of(role.model)
        missing = [i for i in tokens if size is not None and i >= size]
        if missing := [i for i in missing if i != tokenizer.pad_token_id]:
            yield (
                f"{key}: {name} has {size} tokens, but the policy {describe(config.model)} has "
                f"{len(tokens)}: the model could not read token {min(missing)} "
                f"({tokens[min(missing)]!r}). Use a model with the policy's tokens, such as "
                "the one that the policy was trained from, after its embeddings were resized"
            )
            continue
        try:
            others = load_tokenizer(role.model)
        except ModelError:  # a folder of weights alone: only its size is known
            continue
        other = by_id(others)
        differ = sorted(i for i in tokens.keys() & other.keys() if tokens[i] != other[i])
        if set(differ) <= special | set(others.get_added_vocab().values()):
            if differ:
                log.warning(
                    "%s: %d special tokens of %s have other names than in the policy (token %d is "
                    "%r, in the policy %r): it reads their ids as what it learned for them",
                    *(key, len(differ), name, differ[0], other[differ[0]], tokens[differ[0]]),
                )
            continue
        first = next(i for i in differ if i not in special)
        yield (
            f"{key}: {name} has other tokens than the policy {describe(config.model)}: token "
            f"{first} is {other[first]!r}, and {tokens[first]!r} in the policy, so it would read "
            "other texts. Use a model with the policy's tokenizer"
        )


def _same_files(model: ModelConfig, other: ModelConfig) -> bool:
    """Return whether two models are read from the same files, except for adapters."""
    files, others = ((m.path, m.gguf_file, m.scratch, m.tokenizer_override) for m in (model, other))
    return files == others


def _sampling_problems(config: JobConfig) -> Iterator[str]:
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
