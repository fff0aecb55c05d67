"""Scores of a reward model: one number on the last token of prompt + response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.rewards import ModelReward as ModelRewardConfig
from burnish.config.train import TrainConfig
from burnish.models.load import (
    ModelError,
    describe,
    hf_config,
    load_tokenizer,
    resolve_device,
)
from burnish.models.value_head import load_scalar_model
from burnish.rewards.base import RewardInput
from burnish.train.base import TrainEngine
from burnish.train.torch import EngineSpec, TorchTrainEngine
from burnish.types import rows_to_batch

Encode = Callable[[RewardInput], Sequence[int]]


class ModelReward:
    """Scores prompt + response with a reward model in this process. Implements
    ``rewards.base.Reward``."""

    def __init__(
        self,
        name: str,
        engine: TrainEngine,
        encode: Encode,
        scale: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """``scale``: (mean, std) that scores are measured in."""
        self.name, self.engine, self.encode, self.scale = name, engine, encode, scale

    def score(self, items: Sequence[RewardInput]) -> list[float]:
        """One score per item."""
        mean, std = self.scale
        scores = score_rows(self.engine, [list(self.encode(item)) for item in items])
        return [(score - mean) / std for score in scores]

    def close(self) -> None:
        """Nothing to end."""


def score_rows(engine: TrainEngine, rows: Sequence[Sequence[int]]) -> list[float]:
    """The score of each row of token ids. No row may be empty."""
    masks = [[False] * (len(row) - 1) + [True] for row in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[0] * len(rows))
    scores: list[float] = engine.values(batch)[batch.offsets[1:] - 1].tolist()
    return scores


def load_model_reward(
    config: ModelRewardConfig,
    policy_tokenizer: PreTrainedTokenizerBase,
    make_engine: Callable[[EngineSpec], TrainEngine],
) -> ModelReward:
    """The reward model of a recipe entry, in an engine that ``make_engine`` makes.

    Where it has the policy's vocabulary the sampled token ids are scored as they are; otherwise
    prompt and response are tokenised for it. Raises ModelError where it has no trained head.
    """
    spec = _spec(config.model, micro_batch_size=config.micro_batch_size)
    own = load_tokenizer(config.model)
    same = own.get_vocab() == policy_tokenizer.get_vocab()
    encode = _ids if same else _encoder(own)
    scale = _scale(config.model) if config.normalize else (0.0, 1.0)
    return ModelReward(config.name or "model", make_engine(spec), encode, scale)


def _scale(model: ModelConfig) -> tuple[float, float]:
    """Mean and spread of its scores, of the model's config. Raises ModelError where it has none."""
    found = hf_config(model)
    told = {} if found is None else found.to_dict()
    mean, std = told.get("reward_mean"), told.get("reward_std")
    if mean is None or not std:
        raise ModelError(
            f"{describe(model)} has no reward_mean and reward_std in its config (found {mean} and "
            f"{std}), which normalize=true needs; train it by burnish rm with eval_data and export "
            "it, write the two numbers into its config.json, or leave normalize out"
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
    """A frozen engine in the role ``reward`` whose passes take ``micro_batch_size`` rows, or rows
    of ``max_tokens`` together. Raises ModelError where the model has no trained head."""
    scalar = load_scalar_model(model, dtype=dtype, device=resolve_device(device))
    spec = _spec(model, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    return TorchTrainEngine(scalar, replace(spec, precision=PrecisionConfig(dtype=dtype)))


def _spec(
    model: ModelConfig, *, micro_batch_size: int | None, max_tokens: int | None = None
) -> EngineSpec:
    return EngineSpec(
        role="reward",
        train=TrainConfig(layout="packed", max_tokens_per_micro_batch=max_tokens),
        model=model,
        micro_batch_size=micro_batch_size,
        trainable=False,
    )


def encode_text(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str = "") -> list[int]:
    """Prompt + response as token ids, with the special tokens that the tokenizer puts in front
    (unless a chat template wrote them already). Tokens do not reach across the border."""
    begin = str(tokenizer.bos_token or "")
    rendered = bool(begin) and prompt.startswith(begin)  # by a chat template
    head = tokenizer(prompt, add_special_tokens=not rendered)["input_ids"]
    return [*head, *tokenizer(response, add_special_tokens=False)["input_ids"]]


def _ids(item: RewardInput) -> Sequence[int]:
    return item.sample.prompt_ids + item.sample.response_ids


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    def encode(item: RewardInput) -> Sequence[int]:
        ids = encode_text(tokenizer, item.prompt.text, item.sample.text)
        ended = item.sample.finish_reason == "stop"
        return [*ids, *([int(tokenizer.eos_token_id)] if ended else [])]

    return encode
