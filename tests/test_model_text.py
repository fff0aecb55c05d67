"""Every pattern over text of a model takes linear time, and a search that does not ends."""

import importlib
import time
from pathlib import Path

import pytest

import burnish
from burnish import model_text
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import label_of
from burnish.data.sources import DataError, Row
from burnish.model_text import DOTALL, ModelTextError, Pattern
from burnish.rewards.math.text import judge, read_label
from burnish.rewards.python_code.tests import read_code
from tests.support.worst_texts import worst_texts

LENGTH = 10_000
_PACKAGE = Path(burnish.__file__).parent
for _file in sorted(_PACKAGE.rglob("*.py")):
    if "burnish.model_text import" in _file.read_text(encoding="utf-8"):
        importlib.import_module(".".join(_file.relative_to(_PACKAGE.parent).with_suffix("").parts))
PATTERNS = {pattern.expression: pattern for pattern in model_text.PATTERNS}


@pytest.fixture
def short_limit(monkeypatch):
    """A search may take 0.25 s of CPU time, 25 times what the slowest takes. One whose time is
    quadratic takes as much for 10,000 characters as for 20,000 within 1 s."""
    monkeypatch.setattr(model_text, "LIMIT_S", 0.25)


@pytest.mark.parametrize("expression", PATTERNS)
def test_a_pattern_takes_linear_time_on_its_worst_texts(expression, short_limit):
    pattern = PATTERNS[expression]
    length = min(LENGTH, (pattern.longest or LENGTH) - len(expression) - 10)
    for text in worst_texts(expression, max(length, 1)):
        if pattern.longest is None or len(text) <= pattern.longest:
            pattern.worst_case(text)


@pytest.mark.parametrize(
    "expression",
    [
        r"\^\s*\{?\s*\\circ",
        r"(?:jan|feb)[a-z]*\.?\s+\d",
        r"(a|aa)+$",
        r"a\s*,?\s*\d",
        r"\s+$",
    ],
)
def test_worst_texts_find_patterns_that_are_not_linear(expression, short_limit, monkeypatch):
    monkeypatch.setattr(model_text, "LIMIT_S", 0.08)
    pattern = Pattern(expression, DOTALL, is_own=False)
    with pytest.raises(ModelTextError, match="CPU time"):
        for text in worst_texts(expression, LENGTH):
            pattern.finditer(text)


def test_a_text_above_the_limit_of_a_pattern_is_refused():
    with pytest.raises(ValueError, match="at most 3 characters"):
        Pattern("a", longest=3, is_own=False).search("aaaa")


@pytest.mark.parametrize(
    "response",
    [
        "```python\n" * 4_000,
        "```\n" * 10_000,
        "janjanjan" * 4_400,
        "x^" + " " * LENGTH,
        "^" * LENGTH,
        "\\boxed{" * 5_700,
        "\\boxed{1} " * 4_000,
        "the answer is " * 2_800,
        "{" * LENGTH,
        "answer is " + "1," * 19_000,
        "$" * LENGTH,
        "may 5" + " " * LENGTH + ",",
        "1 " * 20_000,
        "\\text{" * 6_600,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_degenerate_responses_are_read_quickly(response):
    """5 s are more than a hundred times what these texts take."""
    labels = [read_label(label) for label in ("42", "x^2+1", "C", "march 5", "blue whale")]
    start = time.process_time()
    for label in labels:
        judge(label, response)
    for which in ("last_block", "all"):
        read_code(response, which)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\ntext\n```py\nb\n  ```\n", "b\n"),
        ("  ``` Python3 title=x\n  a\n\n```  ", "a\n\n"),
        ("```\n```", ""),
        ("```python\na\n", "a\n"),
        ("```js\na\n```", None),
        ("```python\na\n```js\nb\n```", "a\n```js\nb\n"),
        ("````\na\n````", "a\n"),
        ("```a`b\nx\n```\ny\n```", "y\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("```python\na\n```</think>none", None),
    ],
)
def test_the_last_block_of_python_is_the_code(response, code):
    assert read_code(response, "last_block") == code


def test_a_label_pattern_that_backtracks_names_its_row(short_limit):
    config = PromptDataConfig(
        sources=[{"path": "rows.jsonl"}], label_key="label", label_pattern="(a|aa)+$"
    )
    row = Row({"label": "a" * 40 + "!"}, "rows.jsonl:1", None)
    with pytest.raises(DataError, match=r"label_key.*CPU time"):
        label_of(row, config)
