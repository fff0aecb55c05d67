"""Tool calls that are cut or malformed: never another call than the policy wrote, and no text is
lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from chat_families import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.episodes.formats import FORMATS, response_template
from burnish.episodes.parsing import ParsedMessage, ResponseParser
from burnish.episodes.probing import TOOLS
from burnish.episodes.renderer import ChatRenderer
from burnish.reasoning_tags import THINK
from burnish.schema_keywords import UncheckableError
from burnish.tool_arguments import (
    argument_problem,
    check_parameters,
)

TOKENIZER = chat_tokenizer("chatml")
ONE: dict[str, Any] = {"key": "bob and", "limit": 1200}
OTHER: dict[str, Any] = {"key": "a"}


def hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def xml(name: str, arguments: Mapping[str, Any]) -> str:
    values = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


def glm(name: str, arguments: Mapping[str, Any]) -> str:
    values = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{''.join(values)}</tool_call>"


def llama3_json(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def mistral(name: str, arguments: Mapping[str, Any]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments}])


def mistral_args(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def seed(name: str, arguments: Mapping[str, Any]) -> str:
    return xml(name, arguments).replace("tool_call>", "seed:tool_call>")


def listed(opening: str, closing: str) -> Callable[[str, Mapping[str, Any]], str]:
    """A function that writes a call as a list between two texts."""
    return lambda name, arguments: (
        opening + json.dumps([{"name": name, "arguments": arguments}]) + closing
    )


def harmony(name: str, arguments: Mapping[str, Any]) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{json.dumps(arguments)}<|call|>"


CALL = {
    function.__name__: function
    for function in (hermes, xml, seed, glm, llama3_json, mistral, mistral_args, harmony)
} | {
    "nemotron": listed("<TOOLCALL>", "</TOOLCALL>"),
    "apriel": listed("<tool_calls>", "</tool_calls>"),
    "phi4": listed("<|tool_call|>", "<|/tool_call|>"),
    "granite": listed("<|tool_call|>", ""),
}
"""Format -> function that writes one call."""


def replies(name: str) -> list[tuple[str, str, str]]:
    """(text before, calls, text after) of replies in a format, with one or two calls."""
    one, other = CALL[name]("look_up", ONE), CALL[name]("measure", OTHER)
    if name == "llama3_json":
        return [("", one, "")]
    if name in ("mistral", "granite"):
        both = FORMATS[name].opening + json.dumps(
            [{"name": "look_up", "arguments": ONE}, {"name": "measure", "arguments": OTHER}]
        )
        return [("Let me see. ", one, ""), ("Let me see. ", both, "")]
    if name == "mistral_args":
        return [("Let me see. ", one, ""), ("Let me see. ", one + other, "")]
    if name == "harmony":
        before = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
        return [("", one, ""), (before, one, ""), ("", f"{one}<|start|>assistant{other}", "")]
    thought = "<think>\nI think.\n</think>\n\n"
    return [("Let me see. ", one, ""), (f"{thought}Two: ", f"{one}\n{other}", "\nThat is all.")]


CASES = [(name, *reply) for name in FORMATS for reply in replies(name)]


def parser(name: str) -> ResponseParser:
    reasoning = None if name == "harmony" else THINK
    template = response_template(FORMATS[name], reasoning=reasoning)
    return ResponseParser(TOKENIZER, template, tool_format=FORMATS[name])


def calls(found: ParsedMessage) -> list[tuple[str, Any]]:
    made = found.message.get("tool_calls", [])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in made]


def visible(found: ParsedMessage) -> str:
    """The text that a client sees, without white space and without the markers of reasoning."""
    return letters(found.message.get("reasoning_content", "") + found.message["content"])


def letters(text: str) -> str:
    for marker in ("<think>", "</think>"):
        text = text.replace(marker, "", 1)
    return "".join(text.split())


@pytest.mark.parametrize(("name", "before", "middle", "after"), CASES)
def test_a_reply_that_is_cut_anywhere_has_no_call_of_its_own_and_loses_no_text(
    name: str, before: str, middle: str, after: str
) -> None:
    """For every cut: the calls are the first ones of the complete reply, and all other text is
    visible. (In channels: from the last complete call on.)"""
    read, whole = parser(name), before + middle + after
    wanted = calls(read.parse(whole, TOOLS, end="<|im_end|>"))
    assert wanted in ([("look_up", ONE)], [("look_up", ONE), ("measure", OTHER)])
    counts = set()
    for cut in range(len(whole) + 1):
        found = read.parse(whole[:cut], TOOLS)
        made = calls(found)
        counts.add(len(made))
        assert made == wanted[: len(made)], whole[:cut]
        written = middle if len(made) == len(wanted) else CALL[name](*made[0]) if made else ""
        if name != "harmony":
            rest = whole[:cut].replace(written, "", 1)
            assert visible(found) == letters(rest), whole[:cut]
        elif len(made) < len(wanted) and cut > len(before):
            begun = whole[:cut].removeprefix(before).removeprefix(written)
            assert visible(found).endswith(letters(begun)), whole[:cut]
    assert counts == {0, len(wanted)} | ({1} if name not in ("mistral", "granite") else set())


MALFORMED = [
    ("hermes", "The answer is 5. <tool_call> is a tag."),
    ("hermes", '<tool_call>\n{"name": "look_up", "arguments": {"key": }}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "look_up", "input": {"key": "a"}}\n</tool_call>'),
    ("hermes", "<tool_call>\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "look_up", "arguments": {"key": NaN}}\n</tool_call>'),
    ("xml", "<tool_call>\n<function=look_up\n</tool_call> and more"),
    (
        "xml",
        "<tool_call>\n<function=look_up>\n<parameter=key>\na\n</parameter>\nlimit 1200\n"
        "</function>\n</tool_call>",
    ),
    (
        "xml",
        '<tool_call>\n<function=look_up>\n<parameter=key>\nprint("</parameter>")\n</parameter>\n'
        "</function>\n</tool_call>",
    ),
    (
        "glm",
        "<tool_call>look_up\n<arg_key>key</arg_key>\n<arg_value>a</arg_value>\n"
        "<arg_key>key</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
    ),
    ("glm", "Write <tool_call>"),
    ("llama3_json", '{"name": "look_up", "parameters": {"key": "a"}} and more'),
    ("mistral", '[TOOL_CALLS][{"name": "look_up", "arguments": {"key": "a"}}, {"name": 3}]'),
    ("mistral_args", '[TOOL_CALLS]look_up[ARGS]{"key": "a"} and more'),
    ("mistral_args", '[TOOL_CALLS]look_up{"key": "a"}'),
    ("seed", "<seed:tool_call>\n<function=look_up\n</seed:tool_call> and more"),
    ("nemotron", '<TOOLCALL>[{"name": "look_up", "arguments": {"key": "a"}}] and more'),
    ("apriel", '<tool_calls>[{"name": "look_up"}, 3]</tool_calls>'),
    ("phi4", '<|tool_call|>{"name": "look_up", "arguments": {"key": "a"}}'),
    ("granite", '<|tool_call|>[{"name": "look_up", "arguments": {"key": "a"}}] and more'),
    ("harmony", "<|channel|>commentary to=functions.look_up<|message|>{]<|call|>"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_a_malformed_call_and_everything_after_it_is_content(name: str, text: str) -> None:
    """Calls before it are calls, those after it are text."""
    read = parser(name)
    found = read.parse(text, TOOLS, end="<|im_end|>")
    assert found.problem is not None and calls(found) == []
    assert found.message["content"] == text.strip()
    good = CALL[name]("measure", OTHER)
    if name in ("llama3_json", "mistral", "granite"):  # one text with all calls
        return
    both = f"{good}\n{text}\n{good}" if name != "harmony" else f"{good}<|start|>assistant{text}"
    found = read.parse(both, TOOLS, end="<|im_end|>")
    assert calls(found) == [("measure", OTHER)]
    assert found.message["content"] == both.removeprefix(good).strip()


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_everything_is_content(name: str) -> None:
    text = CALL[name]("look_up", ONE)
    found = parser(name).parse(text, ())
    assert found == ParsedMessage({"role": "assistant", "content": text.strip()}, None)


def test_own_templates_read_complete_calls_and_keep_the_others_as_text() -> None:
    """The field has no JSON, so only its end shows that a call is complete."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+)\n",
                "close": "<|im_end|>",
                "repeats": True,
                "content": "kv-lines",
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    renderer = ChatRenderer(tokenizer)
    for end, made in (("<|im_end|>", [("look_up", {"key": "a"})]), ("", [])):
        text = f"Hm. CALL look_up\nkey: a{end}"
        found = renderer.parse(tokenizer(text)["input_ids"], TOOLS)
        assert calls(found) == made
        assert found.message["content"] == ("Hm." if made else text)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([*FORMATS]),
    pieces=st.lists(
        st.sampled_from(["word ", "<", "\n", "{", "}", '"', "<tool_call>", "[TOOL_CALLS]", "CALL"]),
        max_size=12,
    ),
)
def test_words_between_anything_stay_in_order(name: str, pieces: list[str]) -> None:
    """Numbered words and calls in any order: each word is in the content or in a call's place."""
    text = "".join(
        f"w{i} " if piece == "word " else CALL[name]("measure", OTHER) if piece == "CALL" else piece
        for i, piece in enumerate(pieces)
    )
    found = parser(name).parse(text, TOOLS, end="<|im_end|>")
    words = [f"w{i}" for i, piece in enumerate(pieces) if piece == "word "]
    places = [found.message["content"].find(word) for word in words]
    assert -1 not in places and places == sorted(places)
    assert all(call == ("measure", OTHER) for call in calls(found))


# ---- limits ------------------------------------------------------------------------------------

LONG = 40_000
WORST = [
    "<tool_call>" * 4_000,
    "<tool_call>" + " " * LONG,
    "<tool_call><function=" + "a" * LONG,
    "<tool_call><function=" * 2_000,
    "<tool_call><function=f>" + "<parameter=" * 4_000 + "</function></tool_call>",
    "<tool_call><function=f>" + "</function> " * 4_000,
    "<tool_call><function=f>" + "<parameter=k>\n" * 3_000 + "</function></tool_call>",
    "<tool_call>f" + "<arg_key>k</arg_key>" * 2_000 + "</tool_call>",
    "<tool_call>f" + "<arg_key>k</arg_key> <arg_value>" * 1_300 + "</tool_call>",
    "[TOOL_CALLS]" + "a" * LONG,
    "[TOOL_CALLS]" + "a " * (LONG // 2),
    "[TOOL_CALLS]" * 3_000 + "[ARGS]",
    "[TOOL_CALLS]a[ARGS]" * 2_000,
    "<|channel|>commentary to=functions.f" + " " * LONG,
    "<|channel|>commentary to=functions." + "a" * LONG,
    "<|channel|>commentary to=functions.f <|constrain|>" + " json" * 8_000,
    "<think>" * 5_000,
    "<think></think>" * 2_500,
    " " * LONG,
    "\n" * LONG + '{"name": ',
    '{"name": "a", "parameters": ' + "[" * LONG,
    "{" * LONG,
]


@pytest.mark.parametrize("name", FORMATS)
def test_the_worst_texts_take_linear_time(name: str) -> None:
    """40,000 characters each, for parsing all at once and in parts, in 5 s together."""
    read, begun = parser(name), time.process_time()
    for text in WORST:
        read.parse(text, TOOLS, end="<|im_end|>")
        stream = read.stream()
        for place in range(0, len(text), 4_000):
            stream.feed(text[place : place + 4_000])
    assert time.process_time() - begun < 5


NESTED: dict[str, Any] = {
    f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)
} | {"d40": {}}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"pattern": "^(a|a)+$"}}}, {"a": "a" * 40 + "!"}),
        ({"patternProperties": {"^(a|a|b?)+$": {}}}, {"a" * 40 + "!": 1}),
        ({"patternProperties": {"^(a|a)+$": {}}, "additionalProperties": False}, {"a" * 40: 1}),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [{"k": i} for i in range(9_000)]}),
        ({"properties": {"a": {"items": {"enum": [*range(9_000)]}}}}, {"a": [-1] * 9_000}),
        ({"$defs": NESTED, "$ref": "#/$defs/d0"}, {}),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {}),
        ({"unevaluatedProperties": False, "$defs": NESTED, "$ref": "#/$defs/d0"}, {"a": 1}),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": {"pattern": "(a|a)+$"}},
            ["a" * 40 + "!"],
        ),
        ({"type": [{"a": i} for i in range(6_000)]}, {}),
        ({"allOf": [{"properties": {str(i): {}}} for i in range(3_000)]}, {}),
    ],
)
def test_comparing_arguments_with_a_schema_is_bounded(schema: Any, arguments: Any) -> None:
    """Without limits each takes minutes or does not end."""
    begun = time.process_time()
    for function in (lambda: check_parameters(schema), lambda: argument_problem(schema, arguments)):
        try:
            function()
        except Exception as error:  # refused
            assert str(error)
    assert time.process_time() - begun < 5


def test_arguments_that_cannot_be_compared_do_not_match() -> None:
    nested = {"$defs": NESTED, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    check_parameters(nested)
    assert argument_problem(nested, {}) is None
    assert "too many steps" in str(argument_problem(nested, {"a": 1}))
    with pytest.raises(UncheckableError, match="characters"):
        check_parameters({"description": "a" * 200_000})


@pytest.mark.parametrize(
    ("schema", "valid", "wrong"),
    [
        ({"uniqueItems": True}, [1, True, "1", [1]], [1, 1.0]),
        ({"items": {"pattern": "^a+$"}}, ["aa", 1], ["ab"]),
        ({"additionalProperties": False, "properties": {"a": {}}}, {"a": 1}, {"b": 1}),
        ({"additionalProperties": {"type": "string"}}, {"a": "b"}, {"a": 1}),
        ({"patternProperties": {"^a": {"type": "string"}}}, {"ab": "x", "b": 1}, {"ab": 1}),
        (
            {"patternProperties": {"^a": {}}, "additionalProperties": False},
            {"ab": 1},
            {"ab": 1, "c": 2},
        ),
        ({"items": {"const": {"nullable": True}}}, [{"nullable": True}], [None]),
        (
            {"properties": {"default": {"type": "string", "nullable": True}}},
            {"default": None},
            {"default": 1},
        ),
        (
            {"$defs": {"enum": {"type": "string", "nullable": True}}, "$ref": "#/$defs/enum"},
            None,
            1,
        ),
        (
            {"$defs": {"n": {"type": "number"}}, "nullable": True, "items": {"$ref": "#/$defs/n"}},
            [1],
            ["a"],
        ),
        ({"properties": {"nullable": True, "a": {"type": "string"}}}, {"a": "b"}, {"a": 1}),
        ({"properties": {"$schema": {"type": "string"}}}, {"$schema": "a"}, {"$schema": 1}),
        ({"required": ["a"], "properties": {"a": {"enum": [1, "b"]}}}, {"a": 1.0}, {"a": True}),
    ],
)
def test_keywords_of_json_schema_mean_what_the_standard_says(
    schema: Any, valid: Any, wrong: Any
) -> None:
    assert argument_problem(schema, valid) is None
    assert argument_problem(schema, wrong) is not None
