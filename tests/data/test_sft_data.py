"""Demonstrations: the three kinds of row, the trained tokens of each, and batches that can be
resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from burnish.config import load_config
from burnish.data.batches import BatchStream, load_batch
from burnish.data.chat import encode_prompt
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.forms import open_rows
from burnish.data.notices import collecting
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptStream
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import ResponseEncoder
from burnish.data.sources import DataError
from burnish.data.stream import RowRef
from burnish.types import Batch

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]
CHAT = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


def one_row(tokenizer: Tok, path: str, **options: Any) -> Batch:
    return load_batch(SFTDataConfig(sources=(path,), **options), tokenizer)


def trained(tokenizer: Tok, batch: Batch) -> str:
    return tokenizer.decode(batch.tokens[batch.action_mask].tolist())


def test_a_conversation_is_trained_on_every_assistant_turn(chars: Tok, jsonl: Jsonl) -> None:
    batch = one_row(chars, jsonl([{"messages": CHAT}]), system_prompt="brief")
    assert trained(chars, batch) == "2<|im_end|>4<|im_end|>"
    text = chars.decode(batch.tokens.tolist())
    assert text.startswith("<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\n1+1")
    prompt = [{"role": "system", "content": "brief"}, CHAT[0]]
    assert batch.prompt_lens.tolist() == [len(encode_prompt(chars, prompt)[1])]


def test_a_prompt_and_a_response_are_trained_on_the_response_and_its_end(
    chars: Tok, jsonl: Jsonl
) -> None:
    """Tokens: ``<s> 1 + 1 = | 2 <|im_end|>``: five of prompt, two of response."""
    batch = one_row(chars, jsonl([{"prompt": "1+1=", "response": "2"}]))
    assert chars.decode(batch.tokens.tolist()) == "<s>1+1=2<|im_end|>"
    assert batch.action_mask.tolist() == [False] * 5 + [True] * 2
    assert batch.prompt_lens.tolist() == [5]
    assert (batch.num_tokens, batch.num_sequences, batch.rows_per_unit) == (2, 1, 1)


CUT: tuple[Any, ...] = (
    *("length", "content_filter", "MAX_TOKENS", "FinishReason.MAX_TOKENS", "model_length"),
    *("abort", "aborted", "incomplete", "Length ", {"type": "length", "length": 5}),
    {"reason": "max_output_tokens"},
)
ENDED: tuple[Any, ...] = (
    *("stop", "STOP", "tool_calls", "end_turn", "eos_token", "", None),
    {"type": "stop", "matched": 2},
)
UNKNOWN: tuple[Any, ...] = ("odd", 3, True, ["length"], {"kind": "length"}, {})


@pytest.mark.parametrize("reason", [*CUT, *ENDED, *UNKNOWN], ids=str)
@pytest.mark.parametrize("form", ["plain", "chat", "messages", "api_log"])
def test_a_response_that_was_cut_is_trained_without_an_end_token(
    form: str, reason: Any, chars: Tok, jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    choice = {"message": CHAT[1], "finish_reason": reason}
    row: dict[str, Any] = {
        "plain": {"prompt": "1+1=", "response": "2", "finish_reason": reason},
        "chat": {"prompt": CHAT[:1], "response": "2", "finish_reason": reason},
        "messages": {"messages": CHAT[:2], "finish_reason": reason},
        "api_log": {"request": {"messages": CHAT[:1]}, "response": {"choices": [choice]}},
    }[form]
    text = trained(chars, one_row(chars, jsonl([row])))
    assert text == ("2" if reason in CUT else "2<|im_end|>")
    assert ("finish reason" in caplog.text) == any(reason is each for each in UNKNOWN)


@pytest.mark.parametrize("reason", [*CUT, *ENDED, *UNKNOWN], ids=str)
def test_the_job_score_reads_the_same_finish_reasons(reason: Any, chars: Tok, jsonl: Jsonl) -> None:
    path = jsonl([{"prompt": "1+1=", "response": "2", "finish_reason": reason}])
    config = ResponseDataConfig(sources=(path,))
    (source,) = open_rows(config)
    with collecting() as notes:
        encoded = ResponseEncoder(config, chars).encode(source[0], RowRef("rows", 0, 0))
    assert encoded.group.samples[0].is_cut == (reason in CUT)
    assert ("unknown_finish_reason" in notes) == any(reason is each for each in UNKNOWN)


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "refusal": "2"},
        {"content": "", "refusal": "2"},
        {"content": [{"type": "refusal", "refusal": "2"}]},
        {"content": "2", "refusal": None},
    ],
)
@pytest.mark.parametrize("form", ["messages", "api_log"])
def test_a_refusal_of_an_api_is_the_answer_and_counted(
    form: str, answer: dict[str, Any], chars: Tok, jsonl: Jsonl
) -> None:
    message = {"role": "assistant", **answer}
    row: dict[str, Any] = {
        "messages": {"messages": [*CHAT[:1], message]},
        "api_log": {
            "request": {"messages": CHAT[:1]},
            "response": {"choices": [{"message": message, "finish_reason": "stop"}]},
        },
    }[form]
    stream = BatchStream(SFTDataConfig(sources=(jsonl([row] * 2),)), chars, seed=0)
    assert trained(chars, stream.next(1)) == "2<|im_end|>"
    is_refusal = answer["content"] != "2"
    assert stream.counts.get("rows_refusal", 0) == int(is_refusal)
    both = {**message, "content": "3", "refusal": "2"}
    with pytest.raises(DataError, match="differ"):
        one_row(chars, jsonl([{"messages": [*CHAT[:1], both]}]))


@pytest.mark.parametrize("column", ["finish_reason", "rejected_finish_reason"])
def test_a_response_of_a_pair_that_was_cut_has_no_end_token(
    column: str, chars: Tok, jsonl: Jsonl
) -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", column: "length"}
    config = PreferenceDataConfig(sources=(jsonl([row]),))  # type: ignore[arg-type]
    chosen = "2" if column == "finish_reason" else "2<|im_end|>"
    assert trained(chars, load_batch(config, chars)) == chosen + "3"


@pytest.mark.parametrize(
    ("columns", "keys", "cut"),
    [
        ({"a": "2", "b": "3"}, {"chosen_key": "a", "rejected_key": "b"}, "3"),
        ({"a": "2", "rejected": "3"}, {"chosen_key": "a"}, "3"),
        # the column belongs to another response
        (
            {"chosen": "3", "rejected": "2"},
            {"chosen_key": "rejected", "rejected_key": "chosen"},
            "2",
        ),
        ({"a": "2", "b": "3", "rejected": "x"}, {"chosen_key": "a", "rejected_key": "b"}, None),
        (
            {"a": "2", "b": "3", "b_finish_reason": "stop"},
            {"chosen_key": "a", "rejected_key": "b"},
            None,
        ),
    ],
)
def test_the_finish_reason_of_a_renamed_column_is_read(
    columns: dict[str, str], keys: dict[str, str], cut: str | None, chars: Tok, jsonl: Jsonl
) -> None:
    row = {"prompt": "1+1=", "rejected_finish_reason": "length", **columns}
    config = PreferenceDataConfig(sources=(jsonl([row]),), **keys)  # type: ignore[arg-type]
    text = "".join(each if each == cut else f"{each}<|im_end|>" for each in "23")
    assert trained(chars, load_batch(config, chars)) == text


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "response": "2"},
        {"prompt": CHAT[:1], "response": "2"},
        {"prompt": CHAT[:1], "response": CHAT[1:2]},
        {"prompt": "1+1", "response": CHAT[:2]},
        {"messages": CHAT[:2]},
    ],
)
def test_strings_and_messages_of_the_same_exchange_give_the_same_tokens(
    chars: Tok, jsonl: Jsonl, row: dict[str, Any]
) -> None:
    batch = one_row(chars, jsonl([row]), apply_chat_template=True)
    expected = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert chars.decode(batch.tokens.tolist()) == expected
    assert trained(chars, batch) == "2<|im_end|>"
    prompt_ids = encode_prompt(chars, "1+1", apply_chat_template=True)[1]
    assert batch.tokens.tolist()[: int(batch.prompt_lens[0])] == prompt_ids


def test_assistant_turns_in_the_prompt_are_not_trained(chars: Tok, jsonl: Jsonl) -> None:
    batch = one_row(chars, jsonl([{"prompt": CHAT[:3], "response": "4"}]))
    assert trained(chars, batch) == "4<|im_end|>"


def test_plain_text_is_trained_on_all_but_its_first_token(
    chars: Tok, bpe: Tok, jsonl: Jsonl
) -> None:
    """No token precedes the first one to predict it, be it ``<s>`` or the text's own."""
    with_bos = one_row(chars, jsonl([{"text": "1+1=2"}]))
    assert trained(chars, with_bos) == "1+1=2<|im_end|>"
    without = one_row(bpe, jsonl([{"text": "the cat"}]))
    assert without.action_mask.tolist() == [False] + [True] * (len(without.tokens) - 1)
    assert without.prompt_lens.tolist() == [1] and without.tokens[-1] == bpe.eos_token_id


def test_training_on_the_prompt_covers_all_up_to_the_last_answer(chars: Tok, jsonl: Jsonl) -> None:
    batch = one_row(chars, jsonl([{"messages": CHAT}]), train_on_prompt=True)
    newline = 1
    assert batch.action_mask.tolist() == (
        [False] + [True] * (len(batch.tokens) - 1 - newline) + [False]
    )


def test_messages_come_before_response_and_response_before_text(chars: Tok, jsonl: Jsonl) -> None:
    row = {"messages": None, "prompt": "1+1=", "response": "2", "text": "no"}
    assert trained(chars, one_row(chars, jsonl([row]))) == "2<|im_end|>"
    row["messages"] = CHAT[:2]
    assert trained(chars, one_row(chars, jsonl([row]))) == "2<|im_end|>"
    assert trained(chars, one_row(chars, jsonl([{"text": "hi", "response": None}]))).startswith(
        "hi"
    )


def stream(tokenizer: Tok, path: str, **options: Any) -> BatchStream:
    return BatchStream(SFTDataConfig(sources=(path,), **options), tokenizer, seed=0)


@given(stop=st.integers(0, 9))
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_resumed_stream_gives_the_very_next_batches(chars: Tok, jsonl: Jsonl, stop: int) -> None:
    path = jsonl([{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(7)])
    whole = stream(chars, path)
    expected = [whole.next(2) for _ in range(stop + 3)]
    first = stream(chars, path)
    for _ in range(stop):
        first.next(2)
    second = stream(chars, path)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for batch in expected[stop:]:
        mine = second.next(2)
        assert torch.equal(mine.tokens, batch.tokens)
        assert torch.equal(mine.group_ids, batch.group_ids)
    assert second.counts == whole.counts


def test_every_row_is_a_separate_group_across_batches(chars: Tok, jsonl: Jsonl) -> None:
    rows = stream(chars, jsonl([{"text": "ab"}, {"text": "cd"}, {"text": "ef"}]))
    assert [rows.next(2).group_ids.tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert rows.counts == {"rows_seen": 6, "rows_dropped": 0, "rows_truncated": 0, "epoch": 2}
    assert rows.num_rows == 3


def test_the_four_policies_for_an_overlong_row(chars: Tok, jsonl: Jsonl) -> None:
    """The first row is ``<s> 1 + 1 = 2 <|im_end|>``, 7 tokens of which the last 5 are ``+1=2`` and
    the end."""
    path = jsonl([{"prompt": "1+1=", "response": "2"}, {"prompt": "1", "response": "2"}])
    options = {"shuffle": False, "max_len": 5}
    with pytest.raises(DataError, match=r"the row has 7 tokens, but max_len is 5.*truncate_right"):
        stream(chars, path, **options).next(1)
    cut = stream(chars, path, overlong="truncate_left", **options)
    batch = cut.next(2)
    assert chars.decode(batch.tokens.tolist()) == "+1=2<|im_end|><s>12<|im_end|>"
    assert batch.prompt_lens.tolist() == [3, 2] and cut.counts["rows_truncated"] == 1
    start = stream(chars, path, overlong="truncate_right", **{**options, "max_len": 6})
    batch = start.next(2)
    assert chars.decode(batch.tokens.tolist()) == "<s>1+1=2<s>12<|im_end|>"
    assert batch.action_mask.sum() == 1 + 2 and start.counts["rows_truncated"] == 1
    gone = stream(chars, path, overlong="truncate_right", **options)  # no token of the answer
    assert chars.decode(gone.next(1).tokens.tolist()) == "<s>12<|im_end|>"
    assert gone.counts["rows_dropped"] == 1
    rest = stream(chars, path, overlong="drop", **options)
    assert chars.decode(rest.next(1).tokens.tolist()) == "<s>12<|im_end|>"
    assert rest.counts["rows_dropped"] == 1


def test_the_first_token_of_a_truncated_text_is_not_trained(chars: Tok, jsonl: Jsonl) -> None:
    batch = one_row(chars, jsonl([{"text": "123456"}]), max_len=3, overlong="truncate_left")
    assert chars.decode(batch.tokens.tolist()) == "56<|im_end|>"
    assert batch.action_mask.tolist() == [False, True, True]
    assert batch.prompt_lens.tolist() == [1]


@pytest.mark.parametrize("wide", [False, True])
def test_a_row_truncated_to_no_prompt_is_dropped_and_counted(
    chars: Tok, jsonl: Jsonl, wide: bool
) -> None:
    """``<s> 1 | 2 3 4 5 6 <end>``: truncation to 6 leaves ``2 .. <end>``, an answer without a
    prompt."""
    path = jsonl([{"prompt": "1", "response": "23456"}, {"prompt": "1", "response": "2"}])
    options = {"overlong": "truncate_left", "shuffle": False, "train_on_prompt": wide}
    rows = stream(chars, path, max_len=6, **options)
    assert chars.decode(rows.next(1).tokens.tolist()) == "<s>12<|im_end|>"
    assert rows.counts["rows_dropped"] == 1 and rows.counts["rows_truncated"] == 0
    kept = stream(chars, path, max_len=7, **options).next(1)
    assert chars.decode(kept.tokens.tolist()) == "123456<|im_end|>"


def test_truncation_inside_an_earlier_answer_keeps_later_ones(chars: Tok, jsonl: Jsonl) -> None:
    """The rendered end of the conversation is 47 tokens from the second question on; two tokens
    more are the end of the first answer, which is not trained on without its beginning."""
    rest = "\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    size = len(chars(rest, add_special_tokens=False)["input_ids"])
    path = jsonl([{"messages": CHAT}])
    batch = one_row(chars, path, max_len=size + 2, overlong="truncate_left")
    assert chars.decode(batch.tokens.tolist()) == f"2<|im_end|>{rest}"
    assert trained(chars, batch) == "4<|im_end|>"
    wide = one_row(chars, path, max_len=size + 2, overlong="truncate_left", train_on_prompt=True)
    assert trained(chars, wide).startswith("\n<|im_start|>user")


def test_two_sources_may_name_a_column_each(jsonl: Jsonl) -> None:
    sources = [jsonl([{"chat": CHAT}], "a.jsonl"), jsonl([{"prompt": "1", "out": "2"}], "b.jsonl")]
    recipe = {"job": "sft", "model": {"scratch": {}}, "train": {"train_batch_size": 1}}
    data = {"sources": sources, "messages_key": "chat", "response_key": "out"}
    assert load_config(recipe | {"data": data}).data.response_key == "out"


def test_an_end_token_at_the_end_of_a_text_is_not_duplicated(
    chars: Tok, jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl([{"text": "<s>1+1=2<|im_end|>"}, {"text": "<s>2<|im_end|>"}])
    rows = stream(chars, path, shuffle=False)
    with caplog.at_level("WARNING", logger="burnish"):
        assert chars.decode(rows.next(2).tokens.tolist()) == "<s>1+1=2<|im_end|><s>2<|im_end|>"
    assert caplog.text.count("it is kept once") == 2  # one of each kind
    assert (rows.counts["rows_double_bos"], rows.counts["rows_double_eos"]) == (2, 2)


def test_a_template_without_end_token_is_logged_once_and_counted(
    chars: Tok, jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    chars.chat_template = chars.chat_template.replace("<|im_end|>", "")
    rows = stream(chars, jsonl([{"messages": CHAT[:2]}] * 3))
    with caplog.at_level("WARNING", logger="burnish"):
        rows.next(3)
    assert caplog.text.count("appends no end token to the assistant's turn") == 1
    assert rows.counts["rows_no_end_token"] == 3
    with caplog.at_level("WARNING", logger="burnish"):
        one_row(chars, jsonl([{"messages": CHAT[:2]}] * 3))
    assert "3 rows in all: no end token" in caplog.text


@pytest.mark.parametrize(
    ("column", "counted"),
    [
        ({"weight": 0.5}, 1),
        ({"train": False}, 1),
        ({"loss_mask": [1, 0]}, 1),
        ({"weight": "0"}, 1),
        ({"exclude": True}, 1),
        ({"exclude": 0, "trainable": True}, 0),
        ({"weight": 1.0, "train": True, "mask": [1, 1]}, 0),
        ({"weight": None}, 0),
        ({"level": 0.5}, 0),
    ],
)
def test_columns_that_should_weight_a_row_are_counted(
    chars: Tok, jsonl: Jsonl, column: dict[str, Any], counted: int
) -> None:
    path = jsonl([{"prompt": "1+1=", "response": "2", "label": "2", **column}])
    stream = BatchStream(SFTDataConfig(sources=(path,)), chars, seed=0)
    stream.next(1)
    assert stream.counts.get("rows_column_unread", 0) == counted
    template = "{prompt}" + "".join(f"{{{name}}}" for name in column)
    used = SFTDataConfig(sources=(path,), prompt_template=template)
    prompts = PromptStream(PromptDataConfig(sources=(path,)), chars, seed=0)
    prompts.next(1)  # a reward reads all columns
    assert "prompts_column_unread" not in prompts.counts
    if all(isinstance(value, int | float | str) for value in column.values()):
        stream = BatchStream(used, chars, seed=0)
        stream.next(1)
        assert "rows_column_unread" not in stream.counts


_PAIRS, _TURNS = [["a", "b"]], [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("columns", "counted"),
    [
        ({"query": "q", "history": _PAIRS}, 1),
        ({"query": "q", "history": _TURNS, "system": "s"}, 1),
        ({"query": "q", "history": json.dumps(_PAIRS)}, 1),
        ({"query": "q", "history": [{"user": "a", "assistant": "b"}]}, 1),
        ({"query": "q", "history": [{"from": "human", "value": "a"}]}, 1),
        ({"query": "q", "history": ["hq", "ha"]}, 1),
        ({"query": "q", "history": "User: hq"}, 1),
        ({"query": "hq ha q", "history": [["hq", "ha"]]}, 0),
        ({"query": "q", "history": []}, 0),
        ({"query": "q", "history": " "}, 0),
        ({"query": "q", "history": [0.5, 0.25], "input": "x"}, 0),
        ({"instruction": "q", "input": "x"}, 1),
        ({"instruction": "q", "input": ""}, 0),
    ],
)
def test_parts_of_a_prompt_that_are_not_read_are_counted(
    chars: Tok, jsonl: Jsonl, columns: dict[str, Any], counted: int
) -> None:
    """ms-swift's and Alpaca's columns, of which a key of the recipe reads one."""
    row = {**columns, "response": "r", "chosen": "r", "rejected": "x", "label": "r"}
    (key,) = {"query", "instruction"} & columns.keys()
    named: Any = {"sources": (jsonl([row]),), "prompt_key": key, "apply_chat_template": True}
    stream = BatchStream(SFTDataConfig(**named), chars, seed=0)
    stream.next(1)
    assert stream.counts.get("rows_column_unread", 0) == counted
    prompts = PromptStream(PromptDataConfig(**named), chars, seed=0)
    prompts.next(1)
    assert prompts.counts.get("prompts_column_unread", 0) == counted
    pairs = BatchStream(PreferenceDataConfig(**named), chars, seed=0)
    pairs.next(1)
    assert [n for k, n in pairs.counts.items() if k.endswith("column_unread")] == [1] * counted


def test_parts_of_an_alpaca_prompt_are_not_counted(chars: Tok, jsonl: Jsonl) -> None:
    row = {"instruction": "q", "input": "x", "history": _PAIRS, "output": "r"}
    config = SFTDataConfig(sources=(jsonl([row]),), apply_chat_template=True)
    stream = BatchStream(config, chars, seed=0)
    stream.next(1)
    assert "rows_column_unread" not in stream.counts


@pytest.mark.parametrize(("value", "counted"), [({"enable_thinking": False}, 1), ({}, 0)])
def test_variables_of_a_row_for_the_template_are_counted(
    chars: Tok, jsonl: Jsonl, value: dict[str, bool], counted: int
) -> None:
    """In training and in RL: all rows are rendered with the same variables."""
    path = jsonl([{"prompt": "1+1=", "response": "2", "chat_template_kwargs": value}])
    rows = BatchStream(SFTDataConfig(sources=(path,)), chars, seed=0)
    rows.next(1)
    prompts = PromptStream(PromptDataConfig(sources=(path,)), chars, seed=0)
    prompts.next(1)
    assert rows.counts.get("rows_column_unread", 0) == counted
    assert prompts.counts.get("prompts_column_unread", 0) == counted


@pytest.mark.parametrize(
    ("place", "flag", "counted"),
    [
        (1, {"masked": True}, (1, 1)),
        (1, {"mask": 0}, (1, 1)),
        (1, {"trainable": "false"}, (1, 1)),
        (1, {"masked": False, "mask": 1, "exclude": None, "name": "masked"}, (0, 0)),
        (1, {"train": True}, (0, 0)),
        (0, {"masked": True}, (0, 1)),  # trained only with the prompt
        (0, {"train": True}, (1, 0)),
        (0, {"loss": 0}, (0, None)),  # refused with train_on_prompt
    ],
)
def test_flags_of_messages_that_nothing_reads_are_counted(
    chars: Tok, jsonl: Jsonl, place: int, flag: dict[str, Any], counted: tuple[int, int | None]
) -> None:
    messages = [dict(message) for message in CHAT[:2]]
    messages[place] |= flag
    path = jsonl([{"messages": messages}])
    for train_on_prompt, count in zip((False, True), counted, strict=True):
        config = SFTDataConfig(sources=(path,), train_on_prompt=train_on_prompt)
        if count is None:
            with pytest.raises(DataError, match="train_on_prompt"):
                one_row(chars, path, train_on_prompt=True)
            continue
        rows = BatchStream(config, chars, seed=0)
        rows.next(1)
        assert rows.counts.get("rows_message_flag_unread", 0) == count


def test_a_limit_stops_the_loading_of_rows(chars: Tok, jsonl: Jsonl) -> None:
    path = jsonl([{"text": "ab"}, {"text": "cd"}, {"text": "ef"}])
    batch = load_batch(SFTDataConfig(sources=(path,)), chars, limit=2)
    assert chars.decode(batch.tokens.tolist()) == "<s>ab<|im_end|><s>cd<|im_end|>"
    assert batch.group_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "1", "respnse": "2"},
            r"rows\.jsonl:1.*columns 'messages' \(messages_key\).*nearest: respnse",
        ),
        ({"response": "2"}, r"rows\.jsonl:1.*\(prompt_key\)"),
        ({"messages": CHAT[:1]}, r"rows\.jsonl:1.*conversation"),
        ({"messages": "hi"}, r"rows\.jsonl:1.*\(messages_key\) holds"),
        ({"text": 3}, r"rows\.jsonl:1.*\(text_key\)"),
        (
            {"prompt": "1", "response": 2},
            r"rows\.jsonl:1.* expected",
        ),
        (
            {"prompt": CHAT[:1], "response": [{"role": "user", "content": "no"}]},
            r"rows\.jsonl:1.*response",
        ),
    ],
)
def test_an_unusable_row_is_refused_with_its_location(
    chars: Tok, jsonl: Jsonl, row: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        stream(chars, jsonl([row])).next(1)


def test_a_text_without_tokens_is_refused(bpe: Tok, jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: an answer .* is empty"):
        stream(bpe, jsonl([{"text": ""}])).next(1)


TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bb"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "dd"},
]


@pytest.mark.parametrize(
    ("flags", "options", "trained"),
    [
        ({}, {}, "bb<|im_end|>dd<|im_end|>"),
        ({}, {"train_on_turns": "last"}, "dd<|im_end|>"),
        ({1: {"train": False}}, {}, "dd<|im_end|>"),
        ({3: {"weight": 0}}, {}, "bb<|im_end|>"),
        ({0: {"weight": 0}, 1: {"weight": 1, "train": True}}, {}, "bb<|im_end|>dd<|im_end|>"),
    ],
)
def test_flags_and_last_turn_choose_the_trained_answers(flags, options, trained, chars, jsonl):
    """The tokens are the same in all cases, up to the last trained answer; the mask differs."""
    messages = [{**turn, **flags.get(i, {})} for i, turn in enumerate(TURNS)]
    rows = SFTDataConfig(sources=(jsonl([{"messages": messages}]),), **options)
    plain = SFTDataConfig(sources=(jsonl([{"messages": TURNS}], "plain.jsonl"),))
    batch = load_batch(rows, chars)
    tokens = batch.tokens.tolist()
    assert tokens == load_batch(plain, chars).tokens.tolist()[: len(tokens)]
    assert chars.decode(batch.tokens[batch.action_mask].tolist()) == trained
    split = {"prompt": messages[:1], "response": messages[1:]}
    rows = SFTDataConfig(sources=(jsonl([split], "split.jsonl"),), **options)
    batch = load_batch(rows, chars)
    assert chars.decode(batch.tokens[batch.action_mask].tolist()) == trained


@pytest.mark.parametrize(
    ("flags", "options", "error"),
    [
        ({"weight": 0.5}, {}, "message 1 (assistant) has weight: 0.5; use"),
        ({"train": True, "weight": 0}, {}, "train: True and weight: 0, which differ"),
        ({"train": False}, {"train_on_prompt": True}, "train_on_prompt=true trains on all"),
    ],
)
def test_flags_without_a_meaning_are_errors(flags, options, error, chars, jsonl):
    messages = [TURNS[0], {**TURNS[1], **flags}, *TURNS[2:]]
    config = SFTDataConfig(sources=(jsonl([{"messages": messages}]),), **options)
    with pytest.raises(DataError, match=re.escape(error)):
        load_batch(config, chars)
    with pytest.raises(DataError, match="every assistant message"):
        load_batch(
            SFTDataConfig(sources=(jsonl([{"messages": [TURNS[0], {**TURNS[1], "weight": 0}]}]),)),
            chars,
        )
    both = SFTDataConfig(sources=("f",), train_on_prompt=True, train_on_turns="last")
    assert "train_on_turns=last has no effect" in both.broken_rules()[0]
