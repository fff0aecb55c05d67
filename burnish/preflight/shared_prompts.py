"""Count held-out rows whose prompt is also a training prompt (``data.held_out``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from burnish.data.config import DataConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.forms import open_rows
from burnish.data.messages import as_messages
from burnish.data.rows import demonstration_key, prompt_column
from burnish.data.sources import DataError, Row


def num_shared_prompts(config: DataConfig, *, limit: int | None = None) -> int:
    """Return the number of held-out rows of ``config`` whose prompt is also that of a training row.

    ``limit``: the most training rows to compare, of each source. Rows without a readable prompt
    are not compared.
    """
    held = list(_prompts(config.model_copy(update={"part": "held_out"})))
    wanted, found = set(held), set[bytes]()
    for prompt in _prompts(config.model_copy(update={"part": "train"}), limit=limit):
        if prompt in wanted:
            found.add(prompt)
    return sum(prompt in found for prompt in held)


def _prompts(config: DataConfig, *, limit: int | None = None) -> Iterator[bytes]:
    """Yield a digest of the prompt of each row."""
    for source in open_rows(config):
        for i in range(len(source) if limit is None else min(limit, len(source))):
            try:
                prompt = _prompt(source[i], config)
            except DataError:  # reported with the other unusable rows
                continue
            text = json.dumps(prompt, sort_keys=True, default=str)
            yield hashlib.blake2b(text.encode(), digest_size=16).digest()


def _prompt(row: Row, config: DataConfig) -> object:
    """Return the prompt of a row: its column, the messages before the last, or its text."""
    if not isinstance(config, SFTDataConfig):
        return prompt_column(row, config.prompt_key, config.prompt_template)
    kind = demonstration_key(row, config)
    if kind == config.response_key:
        return prompt_column(row, config.prompt_key, config.prompt_template)
    if kind == config.text_key:
        return row.values[kind]
    return as_messages(row.values[kind])[:-1]
