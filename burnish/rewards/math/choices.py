"""Choices of a question: which letter an answer names, possibly followed by the text of the choice.

``A`` is also an article and an initial, and a line such as ``A. 5 apples`` can be one of the listed
choices. So a line counts as an answer only if it can be nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from burnish.model_text import DOTALL, IGNORECASE, Form, Pattern
from burnish.rewards.math.markup import MARKS
from burnish.rewards.math.unspaced import SCRIPT

CHOICE = Form(r"[a-j]")
_CHOSEN = Form(
    r"(?:(?:option|choice) )?\(?(?P<letter>[a-j])(?:$|(?P<mark>[).:,])(?P<text>.*))", DOTALL
)
_JOINED = Form(  # another choice after "A, " or "A) or "; "a" may be an article, "d = 5" is a text
    r"\s*+(?:(?:[,;/&]|(?:and|or)\b)\s*+)*+(?:(?:option|choice) )?\(?"
    r"(?:[b-hj](?!\w|'| ?[=+*^/<>-])|[ai](?=$|[),.;/]| (?:and|or)\b))"
)
_LONGEST = 80
_LETTER = Pattern(r"[A-J]")
_LETTERS = Form(r"\(?[A-J]\)?(?:(?:\s?[,;&、，；和及与與]\s?|\s|,? and |)\(?[A-J]\)?){1,9}")
_MARKED = Form(r"\s*+(?:(?:option|choice) )?\(?[a-j][).]")
_CONNECTED = Form(r"\s*+(?:[,;/&]|(?:and|or)\b)")
_MARKUP = Pattern(rf"[{MARKS}*_{{}}$]|\\(?:text|math)(?:bf|rm|it)?|^[\s>#+-]+")
_LINE = Form(
    r"(?P<named>(?i:(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:(?:correct|right|best|final) )?"
    r"(?:answer|option|choice)(?: is)?:? (?:(?:option|choice) )?))?"
    r"(?:\((?P<inside>[A-J])\)|(?P<letter>[A-J])(?P<mark>[).:]))(?:\s+(?P<text>\S.*))"
)
_CORRECT = Form(r"is (?:the )?(?:correct|right)(?: (?:one|answer|option|choice))?\.?", IGNORECASE)
_ABOUT = Form(
    r"(?:is|are|was|were|can|cannot|could|would|has|does|do|did|must|should|seems?|follows|says|"
    r"means|gives|(?:is|are|was|were|do|does|did|ca|could|would)n'?t)\b",
    IGNORECASE,
)
_DENIED = Pattern(
    r"\b(?:is|are|was|were) (?:not|wrong|incorrect|false|too|impossible|out)\b|"
    r"\b(?:is|are|was|were|does|do|did)n'?t\b|[✗✘❌]",
    IGNORECASE,
)
_ANOTHER = Pattern(r"(?<!\w)[A-J][).]\s+(?!(?:and|or|nor|is|are)\b)[\w(]")
_INITIAL = Form(r"[A-Z]\.")
_PUNCTUATION = str.maketrans(
    {"：": ": ", "，": ", ", "。": ". ", "（": " (", "）": ") ", "．": ". "}
)
_ALONE = Pattern(  # a letter next to text without spaces, unless it is denied
    rf"(?<=[{SCRIPT}])(?<!不选)(?<!不選)(?<!不是)(?<!非)(?=[A-J](?![A-Za-z]))|(?<=[A-J])(?=[{SCRIPT}])"
)


def with_ascii_punctuation(text: str) -> str:
    """Return a text in which a choice stands alone, as in English, also next to Chinese.

    >>> with_ascii_punctuation("答案：B"), with_ascii_punctuation("所以选B。")
    ('答案: B', '所以选 B. ')
    >>> with_ascii_punctuation("不选B")
    '不选B'
    """
    return _ALONE.sub(" ", text.translate(_PUNCTUATION))


class Letters(NamedTuple):
    """Choices that are the answer together: in alphabetical order a selection, else a sequence."""

    letters: tuple[str, ...]
    is_list: bool
    """They are written apart, so that they cannot name a segment, an angle or a word."""


def read_letters(text: str) -> Letters | None:
    """Return the choices that an entire text names; None if it is another text, such as the point
    (A, B).

    >>> read_letters("(A) and (C)").is_list, read_letters("ABD").is_list, read_letters("A or C")
    (True, False, None)
    """
    plain = _MARKUP.sub("", text).strip(" .")
    is_pair = plain.startswith("(") and plain.endswith(")") and plain.count("(") == 1
    if is_pair or len(plain) > _LONGEST or _LETTERS.fullmatch(plain) is None:
        return None
    letters = _LETTER.findall(plain)
    if len(letters) < 2 or len(set(letters)) < len(letters):
        return None
    return Letters(tuple(letters), is_list=plain != "".join(letters))


def same_letters(label: Letters | None, answer: Letters | None) -> bool | None:
    """Return whether both are the same choices, in any order if those of the label are in that of
    the alphabet. None: both are written in one word, which can be a name, or one is no choices.

    >>> same_letters(read_letters("AC"), read_letters("C, A"))
    True
    >>> same_letters(read_letters("C, A, B"), read_letters("A, B, C"))
    False
    """
    if label is None or answer is None or not (label.is_list or answer.is_list):
        return None
    selection = tuple(sorted(answer.letters))
    return label.letters in (answer.letters, selection)


def chosen(answer_words: str) -> str | None:
    """Return the letter of a choice, possibly followed by its text, or None if the answer is none,
    or a list of several.

    >>> chosen("c) 12"), chosen("c"), chosen("a, b, c or d"), chosen("d) a and b")
    ('c', 'c', None, 'd')
    """
    match = _CHOSEN.match(answer_words.lstrip("("))
    if match is None or match["mark"] is None:
        return match and str(match["letter"])
    mark, text = match["mark"], match["text"]
    is_list = _MARKED.match(text) is not None
    if mark == "," or _CONNECTED.match(text):
        is_list = is_list or _JOINED.match(text) is not None
    if mark == ".":
        is_list = is_list or CHOICE.fullmatch(text.strip(" ()")) is not None
    return None if is_list else str(match["letter"])


def concluded_choice(text: str) -> str | None:
    """Return the letter of the choice with its text that is the last line of a text without a
    marked answer, such as ``(B) 12 km``, or None.

    The line is none if it is one of several choices: the line before it, or any other line unless
    they list the choices and it repeats one of them. ``A:`` alone can mean "answer".

    >>> concluded_choice("It is 12.\\n\\n**B. 12 km**"), concluded_choice("A. 5 km\\nB. 12 km")
    ('b', None)
    >>> concluded_choice("A cat sat."), concluded_choice("A. M. Turing"), concluded_choice("A: 12")
    (None, None, None)
    """
    lines = [plain for line in text.split("\n") if (plain := _MARKUP.sub("", line).strip())]
    choices = [_opening_choice(line) for line in lines]
    last = choices.pop() if choices else None
    others = [choice for choice in choices if choice is not None]
    if last is None or (others and (choices[-1] is not None or last not in others)):
        return None
    return last[0]


def _opening_choice(line: str) -> tuple[str, str] | None:
    """Return (letter in lower case, text) if a line is one choice followed by its text."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    letter, mark, text = match["inside"] or match["letter"], match["mark"], match["text"]
    if (mark == ":" and not match["named"]) or (mark == "." and _INITIAL.match(text)):
        return None
    is_about = _ABOUT.match(text) is not None and _CORRECT.fullmatch(text) is None
    if is_about or _DENIED.search(text) or _ANOTHER.search(text):
        return None
    is_one = chosen(f"{letter}) {text}".lower()) is not None
    return (letter.lower(), text.rstrip(" .")) if is_one else None
