"""What is fuzzed: readers of text of a model, chat templates, JSON schemas, headers of files.

Each target is a function of one generated value, with the errors that it may raise.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from chat_families import chat_tokenizer
from hypothesis import strategies as st
from jinja2 import TemplateError
from jsonschema import SchemaError
from referencing.exceptions import Unresolvable
from safetensors import SafetensorError

from burnish.episodes.formats import FORMATS, format_of, response_template
from burnish.episodes.parsing import ResponseParser
from burnish.episodes.probing import TOOLS
from burnish.errors import BurnishError
from burnish.models.tensor_files import TensorFiles
from burnish.reasoning_tags import THINK, after_reasoning
from burnish.rewards.labels import LabelError
from burnish.rewards.math.quantities import read_quantity
from burnish.rewards.math.text import judge, last_answer, read_date, read_label
from burnish.rewards.python_code.tests import read_code, read_tests
from burnish.rewards.remote.client import read_reply
from burnish.schema_keywords import UncheckableError
from burnish.templates import render_chat
from burnish.tool_arguments import argument_problem

Check = Callable[[Any], object]
LONGEST = 40_000
"""Maximum characters of a text."""
SHORT = 1_000
"""Texts up to this length are not cut."""


@dataclass(frozen=True)
class Target:
    """A reader, the inputs that it gets, and what it may raise."""

    check: Check
    inputs: st.SearchStrategy[Any]
    allowed: tuple[type[Exception], ...] = ()
    cpu_s: float = 1.0
    """Maximum user CPU for an empty input."""
    cpu_us_per_char: float = 50.0
    """Additional user CPU per character: 2 s for 40,000. The slowest linear reader takes 12."""


def texts(*fragments: str) -> st.SearchStrategy[str]:
    """Texts of fragments, other characters, and long repetitions, at most LONGEST characters."""
    fragment = st.sampled_from(fragments)
    piece = st.one_of(fragment, st.text(max_size=6))
    unit = fragment | st.lists(piece, min_size=1, max_size=4).map("".join)
    times = st.sampled_from([1, 1, 1, 2, 30, 3_000, LONGEST])
    repeated = st.builds(lambda text, n: (text * n)[:LONGEST], unit, times)
    return st.lists(repeated, max_size=6).map(_joined)


def _joined(parts: list[str]) -> str:
    """Join texts; the long ones are cut so that what follows them is within LONGEST."""
    num_long = sum(len(part) > SHORT for part in parts)
    left = LONGEST - sum(len(part) for part in parts if len(part) <= SHORT)
    return "".join(part if len(part) <= SHORT else part[: left // num_long] for part in parts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)

CALLS = (
    *("<tool_call>", "</tool_call>", "<function=look_up>", "</function>", "<parameter=key>\n"),
    *("</parameter>", "<arg_key>key</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", '{"name": "look_up", "arguments": {', '"key": "a"', "}}", "{", "[{"),
    *("<think>", "</think>", "<|channel|>commentary to=functions.look_up", "<|message|>"),
    *("<|channel|>analysis", "<|constrain|>json", "<|end|>", "<|call|>", "<|start|>assistant"),
    *("<|python_tag|>", "look_up", "\n", " ", "\\", '"', "1e999", "NaN"),
)
MATH = (
    *("\\boxed{", "}", "{", "\\frac", "answer is ", "answer: ", "####", "<answer>", "</answer>"),
    *("$", "\\text{", "^", "\\circ", "1", "6,000", "1 1/2", "½", "e5", "jan", "may 5", "2017"),
    *("of ", ",", " or ", "A", "(B)", "C.", "\\times 10", "√(", " ", "\n", "</think>", "%", "not "),
)
DATES = (
    *("jan", "September", "mai", "5", "31st", "2017", "20170505", "-", "/", ".", ",", " ", "of"),
    *("the ", "0", "99", "T00:00:00Z", "BC", "\n"),
)
CODE = ("```", "```python", "\n", " ", "\t", "`", "print(1)", "</think>", "\r\n", "~~~")
TEMPLATE = (
    *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages|tojson }}"),
    *("{% set x = x ~ x %}", "{% set x = 'a' * 99999 %}", "{{ x }}", "{% if x %}", "{% endif %}"),
    *("{{ 'a'|center(99999999) }}", "{{ range(99999999)|list }}", "{{ x|join(x) }}", "|tojson"),
    *("{{ '%99999999d'|format(1) }}", "{{ x.__class__ }}", "{{ 9**99999 }}", "{% macro f() %}"),
    *(
        "{{ f() }}",
        "{% endmacro %}",
        "{{ [x, x] == [x, x] }}",
        "{{ x|replace('', x) }}",
        "{%",
        "}}",
    ),
)
SCHEMA_KEYS = (
    *("type", "properties", "items", "pattern", "$ref", "anyOf", "allOf", "not", "enum", "const"),
    *("uniqueItems", "patternProperties", "required", "minimum", "nullable", "format"),
)
SCHEMAS = st.recursive(
    st.sampled_from(["object", "string", "^(a+)+$", "(a|aa)*b", "#", "#/properties/a", True, 3])
    | st.booleans(),
    lambda inner: (
        st.dictionaries(st.sampled_from(SCHEMA_KEYS), inner, max_size=4)
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=10,
)
HEADERS = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda head, length, tail: (
            struct.pack("<Q", len(head) if length is None else length) + head + tail
        ),
        st.one_of(
            JSON.map(lambda tree: json.dumps(tree).encode("utf-8", "replace")),
            st.builds(
                lambda dtype, shape, ends: json.dumps(
                    {
                        "a": {"dtype": dtype, "shape": shape, "data_offsets": ends},
                        "__metadata__": {"pieces": "[1"},
                    }
                ).encode(),
                st.sampled_from(["F32", "I64", "BOOL", "X"]),
                st.lists(st.sampled_from([0, 1, 2, -1, 10**12]), max_size=3),
                st.lists(st.sampled_from([0, 4, 8, -1, 10**15]), max_size=3),
            ),
        ),
        st.sampled_from([None, None, 0, 7, 2**63, 2**40]),
        st.binary(max_size=16),
    ),
)


@lru_cache
def _tokenizer() -> Any:
    return chat_tokenizer("chatml")


@lru_cache
def _parser(name: str) -> ResponseParser:
    tool_format = FORMATS[name]
    template = response_template(tool_format, reasoning=THINK)
    return ResponseParser(_tokenizer(), template, tool_format=tool_format)


def read_calls(name: str) -> Check:
    """Return the reader of one format of tool calls, complete and as a stream."""

    def check(text: str) -> None:
        _parser(name).parse(text, TOOLS)
        stream = _parser(name).stream()
        for start in range(0, min(len(text), 2_000), 97):
            stream.feed(text[start : start + 97])

    return check


@lru_cache
def _labels() -> list[Any]:
    return [read_label(label) for label in ("42", "x^2+1", "C", "march 5", "blue whale", "1, 2")]


def read_answer(text: str) -> None:
    """Compare a response with each kind of label."""
    last_answer(after_reasoning(text))
    for label in _labels():
        judge(label, text)


def read_blocks(text: str) -> None:
    """Find the code in a response."""
    read_code(text, "last_block")
    read_code(text, "all")


def render(template: str) -> None:
    """Render a conversation with a chat template."""
    tokenizer = _tokenizer()
    before = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        render_chat(tokenizer, [{"role": "user", "content": "a" * 50}], x="abc")
    finally:
        tokenizer.chat_template = before


def read_file(data: bytes) -> None:
    """Open a file of tensors and read them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data)
        files = TensorFiles([path])
        for name in files:
            files.read(name)


TARGETS = {
    **{f"tool_calls_{name}": Target(read_calls(name), texts(*CALLS)) for name in sorted(FORMATS)},
    "format_of": Target(format_of, texts(*CALLS)),
    "math_answers": Target(read_answer, texts(*MATH)),
    "math_labels": Target(read_label, texts(*MATH) | JSON, (LabelError,)),
    "numbers": Target(read_quantity, texts(*MATH)),
    "dates": Target(read_date, texts(*DATES)),
    "code_blocks": Target(read_blocks, texts(*CODE)),
    "code_tests": Target(
        read_tests, texts(*CODE, "[", '"', "{", "assert f(1)") | JSON, (LabelError,)
    ),
    "chat_templates": Target(render, texts(*TEMPLATE), (TemplateError, BurnishError), cpu_s=10.0),
    "json_schemas": Target(
        lambda pair: argument_problem(*pair),
        st.tuples(st.dictionaries(st.sampled_from(SCHEMA_KEYS), SCHEMAS, max_size=4), JSON),
        (SchemaError, UncheckableError, Unresolvable),
    ),
    "reward_replies": Target(
        lambda data: read_reply(data, 2),
        JSON.map(lambda tree: json.dumps({"rewards": tree, "extra_logs": tree}).encode())
        | st.binary(max_size=60)
        | texts("[", '{"rewards":', "1,").map(lambda text: text.encode("utf-8", "replace")),
        (ValueError, RecursionError),
    ),
    "tensor_headers": Target(
        read_file, HEADERS, (BurnishError, ValueError, OSError, SafetensorError)
    ),
}
