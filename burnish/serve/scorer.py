"""Texts to token ids, and token ids to scores. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from burnish.config.model import ModelConfig
from burnish.errors import BurnishError
from burnish.models.load import describe, load_tokenizer, num_positions
from burnish.rewards.model import load_reward_engine, metadata_of, score_rows
from burnish.rewards.rows import encode_text
from burnish.serve.base import ServeError, ServeOptions
from burnish.train.base import TrainEngine


class TextError(BurnishError, ValueError):
    """A text that cannot be scored: why, and what to do."""


@dataclass(frozen=True)
class Row:
    """A text, ready for the model."""

    ids: tuple[int, ...]
    truncated: bool = False


@dataclass(frozen=True)
class TextScorer:
    """A reward model with its tokenizer. Either method may run beside the other, in a thread of its
    own; neither beside itself."""

    engine: TrainEngine
    tokenizer: PreTrainedTokenizerBase
    options: ServeOptions
    max_len: int
    """Longest row in tokens."""

    @property
    def max_chars(self) -> int:
        """Longest text in characters. Vocabularies have few tokens of more than 32."""
        return self.options.max_chars or 32 * self.max_len

    def encode(self, query: str, prompt: str | None) -> Row:
        """Token ids of ``query``. Where it begins with ``prompt``, no token reaches across that
        border, as none does where the policy writes.

        Raises TextError: no token at all, or more than ``max_len`` and ``overlong`` is ``error``.
        """
        excess = len(query) - self.max_chars
        if excess > 0 and self.options.overlong == "error":
            raise TextError(
                f"has {len(query)} characters, and the limit is {self.max_chars}; send shorter "
                "texts, or start the server with a larger --max-chars"
            )
        if excess > 0:  # the tokenizer would need minutes, for tokens that are cut off
            starts = prompt is not None and query.startswith(prompt)
            prompt = prompt[excess:] if prompt is not None and starts else None
            query = query[excess:]
        query = query.encode("utf-8", errors="replace").decode("utf-8")  # half surrogate pairs
        cut = len(prompt) if prompt and query.startswith(prompt) else len(query)
        head, tail = encode_text(self.tokenizer, query[:cut], query[cut:])
        ids = [*head, *tail]
        eos = int(self.tokenizer.eos_token_id)
        if self.options.append_eos and ids[-1:] != [eos]:
            ids.append(eos)
        if not ids:
            raise TextError("has no tokens; there is nothing to score")
        if len(ids) <= self.max_len:
            return Row(tuple(ids), truncated=excess > 0)
        if self.options.overlong == "error":
            raise TextError(
                f"has {len(ids)} tokens, and the limit is {self.max_len}; send shorter texts, or "
                "start the server with --overlong truncate_left to cut tokens off the left end"
            )
        return Row(tuple(ids[-self.max_len :]), truncated=True)

    def score(self, rows: Sequence[Row]) -> list[float]:
        """The score of each row, in one forward pass where they have ``max_batch_tokens`` or less
        together."""
        return score_rows(self.engine, [row.ids for row in rows])


def load_text_scorer(model: ModelConfig, options: ServeOptions) -> TextScorer:
    """The model of a folder or hub name. Raises ModelError if it is no reward model, ServeError
    if ``max_len`` is more than it can read."""
    positions = num_positions(model)
    if positions is not None and options.max_len is not None and options.max_len > positions:
        raise ServeError(
            f"max_len={options.max_len} is more than the model's {positions} positions"
        )
    if metadata_of(model).get("process_reward"):
        raise ServeError(
            f"{describe(model)} is a process reward model, which scores steps of a response whose "
            "beginning it knows, and requests are whole texts; use it in the run itself "
            "(rewards: {kind: model}), or serve a model of whole responses"
        )
    limit = options.max_len or positions or options.max_batch_tokens
    engine = load_reward_engine(
        model, dtype=options.dtype, device=options.device, max_tokens=options.max_batch_tokens
    )
    max_len = min(limit, options.max_batch_tokens)
    return TextScorer(engine, load_tokenizer(model), options, max_len)
