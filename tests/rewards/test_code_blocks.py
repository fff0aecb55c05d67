"""The fenced blocks of a response are those of Markdown, whose parser is the oracle."""

from __future__ import annotations

import time

import pytest
from markdown_it import MarkdownIt

from burnish.rewards.python_code.tests import read_code

CODE = 'def f():\n    """\n    ```\n    ~~~\n    """\n    return 1\n'
"""Code with fences in a text."""


def indented(text: str, indent: str) -> str:
    return "".join(indent + line for line in text.splitlines(keepends=True))


BLOCK = f"```python\n{CODE}```"
BLOCKS = {
    "plain": BLOCK,
    "longer": f"````python\n{CODE}`````  \nText.",
    "shorter fences inside": f"````\n{CODE}x = '\n```\n'\n````",
    "tildes": f"~~~ python title=`x`\n{CODE}~~~",
    "not closed": f"Text.\n\n```python\n{CODE}",
    "not closed by another fence": f"```python\n{CODE}s = 1\n~~~\n````python",
    "in an item": f"1. x\n\n{indented(BLOCK, '   ')}\n2. y",
    "an item": f"10) ```python\n{indented(f'{CODE}```', '    ')}\n",
    "in an item of an item": f"- a\n  - b\n{indented(BLOCK, '    ')}\n",
    "closed further in": f" ```python\n{indented(CODE, ' ')}  ```\nText.",
    "tabs": f"- x\n\n{indented(BLOCK, chr(9))}",
    "windows": f"{BLOCK}\nText.".replace("\n", "\r\n"),
    "no fence in a line": f"{BLOCK}\nUse ```python``` and\n``` `x` ```",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_markdown(name: str) -> None:
    tokens = MarkdownIt("commonmark").parse(BLOCKS[name])
    expected = [token.content for token in tokens if token.type == "fence"][-1]
    code = read_code(BLOCKS[name], "last_block")
    assert code is not None and code.split() == expected.split() and "return 1" in code
    lines = [line.rstrip() for line in code.splitlines()]
    assert lines == [line.rstrip().expandtabs(4) for line in expected.splitlines()]


@pytest.mark.parametrize(
    "response",
    [
        f"  ```python\n{CODE}  ```",  # (its lines have less indent than the fence)
        f"1. x\n      ```python\n{indented(CODE, '    ')}      ```",
        f"{BLOCK}\n```",  # (a fence too many opens an empty block)
        f"<answer>\n{BLOCK}\n</answer>",
    ],
)
def test_blocks_that_models_write_in_another_way_than_markdown(response: str) -> None:
    assert read_code(response, "last_block") == CODE


@pytest.mark.parametrize(
    ("tag", "is_python"),
    [
        *((tag, True) for tag in ("", "py", "py3", "python", "Python", "PYTHON", "python3", "Py3")),
        *((tag, True) for tag in ("python3.11", "ipython", "ipython3", "{.python}", "{python}")),
        *((tag, True) for tag in ("python:main.py", "python=", "python,linenos", "python{1,3}")),
        *((tag, True) for tag in ("solution.py", "python title=`x`", "{.python .numberLines}")),
        *((tag, False) for tag in ("c++", "cpp", "C", "java", "javascript", "js", "bash", "text")),
        *((tag, False) for tag in ("python2", "py2", "pycon", "pytb", "pyx", "output", "p")),
    ],
)
def test_the_tag_of_a_block_names_its_language(tag: str, is_python: bool) -> None:
    """Tildes, because the tags of a fence of backticks contain none."""
    assert read_code(f"~~~{tag}\n{CODE}~~~", "last_block") == (CODE if is_python else None)


@pytest.mark.parametrize("text", ["```python\n", "- ", " ", "`", "~", "\t", "1. "])
def test_blocks_are_read_in_linear_time(text: str) -> None:
    before = time.process_time()
    read_code(text * 40_000, "last_block")
    read_code(f"   ```\n{text * 40_000}", "last_block")
    assert time.process_time() - before < 5
