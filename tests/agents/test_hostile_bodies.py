"""Wrong and hostile request bodies: every one is refused with a path and a reason, or read as a
well-formed call."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.agents.anthropic_messages import Messages
from burnish.agents.app import parse_json
from burnish.agents.calls import CallError, check_supported, well_formed
from burnish.agents.conversation import Conversation
from burnish.agents.openai_chat import ChatCompletions, Completions
from burnish.agents.openai_responses import Responses
from burnish.chat_message import with_names_of_calls

DIALECTS = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = DIALECTS.values()
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALLING = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "u", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALLING]},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "stop": ["x"],
        "n": 1,
        "seed": 1,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {"model": "m", "prompt": [[1, 2]], "max_tokens": 5, "stop": "x"},
    "/v1/responses": {
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": {}, "strict": False}],
        "tool_choice": {"type": "function", "name": "weather"},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "r"},
                    {"type": "text", "text": "u"},
                ],
            },
        ],
        "tools": [{"name": "weather", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x"],
        "output_config": {"effort": "low"},
    },
}
WRONG_VALUES = st.one_of(
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.just(10**400),
            st.floats(),
            st.text(st.characters(codec=None), max_size=4),
            st.sampled_from(["function", "text", "image_url", "assistant", "message", "\ud800"]),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["type", "text", "role", "name", "\udfff"]), inner),
        ),
        max_leaves=5,
    ),
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a body."""
    found = [path]
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += paths(item, (*path, key))
    return found


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a body with another value at a path."""
    if not path:
        return value
    changed = copy.deepcopy(body)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


def dotted(path: tuple[Any, ...]) -> str:
    keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "".join(keys).removeprefix(".")


PLACES = [(url, path) for url, body in BODIES.items() for path in paths(body)]


@settings(max_examples=400, deadline=None)
@given(place=st.sampled_from(PLACES), value=WRONG_VALUES)
def test_any_value_anywhere_gives_a_call_or_an_error_with_its_path(
    place: tuple[str, tuple[Any, ...]], value: Any
) -> None:
    """Calls are well-formed. An error may name another field: without tools, the tool choice."""
    url, path = place
    try:
        call = DIALECTS[url].read(replaced(BODIES[url], path, value), max_messages=100)
    except CallError as error:
        assert (error.status, error.kind) == (400, "invalid_request_error")
        json.dumps(DIALECTS[url].error(error), ensure_ascii=False).encode()
        field = (error.param or "model").partition(".")[0].partition("[")[0]
        assert not path or field in BODIES[url]
        return
    for part in (list(call.messages), list(call.tools), list(call.stop), call.prompt, call.model):
        json.dumps(part, ensure_ascii=False, allow_nan=False).encode()
    assert well_formed(list(call.messages)) == list(call.messages)


UNREAD = [
    "/v1/chat/completions messages[2].tool_calls[0].function.arguments",
    "/v1/chat/completions chat_template_kwargs.enable_thinking",
    "/v1/responses input[1].id",
    "/v1/responses input[2].arguments",
    "/v1/responses tools[0].strict",
    "/v1/responses text.format.type",
    "/v1/responses reasoning.effort",
    "/v1/messages system[0].cache_control",
    "/v1/messages system[0].cache_control.type",
    "/v1/messages messages[1].content[0].signature",
    "/v1/messages thinking.budget_tokens",
    "/v1/messages output_config.effort",
]
"""Values without a type: arguments may be an object as well, unsupported parameters are refused
later, and the others are not used."""


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"b": [{"a": 1, "a": 2}]}'])
def test_arguments_with_the_same_key_twice_are_refused_in_every_dialect(text: str) -> None:
    """As JSON text of a call, and as an object of the body."""
    with pytest.raises(CallError, match="twice"):
        parse_json(f'{{"messages": [{{"input": {text}}}]}}'.encode())
    places = [(url, path) for url, path in PLACES if path[-1:] == ("arguments",)]
    assert len(places) == 2
    for url, path in places:
        with pytest.raises(CallError, match="twice"):
            DIALECTS[url].read(replaced(BODIES[url], path, text), max_messages=100)


def test_the_bodies_are_valid_and_every_wrong_type_is_named() -> None:
    """A list is wrong for every object and number, and an object for every list and text."""
    for url, body in BODIES.items():
        DIALECTS[url].read(body, max_messages=100)
    unnamed = []
    for url, path in PLACES:
        value: Any = BODIES[url]
        for key in path:
            value = value[key]
        wrong = {"a": [1]} if isinstance(value, (list, str)) else [[{}]]
        try:
            DIALECTS[url].read(replaced(BODIES[url], path, wrong), max_messages=100)
        except CallError as error:
            if (error.param or "").startswith(dotted(path)):
                continue
        unnamed.append(f"{url} {dotted(path)}")
    assert "\n".join(unnamed) == "\n".join(UNREAD)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "u"}], **fields}


def user(content: Any) -> dict[str, Any]:
    return chat_body(messages=[{"role": "user", "content": content}])


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
TWICE = [TOOL, TOOL]
NO_CALL = [{"role": "tool", "content": "r", "tool_call_id": "c"}]
NO_FUNCTION = [{"role": "function", "content": "r", "name": "f"}]
MANY = [{"role": "user", "content": "u"}] * 101
DEEP_CALL = [
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "c",
                "function": {"name": "f", "arguments": '{"a":' + "[" * 9999 + "]" * 9999 + "}"},
            }
        ],
    }
]
REFUSED = [
    (CHAT, [], None, "must be an object"),
    (CHAT, chat_body(messages=[]), "messages", "is empty"),
    (CHAT, chat_body(messages=MANY), "messages[100]", "more than 100"),
    (CHAT, chat_body(messages=[{"role": "robot"}]), "messages[0].role", "'developer'"),
    (CHAT, chat_body(messages=[{"content": "u"}]), "messages[0].role", "is missing"),
    (CHAT, chat_body(messages=NO_CALL), "messages[0]", "no earlier assistant"),
    (CHAT, chat_body(messages=[{"role": "assistant"}]), "messages[0]", "nothing to answer"),
    (CHAT, chat_body(messages=DEEP_CALL), None, "arguments"),
    (CHAT, user([IMAGE]), "messages[0].content[0].type", "reads text only"),
    (CHAT, user([{"type": "poem"}]), "messages[0].content[0].type", "known are text"),
    (CHAT, chat_body(tools=[{"type": "function", "function": {}}]), "tools[0].function.name", "is"),
    (CHAT, chat_body(tools=TWICE), "tools[1]", "also named 'weather'"),
    (CHAT, chat_body(tools=nested(40)), "tools", "must be a list"),
    (CHAT, chat_body(metadata=nested(60)), "metadata.a[0].a", "more than 100 deep"),
    (CHAT, chat_body(tool_choice="required"), "tool_choice", "there are no tools"),
    (CHAT, chat_body(temperature=float("nan")), "temperature", "not a JSON number"),
    (CHAT, chat_body(temperature=10**400), "temperature", "from 0 to 100"),
    (CHAT, chat_body(temperature=True), "temperature", "a number"),
    (CHAT, chat_body(max_tokens=0), "max_tokens", "at least 1"),
    (CHAT, chat_body(max_tokens=2**70), "max_tokens", "an integer"),
    (CHAT, chat_body(stop=["a"] * 17), "stop", "at most 16"),
    (CHAT, chat_body(stop=[""]), "stop[0]", "non-empty"),
    (CHAT, chat_body(metadata=[0] * 1_000_001), None, "more than 1000000 values"),
    (COMPLETIONS, {"model": "m", "prompt": ["a"] * 129}, "prompt", "at most 128"),
    (COMPLETIONS, {"model": "m", "prompt": ["a", 5]}, "prompt[1]", "non-empty"),
    (CHAT, chat_body(max_tokens=4.5), "max_tokens", "an integer"),
    (CHAT, chat_body(top_p=-0.1), "top_p", "from 0 to 1"),
    (
        CHAT,
        chat_body(messages=[{"role": "function", "name": "f", "content": ""}]),
        "messages[0]",
        "f",
    ),
    (COMPLETIONS, {"model": "m", "prompt": []}, "prompt", "non-empty"),
    (COMPLETIONS, {"model": "m", "prompt": [1, -1]}, "prompt[1]", "an integer"),
    (RESPONSES, {"model": "m", "input": [{"type": "item_reference"}]}, "input[0].type", "stores"),
    (
        RESPONSES,
        {"model": "m", "input": "u", "tools": [{"type": "custom"}]},
        "tools[0].type",
        "'function'",
    ),
    (MESSAGES, chat_body(), "max_tokens", "is missing"),
    (MESSAGES, {**chat_body(tools=[{"type": "bash_20250124"}]), "max_tokens": 1}, None, "custom"),
    (MESSAGES, {**user([{"type": "document"}]), "max_tokens": 1}, None, "reads text only"),
]


@pytest.mark.parametrize(("dialect", "body", "param", "text"), REFUSED)
def test_a_wrong_body_is_refused_with_the_path_and_the_reason(
    dialect: Any, body: Any, param: str | None, text: str
) -> None:
    with pytest.raises(CallError, match=text) as found:
        dialect.read(body, max_messages=100)
    assert found.value.status == 400
    assert param is None or (found.value.param or "").startswith(param)


def test_arguments_that_python_wrote_are_read_as_json() -> None:
    """json.dumps writes NaN, and 1e999 is read as infinity."""
    call = {
        "id": "c",
        "function": {"name": "f", "arguments": '{"a": NaN, "b": [1e999, "\\ud800"]}'},
    }
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "u"}]
    read = CHAT.read(chat_body(messages=messages), max_messages=9).messages[0]
    assert read["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": [None, "\ufffd"]}


def test_legal_numbers_and_older_forms_are_read() -> None:
    """JSON has one kind of number. Functions are tools without ids."""
    read = CHAT.read(chat_body(max_tokens=4.0, top_p=0, seed=3.0, n=1.0), max_messages=9)
    assert (read.max_tokens, read.seed, read.n) == (4, 3, 1) and type(read.max_tokens) is int
    assert read.top_p == 1e-6  # only the most probable token
    call = {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "f", "content": "r"}
    asked = [{"role": "user", "content": "u"}, call, result, {**call, "content": None}, result]
    messages = CHAT.read(chat_body(messages=asked), max_messages=9).messages
    ids = [made["tool_calls"][0]["id"] for made in messages[1::2]]
    assert len(set(ids)) == 2
    assert [message["tool_call_id"] for message in messages[2::2]] == ids
    assert {message["role"] for message in messages[2::2]} == {"tool"}
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    prompts = COMPLETIONS.read({"model": "m", "prompt": ["a", [1, 2]], "n": 2}, max_messages=1)
    assert (prompts.prompt, prompts.more_prompts, prompts.num_responses) == ("a", ((1, 2),), 4)


UNSUPPORTED = [
    ("/v1/chat/completions", {"logit_bias": {"5": 1}, "response_format": {"type": "json_object"}}),
    (
        "/v1/chat/completions",
        {"top_logprobs": 2, "frequency_penalty": 0.1, "modalities": ["audio"]},
    ),
    ("/v1/completions", {"echo": True, "best_of": 2, "suffix": "x", "logprobs": 1}),
    ("/v1/responses", {"previous_response_id": "r", "background": True, "top_logprobs": 1}),
    ("/v1/messages", {"mcp_servers": [{}]}),
    ("/v1/messages", {"thread": {"type": "create"}, "compaction": {"type": "summarize"}}),
]


@pytest.mark.parametrize(("url", "fields"), UNSUPPORTED)
def test_parameters_that_change_the_distribution_are_refused_by_name(
    url: str, fields: dict[str, Any]
) -> None:
    call = DIALECTS[url].read({**BODIES[url], **fields}, max_messages=100)
    assert list(call.unsupported) == sorted(fields, key=list(call.unsupported).index)
    with pytest.raises(CallError) as found:
        check_supported(call)
    assert all(f"{name}: " in found.value.message for name in fields)


PARAMETERS: list[tuple[Any, str]] = [
    (2, "truncate_prompt_tokens length_penalty thinking_token_budget n best_of max_tokens"),
    (2, "max_completion_tokens max_tool_calls max_output_tokens seed top_k top_logprobs logprobs"),
    (True, "include_stop_str_in_output echo early_stopping continue_final_message background"),
    (True, "return_token_ids use_beam_search ignore_eos made_up"),
    (False, "skip_special_tokens spaces_between_special_tokens parallel_tool_calls"),
    (False, "include_reasoning add_generation_prompt"),
    ("x", "stop suffix reasoning_effort verbosity truncation system instructions chat_template"),
    ("x", "previous_response_id regex ebnf guided_regex"),
    (["x"], "stop_sequences modalities allowed_token_ids documents bad_words functions include"),
    (0.5, "temperature top_p min_p typical_p repetition_penalty presence_penalty"),
    ({"b": 1}, "logit_bias structured_outputs response_format chat_template_kwargs prediction"),
    ({"b": 1}, "stream_options text reasoning output_config thinking context_management"),
]
"""Values and parameters of OpenAI's and Anthropic's APIs, of vLLM and of SGLang."""


@pytest.mark.parametrize("url", DIALECTS)
def test_every_parameter_changes_the_call_or_is_refused_or_named(url: str) -> None:
    key = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(url, "messages")
    body = {"model": "m", key: "u" if key == "prompt" else [{"role": "user", "content": "u"}]}
    body |= {"max_tokens": 5} if url == "/v1/messages" else {}
    plain = DIALECTS[url].read(body, max_messages=9)
    assert (plain.unsupported, plain.ignored) == ({}, ())
    for value, names in PARAMETERS:
        for name in names.split():
            try:
                assert DIALECTS[url].read({**body, name: value}, max_messages=9) != plain, name
            except CallError as error:
                assert name in str(error)


@pytest.mark.parametrize("url", DIALECTS)
def test_the_names_of_ignored_parameters_fit_into_a_header(url: str) -> None:
    odd = ["a\r\nb: c", "a, b", "ü", "", "x" * 500, "\ud800"]
    before = DIALECTS[url].read(BODIES[url], max_messages=100).ignored
    body = {**BODIES[url], **dict.fromkeys(odd, 1), "made.up-1_": 1, "nothing": None}
    assert DIALECTS[url].read(body, max_messages=100).ignored == (*before, "made.up-1_", "other")
    many = {**BODIES[url], **{f"p{i}": 1 for i in range(1000)}}
    found = DIALECTS[url].read(many, max_messages=100).ignored
    assert len(found) <= len(before) + 17 and found[-1] == "other"


def test_neutral_values_and_unknown_fields_are_accepted() -> None:
    """And structured output of Responses and Anthropic is found in its object."""
    neutral = {"logit_bias": {}, "presence_penalty": 0.0, "response_format": {"type": "text"}}
    harmless = {"user": "u", "store": True, "metadata": {"a": "b"}, "reasoning_effort": "low"}
    call = CHAT.read(chat_body(**neutral, **harmless, n=None), max_messages=1)
    assert (call.unsupported, call.ignored, call.n) == ({}, ("reasoning_effort",), 1)
    formatted = {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}
    call = RESPONSES.read({"model": "m", "input": "u", **formatted}, max_messages=1)
    assert list(call.unsupported) == ["text.format"]
    config = {"output_config": {"format": {"type": "json_schema"}}}
    call = MESSAGES.read({**chat_body(**config), "max_tokens": 1}, max_messages=1)
    assert list(call.unsupported) == ["output_config.format"]


def test_unread_keys_of_messages_are_named_and_each_key_of_reasoning_is_read() -> None:
    messages = [
        {"role": "system", "content": "x", "functions": "[f]", "cache_control": {"type": "e"}},
        {"role": "assistant", "content": "y", "thinking": "t", "reasoning_content": ""},
        {"role": "assistant", "content": "y", "thinking": {"a": 1}, "annotations": [1]},
        {"role": "assistant", "content": "y", "name": "researcher"},
        {"role": "user", "content": "z", "bad key": 1, "details": {"a": 1}, "reasoning": "no"},
    ]
    body = {**BODIES["/v1/chat/completions"], "messages": messages}
    call = DIALECTS["/v1/chat/completions"].read(body, max_messages=9)
    assert call.messages[1]["reasoning_content"] == "t"
    of_messages = ("messages.details", "messages.functions", "messages.name", "messages.reasoning")
    unread = (*of_messages, "other")
    assert call.ignored == unread


@pytest.mark.parametrize(
    ("path", "items", "unread"),
    [
        (
            "/v1/messages",
            [
                {"role": "user", "content": "x", "functions": "[f]", "thinking": "", "usage": {}},
                {"role": "assistant", "content": "y", "id": "msg_1", "stop_reason": "end_turn"},
                {"role": "user", "content": "z", "tools": "[g]", "cache_control": {"type": "e"}},
            ],
            ("messages.functions", "messages.tools"),
        ),
        (
            "/v1/responses",
            [
                {"role": "user", "content": "x", "functions": "[f]", "name": "n", "type": None},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e"},
                {"type": "message", "role": "assistant", "content": "y", "status": "completed"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o", "thinking": "t"},
            ],
            ("input.functions", "input.name", "input.thinking"),
        ),
        ("/v1/responses", "x", ()),
    ],
)
def test_unread_keys_are_named_in_every_api(path: str, items: Any, unread: tuple[str, ...]) -> None:
    body = {**BODIES[path], ("input" if "responses" in path else "messages"): items}
    before = DIALECTS[path].read(BODIES[path], max_messages=9).ignored
    call = DIALECTS[path].read(body, max_messages=9)
    assert tuple(name for name in call.ignored if name not in before) == unread


def test_results_of_calls_that_share_an_id_get_the_names_that_rows_give_them() -> None:
    """In order; a later answer may use the id again. The last name of an answer was given to all of
    its results."""
    calls = [
        {"id": "c", "type": "function", "function": {"name": name, "arguments": {}}}
        for name in ("f", "g", "h")
    ]
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls[:2]},
        *[result] * 3,
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        result,
    ]
    conversation = Conversation(max_messages=9)
    for message in messages:
        conversation.add(message, "messages")
    names = [message.get("name") for message in conversation.finish("messages")]
    assert names == [None, "f", "g", "g", None, "h"]
    assert [message.get("name") for message in with_names_of_calls(messages)] == names
