"""Encode texts to token ids and score them. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from burnish.config.model import ModelConfig
from burnish.errors import BurnishError
from burnish.models.load import describe, load_tokenizer, num_positions
from burnish.rewards.model.reward import load_reward_engine, metadata_of, score_rows
from burnish.rewards.model.rows import encode_text
from burnish.serve.base import ServeError, ServeOptions
from burnish.train.base import TrainEngine


class TextError(BurnishError, ValueError):
    """A text that cannot be scored. The message says why and what to do."""


@dataclass(frozen=True)
class EncodedText:
    """An encoded text."""

    ids: tuple[int, ...]
    truncated: bool = False


@dataclass(frozen=True)
class TextScorer:
    """A reward model with its tokenizer.

    ``encode`` and ``score`` may run concurrently in different threads, but neither may run
    concurrently with itself.
    """

    engine: TrainEngine
    tokenizer: PreTrainedTokenizerBase
    options: ServeOptions
    max_len: int
    """Longest row in tokens."""

    @property
    def max_chars(self) -> int:
        """Longest text in characters. Few tokens of a vocabulary have more than 32 characters."""
        return self.options.max_chars or 32 * self.max_len

    def encode(self, query: str, prompt: str | None) -> EncodedText:
        """Encode ``query``. If it begins with ``prompt``, no token spans that boundary, as in rows
        of the policy.

        Raises TextError if there are no tokens, or if the text is too long and ``overlong`` is
        ``error``.
        """
        excess = len(query) - self.max_chars
        if excess > 0 and self.options.overlong == "error":
            raise TextError(
                f"has {len(query)} characters, but the limit is {self.max_chars}; send shorter "
                "texts, or start the server with a larger --max-chars"
            )
        if excess > 0:  # tokenizing all of it could take minutes, and the tokens would be dropped
            starts = prompt is not None and query.startswith(prompt)
            prompt = prompt[excess:] if prompt is not None and starts else None
            query = query[excess:]
        query = query.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates
        cut = len(prompt) if prompt and query.startswith(prompt) else len(query)
        head, tail = encode_text(self.tokenizer, query[:cut], query[cut:])
        ids = [*head, *tail]
        eos = int(self.tokenizer.eos_token_id)
        if self.options.append_eos and ids[-1:] != [eos]:
            ids.append(eos)
        if not ids:
            raise TextError("has no tokens, so it cannot be scored")
        if len(ids) <= self.max_len:
            return EncodedText(tuple(ids), truncated=excess > 0)
        if self.options.overlong == "error":
            raise TextError(
                f"has {len(ids)} tokens, but the limit is {self.max_len}; send shorter texts, or "
                "start the server with --overlong truncate_left to truncate them on the left"
            )
        return EncodedText(tuple(ids[-self.max_len :]), truncated=True)

    def score(self, rows: Sequence[EncodedText]) -> list[float]:
        """Return the score of each row. One forward pass is used for at most ``max_batch_tokens``
        tokens in total."""
        return score_rows(self.engine, [row.ids for row in rows])


def load_text_scorer(model: ModelConfig, options: ServeOptions) -> TextScorer:
    """Load the reward model of a folder or hub name.

    Raises ModelError if it is not a reward model. Raises ServeError if it is a process reward model
    or ``max_len`` exceeds its positions.
    """
    positions = num_positions(model)
    if positions is not None and options.max_len is not None and options.max_len > positions:
        raise ServeError(
            f"max_len={options.max_len} is more than the model's {positions} positions; use at "
            "most that"
        )
    if metadata_of(model).get("process_reward"):
        raise ServeError(
            f"{describe(model)} is a process reward model, which scores the steps of a response, "
            "but a request does not say where the response begins; use it in the run itself "
            "(rewards: {kind: model}), or serve a model that scores complete responses"
        )
    limit = options.max_len or positions or options.max_batch_tokens
    engine = load_reward_engine(
        model, dtype=options.dtype, device=options.device, max_tokens=options.max_batch_tokens
    )
    max_len = min(limit, options.max_batch_tokens)
    return TextScorer(engine, load_tokenizer(model), options, max_len)
