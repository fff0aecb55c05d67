r"""Sentences that mark an answer ("The answer is 12, because ...", ``答案：12``), by language."""

from __future__ import annotations

from burnish.model_text import IGNORECASE, Form, Match, Pattern
from burnish.rewards.math.quantities import read_quantity
from burnish.rewards.math.unspaced import SCRIPT, with_spaces

_NAMES_AND_VERBS = {
    "English": (r"\banswer", r"\s+is"),
    "German": (r"\bantwort", r"\s+(?:ist|lautet)"),
    "French": (r"\br[ée]ponse(?:\s(?:correcte|finale))?", r"\s+est"),
    "Spanish": (r"\brespuesta(?:\s(?:correcta|final))?", r"\s+es"),
    "Portuguese": (r"\bresposta(?:\s(?:correta|final))?", r"\s+[ée]"),
    "Italian": (r"\brisposta(?:\s(?:corretta|finale))?", r"\s+è"),
    "Russian": (r"\bответ", r"\s+[—–-]"),
    "Vietnamese": (r"\bđáp án(?:\s(?:đúng|cuối cùng))?", r"\s+là"),
    "Chinese": (r"答案", r"(?:是|为|為|等于|等於)(?![不否什多几])"),
    "Chinese, of choices": (r"(?:故|应|應)[选選]", r"(?:[是为為]|(?=\s?+[(（]?[A-J]))"),
    "Japanese": (r"(?:答え|正解)", r"は"),
    "Korean": (r"(?:정답|(?<![가-힣])답)", r"은"),
    "Thai": (r"คำตอบ", r"คือ"),
}
"""Language -> the noun, and the verb behind it, instead of which a colon or ``=`` can follow."""
_MARK = Pattern(
    "|".join(rf"{n}(?:{v}|\s*+[:：=])" for n, v in _NAMES_AND_VERBS.values()), IGNORECASE
)
_END = Pattern(
    r"\.(?=\s|$)|,?\s(?:because|since|which|weil|parce que|porque|perché|потому)\s"
    r"|,\s+(?:not|so|nicht|no|non|não|не|pas)\s"
    rf"|。|[，；](?=\s?[{SCRIPT}])|[，,]?\s?(?:因[为為]|なぜなら|왜냐하면|เพราะ)"
)
_WORDS_BEHIND = Pattern(rf"(?<![{SCRIPT}\s])\s?(?P<words>[{SCRIPT}][{SCRIPT}\s!！~～]*+)$")
_CHANGES = Pattern(r"^[的倍の以]")
"""Words behind a value that make another one of it ("a multiple of 2")."""
_SCALES = Pattern(r"^[十百千万萬億亿兆백천만억割成折乗分半]")
_DENIES = Pattern(
    r"不|非(?!常)|[错錯誤误除另假違]|[以之]外|以[上下内]|未[满満]|より|이상|이하|미만|초과|보다|ない|なく|ません|아니|아닙|제외|틀|ไม่|ผิด|ยกเว้น"
)
"""Words behind a value that deny it, or name others (more, fewer, all but it)."""
_CHOICE = r"(?:\\(?:text|math)(?:bf|rm)?\{)?\(?[A-J]\)?\}?"
_COPULA = Form(
    r"(?:입니다|이다|임|다|이에요|예요|에요|이 ?됩니다|이 ?맞습니다"
    r"|です(?:ね|よ)?|でした|でしょう|だ(?:よ|ね)?|である|に?なります|となる|となります|だと思います"
    r"|吧|呢|哦|啊)[!！~～]{0,9}"
)
"""Words behind a value that add nothing to it."""
_CHOICES = Form(rf"{_CHOICE}(?:[\s,、和]{{0,3}}{_CHOICE}){{0,9}}")
_VALUES = (
    _CHOICES,
    Form(r"(?!非)[^\W\d_a-zA-Z]{1,20}"),  # one word of another script
    Form(r"[\[({].{0,80}[\])}]"),  # a set, an interval, a point
)
_DENIALS = ("not ", "nicht ", "kein ", "не ", "pas ", "non ", "não ", "không ", "不")
_MOST = 20
"""Only this many of the last marks are examined."""


def marked_sentences(text: str, begin: int = 0) -> list[str]:
    """Return what follows the last marks behind ``begin``: a sentence up to its end or a reason.

    Marks of other languages than English count if a value or choices follow: their sentences are
    not read otherwise. What denies its value begins with "not".

    >>> marked_sentences("The answer is 7, because 3+4=7. Answer: x = 7")
    ['7', 'x = 7']
    >>> marked_sentences("答案是3万元。共2步"), marked_sentences("答案: 2的倍数")
    (['30000'], [])
    """
    matches = _MARK.finditer(text, begin)[-_MOST:]
    return [sentence for match in matches if (sentence := _behind(text, match))]


def sentence_of_label(text: str) -> str | None:
    """Return the sentence behind the first mark of a label; None without a mark."""
    match = _MARK.search(text)
    return None if match is None else _behind(text, match) or None


def denies(sentence: str) -> bool:
    """Return whether a sentence behind a mark denies its value."""
    return sentence.lower().startswith(_DENIALS)


def _behind(text: str, mark: Match) -> str:
    line = text[mark.end() :].lstrip().lstrip(":：").lstrip().partition("\n")[0]
    sentence = _END.split(line, maxsplit=1)[0].strip()
    if mark.group().lower().startswith("answer") or denies(sentence):
        return sentence
    words = _WORDS_BEHIND.search(sentence)
    if words is not None and _DENIES.search(words["words"]):
        return f"not {sentence}"
    value = sentence
    if words is not None and words.start() and not _CHANGES.search(words["words"]):
        value = with_spaces(f"：{sentence}").removeprefix("：").strip()
        rest = _WORDS_BEHIND.search(value)
        if rest is not None and not _SCALES.search(rest["words"]):  # not "3 thousand"
            value = _WORDS_BEHIND.sub("", value).strip()
    if read_quantity(value):
        return value
    plain = value.strip("*_$")
    is_part = plain != value and words is not None and not _COPULA.fullmatch(words["words"])
    forms = (_CHOICES,) if is_part else _VALUES
    return plain if any(form.fullmatch(plain) for form in forms) else ""
