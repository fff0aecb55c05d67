"""Texts of other libraries and of servers: shorten their errors for use in messages, escape what a
terminal would obey, and silence their noise."""

from __future__ import annotations

import logging
import os
import sys

_LINES = 6
"""Lines kept at each end of a long text."""
_CHARS = 240
"""Characters kept at each end of a long line."""
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in "\t\n"}
_ESCAPES |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
"""Characters that terminals obey (such as ESC, which begins their commands) or cannot encode."""


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


def visible(text: str) -> str:
    """Return text for a terminal or a log. Control characters other than tabs and line breaks, and
    unpaired surrogates, are escaped.

    >>> visible("\\x1b[2J done")
    '\\\\x1b[2J done'
    """
    return text.translate(_ESCAPES)


def _shortened(line: str) -> str:
    left_out = len(line) - 2 * _CHARS
    if left_out <= 30:
        return line
    return f"{line[:_CHARS]}[... {left_out} characters ...]{line[-_CHARS:]}"


def quiet_libraries() -> None:
    """Silence output of libraries that says nothing about the run. Call this before they are
    imported.

    accelerate imports DeepSpeed if it is installed, which then reports the device that it detected,
    also in runs without DeepSpeed. Progress bars of the hub and of transformers are shown on a
    terminal only, because a log file keeps each of their states.
    """
    logging.getLogger("DeepSpeed").addFilter(_says_more_than_its_device)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _says_more_than_its_device(record: logging.LogRecord) -> bool:
    return "Setting accelerator to" not in record.getMessage()
