"""Rewards from a reward model in this process.

A reward model scores the last token of prompt + response. A process reward model scores the last
token of every step, and the step scores are aggregated to one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from burnish.algorithms.process import aggregate_steps
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.data.decoding import Decode, response_decoder
from burnish.data.sources import DataError
from burnish.data.steps.encode import separator_problem
from burnish.models.load import (
    ModelError,
    describe,
    hf_config,
    load_tokenizer,
    num_positions,
    resolve_device,
)
from burnish.models.scalar_model import scores_last_token
from burnish.models.value_head import load_scalar_model
from burnish.rewards.base import Reward, RewardError, RewardInput, SampleError
from burnish.rewards.build import RewardInputs
from burnish.rewards.model.config import ModelReward, StepAggregation
from burnish.rewards.model.rows import Encode, Pair, reward_encoder
from burnish.train.base import TrainEngine
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import rows_to_batch, steps_to_batch


class ModelScorer:
    """A reward that scores prompt + response with a reward model in this process.

    Implements ``rewards.base.Reward``.
    """

    def __init__(
        self,
        name: str,
        engine: TrainEngine,
        encode: Encode,
        scale: tuple[float, float] = (0.0, 1.0),
        *,
        max_len: int | None = None,
    ) -> None:
        """``scale``: (mean, std) that normalizes scores: ``(score - mean) / std``. ``max_len``:
        longest row in tokens that the model reads; None: no limit."""
        self.name, self.engine, self.encode, self.scale = name, engine, encode, scale
        self.max_len = max_len

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """Return one score per item, or an error if the model cannot read its row."""
        return self.score_pairs(items, self._scores)

    def score_pairs(
        self, items: Sequence[RewardInput], scores_of: Callable[[Sequence[Pair]], list[float]]
    ) -> list[float | SampleError]:
        """Return the normalized ``scores_of`` the encoded items, and an error for each conversation
        that cannot be rendered, and for each row longer than the limit."""
        fitting: list[Pair] = []
        errors: list[SampleError | None] = []
        for item in items:
            try:
                pair = self.encode(item)
            except DataError as error:
                advice = "see above, for the reward's model"
                problem = f"cannot render the conversation: {error}"
                errors.append(SampleError(self, item, problem, advice=advice))
                continue
            count = sum(map(len, pair))
            if self.max_len is None or count <= self.max_len:
                fitting.append(pair)
                errors.append(None)
                continue
            problem = f"got a row of {count} tokens, but its model reads rows of up to "
            advice = "shorten prompts and responses, or use a reward model with more positions"
            errors.append(SampleError(self, item, f"{problem}{self.max_len}", advice=advice))
        mean, std = self.scale
        scores = iter(scores_of(fitting) if fitting else [])
        return [(next(scores) - mean) / std if error is None else error for error in errors]

    def _scores(self, pairs: Sequence[Pair]) -> list[float]:
        return score_rows(self.engine, [[*prompt, *response] for prompt, response in pairs])

    def close(self) -> None:
        """Do nothing: no process was started."""


class ProcessScorer:
    """A reward that scores every step of a response with a process reward model in this process.

    Step scores in [0, 1] are aggregated to one number, which is then normalized by the scale of
    ``inner``. Implements ``rewards.base.Reward`` and ``HasMeans``.
    """

    def __init__(
        self,
        inner: ModelScorer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        separator: str,
        aggregation: StepAggregation,
    ) -> None:
        """``inner``: the model with its encoding and scale. ``tokenizer``: the tokenizer of the
        encoded token ids. ``aggregation``: the aggregation of step scores."""
        self.name, self.inner, self.tokenizer = inner.name, inner, tokenizer
        self.separator, self.aggregation = separator, aggregation
        self._steps, self._responses = 0, 0

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """Return one score per item, or an error if the model cannot read its row. An empty
        response is one step that ends with the prompt."""
        return self.inner.score_pairs(items, self._scores)

    def _scores(self, pairs: Sequence[Pair]) -> list[float]:
        rows = [[*prompt, *response] for prompt, response in pairs]
        ends = [
            [len(prompt) + end for end in step_ends(self.tokenizer, response, self.separator)]
            for prompt, response in pairs
        ]
        lens = [len(prompt) for prompt, _ in pairs]
        batch = steps_to_batch(rows, ends, prompt_lens=lens)
        mask = batch.action_mask
        probs = self.inner.engine.values(batch)[mask].sigmoid()
        scores = aggregate_steps(
            probs, batch.row_ids[mask], num_rows=len(rows), how=self.aggregation
        )
        self._steps += int(mask.sum())
        self._responses += len(rows)
        as_list: list[float] = scores.to(torch.float64).tolist()
        return as_list

    def take_means(self) -> dict[str, tuple[float, float]]:
        """Return ``steps``: (number of steps, number of responses) since the last call."""
        means = {"steps": (float(self._steps), float(self._responses))}
        self._steps = self._responses = 0
        return means

    def close(self) -> None:
        """Do nothing: no process was started."""


def score_rows(engine: TrainEngine, rows: Sequence[Sequence[int]]) -> list[float]:
    """Return the score of each row of token ids. No row may be empty."""
    masks = [[False] * (len(row) - 1) + [True] for row in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[0] * len(rows))
    scores: list[float] = engine.values(batch)[batch.offsets[1:] - 1].tolist()
    return scores


def load_model_reward(
    config: ModelReward,
    policy_tokenizer: PreTrainedTokenizerBase,
    make_engine: Callable[[EngineSpec], TrainEngine],
) -> ModelScorer | ProcessScorer:
    """Load the reward model of a recipe entry, in an engine built by ``make_engine``.

    It scores rows like those that it was trained on: the sampled token ids if they are such a row,
    else prompt and response encoded by its own tokenizer (``rows.py``). For a classifier that was
    not exported by Burnish, conversations go to the last token of their rendering. If
    ``process_reward`` is set in its config, every step is scored. Raises ModelError if the model
    has no trained head.
    """
    metadata = metadata_of(config.model)
    _check_steps(config, metadata)
    spec = _spec(config.model, micro_batch_size=config.micro_batch_size)
    spec = replace(spec, output_weights=config.output_weights)
    tokenizer = load_tokenizer(config.model)
    aggregation = (config.step_aggregation or "min") if metadata.get("process_reward") else None
    scale = _scale(config.model, metadata, aggregation) if config.normalize else (0.0, 1.0)
    name = config.name or "model"
    separator = None
    if aggregation is not None:
        separator = str(config.step_separator or metadata["step_separator"])
        if problem := separator_problem(tokenizer, separator):
            raise ModelError(f"reward {name!r}, {describe(config.model)}: {problem}")
    limit = num_positions(config.model)
    encode = reward_encoder(
        tokenizer,
        policy_tokenizer,
        name,
        step_separator=separator,
        to_last_token=scores_last_token(metadata),
        pad_id=_pad_id(config.model),
        max_len=limit,
    )
    reward = ModelScorer(name, make_engine(spec), encode, scale, max_len=limit)
    if aggregation is None or separator is None:
        return reward
    return ProcessScorer(reward, tokenizer, separator=separator, aggregation=aggregation)


def metadata_of(model: ModelConfig) -> dict[str, Any]:
    """Return the export metadata in the model's own config; empty if it cannot be read."""
    model_config = hf_config(model)
    return {} if model_config is None else model_config.to_dict()


def _pad_id(model: ModelConfig) -> int | None:
    """Return the pad token in the model's own config. transformers' classifiers score the last
    token that is another one, whatever the tokenizer's pad token is."""
    model_config = hf_config(model)
    if model_config is None:
        return None
    pad_id: int | None = model_config.get_text_config().to_dict().get("pad_token_id")
    return pad_id


def _check_steps(config: ModelReward, metadata: Mapping[str, Any]) -> None:
    """Raise ModelError if the step settings of the recipe do not fit the model."""
    process = bool(metadata.get("process_reward"))
    if process and not (config.step_separator or metadata.get("step_separator")):
        raise ModelError(
            f"{describe(config.model)} is a process reward model without a step_separator in its "
            "config; set the reward's step_separator"
        )
    for name in ("step_aggregation", "step_separator"):
        value = config.model_dump()[name]
        if value is not None and not process:
            raise ModelError(
                f"{name}={value!r} is for process reward models, but {describe(config.model)} is "
                "not marked as one (process_reward in its config.json); train one with burnish "
                f"rm and data.kind=steps, or remove {name}"
            )


def _scale(
    model: ModelConfig, metadata: Mapping[str, Any], aggregation: StepAggregation | None
) -> tuple[float, float]:
    """Return (mean, std) of the model's scores from its config.

    Raises ModelError if the config has none.
    """
    names = "reward_mean and reward_std"
    mean, std = metadata.get("reward_mean"), metadata.get("reward_std")
    if aggregation is not None:
        names = f"process_reward_stats with {aggregation!r}"
        mean, std = (metadata.get("process_reward_stats") or {}).get(aggregation, (None, None))
    if mean is None or not std:
        raise ModelError(
            f"{describe(model)} has no {names} in its config (found {mean} and {std}), which "
            "normalize=true needs; train it with burnish rm and eval.data and export it, write the "
            "two numbers into its config.json, or remove normalize"
        )
    return float(mean), float(std)


def load_reward_engine(
    model: ModelConfig,
    *,
    dtype: Dtype,
    device: str,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
) -> TorchTrainEngine:
    """Load a reward model into a frozen engine with the role ``reward``.

    A micro-batch has ``micro_batch_size`` rows, or rows with ``max_tokens`` tokens in total. Raises
    ModelError if the model has no trained head.
    """
    scalar = load_scalar_model(model, dtype=dtype, device=resolve_device(device))
    spec = _spec(
        model,
        micro_batch_size=micro_batch_size,
        max_tokens=max_tokens,
        precision=PrecisionConfig(dtype=dtype),
    )
    return TorchTrainEngine(scalar, spec)


def _spec(
    model: ModelConfig,
    *,
    micro_batch_size: int | None,
    max_tokens: int | None = None,
    precision: PrecisionConfig = PrecisionConfig(),
) -> EngineSpec:
    train = TrainConfig(layout="packed", max_tokens_per_micro_batch=max_tokens)
    role = TrainRole.alone("reward", train, model, precision=precision, trainable=False)
    return EngineSpec(role, micro_batch_size=micro_batch_size)


def step_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], separator: str) -> list[int]:
    """Return the indices in response ``ids`` [T] at which a step ends, in order.

    A step ends at the token that completes a separator, if there is text since the previous
    separator. The last step ends at the last token of the response. Tokens without text after the
    last separator (an end token, spaces) belong to the step before it. A response with at most one
    step has one index, T - 1.
    """
    decode = response_decoder(tokenizer, shown=separator)
    text = decode(ids)
    ends: list[int] = []
    begin, pending = 0, False
    while (separator_begin := text.find(separator, begin)) >= 0:
        pending = pending or bool(text[begin:separator_begin].strip())
        begin = separator_begin + len(separator)
        if pending:
            ends.append(_token_of(decode, ids, begin))
            pending = False
    last = len(ids) - 1
    if not text[begin:].strip() and ends:
        ends.pop()
    return [*(end for end in dict.fromkeys(ends) if end < last), last]


def _token_of(decode: Decode, ids: Sequence[int], length: int) -> int:
    """Return the index of the first token with which the decoded text has ``length`` characters."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        # An incomplete character decodes to U+FFFD, which does not count yet.
        text = decode(ids[: middle + 1])
        if len(text.rstrip("\ufffd")) >= length:
            high = middle
        else:
            low = middle + 1
    return low


def make_reward(config: ModelReward, inputs: RewardInputs) -> Reward:
    if inputs.model_reward is None:
        raise RewardError(
            f"reward {inputs.name!r} is of kind model, but this job was started without "
            "model_reward, which builds such rewards"
        )
    return inputs.model_reward(config.model_copy(update={"name": inputs.name}))
