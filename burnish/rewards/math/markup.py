r"""Remove quotation marks around answers, and write signs in words as signs, in the text of a
response or label: math-verify finds no number in quotation marks, and reads "negative $7$" as 7.

Reading order: without_quotes, with_signs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from burnish.model_text import IGNORECASE, MULTILINE, Match, Pattern
from burnish.rewards.math.quantities import NUMBER_WORDS, VULGAR

MARKS = "\"'`«»‘’‚‛“”„‟‹›⹂「」『』〝〞〟﹁﹂﹃﹄＂＇｢｣"
"""Quotation marks (the property of Unicode) and the backtick, as a class of a pattern."""
_APOSTROPHE = r"(?<=[^\W\d_])['’](?=[^\W\d_])|(?<=\d)['’](?=\d)"
_RUN = Pattern(rf"(?:(?!{_APOSTROPHE})[{MARKS}])++")
_SINGLE = frozenset("'`‘’‚‛‹›＇")
_LONGEST = 80
"""Most characters between the marks of a quotation."""
_DEEPEST = 4
"""Quotations that may end with one mark."""

_AROUND = r"[\s*_${]"
_ANCHOR = rf"(?:^|[=:({{>#]|\b(?:is|are|be|equals)\b){_AROUND}{{0,8}}"
_BETWEEN = rf"(?:{_AROUND}|\}}|:(?![^\S\n]*+\n)|\\[(\[,;: ])++"
_ENCLOSED = r"\(\.?\d[^()\n+−-]{0,20}\)"
_NUMBER = (
    rf"\.?\d|[{''.join(VULGAR)}π∞√]|\\(?:[dtc]?frac|sqrt|pi|infty)(?![A-Za-z])|{_ENCLOSED}"
    rf"|(?:\\\$|[€£¥₹])\s?\.?\d|(?:{'|'.join(NUMBER_WORDS)}|pi|infinity)(?![A-Za-z])"
)
_SIGN = Pattern(
    rf"(?:(?<![\w-])negative|\bminus(?<={_ANCHOR}minus)|[−–-](?<={_ANCHOR}[−–-])(?=[$*_\\]))"
    rf"(?P<follows>(?<={_ANCHOR}(?:\w{{5,8}}|[−–-])))?"
    rf"(?P<between>{_BETWEEN})(?=(?P<number>{_NUMBER})|[A-Za-z(\\])(?:(?P<enclosed>{_ENCLOSED})|"
    r"(?P<formula>(?<=(?:\$|\\[(\[])\s{0,3})[^$\n=<>,]{1,80}?(?=\s?(?:\$(?!\d)|\\[)\]]))))?",
    IGNORECASE | MULTILINE,
)
_EMPHASIS = (
    Pattern(
        r"(?<=^|[:>#({]\s?|[^\W\d_]{2}[:,*]{0,4}\s)\*([^\s*](?:[^*\n]{0,78}[^\s*])?)\*(?![\w*])",
        MULTILINE,
    ),
    Pattern(
        r"(?<![\w\\)\]}^*])(\*\*|__?)([^\s*_{}^\\](?:[^*_{}^\\\n]{0,78}[^\s*_{}^\\])?)\1(?![\w*_])"
    ),
)
_SUM = Pattern(r"(?<=.)[+−±-]")


def without_quotes(text: str) -> str:
    """Remove the marks around quoted text, also those of quotations in quotations, and those of
    emphasis (``**12**``, ``*12*``, ``_12_``).

    A single mark ends a quotation that began with a single mark, and a double one the others. A
    mark after a letter or digit (``f'(x)``, ``6"``) begins no quotation.

    >>> without_quotes("First 3, then `12`"), without_quotes("«f'(x)» is “‘7’”")
    ('First 3, then 12', "f'(x) is 7")
    """
    removed: list[int] = []
    opened: list[int] = []
    line = 0
    for match in _RUN.finditer(text):
        begin, end = match.span()
        if text.find("\n", line, begin) >= 0:
            opened.clear()
        line = end
        ends, opens = _ends(text, begin, end), _begins(text, begin, end)
        earlier = len(opened)  # the quotations that begin before these marks
        for place in range(begin, end):
            depth = _depth(text, opened[max(0, earlier - _DEEPEST) : earlier], place) if ends else 0
            if depth:
                earlier -= depth
                removed += [opened[earlier], place]
                del opened[earlier:]
            elif opens:
                opened.append(place)
    parts = pairwise([-1, *sorted(removed), len(text)])
    text = "".join(text[place + 1 : following] for place, following in parts)
    for pattern in _EMPHASIS:
        text = pattern.sub(lambda match: str(match.groups()[-1]), text)
    return text


def _depth(text: str, opened: Sequence[int], place: int) -> int:
    """Return how many of the opened quotations end at the mark: the innermost one of its kind, and
    those in it, which have no end. 0: none."""
    is_single = text[place] in _SINGLE
    for depth, begin in enumerate(reversed(opened), start=1):
        if (text[begin] in _SINGLE) == is_single and place - begin <= _LONGEST + 1:
            return depth
    return 0


def _begins(text: str, begin: int, end: int) -> bool:
    """Return whether quotations may begin with the marks."""
    if unicodedata.category(text[begin]) in ("Ps", "Pi"):
        return True
    before, after = text[max(0, begin - 1) : begin], text[end : end + 1]
    if before.isalnum() or before in (")", "]", "}"):
        return False
    return bool(after.strip()) or not before.strip()


def _ends(text: str, begin: int, end: int) -> bool:
    """Return whether quotations may end with the marks."""
    if unicodedata.category(text[end - 1]) in ("Pe", "Pf"):
        return True
    before, after = text[max(0, begin - 1) : begin], text[end : end + 1]
    return not after.isalnum() and (bool(before.strip()) or not after.strip())


def with_signs(text: str) -> str:
    """Write "negative 7" and "is minus 7" as -7, also if the number is in markup, and -$7$ as $-7$.

    "minus" is a sign at the beginning of a line, a formula or parentheses, and after "is". Before a
    formula that begins with a letter, so is "negative".

    >>> with_signs("It is negative $7$ or **minus 8**"), with_signs("is 10 minus 4")
    ('It is $-7$ or **minus 8**', 'is 10 minus 4')
    """
    return _SIGN.sub(_signed, text)


def _signed(match: Match) -> str:
    formula = match["formula"] or ""
    if match["number"] is None and (not formula or match["follows"] is None):
        return str(match.group())
    enclosed = match["enclosed"] or ""
    operand = f"({formula})" if _SUM.search(formula) else formula or enclosed.strip("()")
    markup = str(match["between"]).lstrip(" \n:")
    return f"{markup}-{operand}"
