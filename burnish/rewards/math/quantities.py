"""Parse and compare single numbers as data sets and models write them.

Supported are separators, fractions, percentages and units: ``6,000``, ``6 000``, ``$6{,}000``,
``6\\,000``, ``1e5``, ``1.5 \\times 10^{3}``, ``1 1/2``, ``\\frac{3}{4}``, ``12%``, ``18 dollars``,
``5 \\text{ cm}``, ``1010_2``. Values are exact fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from burnish.model_text import DOTALL, Form, Match, Pattern

LARGEST_EXPONENT = 400
"""Largest absolute power of ten that is parsed, and largest number of digits of an int label."""
_LONGEST = 300
_DECIMALS = Fraction(5, 10**7)
_RELATIVE = Fraction(1, 10**5)

_WORD = Pattern(r"[a-z]+")
VULGAR = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5),
    "⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8),
    "⅞": (7, 8),
}  # fmt: skip
NUMBER_WORDS = {
    word: str(value)
    for value, word in enumerate(
        _WORD.findall("zero one two three four five six seven eight nine ten eleven twelve")
    )
}
_PLAIN = r"(?:\d+(?:\.\d*)?|\.\d+)"
_GROUPED = (
    r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?: \d{3})+|\d{1,3}(?:[_']\d{3})+)"
    r"(?:\.\d+)?"
)
_NUMBER = rf"(?:{_GROUPED}|{_PLAIN})"
_POWER = r"\s*(?:\\times|\\cdot|\*|×|x|·)\s*10\s*\^\s*\{?\s*(?P<power>[+-]?\d+)\s*\}?"
_FORMS = [
    Form(rf"(?P<sign>[+-]?)\s*{form}(?P<rest>.*)", DOTALL, longest=_LONGEST)
    for form in (
        r"(?P<whole>\d+)\s*(?:and\s+|-|\s|\+\s*)\s*(?P<over>\d+)\s*/\s*(?P<under>\d+)(?![\d.,/])",
        r"(?P<whole>\d+)?\s*\\frac\s*\{\s*(?P<over>-?[\d.,]+)\s*\}\s*\{\s*(?P<under>[\d.,]+)\s*\}",
        r"\\frac\s*(?P<over>\d)\s*(?P<under>\d)",
        rf"\(?(?P<over>-?{_NUMBER})\)?\s*/\s*(?P<under>{_NUMBER})(?![\d.,/])",
        rf"(?P<number>{_NUMBER}){_POWER}",
        rf"(?P<number>{_PLAIN})[eE](?P<power>[+-]?\d+)",
        rf"(?P<number>{_NUMBER})(?![\d])",
    )
]
BASED = (
    r"\d[0-9A-Fa-f]*+(?:\.[0-9A-Fa-f]++)?\s*+_\s*+(?:\{\s*+)?(?:\\text\s*+\{\s*+)?"
    r"(?:\d\d?|[a-z]{3,7})(?![A-Za-z0-9])(?:\s*+\})*+"
)
"""A number with its base as a subscript. Words and braces are checked by :func:`_based`."""
_BASED = Form(
    r"(?P<sign>[+-]?)\s*+\(?(?P<digits>\d[0-9A-Fa-f]*+)(?:\.(?P<after>[0-9A-Fa-f]++))?\)?\s*+_"
    r"\s*+(?:\{\s*+)?\(?(?P<base>\d\d?|[a-z]{3,7})\)?(?:\s*+\})?"
)
_BASES = {"two": 2, "three": 3, "eight": 8, "ten": 10, "sixteen": 16}
_STYLE = Pattern(r"\\(?:text|mbox|mathrm|textbf|textit|mathbf|operatorname)\s*\{([^{}]*)\}")
_SIZE = Pattern(r"\\(?:left|right|displaystyle|big|Big)(?![A-Za-z])")
_FRAC = Pattern(r"\\[dtc]frac")
_LATEX_SPACE = Pattern(r"\\(?:[,;: ]|quad|qquad)|~|[\u00a0\u2009\u202f\u2007]")
_DEGREE = Pattern(r"\^\s*+(?:\{\s*+)?\\circ\s*\}?|°")
_DELIMITER = Pattern(r"\\\(|\\\)|\\\[|\\\]|(?<!\\)\$(?!\s*\d[^$]*$)|\*\*")
SPACES = Pattern(r"\s+")
_ASSIGNED = Form(r"[A-Za-z]\w{0,3}\s*=\s*")
_CURRENCY = Form(r"([+-]?)\s*(\$|€|£|¥|₹|USD|US\$|Rs\.?)\s*([+-]?[\d.].*)", DOTALL)
_SEPARATOR = Pattern(r"[ ,_']")
_DIGITS = Form(r"-?(?:\d+(?:\.\d*)?|\.\d+)")
_FIRST_WORD = Form(r"\s*([A-Za-z]+)(?![A-Za-z])")
_PERCENT = Form(r"%|percent(?:age)?|pct|per cent")
_SQUARED = Pattern(r"\s*\^\s*\{?[23]\}?$|[²³]$", longest=_LONGEST)
_DEGREES = Form(r"\\circ ?[cf]?")
_WORDS = Form(r"[a-z]+(?:[ /.-]+[a-z]+)*\.?")
_UNITS = {
    alias: names[0]
    for names in (
        line.split("|")
        for line in (
            "m|meter|metre", "cm|centimeter|centimetre", "mm|millimeter|millimetre",
            "km|kilometer|kilometre", "in|inch|inches", "ft|foot|feet", "yd|yard", "mi|mile",
            "g|gram", "kg|kilogram|kilo", "mg|milligram", "lb|lbs|pound", "oz|ounce",
            "s|sec|second", "min|minute", "h|hr|hour", "day", "week", "month", "yr|year",
            "l|liter|litre", "ml|milliliter|millilitre", "$|dollar|usd|buck", "cent", "€|euro|eur",
            "£|gbp", "deg|degree|°|\\circ", "mph", "km/h|kmh|kph",
        )
    )
    for alias in names
}  # fmt: skip
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_ALONE = frozenset(_UNITS) | {"c", "f", "k", "v", "w", "n", "j", "hz", "pm", "am"}
_NOT_UNITS = frozenset(
    _WORD.findall(
        "pi sqrt sin cos tan log ln exp infty infinity and or to over mod times plus minus if "
        "is not x y z cup cap in jan feb mar apr may jun jul aug sep oct nov dec january "
        "february march april june july august september october november december st nd rd "
        "th am pm factorial"
    )
)


@dataclass(frozen=True)
class Quantity:
    """A number with the text around it."""

    value: Fraction
    """The number as written: 12 for ``12%``."""
    decimal: bool = False
    """True if it was written with a decimal point, so it may be rounded."""
    percent: bool = False
    unit: str = ""
    """The canonical name for units in ``_UNITS``; the words as written for other units."""
    base: int = 0
    """Base that is written as a subscript. 0: none, or 10."""
    digits: str = ""
    """Number as written, with its sign, if it has a base."""


def bare(text: str) -> str:
    """Remove dollar delimiters, emphasis, ``\\text`` and LaTeX spaces from ``text``."""
    text = text.strip().replace("−", "-").replace("–", "-")
    text = _STYLE.sub(r" \1 ", text)
    text = _SIZE.sub("", text)
    text = _FRAC.sub(r"\\frac", text).replace("{,}", ",").replace(r"\!", "")
    text = _LATEX_SPACE.sub(" ", text)
    text = _DEGREE.sub(r" \\circ ", text)
    text = _DELIMITER.sub(" ", text)
    return SPACES.sub(" ", text.replace(r"\$", "$").replace(r"\%", "%")).strip()


def read_quantity(text: str) -> Quantity | None:
    """Parse ``text`` as a number. Return None if it is more than a number with a unit.

    >>> read_quantity("6 000").value, read_quantity("1 1/2").value, read_quantity("2x + 1")
    (Fraction(6000, 1), Fraction(3, 2), None)
    """
    if len(text) > _LONGEST:
        return None
    text = bare(text).rstrip(".,;: ").strip()
    minus, word = text[: text.startswith("-")], text.removeprefix("-").lower()
    text = minus + NUMBER_WORDS[word] if word in NUMBER_WORDS else text
    if assigned := _ASSIGNED.match(text):
        text = text[assigned.end() :]
    for sign, (over, under) in VULGAR.items():
        text = text.replace(sign, f" {over}/{under}")
    if len(text) > _LONGEST:  # signs became words
        return None
    text, money = text.strip(), ""
    if (match := _CURRENCY.fullmatch(text)) is not None:
        name = match[2].lower().replace("us$", "$")
        text, money = match[1] + match[3], _UNITS.get(name, name)
    if (match := _BASED.fullmatch(text)) is not None:
        return _based(match)
    for form in _FORMS:
        match = form.fullmatch(text)
        quantity = None if match is None else _quantity(match, money)
        if quantity is not None:
            return quantity
    return None


def _based(match: Match) -> Quantity | None:
    """Return a number with a base, or None if the base or a digit does not exist."""
    name, digits, after = match["base"], match["digits"].upper(), (match["after"] or "").upper()
    base = int(name) if name.isdecimal() else _BASES.get(name, 0)
    try:
        value = Fraction(int(digits + after, base), base ** len(after)) if base > 1 else None
    except ValueError:
        value = None
    if value is None:
        return None
    sign, point = match["sign"].strip("+"), "." if after else ""
    value = -value if sign else value
    if base == 10:
        return Quantity(value, decimal=bool(after))
    return Quantity(value, base=base, digits=f"{sign}{digits.lstrip('0')}{point}{after}")


def _quantity(match: Match, money: str) -> Quantity | None:
    parts = match.groupdict()
    text, scale = parts["rest"], 1
    first_word = _FIRST_WORD.match(text)
    if first_word is not None and first_word[1].lower() in _SCALES:  # such as 3 thousand
        text, scale = text[first_word.end() :], _SCALES[first_word[1].lower()]
    rest, value = _rest(text), _value(parts)
    if rest is None or value is None:
        return None
    percent, unit = rest
    value *= scale
    decimal = "." in match.group(0)[: match.start("rest") - match.start()]
    return Quantity(-value if parts["sign"] == "-" else value, decimal, percent, unit or money)


def _value(parts: dict[str, str | None]) -> Fraction | None:
    if parts.get("over"):
        over, under = _plain(parts["over"]), _plain(parts["under"])
        if over is None or not under:
            return None
        return Fraction(parts.get("whole") or 0) + over / under
    number, power = _plain(parts["number"]), int(parts.get("power") or 0)
    if number is None or abs(power) > LARGEST_EXPONENT:
        return None
    return number * Fraction(10) ** power


def _plain(number: str | None) -> Fraction | None:
    digits = _SEPARATOR.sub("", number or "")
    return Fraction(digits) if _DIGITS.fullmatch(digits) else None


def _rest(text: str) -> tuple[bool, str] | None:
    """Parse the text after a number. Return (is percent, unit), or None if it is neither."""
    glued = bool(text) and not text[0].isspace()
    text = text.strip().lower()
    if not text:
        return False, ""
    if _PERCENT.fullmatch(text):
        return True, ""
    text = _SQUARED.sub("", text)
    words = _WORD.findall(text)
    if text in ("$", "€", "£", "\\circ"):
        return False, _UNITS[text]
    if _DEGREES.fullmatch(text):
        return False, "deg"
    if not _WORDS.fullmatch(text) or set(words) & _NOT_UNITS:
        return None
    singular = [w if w in _UNITS else w.rstrip("s") for w in words]
    if any(len(w) == 1 for w in words) and not set(words) <= _ALONE | {"per", "of"}:
        return None
    if glued and not set(singular) <= _ALONE:
        return None
    return False, " ".join(_UNITS.get(w, w) for w in singular)


def quantities_equal(first: Quantity, second: Quantity) -> bool:
    """Return whether two numbers are the same answer.

    A number with a base as a subscript equals only numbers with the same base: otherwise a number
    that the task asks to convert would be the answer. Units matter only if both are known and
    differ. ``12%`` equals 0.12 and also 12. If either
    number has a decimal point, they may differ by rounding to six decimals, as long as five
    significant digits agree.
    """
    if first.base != second.base:
        return False
    known = set(_UNITS.values())
    if first.unit != second.unit and {first.unit, second.unit} <= known:
        return False
    pairs = [(first.value, second.value)]
    if first.percent != second.percent:
        part, plain = (first, second) if first.percent else (second, first)
        pairs.append((part.value / 100, plain.value))
    rounded = first.decimal or second.decimal
    return any(
        a == b or (rounded and abs(a - b) <= min(_DECIMALS, _RELATIVE * max(abs(a), abs(b))))
        for a, b in pairs
    )


def spell(quantity: Quantity) -> str:
    """Return the number in a form that math-verify parses: a decimal or a fraction of integers. A
    number with a base becomes a symbol, because math-verify ignores subscripts of numbers."""
    if quantity.base:
        sign, digits = "-" if quantity.value < 0 else "", quantity.digits.lstrip("-")
        return f"{sign}N_{{{quantity.base}n{digits.replace('.', 'p')}}}"
    value, mark = quantity.value, r"\%" if quantity.percent else ""
    under, decimals = value.denominator, 0
    while under % 10 == 0 or under % 2 == 0 or under % 5 == 0:
        under //= 10 if under % 10 == 0 else 2 if under % 2 == 0 else 5
        decimals += 1
    if under != 1 or not (quantity.decimal or value.denominator == 1) or decimals > 30:
        sign = "-" if value < 0 else ""
        return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}{mark}"
    digits = f"{abs(value.numerator) * 10**decimals // value.denominator:0{decimals + 1}d}"
    whole, part = digits[: len(digits) - decimals], digits[len(digits) - decimals :]
    return f"{'-' if value < 0 else ''}{whole}{'.' + part if part else ''}{mark}"
