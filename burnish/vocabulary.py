"""Number of embeddings of the model that a tokenizer is used with.

A tokenizer may have more tokens than its model has embeddings. A row with one of the others cannot
be computed (an index error, or a device-side assert on a GPU), so such ids are refused where text
becomes ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # recipes are checked without transformers
    from transformers import PreTrainedTokenizerBase

_embeddings: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()


def set_embeddings(tokenizer: PreTrainedTokenizerBase, num: int) -> None:
    """Record that the model of ``tokenizer`` has ``num`` embeddings, fewer than it has tokens."""
    _embeddings[tokenizer] = num


def num_embeddings(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of embeddings, or None if every token is known to have one."""
    return _embeddings.get(tokenizer)


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of ids that the tokenizer and the model know."""
    return num_embeddings(tokenizer) or len(tokenizer)


def beyond_embeddings(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int | None:
    """Return the first id that has no embedding, or None."""
    num = _embeddings.get(tokenizer)
    if num is None or not ids or max(ids) < num:
        return None
    return next(i for i in ids if i >= num)
