"""Shorten the texts of errors raised by other libraries, for use in messages."""

from __future__ import annotations

_LINES = 6
"""Lines kept at each end of a long text."""
_CHARS = 240
"""Characters kept at each end of a long line."""


def library_text(error: BaseException | str) -> str:
    """Return the text of ``error`` for use inside a sentence.

    A long text is reduced to its head and tail. An exception without a text becomes the name of its
    class. Lines are joined by spaces; blank ones are dropped.

    >>> library_text(ValueError("none of:\\n\\n(1) a file,\\n(2) a folder"))
    'none of: (1) a file, (2) a folder'
    >>> library_text("\\n".join(map(str, range(20))))
    '0 1 2 3 4 5 [... 8 lines ...] 14 15 16 17 18 19'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "" if isinstance(error, str) else type(error).__name__
    left_out = len(lines) - 2 * _LINES
    if left_out > 1:
        lines = [*lines[:_LINES], f"[... {left_out} lines ...]", *lines[-_LINES:]]
    return " ".join(map(_shortened, lines))


def _shortened(line: str) -> str:
    left_out = len(line) - 2 * _CHARS
    if left_out <= 30:
        return line
    return f"{line[:_CHARS]}[... {left_out} characters ...]{line[-_CHARS:]}"
