"""Regular expressions over text that a model wrote, in time linear in the length of the text.

A policy writes anything: 40,000 spaces, 4,000 lines of "```python". A pattern that takes quadratic
time stops the run for minutes. Modules that read such text therefore search it with
:class:`Pattern` and :class:`Form` only; ``tools/house.py`` refuses ``re`` in them. Three bounds, in
this order:

- every pattern is linear by construction: no two adjacent repeats that match the same characters,
  possessive repeats (``\\s*+``), bounded repeats (``{0,6}``). A test gives each pattern of
  :data:`PATTERNS` its worst texts;
- a pattern of which the form does not allow this has a maximum length of text (``longest``);
- a search ends with ModelTextError after :data:`LIMIT_S` seconds of CPU time, which linear patterns
  never reach. It is the failure of the caller, such as a reward, and never "no match": the time
  depends on the machine.

The syntax is that of ``re``, plus that of the library regex, which has a time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regex

from burnish.errors import BurnishError

LIMIT_S = 60.0
"""CPU time of one search, summed over all threads of the process, as the library counts it."""
_SHORT = 1_000
"""Texts of at most this length need no time limit, which costs more than their search."""
DOTALL, IGNORECASE, MULTILINE = regex.DOTALL, regex.IGNORECASE, regex.MULTILINE
PATTERNS: list[_Bounded] = []
"""Patterns of Burnish that were created, for the test of worst texts."""

Match = Any
"""A ``regex.Match``, which has the methods of ``re.Match``."""


class ModelTextError(BurnishError, RuntimeError):
    """A search that took too much time. The message names the pattern."""


class _Bounded:
    """A compiled regular expression with bounds.

    ``longest``: maximum length of a text; a longer one is a mistake of the caller (ValueError).
    ``is_own``: False for a pattern of the user, such as ``data.label_pattern``.
    """

    def __init__(
        self, expression: str, flags: int = 0, *, longest: int | None = None, is_own: bool = True
    ) -> None:
        self.expression, self.longest = expression, longest
        self._compiled = regex.compile(expression, flags)
        self._unlimited = _SHORT if is_own else 0
        if is_own:
            PATTERNS.append(self)

    def worst_case(self, text: str) -> None:
        """Do all work that a method may do. For the test of worst texts."""
        raise NotImplementedError

    def match(self, text: str, start: int = 0) -> Match | None:
        """Return the match that begins at ``start``, or None."""
        return self._limited(self._compiled.match, text, start)

    def _limited(self, search: Callable[..., Any], text: str, *others: int) -> Any:
        if self.longest is not None and len(text) > self.longest:
            raise ValueError(f"{self.expression!r} takes at most {self.longest} characters")
        if len(text) <= self._unlimited:
            return search(text, *others)
        try:
            return search(text, *others, timeout=LIMIT_S)
        except TimeoutError:
            raise ModelTextError(
                f"the pattern {self.expression!r} did not finish in {LIMIT_S:g} s of CPU time on a "
                f"text of {len(text)} characters that begins with {text[:40]!r}; simplify the "
                "pattern: no repeat inside a repeat, and no two adjacent repeats that match the "
                "same characters"
            ) from None


class Form(_Bounded):
    """The form of an entire text, or of its beginning: one position is tried, so that the pattern
    may begin with a repeat."""

    def fullmatch(self, text: str) -> Match | None:
        """Return the match of the entire text, or None."""
        return self._limited(self._compiled.fullmatch, text)

    def worst_case(self, text: str) -> None:
        """Do all work that a method may do. For the test of worst texts."""
        self.match(text)
        self.fullmatch(text)


class Pattern(_Bounded):
    """A compiled regular expression for searches: every position of a text is tried."""

    def worst_case(self, text: str) -> None:
        """Do all work that a method may do. For the test of worst texts."""
        self.finditer(text)

    def search(self, text: str) -> Match | None:
        """Return the first match, or None."""
        return self._limited(self._compiled.search, text)

    def finditer(self, text: str, start: int = 0) -> list[Match]:
        """Return all matches from ``start``. They do not overlap."""
        return self._limited(
            lambda *a, **limit: [*self._compiled.finditer(*a, **limit)], text, start
        )

    def findall(self, text: str) -> list[Any]:
        """Return the texts of all matches, or those of their groups."""
        return self._limited(self._compiled.findall, text)

    def sub(self, replacement: str | Callable[[Match], str], text: str) -> str:
        """Return the text with each match replaced."""
        return self._limited(lambda t, **limit: self._compiled.sub(replacement, t, **limit), text)

    def split(self, text: str, maxsplit: int = 0) -> list[str]:
        """Return the parts of the text between matches, at most ``maxsplit`` + 1 (0: all)."""
        return self._limited(self._compiled.split, text, maxsplit)
