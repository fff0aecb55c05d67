"""Count held-out rows whose prompt is also a training prompt (``data.held_out``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from burnish.data.config import DataConfig
from burnish.data.forms import open_rows
from burnish.data.reader import reader_of
from burnish.data.sources import DataError


def num_shared_prompts(config: DataConfig, *, limit: int | None = None) -> int:
    """Return the number of held-out rows of ``config`` whose prompt is also that of a training row.

    ``limit``: the most training rows to compare, of each source. Rows without a readable prompt
    are not compared.
    """
    held = list(_prompts(config.model_copy(update={"part": "held_out"})))
    held_digests, shared = set(held), set[bytes]()
    for prompt in _prompts(config.model_copy(update={"part": "train"}), limit=limit):
        if prompt in held_digests:
            shared.add(prompt)
    return sum(prompt in shared for prompt in held)


def _prompts(config: DataConfig, *, limit: int | None = None) -> Iterator[bytes]:
    """Yield a digest of the prompt of each row."""
    reader = reader_of(config)
    for source in open_rows(config):
        for i in range(len(source) if limit is None else min(limit, len(source))):
            try:
                prompt = reader.prompt(source[i])
            except DataError:  # reported with the other unusable rows
                continue
            text = json.dumps(prompt, sort_keys=True, default=str)
            yield hashlib.blake2b(text.encode(), digest_size=16).digest()
