r"""Put white space around the last number of a text that marks no answer: math-verify finds numbers
only after white space and ``=``, so it finds none in ``答案是12。``, ``total:12`` or ``<b>12</b>``.

The text changes only if that number is the last one and nothing that math-verify finds follows it.
Ranges, ratios, dates, times, versions and lists of values stay as they are.
"""

from __future__ import annotations

import unicodedata
from decimal import Decimal

from burnish.model_text import Form, Match, Pattern
from burnish.rewards.math.quantities import read_quantity

_MOST_TOKENS = 20
"""Only this many of the last numbers are examined: names (``H2O``) and remarks are skipped."""
_WINDOW = 16
"""Characters on each side that decide what a number is."""
_LONGEST = 40

SCRIPT = (  # of languages that are written without spaces, or with units next to the number
    r"\u3005\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u1100-\u11ff\uac00-\ud7af"  # CJK
    r"\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
)
_CURRENCY = "$€£¥\uffe5₩₹฿"
_TOKEN = Pattern(r"\d++(?:[.,\uff0e\uff0c:\uff1a/\uff0f×*+^÷·'_~\uff5e〜–−\uff0d-]?\d++)*+")
_NUMBER = Form(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\d+/\d+")
_ASCII = Form(r"[!-~]*")
_SIGN = Pattern(rf"([-−\uff0d﹣]?)([{_CURRENCY}]?)$")

_NAME = Pattern(rf"(?:(?![{SCRIPT}])[^\W\d][._-]?|[#№@&\\])$")
_ITEM = Pattern(r"(?:步[骤驟]|方法|[例图圖表式题題页頁])$")
_STEPS = frozenset("步题題问問章节節种種页頁行")
_REMARK = Pattern(r"[(\uff08\[{]$"), Form(r"[)\uff09\]}][*_.。!\uff01]{0,4}\s*")

_BEGINS = Pattern(
    rf"(?:[{SCRIPT}\uff1a\uff0c\uff1b\uff01\uff1f。、「『《〈]|(?<=[{SCRIPT}]—?)—"
    r"|(?<=(?:^|[\s*(])[^\W\d_]{2,12}):|(?<![=-])(?<=<[a-z][a-z0-9]{0,7})>(?<!<su[bp]>))[*]{0,3}$"
)
"""The end of a text behind which a number begins. A number that is no ASCII may follow a space."""
_BEGINS_ALONE = Pattern(
    r"(?:[~≈≃|]|(?<![A-Za-z0-9_])[(\[{]|(?<!(?:^|[\W\d_])[^\W\d_]\s?)(?:[→⇒⟹]|[=-]>)"
    r"|[^\W\d_][—―]|(?:^|\s)[:+])[*]{0,3}$"
)
"""The same, of texts in which math-verify finds nothing."""
_SPACED = Pattern(rf"(?:^|[\s=])(?:\*\*)?[{_CURRENCY}]?-?\(?-?\.?\d")
_FORMULA = Pattern(r"\$|\\[()\[\]]|\\[dt]?frac|\\boxed|\s\[|(?<!\[\d{1,3})\]\s")

_BEHIND_ANOTHER = Pattern(
    r"\d\s?(?:[、\uff0c,或和与與及至到比又加减減乘除\uff1a:~\uff5e〜–−-]|[加减減乘除][以上去])\s?$"
    r"|\d\s?(?:[年月日号號点點時时分秒元块塊角米尺斤度周週天년월일시분초원]|小[时時]|分[钟鐘]|時間|시간)$"
    r"|分之\s?$|不(?:是|等于|等於|为|為)?\s?$|(?:並|并)?非\s?$"
)
"""A number behind these belongs to the number before them, or is denied."""
_CONTINUES = Form(
    r"\s?(?:[十百千万萬亿億兆백천만억](?![克米瓦卡升])|分之)|[²³⁰-⁹½-¾^_√π\\:\uff1a]"
    r"|\s?[-+*/×÷=·<>](?![\s*/<-]|$)(?!/?[a-z]{1,8}>)|\([A-Za-z\d]|[～~至到比或]\s?\d"
)
"""What may follow a number that is only a part of the value."""
_TENTHOUSANDS = Form(r"\s?([万萬만亿億억])(?![十百千万萬亿億兆백천만억\d零〇一二三四五六七八九])")
_LETTERS = Form(r"[A-Za-z]{1,12}")


def with_spaces(text: str) -> str:
    """Return the text with white space around its last number if it has none.

    Digits of other scripts and full-width signs are written in ASCII, and ``3万`` as 30000.

    >>> with_spaces("步骤 3：所以答案是12。"), with_spaces("Step 3, total:12")
    ('步骤 3：所以答案是 12 。', 'Step 3, total: 12 ')
    >>> with_spaces("时间是3:45。"), with_spaces("It is H2O."), with_spaces("共3至5个")
    ('时间是3:45。', 'It is H2O.', '共3至5个')
    """
    for token in reversed(_TOKEN.finditer(text)[-_MOST_TOKENS:]):
        if not _is_name_or_remark(text, token):
            return _spaced(text, token)
    return text


def _is_name_or_remark(text: str, token: Match) -> bool:
    """Return whether a number is none of values: a part of a name, the number of a step, a
    citation, or the beginning of a remark in brackets."""
    before, after = _around(text, token)
    if _NAME.search(before) or _ITEM.search(before):
        return True
    if before.endswith("第") and after[:1] in _STEPS:
        return True
    if _REMARK[0].search(before) is None:
        return False
    is_citation = before.endswith("[") and before.strip() != "["
    return is_citation or _REMARK[1].fullmatch(after.partition("\n")[0]) is None


def _spaced(text: str, token: Match) -> str:
    before, after = _around(text, token)
    signs = _SIGN.search(before)
    sign, currency = ("", "") if signs is None else signs.groups()
    before = before.removesuffix(sign + currency)
    rest = text[token.end() :]
    number = "".join(_as_ascii(character) for character in token.group()[:_LONGEST])
    begin = token.start() - len(sign + currency)
    if len(token.group()) > _LONGEST or not _NUMBER.fullmatch(number) or _FORMULA.search(rest):
        return text
    if currency == "$" and text.count("$") > 1:
        return text
    if not _is_found(text[:begin], before, token.group(), sign):
        return text
    if _BEHIND_ANOTHER.search(before):
        return text
    end = token.end()
    if scale := _TENTHOUSANDS.match(after):
        if "/" in number:
            return text
        power = 8 if scale[1] in "亿億억" else 4
        number = format(Decimal(number.replace(",", "")).scaleb(power), "f")
        end += scale.end()
    elif _CONTINUES.match(after):
        return text
    elif letters := _LETTERS.match(after):
        quantity = read_quantity(number + letters.group())
        if quantity is None or not quantity.unit:
            return text
    elif after[:1] in ("%", "\uff05"):
        number, end = number + "%", end + 1
    return f"{text[:begin]} {'-' if sign else ''}{number} {text[end:]}"


def _is_found(head: str, before: str, number: str, sign: str) -> bool:
    """Return whether the number behind ``head`` is read. ``before``: the end of ``head``."""
    if _BEGINS.search(before):
        return True
    if not _ASCII.fullmatch(number) and (not before or before[-1].isspace() or before[-1] == "="):
        return True
    if not _BEGINS_ALONE.search(before) or (sign and before[-1] == "|"):
        return False
    return _SPACED.search(head) is None and _FORMULA.search(head) is None


def _around(text: str, token: Match) -> tuple[str, str]:
    begin, end = token.span()
    return text[max(0, begin - _WINDOW) : begin], text[end : end + _WINDOW]


def _as_ascii(character: str) -> str:
    digit = unicodedata.decimal(character, None)
    return unicodedata.normalize("NFKC", character) if digit is None else str(digit)
