"""Tokens of a sample: columns of a sample file that have one entry per token, for the first samples
of a file (``observe.samples_with_tokens``) and null for the others.

Reading order: :data:`TOKEN_SCHEMA`, :func:`token_table`, :class:`TokenTexts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from burnish.byte_tokens import REPLACEMENT, bytes_of
from burnish.observe.samples import TOKEN_SCHEMA
from burnish.types import Batch, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROMPT_TOKENS = 1024
"""Saved tokens of the prompt of each row, its last ones."""
MAX_TOKENS = 8192
"""Saved tokens of a sample, its last ones."""

_MOST_SHARED = 8  # tokens of a few characters


def token_table(
    samples: Sequence[Sample],
    batch: Batch,
    texts: TokenTexts,
    *,
    trainer_logprobs: Tensor | None = None,
    entropies: Tensor | None = None,
) -> pa.Table:
    """Return the columns of :data:`TOKEN_SCHEMA`, a row per sample. ``batch``: the rows of
    ``samples``, in their order, and no others; the tensors [M] belong to its tokens."""
    row_of_token, sample_of_row = batch.row_ids, batch.row_samples()[0]
    of_prompt = torch.arange(batch.tokens.numel()) - batch.offsets[row_of_token]
    left_in_prompt = batch.prompt_lens[row_of_token] - of_prompt  # at most 0 after the prompt
    saved = _last(left_in_prompt <= MAX_PROMPT_TOKENS, sample_of_row[row_of_token])
    sample = sample_of_row[row_of_token][saved]
    counts = torch.bincount(sample, minlength=len(samples))
    totals = torch.bincount(sample_of_row[row_of_token], minlength=len(samples))
    lists = pa.array([0, *counts.cumsum(0).tolist()], pa.int32())
    is_action, is_response = batch.action_mask[saved], left_in_prompt[saved] <= 0
    first_row = batch.row_samples()[1][sample_of_row][row_of_token]

    def column(name: str, values: Tensor | None, valid: Tensor | None = None) -> pa.Array:
        kind = TOKEN_SCHEMA.field(name).type
        if values is None:
            return pa.nulls(len(samples), kind)
        empty = None if valid is None else ~valid.numpy()
        flat = pa.array(values[saved].numpy(), kind.value_type, mask=empty, from_pandas=False)
        return pa.ListArray.from_arrays(lists, flat)

    rows = torch.split(batch.tokens[saved], torch.bincount(row_of_token[saved]).tolist())
    pieces = [piece for row in rows for piece in texts(row.tolist())]
    turns = torch.where(batch.action_mask, 0, -1) if batch.turn_ids is None else batch.turn_ids
    columns = {
        "tokens": pa.ListArray.from_arrays(lists, pa.array(pieces, pa.string())),
        "token_ids": column("token_ids", batch.tokens),
        "row_numbers": column("row_numbers", row_of_token - first_row),
        "turns": column("turns", turns, is_response),
        "action_mask": column("action_mask", batch.action_mask),
        "versions": column("versions", _versions(samples), is_action),
        "tokens_omitted": pa.array((totals - counts).numpy(), pa.int64()),
    }
    numbers = {
        "sampler_logprobs": batch.sampler_logprobs,
        "trainer_logprobs": trainer_logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "teacher_logprobs": batch.teacher_logprobs,
        "entropies": entropies,
        "token_advantages": batch.advantages,
        "values": batch.values,
    }
    columns |= {name: column(name, values, is_action) for name, values in numbers.items()}
    return pa.table([columns[name] for name in TOKEN_SCHEMA.names], schema=TOKEN_SCHEMA)


def _last(candidates: Tensor, samples: Tensor) -> Tensor:
    """Return which of the ``candidates`` [M] are among the last MAX_TOKENS of their sample [M]."""
    counted = candidates.cumsum(0)
    totals = torch.zeros(int(samples.max()) + 1, dtype=torch.int64)
    totals = totals.scatter_reduce(0, samples, counted, "amax")
    return candidates & (totals[samples] - counted < MAX_TOKENS)


def _versions(samples: Sequence[Sample]) -> Tensor:
    """Return [M] versions of the tokens of all rows, 0 for prompts."""
    parts: list[Any] = []
    for row in (row for sample in samples for row in sample.rows):
        parts += [np.zeros(len(row.prompt_ids), np.int64), np.asarray(row.versions, np.int64)]
    return torch.from_numpy(np.concatenate(parts))


class TokenTexts:
    """Texts of tokens. Those of a row, joined, are the text of the row with its special tokens.

    Of the tokens of one character, the last has the text and the others are empty. Bytes that are
    no character, and ids without a text, are shown as the tokenizer's own form of the token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        """A token before the one that is decoded, because some tokenizers strip the space of the
        first one."""
        self._texts: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        texts = [self._text_of(token) for token in ids]
        alone = self._decoded(ids[:1])
        if alone and REPLACEMENT not in alone and alone.lstrip() != texts[0].lstrip():
            texts[0] = alone  # WordPiece writes the ## of a first token
        place = 0
        while place < len(ids):
            if REPLACEMENT in texts[place]:
                end, text = self._characters(ids, place)
                texts[place:end] = [""] * (end - place - 1) + [text]
                place = end
            else:
                place += 1
        return texts

    def _text_of(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token]) or self._form(token)
        return text

    def _characters(self, ids: Sequence[int], place: int) -> tuple[int, str]:
        """Return the end of the tokens from ``place`` on that are complete characters together, and
        their text; the form of one token if there are none."""
        for end in range(place + 1, min(place + _MOST_SHARED, len(ids)) + 1):
            text = self._decode(ids[place:end])
            if REPLACEMENT not in text or self._is_written(ids[place:end], text):
                return end, text
        return place + 1, self._form(ids[place])

    def _is_written(self, ids: Sequence[int], text: str) -> bool:
        """Return whether U+FFFD in a text is the character that the tokens write, not bytes that
        are none."""
        if len(ids) == 1 and REPLACEMENT in self._form(ids[0]):
            return True
        raw = [data for data in bytes_of(self._tokenizer, ids) if data is not None]
        return len(raw) == len(ids) and b"".join(raw) == text.encode()

    def _decode(self, ids: Sequence[int]) -> str:
        before, both, alone = map(self._decoded, (self._before, [*self._before, *ids], ids))
        text = both.removeprefix(before) if both.startswith(before) else alone
        return text.encode("utf-8", "replace").decode()

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _form(self, token: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
