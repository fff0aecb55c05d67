"""Conversations in the forms that data has them: JSON text, ShareGPT, with tools, with the nulls
of Parquet; and roles that a chat template has no place for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import published_tokenizer
from transformers import PreTrainedTokenizerFast

from burnish.data.batches import BatchStream, load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.forms import open_rows
from burnish.data.messages import as_messages
from burnish.data.notices import collecting
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptEncoder, load_prompts
from burnish.data.rendering import render_text
from burnish.data.sources import DataError
from burnish.data.stream import RowRef
from burnish.types import Batch

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]
USER, ANSWER = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
RENDERED = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}

WITH_TOOLS = (
    "{% if tools %}tools: {% for t in tools %}{{ t | tojson }}{% endfor %};{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Q:{{ m['content'] }}\n"
    "{% elif m['role'] == 'assistant' %}A:{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def prompt_text(tokenizer: Tok, path: str, **options: Any) -> str:
    (prompt,) = load_prompts(PromptDataConfig(sources=(path,), **options), tokenizer)
    return prompt.text


def rows(tokenizer: Tok, path: str, **options: Any) -> Batch:
    return load_batch(SFTDataConfig(sources=(path,), **options), tokenizer)


def text_of(tokenizer: Tok, batch: Batch) -> str:
    return tokenizer.decode(batch.tokens.tolist())


def test_messages_as_json_text_are_parsed_as_messages(
    chars: Tok, jsonl: Jsonl, tmp_path: Path
) -> None:
    assert prompt_text(chars, jsonl([{"prompt": json.dumps([USER])}])) == RENDERED
    path = tmp_path / "rows.csv"
    path.write_text('messages\n"' + json.dumps([USER, ANSWER]).replace('"', '""') + '"\n')
    assert text_of(chars, rows(chars, str(path))) == f"{RENDERED}2<|im_end|>\n"


def test_text_that_begins_like_messages_but_is_not_json_is_refused(
    chars: Tok, jsonl: Jsonl
) -> None:
    path = jsonl([{"prompt": str([USER])}])  # Python's repr
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the text .* is not JSON.*json\.dumps"):
        prompt_text(chars, path)
    other = '[{"role": 3}, 4] is a list'
    with pytest.raises(DataError, match="not JSON"):
        prompt_text(chars, jsonl([{"prompt": other}]))
    assert prompt_text(chars, jsonl([{"prompt": "[1, 2] reversed"}])) == "[1, 2] reversed"


def test_sharegpt_rows_are_converted_to_messages(chars: Tok, jsonl: Jsonl) -> None:
    turns = [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]
    expected = text_of(chars, rows(chars, jsonl([{"messages": [USER, ANSWER]}])))
    assert text_of(chars, rows(chars, jsonl([{"conversations": turns}]))) == expected
    assert text_of(chars, rows(chars, jsonl([{"chat": turns}]), messages_key="chat")) == expected
    assert prompt_text(chars, jsonl([{"prompt": turns[:1]}])) == RENDERED
    odd = [{"from": "narrator", "value": "x"}, *turns]
    with pytest.raises(DataError, match=r"from` 'narrator'; known are human"):
        rows(chars, jsonl([{"conversations": odd}]))


def test_tools_reach_the_chat_template(chars: Tok, jsonl: Jsonl) -> None:
    chars.chat_template = WITH_TOOLS
    head = f"tools: {json.dumps(ADD)};"
    row = {"messages": [USER, ANSWER], "tools": [ADD], "prompt": [USER]}
    for tools in ([ADD], json.dumps([ADD])):
        row["tools"] = tools
        expected = chars.decode(chars(head, add_special_tokens=False)["input_ids"])
        assert text_of(chars, rows(chars, jsonl([row]))).startswith(expected)
        assert prompt_text(chars, jsonl([row])) == head + RENDERED
        assert prompt_text(chars, jsonl([row]), tools_key=None) == RENDERED
    pair = {"prompt": [USER], "chosen": "2", "rejected": "3", "functions": [ADD]}
    data = PreferenceDataConfig(sources=(jsonl([pair]),), tools_key="functions")
    assert text_of(chars, load_batch(data, chars)).count(expected) == 2


@pytest.mark.parametrize("reads", ["{{ t | tojson }}", "{{ t.function.name }}", "{{ t.name }}"])
def test_the_forms_of_a_tool_give_equal_tokens(chars: Tok, jsonl: Jsonl, reads: str) -> None:
    """The template gets OpenAI's form, or the bare one if it renders only that."""
    chars.chat_template = WITH_TOOLS.replace("{{ t | tojson }}", reads)
    function = ADD["function"]
    forms = [ADD, function, {"type": "function", **function}, {"function": function}]
    forms += [json.dumps(function), {"function": function, "type": "function"}]
    forms += [{**function, "function": None}]
    texts = {prompt_text(chars, jsonl([{"prompt": [USER], "tools": [form]}])) for form in forms}
    expected = json.dumps(ADD) if "tojson" in reads else "add"
    assert texts == {f"tools: {expected};{RENDERED}"}
    other = {"type": "web_search", "name": "add"}
    if "tojson" in reads:
        text = prompt_text(chars, jsonl([{"prompt": [USER], "tools": [other]}]))
        assert json.dumps(other) in text


def test_roles_of_sharegpt_in_openai_messages_are_read_in_its_columns(
    chars: Tok, jsonl: Jsonl
) -> None:
    turns = [{"role": "Human", "content": "1+1"}, {"role": "gpt", "content": "2"}]
    expected = text_of(chars, rows(chars, jsonl([{"messages": [USER, ANSWER]}])))
    assert text_of(chars, rows(chars, jsonl([{"conversations": turns}]))) == expected


def test_a_default_tools_column_of_another_type_is_ignored(chars: Tok, jsonl: Jsonl) -> None:
    chars.chat_template = WITH_TOOLS
    row = {"prompt": [USER], "tools": ["calculator"], "mine": ["calculator"]}
    assert prompt_text(chars, jsonl([row])) == RENDERED
    with pytest.raises(
        DataError, match=r"'mine' \(tools_key\) must contain a list of tool descriptions"
    ):
        prompt_text(chars, jsonl([row]), tools_key="mine")


@pytest.mark.parametrize(
    "tools",
    [
        [ADD, {"type": "web_search"}],
        [ADD, "calculator"],
        ADD,
        json.dumps([ADD])[:-1],
        str([ADD]),
    ],
)
def test_tools_that_cannot_be_read_completely_are_refused(
    tools: Any, chars: Tok, jsonl: Jsonl
) -> None:
    chars.chat_template = WITH_TOOLS
    path = jsonl([{"prompt": [USER], "tools": tools}])
    with pytest.raises(DataError, match=r"jsonl:1: .*tools"):
        prompt_text(chars, path)
    assert prompt_text(chars, path, tools_key=None) == RENDERED


def test_tools_as_a_list_of_json_texts_are_tools(chars: Tok, jsonl: Jsonl) -> None:
    chars.chat_template = WITH_TOOLS
    texts = prompt_text(chars, jsonl([{"prompt": [USER], "tools": [json.dumps(ADD)]}]))
    assert texts == prompt_text(chars, jsonl([{"prompt": [USER], "tools": [ADD]}], "objects.jsonl"))
    assert texts != RENDERED


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2\ud83d", "response": "4"},
        {"messages": [USER, {**ANSWER, "content": "4\udfff"}]},
    ],
)
def test_half_of_a_surrogate_pair_is_an_error_of_its_row(
    row: dict[str, Any], chars: Tok, jsonl: Jsonl
) -> None:
    with pytest.raises(DataError, match=r"jsonl:1: .*surrogate"):
        rows(chars, jsonl([row]))
    skipped = rows(
        chars, jsonl([{"messages": [USER, ANSWER]}, row], "two.jsonl"), on_bad_row="skip"
    )
    assert skipped.num_rows == 1


def test_empty_columns_of_tokens_do_not_replace_the_text(chars: Tok, jsonl: Jsonl) -> None:
    row = {"messages": [USER, ANSWER]}
    empty = {"tokens": [], "tokens_mask": [], "tokens_text": ""}
    expected = text_of(chars, rows(chars, jsonl([row])))
    assert text_of(chars, rows(chars, jsonl([row | empty], "empty.jsonl"))) == expected


@pytest.mark.parametrize("in_episodes", [False, True])
def test_tools_of_a_plain_prompt_are_counted(chars: Tok, jsonl: Jsonl, in_episodes: bool) -> None:
    """In an episode, whose prompts are messages, the runner compares them with what is offered."""
    config = PromptDataConfig(sources=(jsonl([{"prompt": "q", "tools": [ADD]}]),))
    (source,) = open_rows(config)
    encoder = PromptEncoder(config, chars, in_episodes=in_episodes)
    with collecting() as notices:
        prompt = encoder.encode(source[0], RowRef("rows", 0, 0))
    assert ("tools_ignored" in notices) is (not in_episodes)
    assert (prompt.tools is not None) is in_episodes


def test_a_template_that_ignores_tools_is_logged_once_and_counted(
    chars: Tok, jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl([{"messages": [USER, ANSWER], "tools": [ADD]}] * 3)
    stream = BatchStream(SFTDataConfig(sources=(path,)), chars, seed=0)
    with caplog.at_level(logging.WARNING, logger="burnish"):
        stream.next(3)
    assert caplog.text.count("does not render tools") == 1
    assert stream.counts["rows_tools_ignored"] == 3
    again = BatchStream(SFTDataConfig(sources=(path,)), chars, seed=0)
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert again.counts == stream.counts


def test_nulls_that_parquet_fills_into_tool_arguments_are_dropped(
    chars: Tok, tmp_path: Path
) -> None:
    """A column has one type: the call of ``add`` gets ``b`` with null, that of ``neg`` ``a``."""
    chars.chat_template = WITH_TOOLS

    def call(**arguments: int) -> dict[str, Any]:
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}]}

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([call(a=1), call(b=2)]), path)
    text = text_of(chars, rows(chars, str(path)))
    assert '{"a": 1}' in text.replace("<unk>", '"') or "null" not in text
    unfilled = tmp_path / "rows.jsonl"
    unfilled.write_text("\n".join(json.dumps(call(**a)) for a in ({"a": 1}, {"b": 2})))
    assert rows(chars, str(path)).tokens.tolist() == rows(chars, str(unfilled)).tokens.tolist()


def test_a_null_of_json_lines_is_an_argument(chars: Tok, jsonl: Jsonl) -> None:
    chars.chat_template = WITH_TOOLS
    calls = [{"function": {"name": "f", "arguments": {"a": None}}}]
    answer = {"role": "assistant", "content": "x", "tool_calls": calls}
    assert "null" in text_of(chars, rows(chars, jsonl([{"messages": [USER, answer]}])))


@pytest.mark.parametrize("job", ["prompts", "sft", "pairs"])
def test_a_system_prompt_that_the_template_drops_is_refused(
    chars: Tok, jsonl: Jsonl, job: str
) -> None:
    chars.chat_template = NO_SYSTEM
    row = {"prompt": "1+1", "response": "2", "chosen": "2", "rejected": "3"}
    path, options = jsonl([row]), {"apply_chat_template": True}

    def load(**more: Any) -> None:
        if job == "prompts":
            prompt_text(chars, path, **options, **more)
        elif job == "sft":
            rows(chars, path, **options, **more)
        else:
            data = PreferenceDataConfig(sources=(path,), **options, **more)
            load_batch(data, chars)

    load()
    with pytest.raises(DataError, match=r"leaves out the system prompt \(system_prompt\)"):
        load(system_prompt="be brief")


def test_a_message_of_a_role_that_the_template_drops_is_refused(chars: Tok, jsonl: Jsonl) -> None:
    chars.chat_template = NO_SYSTEM
    messages = [USER, {"role": "expert", "content": "carry the one"}, ANSWER]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*leaves out messages of the role 'exp"):
        rows(chars, jsonl([{"messages": messages}]))


def test_a_template_that_drops_earlier_reasoning_renders_every_role(
    chars: Tok, jsonl: Jsonl
) -> None:
    """Text dropped from a message's content does not count as a dropped message."""
    chars.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'].split('=')[-1] }}<|im_end|>\n{% endfor %}"
    )
    messages = [USER, {"role": "assistant", "content": "think=2"}]
    assert "think" not in text_of(chars, rows(chars, jsonl([{"messages": messages}])))


@pytest.mark.parametrize("call_id", ["functions.f:0", "call0"])
def test_a_name_that_is_rendered_in_the_id_alone_is_not_left_out(
    chars: Tok, jsonl: Jsonl, call_id: str
) -> None:
    """As Kimi K2's template does; an id without the name is refused."""
    chars.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    call = {"id": call_id, "function": {"name": "f", "arguments": {"a": 1}}}
    path = jsonl([{"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}])
    if call_id == "call0":
        with pytest.raises(DataError, match="tool calls"):
            rows(chars, path)
    else:
        assert rows(chars, path).num_rows == 1


def test_tools_of_the_older_form_are_in_the_prompt_and_calls_without_any_are_counted(
    jsonl: Jsonl,
) -> None:
    """Messages with ``function_call`` are read, so the functions that they call are too."""
    function = {"name": "look_up", "description": "d", "parameters": {"type": "object"}}
    call = {"name": "look_up", "arguments": "{}"}
    answer = {"role": "assistant", "content": None, "function_call": call}
    choices = [{"message": answer, "finish_reason": "function_call"}]
    tools = [{"type": "function", "function": function}]
    request = {"messages": [USER], "functions": [function]}
    rows: list[tuple[dict[str, Any], int]] = [
        ({"messages": [USER, answer], "tools": tools}, 0),
        ({"messages": [USER, answer], "functions": [function]}, 0),
        ({"request": request, "response": {"choices": choices}}, 0),
        ({"messages": [USER, answer]}, 1),
        ({"messages": [USER, answer], "available_tools": [function]}, 1),
    ]
    qwen, texts = published_tokenizer("qwen3"), []
    for row, counted in rows:
        batches = BatchStream(SFTDataConfig(sources=(jsonl([row]),)), qwen, seed=0)
        texts.append(qwen.decode(batches.next(1).tokens))
        assert batches.counts.get("rows_calls_without_tools", 0) == counted
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4]
    for choice in ("none", {"type": "none"}):  # OpenAI's and Anthropic's form
        offers_none = {
            "request": request | {"tool_choice": choice},
            "response": {"choices": choices},
        }
        batches = BatchStream(SFTDataConfig(sources=(jsonl([offers_none]),)), qwen, seed=0)
        assert qwen.decode(batches.next(1).tokens) == texts[3], "as servers render it"
    assert '"name": "look_up", "description"' in texts[0]


def test_results_without_a_name_get_that_of_their_call(chars: Tok, jsonl: Jsonl) -> None:
    """Requests and episodes give it to them, so a template that writes it renders one text. The
    same id may name another call later; a result of no call has no name."""
    chars.chat_template = (
        "{% for m in messages %}{{ m.name ~ ': ' if m.name else '' }}{{ m.content }}\n{% endfor %}"
    )

    def turn(name: str, *results: dict[str, Any]) -> list[dict[str, Any]]:
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": f"{name}{i}", "arguments": {}}}
            for i in range(2)
        ]
        return [{"role": "assistant", "content": "so", "tool_calls": calls}, *results]

    def result(number: int, **more: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"c{number}", "content": "2", **more}

    bare = [USER, *turn("a", result(1), result(0)), *turn("b", result(0), result(7))]
    named = [
        *(USER, *turn("a", result(1, name="a1"), result(0, name="a0"))),
        *turn("b", result(0, name="b0"), result(7)),
    ]
    texts = [render_text(chars, as_messages(m), add_generation_prompt=True) for m in (bare, named)]
    assert texts[0] == texts[1]
    assert [texts[0].count(f"{name}: 2") for name in ("a1", "a0", "b0", "b1")] == [1, 1, 1, 0]
