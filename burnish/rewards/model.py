"""Scores of a reward model: one number on the last token of prompt + response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from burnish.config.rewards import ModelReward as ModelRewardConfig
from burnish.config.train import TrainConfig
from burnish.models.load import load_tokenizer
from burnish.rewards.base import RewardInput
from burnish.train.base import TrainEngine
from burnish.train.torch import EngineSpec
from burnish.types import rows_to_batch

Encode = Callable[[RewardInput], Sequence[int]]


class ModelReward:
    """Scores prompt + response with a reward model in this process. Implements
    ``rewards.base.Reward``."""

    def __init__(self, name: str, engine: TrainEngine, encode: Encode) -> None:
        self.name, self.engine, self.encode = name, engine, encode

    def score(self, items: Sequence[RewardInput]) -> list[float]:
        """One score per item."""
        rows = [list(self.encode(item)) for item in items]
        masks = [[False] * (len(row) - 1) + [True] for row in rows]
        batch = rows_to_batch(rows, masks, prompt_lens=[0] * len(rows))
        scores: list[float] = self.engine.values(batch)[batch.offsets[1:] - 1].tolist()
        return scores

    def close(self) -> None:
        """Nothing to end."""


def load_model_reward(
    config: ModelRewardConfig,
    policy_tokenizer: PreTrainedTokenizerBase,
    make_engine: Callable[[EngineSpec], TrainEngine],
) -> ModelReward:
    """The reward model of a recipe entry, in an engine that ``make_engine`` makes.

    Where it has the policy's vocabulary the sampled token ids are scored as they are; otherwise
    prompt and response are tokenised for it. Raises ModelError where it has no trained head.
    """
    spec = EngineSpec(
        role="reward",
        train=TrainConfig(layout="packed"),
        model=config.model,
        micro_batch_size=config.micro_batch_size,
        trainable=False,
    )
    own = load_tokenizer(config.model)
    same = own.get_vocab() == policy_tokenizer.get_vocab()
    encode = _ids if same else _encoder(own)
    return ModelReward(config.name or "model", make_engine(spec), encode)


def _ids(item: RewardInput) -> Sequence[int]:
    return item.sample.prompt_ids + item.sample.response_ids


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    def encode(item: RewardInput) -> Sequence[int]:
        begin = str(tokenizer.bos_token or "")
        rendered = bool(begin) and item.prompt.text.startswith(begin)  # by a chat template
        prompt = tokenizer(item.prompt.text, add_special_tokens=not rendered)["input_ids"]
        response = tokenizer(item.sample.text, add_special_tokens=False)["input_ids"]
        ended = item.sample.finish_reason == "stop"
        return [*prompt, *response, *([int(tokenizer.eos_token_id)] if ended else [])]

    return encode
