"""Texts of a sample, and the search for one, without regard to case."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_COLUMNS = ("prompt", "response", "label")
_PLAIN = re.compile(r"[ !#-\[\]-~]+")
"""Characters that JSON does not escape."""


class TextMatch:
    """A text that is searched for. Upper and lower case are equal."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pattern = re.compile(re.escape(text), re.IGNORECASE)

    def place(self, text: str) -> int | None:
        """Return where the text begins; None if it does not occur."""
        found = self._pattern.search(text)
        return None if found is None else found.start()

    def first(self, sample: Mapping[str, Any]) -> tuple[str, int] | None:
        """Return the first text of a row of a sample file in which it occurs, and where."""
        for text in texts_of(sample):
            if (place := self.place(text)) is not None:
                return text, place
        return None

    def in_json(self) -> str | None:
        """Return a part of the text that the JSON of every conversation with it contains, in upper
        or lower case; None if there is none."""
        plain = max(_PLAIN.findall(self.text), key=len, default="")
        if plain:
            return plain
        has_case = self.text.lower() != self.text.upper()
        return None if has_case else json.dumps(self.text)[1:-1]


def texts_of(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a row of a sample file: prompt, response, label, and everything that is
    said in its conversation."""
    for name in _COLUMNS:
        if sample.get(name) is not None:
            yield str(sample[name])
    try:
        record = json.loads(sample.get("episode") or "{}")
        messages = list(record.get("start", ()))
        for turn in record.get("turns", ()):
            messages += [turn["message"], *turn["answer"]]
            yield str(turn.get("problem") or "")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    for message in messages:
        yield from _strings(message)


def _strings(node: Any) -> Iterator[str]:
    """Yield the texts in a message, without the names of its keys."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value)
