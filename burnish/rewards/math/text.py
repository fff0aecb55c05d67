"""Find the last answer of a response, parse labels as data sets write them, and compare the two.

Pure functions of text, for ``reward.py``. Comparisons that they cannot decide (:class:`Ask`) go to
math-verify. Numbers, dates and words are handled here because math-verify parses ``6 000`` as
6 * 0, ``1e5`` as 1, ``1 1/2`` as 1/2, a date as a difference and a word as the product of its
letters.

Reading order: :func:`last_answer` -> :func:`read_label` -> :func:`judge`; then
``markup.py``, ``sentences.py``, ``unspaced.py`` and ``quantities.py``.
"""

from __future__ import annotations

import datetime
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from burnish.json_text import json_value
from burnish.model_text import DOTALL, IGNORECASE, Form, Match, Pattern
from burnish.reasoning_tags import after_reasoning
from burnish.rewards.labels import LabelError
from burnish.rewards.math.choices import (
    CHOICE,
    Letters,
    chosen,
    concluded_choice,
    read_letters,
    same_letters,
    with_ascii_punctuation,
)
from burnish.rewards.math.figures import Figure, read_figure
from burnish.rewards.math.markup import MARKS, with_signs, without_quotes
from burnish.rewards.math.quantities import (
    BASED,
    LARGEST_EXPONENT,
    SPACES,
    VULGAR,
    Quantity,
    bare,
    quantities_equal,
    read_quantity,
    spell,
)
from burnish.rewards.math.sentences import denies, marked_sentences, sentence_of_label
from burnish.rewards.math.unspaced import with_spaces

_BOX = Pattern(r"\\(?:boxed|fbox)\s*\{")
_BRACE = Pattern(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_TAG = Form(r"<answer>(.*?)</answer>", DOTALL | IGNORECASE)
_FARTHEST = 40
"""Most characters between two boxes that form one answer."""
_BETWEEN_BOXES = Form(
    r"[\s$.]*(?:,|;|and|or|\\text\{\s*(?:and|or)\s*\}|\\(?:quad|,|;|\s)|[\s$])*"
    r"(?:[A-Za-z]\w*\s*=\s*)?[\s$]*",
    longest=_FARTHEST,
)
_NO_VALUE = frozenset({"", "nan", "NaN", "None", "null", "NULL", "N/A", "<NA>", "NaT"})
_WORD = Pattern(r"[a-z]+")
_MONTHS = _WORD.findall("jan feb mar apr may jun jul aug sep oct nov dec")
_MONTH = r"(?P<month>" + "|".join(_MONTHS) + r")[a-z]{0,6}\.?"
_YEAR = r"(?:\s*+(?:,\s*+)?(?P<year>\d{4}))?"
_DATES = [
    Pattern(expression, IGNORECASE)
    for expression in (
        r"\b(?P<year>\d{4})-(?P<number>\d{1,2})-(?P<day>\d{1,2})\b(?:[T ]\d\d:\d\d.*)?",
        _MONTH + r"\s+(?P<day>\d{1,2})(?:st|nd|rd|th)?" + _YEAR + r"\b",
        r"\b(?P<day>\d{1,2})(?:st|nd|rd|th)?\s+(?:of\s+)?" + _MONTH + _YEAR,
        r"\b(?P<first>\d{1,2})/(?P<second>\d{1,2})/(?P<year>\d{4})\b",
    )
]
_MATH_WORDS = frozenset(
    _WORD.findall(
        "pi sin cos tan cot sec csc log ln exp sqrt frac infty infinity inf arcsin arccos "
        "arctan sinh cosh tanh min max gcd lcm mod cdot times div le ge leq geq neq ne cup "
        "cap emptyset in left right theta alpha beta gamma lambda phi abs floor ceil det dim "
        "oo"
    )
)
_CONSTANTS = frozenset(
    _WORD.findall("pi infty infinity inf oo emptyset alpha beta gamma lambda phi")
)
_SHORT_WORDS = frozenset(
    _WORD.findall("yes no odd all red mon tue wed thu fri sat sun dne on up it he us we")
)
_OTHER_LETTERS = Form(r"(?:[^\W\d_a-zA-Z\u0370-\u03ff]++[ ·-]?+)++")
"""Words of other scripts, but for Greek letters, which are symbols."""
_LETTERS = Form(r"[A-Za-z]+(?: +[A-Za-z]+)*")
_CONNECTIVES = frozenset({"and", "or"})
_VOWEL = Pattern(r"[aeiouy]")
_PRODUCT = Form("a?b?c?d?k?m?n?p?q?r?x?y?z?")
"""Lowercase letters that are usual in algebra, in the order in which a product is written."""
_ROMAN = Form(r"[IVX]{2,}")
_MOST_WORDS = 8
_SIGNS = "".join(VULGAR)  # (\w does not match them)
_CAPITAL = Pattern(r"[A-J]")
_IS_ALTERNATIVE = Pattern(  # quotes are removed: "isnt"
    r"(?:\b(?:not|nor|neither|or|and|than|(?:is|are|was|were|do|does|did|can?|could|would)nt)"
    r"|n't|[/&]|\b(?:не|ни|нет|или|и|nicht|oder|und|không|hoặc)|[不非无無或和与及]|不是|또는|または"
    r"|หรือ|ไม่ใช่)\s?\(?$"
)
_IS_LISTED = Pattern(r"[,;]\s?\(?$")
_ENDS_WITH_CHOICE = Pattern(r"(?:^|[\s(])[a-j]\)?$|\)$")
_ENDS_WITH_VERB = Pattern(r"(?:\b(?:is|are|was|were|be)|'s|:)$")
_OR = Pattern(r"\s(?:or|and)\s")
_CLOCK = Form(r"\d{1,2}:\d{2}(:\d{2})?(\s*[ap]\.?m\.?)?")
_MATH_SIGN = Pattern(r"[=^_\\<>+*]")
_WRAPPED = Form(r"\W*\\(?:text|mbox|textbf|mathrm)\s*\{")
_ANYTHING = Pattern(rf"[\w\\{_SIGNS}]")
_PERIOD = Pattern(r"(?<!\.)\.\s*$")
_MARKUP = Pattern(rf"[{MARKS}*{{}}]")
_PARENTHESES = Form(r"\(([^()]*)\)")
_ARTICLE = Form(rf"(?:the|an?) (?=[\w{_SIGNS}])")
_PI = Pattern(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_INFINITY = Pattern(r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])")
_ROOT = Pattern(r"√\s*(?:(\d+)|\(([^()]*)\))")
_THOUSANDS = Pattern(r"(?<=\d)(?:\\[,!; ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")


@dataclass(frozen=True)
class Label:
    """A reference answer parsed by :func:`read_label`."""

    kind: Literal["number", "math", "words", "date"]
    text: str
    """Input for math-verify (number, math), or the form that :func:`judge` compares (words, date).
    """
    quantity: Quantity | None = None
    figure: Figure | None = None
    """The figure that it names, if its letters are no word."""
    letters: Letters | None = None
    """The choices that it may name together."""


@dataclass(frozen=True)
class Answer:
    """The part of a text that is marked as the answer."""

    text: str
    firm: bool = True
    """True if the mark delimits the answer; False if it is a sentence after "answer is"."""


@dataclass(frozen=True)
class Ask:
    """A comparison for math-verify."""

    label: str
    response: str


def last_answer(text: str) -> Answer | None:
    """Return the last marked answer in ``text``, or None if nothing is marked.

    Marks are a box, ``<answer>``, ``####`` (the rest of the line) and "answer is" in a language of
    ``sentences.py``. After another
    mark, the text after "answer is" counts only if it is a quantity. Boxes separated only by a
    comma, "and" or "or" form one answer. Empty and unclosed boxes are ignored.

    >>> last_answer(r"\\boxed{41}, then I correct: \\boxed{42}").text
    '42'
    >>> last_answer(r"$x=\\boxed{1}$ or $x=\\boxed{2}$").text
    '1,2'
    """
    begin, marked = _last_boxes(text)
    tag = text.rfind("<answer>")
    tagged = _TAG.match(text, tag) if tag > begin else None
    if tagged is not None:
        begin, marked = tag, tagged[1].strip()
    place = text.rfind("####")
    if place > begin:
        begin, marked = place, text[place + 4 :].strip().partition("\n")[0].strip()
    answer = Answer(marked) if marked else None
    for sentence in marked_sentences(text, max(begin, 0)):
        if answer is None or not answer.firm or read_quantity(sentence) is not None:
            answer = Answer(sentence, firm=False)
    return answer


def _last_boxes(text: str) -> tuple[int, str | None]:
    """Return (start of the last box, its content joined with the boxes that belong to it).

    Return (-1, None) if there is no box.
    """
    boxes = _boxes(text)
    if not boxes:
        return -1, None
    last = boxes.pop()
    first, contents = last.begin, [last.content]
    while boxes and first - boxes[-1].end <= _FARTHEST:
        if _BETWEEN_BOXES.fullmatch(text[boxes[-1].end : first]) is None:
            break
        box = boxes.pop()
        first = box.begin
        contents.insert(0, box.content)
    return last.begin, ",".join(dict.fromkeys(contents))


class _Box(NamedTuple):
    begin: int
    end: int
    content: str


def _boxes(text: str) -> list[_Box]:
    """Return the closed, non-empty, outermost boxes in order. Takes one pass over any text."""
    boxes: list[_Box] = []
    opened: list[tuple[int, int] | None] = []  # None: a brace that is not a box
    for match in _BRACE.finditer(text):
        token = match.group()
        if token.endswith("{") and token != r"\{":
            opened.append((match.start(), match.end()) if len(token) > 1 else None)
        elif token == "}" and opened:
            box = opened.pop()
            if box is None or not text[box[1] : match.start()].strip():
                continue
            while boxes and boxes[-1].begin > box[0]:
                boxes.pop()
            content, end = text[box[1] : match.start()].strip(), match.end()
            if subscript := _SUBSCRIPT.match(text, end):  # \boxed{10}_2
                content, end = content + subscript.group(), subscript.end()
            boxes.append(_Box(box[0], end, content))
    return boxes


_SUBSCRIPT = Form(r"\s?_\s?(?:\d|\{[^{}]{1,20}\})")


def read_label(value: Any) -> Label:
    """Parse a label of the data.

    Raises LabelError if it is not an answer: missing, NaN, a mapping, several values, a sentence.
    """
    value = _entries(value)
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, tuple, dict, set)):
        raise LabelError(
            f"is a {type(value).__name__}, so it is unclear whether one or all of its entries are "
            "the answer; make it one text, such as '1, 2' for two solutions"
        )
    if isinstance(value, (datetime.date, datetime.datetime)):
        value = value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        raise LabelError(f"is {value}, which is a missing value; fill it in, or drop the row")
    if isinstance(value, float):
        value = Decimal(repr(float(value)))  # a numpy float's own repr names its type
    if isinstance(value, Decimal):
        value = format(value, "f")
    if isinstance(value, int) and abs(value) >= 10**LARGEST_EXPONENT:
        raise LabelError(f"is a number with more than {LARGEST_EXPONENT} digits")
    text = with_signs(without_quotes(str(value)))
    if "####" in text or _BOX.search(text):  # a full solution, as in GSM8K and MATH
        answer = last_answer(text)
        text = "" if answer is None else answer.text
    else:
        sentence = sentence_of_label(text)
        text = text.strip() if sentence is None else sentence
    if text in _NO_VALUE:
        raise LabelError(f"is {text!r}, which is a missing value; fill it in, or drop the row")
    return replace(_label_of(text), letters=read_letters(text))


def _entries(value: Any) -> Any:
    """Return the list of texts in the JSON text of one (``["27"]``, as in Skywork-OR1), and any
    other value unchanged: ``[1, 2]`` is an interval."""
    text = value.strip() if isinstance(value, str) else ""
    if text.startswith("[") and text.endswith("]") and '"' in text:
        with suppress(ValueError):
            entries = json_value(text)
            # (A control character is LaTeX with single backslashes: \\frac, \\times.)
            if all(isinstance(entry, str) and entry.isprintable() for entry in entries):
                return entries
    return value


def _label_of(text: str) -> Label:
    """Return the answer ``text`` as a label."""
    quantity = read_quantity(text)
    if quantity is not None:
        return Label("number", spell(quantity), quantity)
    words, figure = _words(text), read_figure(text)
    date = read_date(words)
    if date is not None and date[1]:
        return Label("date", date[0])
    if _is_words(text, words):
        if len(words.split()) > _MOST_WORDS:
            raise LabelError(
                f"is a sentence of {len(words.split())} words, but a label is compared with one "
                "answer; reduce it to the answer, or use a reward of kind function"
            )
        named = None if _LETTERS.fullmatch(text.strip(" .*")) and " " not in text else figure
        return Label("words", words, figure=named)
    return Label("math", _symbols(_BASED_NUMBER.sub(_spelled, text)), figure=figure)


def _is_words(text: str, words: str) -> bool:
    """Return whether a label is language rather than mathematics.

    Language is a choice (``C``, ``(C)``), ``\\text``, a clock time, or words that are not names of
    functions.
    """
    if CHOICE.fullmatch(words.lower()) and _CAPITAL.search(text):
        return True
    if _CLOCK.fullmatch(words) or _OTHER_LETTERS.fullmatch(words):
        return True
    if _MATH_SIGN.search(bare(text)):
        return False
    all_words = _WORD.findall(words)
    named = [w for w in all_words if w not in _MATH_WORDS]
    wrapped = _WRAPPED.match(text) is not None
    if any(len(w) > 3 or w in _SHORT_WORDS or wrapped for w in named):
        return True
    letters = text.strip(" .*").split()
    if not _LETTERS.fullmatch(" ".join(letters)):
        return False
    if len(letters) == 1 and letters[0].lower() in _MATH_WORDS:
        return letters[0].lower() not in _CONSTANTS
    return any(_is_word(word) for word in letters if word.lower() not in _MATH_WORDS)


def _is_word(letters: str) -> bool:
    """Return whether letters without a sign are a name or a word rather than a product.

    >>> [_is_word(text) for text in ("Tom", "Al", "USA", "IV", "cat", "ice")]
    [True, True, True, True, True, True]
    >>> [_is_word(text) for text in ("x", "ab", "abc", "kxy", "mgh", "AB", "Mg", "kW", "and")]
    [False, False, False, False, False, False, False, False, False]
    """
    if len(letters) < 2 or letters.lower() in _CONNECTIVES:
        return False
    if letters.isupper():
        return len(letters) > 2 or _ROMAN.fullmatch(letters) is not None
    has_vowel = _VOWEL.search(letters.lower()) is not None
    if letters.istitle():
        return len(letters) > 2 or has_vowel
    if not letters.islower() or len(letters) == 2:
        return False
    return has_vowel and _PRODUCT.fullmatch(letters) is None


def read_date(text: str) -> tuple[str, bool] | None:
    """Return (last date in ``text``, whether it is the whole text), or None if there is no date.

    The date is ``year-month-day``, with an empty year if none is given. Dates such as 3/5/2017 are
    returned as ``2017:3/5``, because the order of day and month is unknown.

    >>> read_date("march 5, 2017")
    ('2017-3-5', True)
    """
    matches = [match for pattern in _DATES for match in pattern.finditer(text)]
    if not matches:
        return None
    match = max(matches, key=lambda m: (m.end(), m.end() - m.start()))
    parts = match.groupdict()
    if parts.get("first"):
        date = f"{parts['year']}:{int(parts['first'])}/{int(parts['second'])}"
    else:
        month = parts.get("number") or _MONTHS.index(parts["month"].lower()[:3]) + 1
        date = f"{parts['year'] or ''}-{int(month)}-{int(parts['day'])}"
    return date, match.group() == text


def judge(label: Label, response: str, prompt: str = "") -> bool | Ask:
    """Return whether the last answer of ``response`` equals ``label``, or an Ask if math-verify
    has to decide. ``prompt``: the end of what the response continues."""
    text = with_signs(without_quotes(after_reasoning(response, prompt)))
    if CHOICE.fullmatch(label.text):
        text = with_ascii_punctuation(text)
    answer = last_answer(text)
    written = text.strip().rpartition("\n")[2] if answer is None else answer.text
    same = None if label.letters is None else same_letters(label.letters, read_letters(written))
    if same is not None:
        return same
    figure = None if label.figure is None or answer is None else read_figure(answer.text)
    if label.figure is not None and figure is not None:
        return label.figure.equals(figure)
    if label.kind == "words":
        return _same_words(label.text, text, answer)
    if _LETTERS.fullmatch(label.text) and _has_letters(label.text.lower(), text, answer):
        return True
    if label.kind == "date":
        date = read_date(_words(text if answer is None else answer.text))
        return date is not None and date[0] == label.text
    quantity = None if answer is None else read_quantity(answer.text)
    if label.quantity is not None and label.quantity.base:
        based = quantity
        if quantity is None or not quantity.base:
            matches = _BASED_NUMBER.finditer(text if answer is None else answer.text)
            based = read_quantity(matches[-1].group()) if matches else None
        if based is not None:
            return quantities_equal(label.quantity, based)
        plain = read_quantity(label.quantity.digits)  # like a unit, the base may be left out
        label = label if plain is None else Label("number", spell(plain), plain)
    if quantity is not None and label.quantity is not None:
        return quantities_equal(label.quantity, quantity)
    if quantity is not None:
        return Ask(label.text, f"\\boxed{{{spell(quantity)}}}")
    if answer is not None and not answer.firm and _claims_others(answer.text, label):
        return False
    several = "," in label.text  # given a sentence, math-verify would take only the last value
    if answer is None or not (answer.firm or several):
        return Ask(label.text, _readable(with_spaces(text)))
    if read_date(_words(answer.text)) or not _ANYTHING.search(answer.text):
        return False
    text = _PERIOD.sub("", answer.text)  # the period that ends a sentence
    return Ask(label.text, f"\\boxed{{{_symbols(_readable(text))}}}")


def _claims_others(sentence: str, label: Label) -> bool:
    """Return whether the sentence after "answer is" denies its value, or has values that differ
    from a number: math-verify would take one of them."""
    if denies(sentence):
        return True
    values = [read_quantity(part) for part in _OR.split(sentence.replace(", ", " or "))]
    numbers = [value for value in values if value is not None]
    if label.quantity is None or len(numbers) < len(values) or len(values) < 2:
        return False
    return not all(quantities_equal(label.quantity, number) for number in numbers)


def _same_words(label: str, text: str, answer: Answer | None) -> bool:
    if answer is None and CHOICE.fullmatch(label) and concluded_choice(text) == label:
        return True
    if answer is None:  # nothing is marked: compare the words at the end
        answer_words = _without_last_parentheses(_words(text.strip().rpartition("\n")[2]), label)
        return answer_words == label or _ends_with(answer_words, label)
    answer_words = _words(answer.text)
    if CHOICE.fullmatch(label):
        return chosen(answer_words) == label
    return answer_words == label or (_ends_with(answer_words, label) and not answer.firm)


def _without_last_parentheses(answer_words: str, label: str) -> str:
    """Return words at the end of a text without the parentheses of the label that they end with.

    These of a choice do not count behind another choice, those of words only behind a verb.

    >>> _without_last_parentheses("the option is (a)", "a"), _without_last_parentheses("a)", "a")
    ('the option is a', 'a')
    >>> _without_last_parentheses("lyon (paris)", "paris"), _without_last_parentheses("b (a)", "a")
    ('lyon (paris)', 'b (a)')
    """
    is_choice = CHOICE.fullmatch(label) is not None
    if is_choice and answer_words == f"{label})":
        return label
    before = answer_words.removesuffix(f" ({label})")
    if before == answer_words:
        return answer_words
    if is_choice and _ENDS_WITH_CHOICE.search(before):
        return answer_words
    if not is_choice and not _ENDS_WITH_VERB.search(before):
        return answer_words
    return f"{before} {label}"


def _has_letters(label: str, text: str, answer: Answer | None) -> bool:
    """Return whether the answer is the letters of a label: math-verify reads no product in a
    sentence. The end of a sentence counts only after a word, not in ``2 ab``."""
    words = _words(text.strip().rpartition("\n")[2] if answer is None else answer.text)
    if words == label:
        return True
    if (answer is not None and answer.firm) or not _ends_with(words, label):
        return False
    before = words.removesuffix(" " + label).split()[-1].rstrip(":,")
    return len(before) > 1 and before.isalpha() and before not in _MATH_WORDS


def _ends_with(answer_words: str, label: str) -> bool:
    """Return whether a text ends with the label, and not with "not" or another answer before it."""
    before = answer_words.removesuffix(" " + label)
    if before == answer_words or _IS_ALTERNATIVE.search(before):
        return False
    return not (CHOICE.fullmatch(label) and _IS_LISTED.search(before))


def _words(text: str) -> str:
    """Lowercase ``text`` and remove markup, articles, quotes and surrounding punctuation."""
    text = bare(text).lower().replace("\\", " ")
    text = SPACES.sub(" ", _MARKUP.sub("", text)).strip(" .!?,;:")
    if enclosed := _PARENTHESES.fullmatch(text):
        text = enclosed[1]
    if article := _ARTICLE.match(text):
        text = text[article.end() :]
    return text.strip()


def _symbols(text: str) -> str:
    """Replace symbols and names of constants with LaTeX: plain ``pi`` would be p times i."""
    for sign, latex in (("π", r"\pi "), ("∞", r"\infty "), ("−", "-"), ("×", r"\times ")):
        text = text.replace(sign, latex)
    text = _PI.sub(r"\\pi ", text)
    text = _INFINITY.sub(r"\\infty ", text)
    return _ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2]}}}", text)


def _readable(text: str) -> str:
    """Rewrite the numbers in ``text`` that math-verify would misread."""
    text = text.replace("−", "-")
    text = _THOUSANDS.sub("", text)
    for pattern in _MISREAD:
        text = pattern.sub(_spelled, text)
    return text


_BASED_NUMBER = Pattern(r"(?<![\w.\\])" + BASED)
_MISREAD = (
    _BASED_NUMBER,
    Pattern(r"(?<![\w./])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?!\w)"),
    Pattern(r"(?<![\w./^)}])\d+ \d+/\d+(?![\w/])"),
    Pattern(r"(?<![\w./^)}])\d+\s*\\[dt]?frac\{\d+\}\{\d+\}"),
)


def _spelled(match: Match) -> str:
    quantity = read_quantity(match.group())
    return match.group() if quantity is None else spell(quantity)
