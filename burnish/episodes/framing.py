"""The texts that a chat template writes around an answer inside its turn.

Cohere's Command R7B writes ``<|START_RESPONSE|>4<|END_RESPONSE|><|END_OF_TURN_TOKEN|>``, and the
policy samples all of it. The message is ``4``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framing:
    """Texts with special tokens around an answer, without white space at their ends."""

    openings: tuple[str, ...] = ()
    """Texts between the prompt and an answer, longest first."""
    closings: tuple[str, ...] = ()
    """Texts between an answer and its end token, and their beginnings up to one of several special
    tokens, longest first."""

    def span(self, text: str) -> tuple[int, int]:
        """Return (begin, end) of the answer in a response without its end token."""
        begin = self._begin(text)
        end = len(text.rstrip())
        closing = next((c for c in self.closings if text.endswith(c, begin, end)), "")
        return begin, end - len(closing) if closing else len(text)

    def _begin(self, text: str) -> int:
        spaces = len(text) - len(text.lstrip())
        opening = next((o for o in self.openings if text.startswith(o, spaces)), "")
        return spaces + len(opening) if opening else 0

    def without_opening(self, content: str) -> str:
        """Return the content of a message that follows a block of reasoning, without its
        opening."""
        return content[self._begin(content) :].lstrip() if self.openings else content

    def missing(self, closing: str, text: str, end: str) -> str:
        """Return the part of ``closing`` that a response lacks. ``text``, ``end``: the response
        without its end token, and that token, which may be a part of ``closing``."""
        for written in self.closings:
            if text.rstrip().endswith(written) or (text + end).endswith(written):
                return closing.partition(written)[2] if written in closing else closing
        return closing

    def begins(self, text: str) -> bool:
        """Return whether a longer text can begin with an opening that ``text`` does not have."""
        body = text.lstrip()
        return any(o.startswith(body) and o != body for o in self.openings)

    def certain(self, text: str) -> int:
        """Return the length of the text that belongs to the answer, however it continues."""
        body = text.rstrip()
        lengths = (
            length
            for closing in self.closings
            for length in range(min(len(closing), len(body)), 0, -1)
            if body.endswith(closing[:length])
        )
        longest = max(lengths, default=0)
        return len(body) - longest if longest else len(text)


class FrameHold:
    """The text of a response that is being sampled, without the framing of its answer. Text that
    may be framing is held back."""

    def __init__(self, framing: Framing, *, strips: bool = False) -> None:
        """``strips``: without white space at the beginning."""
        self._framing, self._strips = framing, strips
        self._held = ""
        self._has_begun = not framing.openings
        self.has_opening = False
        """True once an opening was removed."""

    def feed(self, text: str) -> str:
        """Return the text that more text makes certain."""
        text = self._held + text
        if not self._has_begun:
            self._held = text
            if self._framing.begins(text):
                return ""
            begin = self._framing.span(text)[0]
            self.has_opening |= begin > 0
            text = text[begin:].lstrip() if self._strips else text[begin:]
            if self._strips and not text:  # white space behind the opening
                self._framing, self._held = Framing(), ""
                return ""
            self._has_begun = True
        end = self._framing.certain(text)
        self._held = text[end:]
        return text[:end]
