"""Responses become messages; malformed calls become words for the policy, and never an error."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from chat_families import FAMILIES, chat_tokenizer, encoded, renderer_of
from hypothesis import given
from hypothesis import strategies as st

from burnish.episodes.formats import FORMATS, format_of, response_template
from burnish.episodes.parsing import ParsedMessage, ResponseParser, argument_problem
from burnish.episodes.probing import TOOLS, assistant, call, user
from burnish.episodes.renderer import ChatRenderer, RendererError
from burnish.reasoning_tags import THINK
from burnish.tool_arguments import argument_types

RENDERERS = {
    family: (ChatRenderer(tokenizer, history="keep"), tokenizer)
    for family in FAMILIES
    for tokenizer in [chat_tokenizer(family)]
}


def parsed(family: str, text: str, tools: Any = TOOLS) -> ParsedMessage:
    renderer, tokenizer = RENDERERS[family]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = renderer.render([user("How many?")], TOOLS)
    return renderer.parse(ids, tools, prompt_ids=prompt)


def functions(found: ParsedMessage) -> list[tuple[str, Mapping[str, Any]]]:
    calls = found.message.get("tool_calls", [])
    return [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


LOOK_UP = ("look_up", {"key": "a b", "limit": 2})
WELL_FORMED = {
    "chatml": '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b", "limit": 2}}\n'
    "</tool_call><|im_end|>",
    "llama3": '{"name": "look_up", "parameters": {"key": "a b", "limit": 2}}<|eot_id|>',
    "mistral": '[TOOL_CALLS][{"name": "look_up", "arguments": {"key": "a b", "limit": 2}}]</s>',
    "xml": "<tool_call>\n<function=look_up>\n<parameter=key>\na b\n</parameter>\n"
    "<parameter=limit>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>",
    "harmony": "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
    '{"key": "a b", "limit": 2}<|call|>',
}


PARAMETERS_FIRST = '{"parameters": {"key": "a b", "limit": 2}, "name": "look_up"}<|eot_id|>'


@pytest.mark.parametrize(("family", "text"), [*WELL_FORMED.items(), ("llama3", PARAMETERS_FIRST)])
def test_a_call_is_read(family: str, text: str) -> None:
    found = parsed(family, text)
    assert found.problem is None
    assert functions(found) == [LOOK_UP]
    assert found.message["content"] == ""
    made = found.message["tool_calls"][0]
    assert made["type"] == "function" and len(made["id"]) == 9 and made["id"].isalnum()


def test_text_behind_a_call_in_channels_has_no_rendering() -> None:
    text = WELL_FORMED["harmony"].replace("<|call|>", "<|end|>")
    message = parsed("harmony", f"{text}<|start|>assistant<|channel|>final<|message|>Done.").message
    assert message["content"] == "Done." and message["tool_calls"]
    conversation = [user("Go."), message, user("Go on.")]
    with pytest.raises(RendererError, match="behind its tool calls"):
        RENDERERS["harmony"][0].render(conversation, TOOLS)
    assert RENDERERS["harmony"][0].render_again(conversation, TOOLS)


def test_calls_are_behind_the_text_of_an_answer_if_the_template_rejects_it_as_sampled() -> None:
    """A result without a call is refused, and the sampled text has the call in the content."""
    tokenizer = chat_tokenizer("chatml")
    refuses = "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    refuses += "{{ raise_exception('no call') }}{% endif %}"
    begin = "{% for m in messages %}"
    assert begin in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(begin, begin + refuses, 1)
    renderer = ChatRenderer(tokenizer)
    text = WELL_FORMED["chatml"].replace("<|im_end|>", "") + " behind<|im_end|>"
    message = renderer.parse(encoded(tokenizer, text), TOOLS).message
    (made,) = message["tool_calls"]
    shown = {"role": "tool", "tool_call_id": made["id"], "name": "look_up", "content": "1"}
    conversation = [user("Go."), message, shown]
    with pytest.raises(RendererError, match="no call"):
        renderer.render(conversation, TOOLS)
    prompt = tokenizer.decode(list(renderer.render_again(conversation, TOOLS)))
    assert 0 < prompt.index("behind") < prompt.rindex("<tool_call>")
    with pytest.raises(RendererError, match="no call"):
        renderer.render_again([user("Go."), assistant("So."), shown], TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_template_renders_is_read_back(family: str) -> None:
    renderer, _ = RENDERERS[family]
    message = assistant("", tool_calls=[call("look_up", {"key": "x\ny"}, "probe0000")])
    for answer, calls in ((message, [("look_up", {"key": "x\ny"})]), (assistant("Done."), [])):
        prompt = renderer._template.text([user("Go.")], TOOLS, generate=True)
        text = renderer._template.text([user("Go."), answer], TOOLS, generate=False)
        assert text.startswith(prompt)
        found = parsed(family, text[len(prompt) :].rstrip("\n"))
        assert functions(found) == calls and found.problem is None
        assert found.message["content"] == answer["content"]


@pytest.mark.parametrize(
    ("family", "text", "reasoning", "content"),
    [
        ("chatml", "<think>\nTwo.\n</think>\n\n4<|im_end|>", "Two.", "4"),
        ("chatml", "<think>\nTwo and", "Two and", ""),
        ("chatml", " \n<think>Two.</think> 4<|im_end|>", "Two.", "4"),
        ("chatml", "`<think>` is a tag.", None, "`<think>` is a tag."),
        ("chatml", "4 <think>Two.</think> 5<|im_end|>", None, "4 <think>Two.</think> 5"),
        ("chatml", "<think>a</think>b<think>c</think><think>d", "a", "b<think>c</think><think>d"),
        ("chatml", "2 < 3 and 3 > 2<|im_end|>", None, "2 < 3 and 3 > 2"),
        (
            "harmony",
            "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final"
            "<|message|>4<|return|>",
            "Two.",
            "4",
        ),
        ("harmony", "no channel", None, "no channel"),
        ("mistral", " Hello.</s>", None, "Hello."),
    ],
)
def test_reasoning_and_content(family: str, text: str, reasoning: str | None, content: str) -> None:
    found = parsed(family, text)
    assert found.problem is None
    assert found.message.get("reasoning_content") == reasoning
    assert found.message["content"] == content


def test_text_around_calls_is_content_and_calls_keep_their_order() -> None:
    one, two = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"key": "a"}}}}\n</tool_call>'
        for name in ("look_up", "measure")
    )
    found = parsed("chatml", f"First.\n{one}\nThen.\n{two}<|im_end|>")
    assert [name for name, _ in functions(found)] == ["look_up", "measure"]
    assert found.message["content"].split() == ["First.", "Then."]
    first, second = found.message["tool_calls"]
    assert first["id"] != second["id"]


@pytest.mark.parametrize("header", ["<|im_start|>assistant\n", ">", "\n"])
def test_reasoning_that_the_prompt_opens_is_recognized(header: str) -> None:
    """Also if the header of a turn is in the text after it again."""
    tokenizer = chat_tokenizer("chatml")
    template = tokenizer.chat_template.replace("<|im_start|>assistant\n", header)
    tokenizer.chat_template = template.removesuffix("{% endif %}") + "<think>\n{% endif %}"
    renderer = ChatRenderer(tokenizer, history="keep")
    ids = tokenizer("Two.\n</think>\n\n4<|im_end|>")["input_ids"]
    found = renderer.parse(ids)
    assert found.message == assistant("4", reasoning_content="Two.")


@pytest.mark.parametrize(
    ("source", "opened"),
    [
        ("", "<think>\n"),
        ("", "[THINK]"),
        ("{# </think> #}", ""),
        ("{# [/THINK] #}", "[THINK]"),
    ],
)
def test_the_template_or_the_prompt_decides_whether_a_block_is_reasoning(
    source: str, opened: str
) -> None:
    """Templates that write earlier answers as they are mention no closing tag."""
    tokenizer = chat_tokenizer("xml")
    template = tokenizer.chat_template.removesuffix("{% endif %}")
    tokenizer.chat_template = f"{source}{template}{opened}{{% endif %}}"
    renderer = ChatRenderer(tokenizer, history="keep")
    begin, end = ("[THINK]", "[/THINK]") if opened == "[THINK]" else ("<think>", "</think>")
    written = "" if opened else f"\n{begin}"
    text = f"{written}Two.\n{end}\n\n4 {begin}x{end} " + WELL_FORMED["xml"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = renderer.parse(ids, TOOLS)
    assert found.message["reasoning_content"] == "Two." and functions(found) == [LOOK_UP]
    assert found.message["content"] == f"4 {begin}x{end}"
    reasoning, content = renderer.stream(()).feed(ids)
    assert reasoning.strip() == "Two." and content.strip() == f"4 {begin}x{end}"
    plain = renderer.parse(tokenizer(f"{end}a{begin}", add_special_tokens=False)["input_ids"])
    assert plain.message["content"] == ("a" if opened else f"{end}a") + begin


def test_a_block_is_text_if_the_template_could_not_write_it_again() -> None:
    renderer, tokenizer = renderer_of("xml")
    ids = tokenizer("<think>\nTwo.\n</think>\n\n4", add_special_tokens=False)["input_ids"]
    assert renderer.parse(ids).message == assistant("<think>\nTwo.\n</think>\n\n4")


OWN_TAGS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
        },
        "content": {"repeats": True, "join": ""},
    },
}


@pytest.mark.parametrize("template", [None, OWN_TAGS], ids=["family", "own"])
@pytest.mark.parametrize(
    ("opened", "thought"),
    [("", "<think>\nI.\n</think>\n\n"), ("<think>\n", "I.\n</think>"), ("<think>\n</think>", "")],
)
@pytest.mark.parametrize(
    "content", ["Use the <think> tag.", "<think> is `a`", "<think>b</think> c"]
)
def test_tags_after_the_reasoning_are_content_and_hide_no_call(
    template: Any, opened: str, thought: str, content: str
) -> None:
    """Also in a stream, which sends the text before the call when it is certain."""
    tokenizer = chat_tokenizer("chatml")
    prompt = "<|im_start|>assistant\n"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        prompt + "{% endif %}", f"{prompt}{opened}{{% endif %}}"
    )
    if template is not None:
        tokenizer.response_template = template
    renderer = ChatRenderer(tokenizer, history="keep")
    calls = '\n<tool_call>{"name": "look_up", "arguments": {"key": "<think>"}}</tool_call>' * 2
    ids = tokenizer(thought + content + calls, add_special_tokens=False)["input_ids"]
    found = renderer.parse(ids, TOOLS)
    assert found.problem is None and found.message["content"] == content
    assert found.message.get("reasoning_content") == ("I." if thought else None)
    assert functions(found) == [("look_up", {"key": "<think>"})] * 2
    stream = renderer.stream(())
    parts = [stream.feed([token]) for token in ids]
    reasoning, streamed = ("".join(texts) for texts in zip(*parts, strict=True))
    assert (reasoning, streamed) == ("I." if thought else "", content)


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral", "harmony"])
@pytest.mark.parametrize("value", ["null", "None", "5", "[1]", 'a"b'])
def test_json_arguments_keep_their_types(family: str, value: str) -> None:
    """Whatever the schema of the tool says: a string stays a string."""
    text = WELL_FORMED[family].replace('"a b"', json.dumps(value)).replace("2", '"2"')
    found = parsed(family, text)
    assert found.message["tool_calls"][0]["function"]["arguments"] == {"key": value, "limit": "2"}


def test_ids_of_calls_depend_on_the_prompt_and_repeat() -> None:
    renderer, tokenizer = RENDERERS["chatml"]
    ids = tokenizer(WELL_FORMED["chatml"])["input_ids"]
    one, again, other = (
        renderer.parse(ids, TOOLS, prompt_ids=prompt).message["tool_calls"][0]["id"]
        for prompt in ([1], [1], [2])
    )
    assert one == again != other


@pytest.mark.parametrize(
    ("family", "text", "problem"),
    [
        ("chatml", '<tool_call>\n{"name": "look_up", "argum\n</tool_call>', "is not valid JSON"),
        ("chatml", "<tool_call>\n[3]\n</tool_call>", "is not a JSON object: 3"),
        ("chatml", '<tool_call>\n{"arguments": {}}\n</tool_call>', 'has no "name"'),
        (
            "chatml",
            '<tool_call>\n{"name": "look_up", "arguments": [1]}\n</tool_call>',
            "arguments that are not a JSON object: [1]",
        ),
        (
            "chatml",
            '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>',
            "names the tool 'lookup', which does not exist; the tools are look_up, measure",
        ),
        (
            "chatml",
            '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>',
            "arguments that look_up does not accept: 'key' is a required property",
        ),
        (
            "chatml",
            '<tool_call>{"name": "look_up", "arguments": {"key": "a", "limit": "b"}}</tool_call>',
            "arguments that look_up does not accept: limit: 'b' is not of type 'integer'",
        ),
        (
            "chatml",
            '<tool_call>{"name": "look_up", "arguments": {"key": "a", "more": [NaN]}}</tool_call>',
            "a number in its arguments that is not finite",
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "look_up", "arguments": {"key": "a", "more": 1e999}}]',
            "a number in its arguments that is not finite",
        ),
        (
            "chatml",
            '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}',
            "not closed by '</tool_call>'",
        ),
        (
            "chatml",
            '<think>\nSo <tool_call>{"name": "measure", "arguments": {"key": "a"}}</tool_call>',
            "tool calls in reasoning are not run; write '</think>' first",
        ),
        ("llama3", '{"name": "look_up", "parameters": {"key": ', "is not valid JSON"),
        ("mistral", "[TOOL_CALLS][{", "is not valid JSON"),
        ("xml", "<tool_call>\n<function=look_up\n</tool_call>", "not followed by a well-formed"),
        (
            "xml",
            "<tool_call>\n<function=look_up>\n<parameter=key>\nab\n",
            "not closed by '</function>'",
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{]<|call|>",
            "arguments that are not valid JSON",
        ),
    ],
)
def test_a_malformed_call_is_described(family: str, text: str, problem: str) -> None:
    found = parsed(family, text)
    assert found.problem is not None and problem in found.problem
    example = FORMATS[{"chatml": "hermes", "llama3": "llama3_json"}.get(family, family)].example
    assert found.problem.endswith(f"\nWrite a tool call as:\n{example}")


OWN: Mapping[str, Mapping[str, Any]] = {
    "json": {"content": "json"},
    "quotes": {
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [["<<", ">>"]]},
    },
    "lines": {"content": "kv-lines"},
    "tags": {
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>[^<]*)</>"},
    },
}
"""Response templates of tokenizers: fields of a call."""
TWICE = {
    "chatml": '<tool_call>{"name": "look_up", "arguments": {"key": "a", "key": "a"}}</tool_call>',
    "chatml name": '<tool_call>{"name": "measure", "name": "look_up", "arguments": {}}</tool_call>',
    "chatml text": '<tool_call>{"name": "look_up", "arguments": "{\\"key\\": 1, \\"key\\": 2}"}'
    "</tool_call>",
    "llama3": '{"name": "look_up", "parameters": {"key": "a", "more": [{"b": 1, "b": 2}]}}',
    "mistral": '[TOOL_CALLS][{"name": "look_up", "arguments": {"key": "a", "key": "b"}}]',
    "harmony": "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
    '{"key": "a", "key": "b"}<|call|>',
    "xml": "<tool_call>\n<function=look_up>\n<parameter=key>\na\n</parameter>\n"
    "<parameter=key>\nb\n</parameter>\n</function>\n</tool_call>",
    "xml nested": "<tool_call>\n<function=nested>\n<parameter=more>\n"
    '{"a": 1, "a": 2}\n</parameter>\n</function>\n</tool_call>',
    "own json": 'CALL look_up {"key": "a", "key": "b"};',
    "own quotes": "CALL look_up {key: <<{>>,key: <<b>>};",
    "own lines": "CALL look_up key: a\nkey: b;",
    "own tags": "CALL look_up <key>a</><key>b</>;",
}


@pytest.mark.parametrize("form", TWICE)
def test_a_call_with_the_same_argument_twice_is_malformed_in_every_format(form: str) -> None:
    """Without the repetition it is a call, and text that only looks like one is a value."""
    family, _, kind = form.partition(" ")
    nested = {"name": "nested", "parameters": {"properties": {"more": {"type": "object"}}}}
    tools = [*TOOLS, {"type": "function", "function": nested}]

    def read(text: str) -> ParsedMessage:
        if family != "own":
            return parsed(family, text, tools)
        call = {"open_pattern": r"CALL (?P<name>\w+) ", "close": ";", "repeats": True, **OWN[kind]}
        call["transform"] = {"function": {"name": "{name}", "arguments": "{content}"}}
        template = {"defaults": {"role": "assistant"}, "fields": {"tool_calls": call}}
        template["start_anchor"] = "\0"
        _, tokenizer = RENDERERS["chatml"]
        return ResponseParser(tokenizer, template, ends=()).parse(text, tools, end="<|im_end|>")

    found = read(TWICE[form])
    assert functions(found) == []
    text = TWICE[form].removesuffix("<|call|>")
    assert found.message["content"].split() == text.split()
    assert found.problem is not None and ("twice" in found.problem or "once" in found.problem)
    if kind in ("", "json", "quotes", "lines", "tags"):
        once = TWICE[form].replace("key", "limit", 1).replace('"b": 1', '"c": 1')
        assert len(functions(read(once))) == 1
    if kind == "nested":
        text = TWICE[form].replace("=nested", "=measure")
        assert functions(read(text)) == [("measure", {"more": '{"a": 1, "a": 2}'})]


def test_the_second_of_two_calls_is_named() -> None:
    good = '<tool_call>\n{"name": "measure", "arguments": {"key": "a"}}\n</tool_call>'
    found = parsed("chatml", good + "\n<tool_call>\n{]\n</tool_call>")
    assert found.problem is not None and found.problem.startswith("tool call 2 is not valid JSON")
    assert functions(found) == [("measure", {"key": "a"})]


def test_values_in_xml_have_the_types_of_the_schema() -> None:
    text = WELL_FORMED["xml"].replace("a b", "  7")
    assert functions(parsed("xml", text)) == [("look_up", {"key": "  7", "limit": 2})]


def test_newer_mistral_calls_have_names_before_their_arguments() -> None:
    tokenizer = chat_tokenizer("mistral")
    renderer = ChatRenderer(tokenizer, history="keep", tool_format="mistral_args")
    for text, call_id in (
        ('[TOOL_CALLS]look_up[ARGS]{"key": "a"}', None),
        ('[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{"key": "a"}', "abcdefghi"),
    ):
        found = renderer.parse(tokenizer(text + "</s>")["input_ids"], TOOLS)
        assert functions(found) == [("look_up", {"key": "a"})] and found.problem is None
        assert call_id in (None, found.message["tool_calls"][0]["id"])
    two = '[TOOL_CALLS]look_up[ARGS]{"key": "a"}[TOOL_CALLS]measure[ARGS]{"key": "b"}'
    found = renderer.parse(tokenizer(two)["input_ids"], TOOLS)
    assert functions(found) == [("look_up", {"key": "a"}), ("measure", {"key": "b"})]


def test_the_tokenizers_own_response_template_comes_first() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "tool_calls": {
                "open": "CALL ",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {"function": {"name": "{content.name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    renderer = ChatRenderer(tokenizer)
    found = renderer.parse(tokenizer('CALL {"name": "look_up", "key": "a"};')["input_ids"], TOOLS)
    assert functions(found) == [("look_up", {"name": "look_up", "key": "a"})]
    broken = renderer.parse(tokenizer("CALL {;")["input_ids"], TOOLS)
    assert broken.message == assistant("CALL {;")
    assert broken.problem is not None and broken.problem.startswith("the tool call is malformed")


WITH_END = {
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}<\|eot_id\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|eot_id\|>\s*"},
    },
}
"""TRL's response template for Llama 3.1: a call closes with the end token."""


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|end_of_text|>", ""])
def test_an_end_token_may_be_a_part_of_the_call(end: str) -> None:
    """Also one that the template does not write, and without any, if the JSON is complete."""
    tokenizer = chat_tokenizer("llama3")
    tokenizer.response_template = WITH_END
    renderer = ChatRenderer(tokenizer)
    right = '{"name": "look_up", "parameters": {"key": "a b", "limit": 2}}'

    def read(text: str) -> ParsedMessage:
        ids = tokenizer(text + end, add_special_tokens=False)["input_ids"]
        return renderer.parse(ids, TOOLS, ended=bool(end))

    found = read("So. " + right)
    assert found.problem is None and functions(found) == [LOOK_UP]
    assert found.message["content"] == "So."
    for wrong in (right[:-1], right[:-2], right + "}", right + " ok"):
        broken = read(wrong)
        assert broken.problem and broken.message == assistant(wrong)
    assert read("So.").message == assistant("So.")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "\n" * 50_000,
        "<parameter=key>\n" * 4_000,
        "<tool_call>\n<function=look_up>\n" + "<parameter=key>\n" * 4_000,
        "<tool_call>look_up" + "<arg_key>" * 6_000,
        "<tool_call>look_up" + "<arg_key>a</arg_key><arg_value>" * 2_000,
        "<|channel|>analysis<|message|>" * 2_000,
        "[TOOL_CALLS]a" * 5_000,
    ],
    ids=lambda text: repr(text[-12:]),
)
def test_a_response_that_repeats_itself_is_parsed_in_time(name: str, text: str) -> None:
    """About 60,000 characters, each in less than 1 s. Quadratic patterns took 117 s for 188,000
    characters of parameters (xml) and 46 s for 100,000 spaces (harmony)."""
    _, tokenizer = RENDERERS["chatml"]
    template = response_template(FORMATS[name], reasoning=None if name == "harmony" else THINK)
    begin = time.process_time()
    ResponseParser(tokenizer, template, tool_format=FORMATS[name]).parse(text, TOOLS)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("family", ["chatml", "mistral"])
def test_a_response_with_too_many_calls_is_a_problem(family: str) -> None:
    """Mistral's calls are one list after one marker."""
    calls = '{"name": "look_up", "arguments": {"key": "a"}}'
    for count in (64, 65):
        text = {
            "chatml": f"<tool_call>\n{calls}\n</tool_call>" * count,
            "mistral": f"[TOOL_CALLS][{', '.join([calls] * count)}]",
        }[family]
        found = parsed(family, text)
        if count == 64:
            assert found.problem is None
            assert len({made["id"] for made in found.message["tool_calls"]}) == 64
        else:
            assert functions(found) == [] and found.problem is not None
            assert found.problem.startswith("there are 65 tool calls in one response, and the ")


def test_arguments_that_are_nested_too_deep_are_a_problem() -> None:
    for depth, problem in ((60, False), (64, True)):
        key = "[" * depth + "]" * depth
        text = f'<tool_call>{{"name": "look_up", "arguments": {{"key": {key}}}}}</tool_call>'
        found = parsed("chatml", text)
        assert ("nested more than 64 deep" in (found.problem or "")) == problem


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(RendererError, match="tool_format is 'yaml'; known are hermes"):
        ChatRenderer(chat_tokenizer("chatml"), tool_format="yaml")  # type: ignore[arg-type]


def test_nullable_arguments_may_be_null() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "nullable": True}}}
    assert argument_problem(schema, {"n": None}) is None
    assert argument_problem(schema, {"n": 1}) is None
    assert argument_problem(schema, {"n": "a"}) is not None


def test_types_of_arguments_are_read_behind_references_and_values() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    node = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    schema = {
        "type": "object",
        "$defs": {"point": point, "node": node, "a/b": {"enum": [1, 2]}},
        "properties": {
            "reference": {"$ref": "#/$defs/point"},
            "optional": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
            "all": {"allOf": [{"$ref": "#/$defs/point"}], "description": "a point"},
            "itself": {"$ref": "#/$defs/node"},
            "escaped": {"$ref": "#/$defs/a~1b"},
            "values": {"enum": [1, "auto", None, True]},
            "constant": {"const": 2.5},
            "declared": {"type": ["string", "null"], "enum": ["1", None]},
            "anything": {},
        },
    }
    assert argument_types(schema) == {
        "reference": ["object"],
        "optional": ["null", "object"],
        "all": ["object"],
        "itself": ["null"],
        "escaped": ["integer"],
        "values": ["integer", "string", "null", "boolean"],
        "constant": ["number"],
        "declared": ["string", "null"],
    }
    for invalid in (None, {"properties": []}, {"properties": {"a": {"$ref": "#/$defs/none"}}}):
        assert argument_types(invalid) == {}


def test_types_are_those_of_the_draft() -> None:
    integer, other = {"type": "integer"}, {"type": "string"}
    addresses: dict[str, Any] = {
        "$id": "http://tools.example/root",
        "$defs": {"i": {"$id": "item"} | integer, "n": {"$anchor": "named"} | other},
        "properties": {"a": {"$ref": "item"}, "b": {"$ref": "#named"}},
    }
    assert argument_types(addresses) == {"a": ["integer"], "b": ["string"]}
    alone: dict[str, Any] = {"definitions": {"i": integer}}
    alone["properties"] = {"a": {"$ref": "#/definitions/i", "type": "string"}}
    assert argument_types(alone) == {"a": ["string", "integer"]}
    draft_07 = {"$schema": "http://json-schema.org/draft-07/schema#"}
    assert argument_types(draft_07 | alone) == {"a": ["integer"]}


def test_text_arguments_get_the_types_behind_references() -> None:
    schema = {
        "type": "object",
        "$defs": {"point": {"type": "object"}},
        "properties": {"a": {"$ref": "#/$defs/point"}, "b": {"enum": [1, "auto"]}},
    }
    tool = {"type": "function", "function": {"name": "move", "parameters": schema}}
    found = parsed(
        "xml",
        '<tool_call>\n<function=move>\n<parameter=a>\n{"x": 1}\n</parameter>\n'
        "<parameter=b>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
        [tool],
    )
    assert found.problem is None
    assert functions(found) == [("move", {"a": {"x": 1}, "b": 1})]


def test_formats_are_told_apart_by_their_markers() -> None:
    for family, text in WELL_FORMED.items():
        expected = {"chatml": "hermes", "llama3": "llama3_json"}.get(family, family)
        assert format_of(text) == expected
    assert format_of("The answer is 4.") is None


MARKS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=look_up>", "</function>", "<parameter=key>"),
        *(
            "</parameter>",
            "<think>",
            "</think>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<arg_key>",
            "</arg_key>",
        ),
        *("<|channel|>", "analysis", "final", "commentary", " to=functions.look_up", "<|message|>"),
        *("<|end|>", "<|start|>assistant", "<|call|>", "{", "}", "[", "]", '"name": ', '"look_up"'),
        *('"arguments"', ":", ",", "1", "null", "\x00", "\ud800", "ä", "\n", " "),
    ]
)


@given(pieces=st.lists(MARKS | st.text(max_size=5), max_size=20), name=st.sampled_from([*FORMATS]))
def test_no_response_raises(pieces: list[str], name: str) -> None:
    template = response_template(FORMATS[name], reasoning=None if name == "harmony" else THINK)
    _, tokenizer = RENDERERS["chatml"]
    parser = ResponseParser(tokenizer, template, tool_format=FORMATS[name])
    found = parser.parse("".join(pieces), TOOLS)
    assert found.message["role"] == "assistant"
    assert isinstance(found.message["content"], str)
    assert found.problem is None or found.problem
