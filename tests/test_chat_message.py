"""The canonical chat message: equal forms give equal messages, others are refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.chat_message import (
    MessageError,
    arguments_of,
    calls_in_text,
    canonical,
    is_blank,
    text_of,
    trained_flag,
    with_calls_in_text,
    with_names_of_calls,
    wrapped_tool,
)
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.forms import open_rows
from burnish.data.messages import as_messages
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.rows import content_column
from burnish.data.sources import DataError

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": [{"type": "text", "text": "2"}, {"type": "input_text", "text": "+2"}]}, "2+2"),
        ({"content": ["2", "+2"]}, "2+2"),
        ({"content": [{"type": "text", "text": "2+2", "image_url": None}]}, "2+2"),
        ({"content": []}, ""),
        ({"content": "2+2", "name": None, "tool_calls": None}, "2+2"),
    ],
)
def test_text_and_lists_of_text_parts_are_equal(message: dict[str, Any], expected: str) -> None:
    assert canonical({"role": "user", **message}) == {"role": "user", "content": expected}


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [CALL]},
        {"content": None, "tool_calls": [CALL]},
        {"content": None, "tool_calls": json.dumps([CALL])},
        {"content": "", "tool_calls": [{"function": {"arguments": '{"a": 1}', "name": "f"}}]},
        {"content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
        {"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
    ],
)
def test_forms_of_a_tool_call_are_equal(message: dict[str, Any]) -> None:
    result = canonical({"role": "assistant", **message})
    assert json.dumps(result) == json.dumps(CALLED)  # the order of keys, too
    assert canonical(result) == result


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_one_key(key: str) -> None:
    message = {"role": "assistant", "content": "4", key: [{"type": "text", "text": "2+2"}]}
    assert canonical(message) == {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert canonical({**message, "thinking": "2+2"})["reasoning_content"] == "2+2"
    assert canonical({"role": "assistant", "content": "4", key: ""}) == {
        "role": "assistant",
        "content": "4",
    }


def test_roles_of_other_apis_are_mapped_and_other_keys_kept() -> None:
    assert canonical({"role": "developer", "content": "x"}) == {"role": "system", "content": "x"}
    result = canonical({"role": "function", "name": "f", "content": "x", "tool_call_id": ""})
    assert result == {"role": "tool", "name": "f", "content": "x"}
    assert canonical({"role": "user", "content": "x", "custom": 3})["custom"] == 3


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("hi", "str 'hi'"),
        ({"content": "hi"}, "role"),
        ({"role": "user"}, "no `content`"),
        ({"role": "user", "content": None}, "no `content`"),
        ({"role": "user", "content": 4}, "int 4"),
        ({"role": "user", "content": True}, "bool True"),
        ({"role": "tool", "content": {"a": 1}}, "json.dumps"),
        ({"role": "user", "content": ["a", {"type": "image", "text": ""}]}, "part 1 .*'image'"),
        ({"role": "user", "content": [{"type": "text", "text": 4}]}, "part 0"),
        ({"role": "user", "content": "a", "images": ["x.png"]}, "`images`"),
        ({"role": "assistant", "tool_calls": [3]}, "int 3"),
        ({"role": "assistant", "tool_calls": "[x"}, "not JSON"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "not a list"),
        ({"role": "assistant", "tool_calls": '[{"name": "f", "name": "g"}]'}, "twice"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "name": "f"}]}, "'custom'"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "input": {"a": 1}}]}, "'input'"),
        ({"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "f"}}, "keep one"),
        ({"role": "assistant", "content": "a", "thinking": "b", "reasoning": "c"}, "keep one"),
        ({"role": "assistant", "content": "a", "thinking": 3}, "`thinking`"),
    ],
)
def test_a_message_that_is_not_text_is_refused_with_the_part(message: Any, names: str) -> None:
    with pytest.raises(MessageError, match=names):
        canonical(message)


@pytest.mark.parametrize(
    "value",
    [
        *("[1]", "4", "null", "{a: 1}", "x", [1], 4, True, "[" * 100_000),
        *('{"a": 1, "a": 1}', '{"b": [{"a": 1, "a": 2}]}'),
    ],
)
def test_arguments_that_are_not_an_object_are_refused(value: Any) -> None:
    with pytest.raises(MessageError, match="arguments"):
        arguments_of(value)


@given(st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.lists(st.none())))
def test_arguments_as_json_text_are_the_object(arguments: dict[str, Any]) -> None:
    assert arguments_of(json.dumps(arguments)) == arguments == arguments_of(arguments)
    assert arguments_of(None) == arguments_of("") == arguments_of(" \n") == {}


@pytest.mark.parametrize("key", ["train", "weight", "loss", "loss_mask"])
def test_every_flag_is_read(key: str) -> None:
    for value, expected in ((0, False), (False, False), (0.0, False), (1, True), (True, True)):
        assert trained_flag({"role": "assistant", "content": "", key: value}) is expected
    for value in (2, 0.5, "false", [0]):
        with pytest.raises(MessageError, match=key):
            trained_flag({key: value})
    with pytest.raises(MessageError, match="differ"):
        trained_flag({key: 1, "train" if key != "train" else "weight": 0})


def test_blank_messages() -> None:
    blank = {"role": "assistant", "content": " \n"}
    assert is_blank(blank) and not is_blank(CALLED)
    assert not is_blank({**blank, "reasoning_content": "2+2"})
    assert not is_blank({**blank, "content": text_of(["a"])})


PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
USER, ANSWER = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
USER_PARTS = {"role": "user", "content": PARTS}
ANSWER_PARTS = {"role": "assistant", "content": [{"type": "text", "text": "2"}]}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("config", [PromptDataConfig, ResponseDataConfig, SFTDataConfig])
def test_an_answer_of_parts_is_read_as_its_text(config: Any, suffix: str, tmp_path: Path) -> None:
    """As a label (RL, evaluate), as a response (score), and as a demonstration."""
    results = []
    for number, messages in enumerate(([USER, ANSWER], [USER_PARTS, ANSWER_PARTS])):
        path = tmp_path / f"{number}{suffix}"
        if suffix == ".jsonl":
            path.write_text(json.dumps({"messages": messages}))
        else:
            pq.write_table(pa.Table.from_pylist([{"messages": messages}]), path)
        data = config(sources=(str(path),))
        (source,) = open_rows(data)
        results.append(
            as_messages(content_column(source[0], data.messages_key, ""))
            if config is SFTDataConfig
            else dict(source[0].values)
        )
    assert results[0] == results[1]
    if config is not SFTDataConfig:
        assert "2" in results[0].values()


def test_a_null_argument_survives_if_the_file_can_tell(tmp_path: Path) -> None:
    """Parquet fills nested objects with nulls, but not JSON text in them, or messages as text."""
    calls = [{"function": {"name": "f", "arguments": json.dumps({"a": None})}}]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    path = tmp_path / "rows.parquet"
    for value in (messages, json.dumps(messages)):
        pq.write_table(pa.Table.from_pylist([{"prompt": value}]), path)
        (source,) = open_rows(PreferenceDataConfig(sources=(str(path),)))
        answer = as_messages(content_column(source[0], "prompt", ""))[1]
        assert answer["tool_calls"][0]["function"]["arguments"] == {"a": None}


def test_an_error_names_the_message() -> None:
    with pytest.raises(DataError, match=r"message 1 \(user\): part 0"):
        as_messages([USER, {"role": "user", "content": [{"type": "image_url"}]}])


CALL = {"function": {"name": "f", "arguments": {"x": "h\u00e9\n", "n": 1}}}
OTHER = {"function": {"name": "f", "arguments": {"x": "h\u00e9\n", "n": 100}}}
LATER = {"function": {"name": "f", "arguments": {"n": 1.0, "x": "h\u00e9\n", "y": None}}}


@pytest.mark.parametrize(
    "edit",
    [
        {"content": "a c"},
        {"content": ""},
        {"content": "a \u0431"},
        {"tool_calls": []},
        {"tool_calls": [OTHER]},
        {"tool_calls": [CALL, CALL]},
    ],
)
def test_an_edited_answer_is_not_rendered_as_it_was_sampled(edit: dict[str, Any]) -> None:
    text = 'a <t>{"name":"f","arguments":{"x":"h\\u00e9\\n","n":1}}</t> b'
    message = {"role": "assistant", "content": "a b", "tool_calls": [CALL]}
    message["content_with_calls"] = calls_in_text(message, text)
    for calls in ([CALL], [LATER]):  # as files of other types have it
        rendered = with_calls_in_text([message | {"tool_calls": calls}])
        assert rendered == [{"role": "assistant", "content": text}]
    with pytest.raises(MessageError, match="edited since"):
        with_calls_in_text([message | edit])


def test_values_that_files_change_are_edits_or_none() -> None:
    """A Parquet file has no lone surrogates, and readers of tables may read a date as one."""

    def answer(value: Any) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": {"x": value}}}
        return {"role": "assistant", "content": value, "tool_calls": [call]}

    made = answer("\ud83d")
    (rendered,) = with_calls_in_text(
        [answer("?") | {"content_with_calls": calls_in_text(made, "t")}]
    )
    assert rendered["content"] == "t"
    date = answer("2024-01-01")
    read = date | {"content_with_calls": calls_in_text(date, "t")}
    read["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": datetime(2024, 1, 1)}}}]
    with pytest.raises(MessageError, match="edited since"):
        with_calls_in_text([read])


def test_a_flat_tool_has_no_strict_as_in_a_request_of_the_responses_api() -> None:
    schema = {"type": "object", "properties": {}}
    flat = {"type": "function", "name": "f", "parameters": schema, "strict": True}
    nested = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert wrapped_tool(flat) == nested
    kept = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    assert wrapped_tool(kept) == kept


def test_results_of_tools_inside_an_answer_are_refused() -> None:
    """Gemma 4's own form: they would be trained."""
    call = {"function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "1", "tool_calls": [call]}
    with pytest.raises(DataError, match="has `tool_responses`"):
        as_messages([USER, {**answer, "tool_responses": [{"name": "f", "response": {}}]}])
    assert as_messages([USER, {**answer, "tool_responses": []}])


def test_results_of_calls_that_share_an_id_have_their_names_in_order() -> None:
    calls = [
        {"id": "c", "type": "function", "function": {"name": name, "arguments": {}}}
        for name in "fg"
    ]
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    named = with_names_of_calls([answer, result, result, result])
    assert [message.get("name") for message in named] == [None, "f", "g", "g"]
