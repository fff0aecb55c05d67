"""The parts of a response that belong to one field of a message, with their places in the text.

transformers' parser returns values. Whether a tool call is complete, and which text belongs to a
malformed one, needs the places. Both use the patterns of the same response template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

CALLS = "tool_calls"
"""Name of the field with the tool calls, in response templates."""


@dataclass(frozen=True)
class Region:
    """A part of a response that its delimiters assign to a field."""

    field: str
    begin: int
    """Index of the delimiter that opens it. Negative in a prompt that opens it."""
    body: tuple[int, int]
    """Begin and end of the text between the delimiters."""
    end: int
    is_closed: bool
    """False if the response ends before the delimiter that closes it, or if there is none."""


class RegionScanner:
    """Finds the regions of responses.

    ``template``: a loaded response template of transformers. ``prefix``: text after which responses
    begin.
    """

    def __init__(self, template: ResponseTemplate, *, prefix: str) -> None:
        self._patterns = {
            name: (field.open_re, field.close_re)
            for name, field in template.fields.items()
            if field.open_re is not None
        }
        self._head = template.truncate_past_last_anchor(prefix) if prefix else ""

    def scan(self, text: str, end: str = "") -> Iterator[Region]:
        """Yield the regions of a response in order. ``end``: text of the token that ended it, which
        may close the last region. Takes linear time if the patterns do."""
        whole, shift, limit = self._head + text + end, len(self._head), len(text)
        place = 0
        ahead: dict[str, Any] = {}
        while (opened := self._next(whole, place, ahead)) is not None:
            name, match = opened
            close_re = self._patterns[name][1]
            closing = None if close_re is None else close_re.search(whole, match.end())
            body_end, after = (len(whole), len(whole)) if closing is None else closing.span()
            yield Region(
                name,
                match.start() - shift,
                (match.end() - shift, min(body_end - shift, limit)),
                min(after - shift, limit),
                closing is not None,
            )
            if closing is None or after <= match.start():
                return
            place = after

    def _next(self, whole: str, place: int, ahead: dict[str, Any]) -> tuple[str, Any] | None:
        """Return (field, match) of the delimiter that opens the next region: the earliest, of
        several the longest. ``ahead``: the next match of each field, so that none is sought twice.
        """
        for name, (open_re, _) in self._patterns.items():
            is_stale = name not in ahead or (ahead[name] and ahead[name].start() < place)
            if is_stale:
                ahead[name] = open_re.search(whole, place)
        opened = [(name, match) for name, match in ahead.items() if match is not None]
        return min(
            opened,
            key=lambda opener: (opener[1].start(), -opener[1].end(), opener[0]),
            default=None,
        )
