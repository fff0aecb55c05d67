"""Forms of public datasets: one example and one broken row for each form and job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import PreTrainedTokenizerBase

from burnish.config.forms import comparison_of, first_is_better
from burnish.config.passes import total_rows
from burnish.data.batches import load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.forms import form_of_row, in_columns, open_rows
from burnish.data.notices import collecting
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import load_prompts
from burnish.data.prompts.generation import OWN_COLUMNS, GenerationPrompts
from burnish.data.rated.config import ClassesDataConfig
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import GivenResponses
from burnish.data.sources import DataError, Row, first_rows

HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"
USER, SAYS = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
GSM = {"question": "1+1?", "answer": "It is 2.\n#### 2"}
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
BARE = {"instruction": "Say hi.", "input": "", "output": "hi"}
CALL = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}

FORMS: list[tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    # name, config class, example, expected columns, broken second row, part of the error
    (
        "implicit_prompt",
        PreferenceDataConfig,
        {"chosen": HH + " See you", "rejected": HH + " No"},
        {"prompt": HH, "chosen": " See you", "rejected": " No"},
        {"chosen": HH + " See you", "rejected": "No"},
        "'chosen' and 'rejected' is a transcript",
    ),
    (
        "implicit_prompt",
        PreferenceDataConfig,
        {"chosen": [USER, SAYS], "rejected": [USER, {**SAYS, "content": "No"}]},
        {"prompt": [USER], "chosen": [SAYS], "rejected": [{**SAYS, "content": "No"}]},
        {"chosen": [USER, SAYS], "rejected": [{**USER, "content": "Other"}, SAYS]},
        "no common prompt: they share their first 0 messages",
    ),
    (
        "implicit_prompt",  # ShareGPT turns; identical answers keep the last one as response
        PreferenceDataConfig,
        {"chosen": SHARE, "rejected": SHARE},
        {"prompt": [USER], "chosen": [SAYS], "rejected": [SAYS]},
        {"chosen": SHARE, "rejected": "Hello"},
        "'rejected' is neither a transcript",
    ),
    (
        "sharegpt",
        SFTDataConfig,
        {"system": "Be kind.", "conversations": SHARE},
        {"messages": [{"role": "system", "content": "Be kind."}, USER, SAYS]},
        {"conversations": [{"from": "alien", "value": "?"}]},
        "'conversations': a ShareGPT turn has the unknown `from` 'alien'",
    ),
    (
        "sharegpt",
        SFTDataConfig,
        {"conversations": [SHARE[0], CALL, {"from": "observation", "value": "2"}, SHARE[1]]},
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
                    ],
                },
                {"role": "tool", "content": "2"},
                SAYS,
            ]
        },
        {"conversations": [SHARE[0], {"from": "function_call", "value": "f(1)"}]},
        "'conversations': a ShareGPT turn from 'function_call' must contain the JSON text",
    ),
    (
        "sharegpt",
        PromptDataConfig,
        {"conversations": json.dumps(SHARE)},
        {"prompt": [USER], "label": "Hello"},
        {"conversations": SHARE[1:]},
        "has no message before the answer",
    ),
    (
        "sharegpt",
        PreferenceDataConfig,
        {"conversations": SHARE[:1], "chosen": SHARE[1], "rejected": "No"},
        {"prompt": [USER], "chosen": [SAYS], "rejected": "No"},
        {"conversations": SHARE[:1], "chosen": SHARE[1], "rejected": None},
        "'rejected' is empty or absent",
    ),
    (
        "alpaca",
        SFTDataConfig,
        ALPACA,
        {
            "prompt": "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n",
            "response": "3",
        },
        {"instruction": "Add.", "input": "", "output": None},
        "'output' is empty",
    ),
    (
        "alpaca",
        SFTDataConfig,
        BARE,
        {"prompt": "### Instruction:\nSay hi.\n\n### Response:\n", "response": "hi"},
        {**BARE, "input": 7},
        "'input' contains a int, not a text",
    ),
    (
        "alpaca",
        PreferenceDataConfig,
        {"instruction": "Hi", "history": [["A", "B"]], "chosen": "yes", "rejected": "no"},
        {
            "prompt": [
                {"role": "user", "content": "A"},
                {"role": "assistant", "content": "B"},
                {"role": "user", "content": "Hi"},
            ],
            "chosen": "yes",
            "rejected": "no",
        },
        {"instruction": "Hi", "history": ["A"], "chosen": "yes", "rejected": "no"},
        "'history' must be a list of [instruction, answer]",
    ),
    (
        "gsm8k",
        PromptDataConfig,
        GSM,
        {"prompt": "1+1?\n", "label": "2"},
        {"question": "1+1?", "answer": "It is 2."},
        "'answer' has no '####'",
    ),
    (
        "gsm8k",
        SFTDataConfig,
        GSM,
        {"prompt": "1+1?\n", "response": GSM["answer"]},
        {"question": None, "answer": "#### 2"},
        "'question' is empty",
    ),
    (
        "messages",
        ResponseDataConfig,
        {"messages": [USER, SAYS]},
        {"prompt": [USER], "response": "Hello"},
        {"messages": [USER]},
        "does not end with an assistant message to score",
    ),
]


@pytest.mark.parametrize(
    "case",
    FORMS,
    ids=[f"{form}-{kind.__name__}-{i}" for i, (form, kind, *_) in enumerate(FORMS)],
)
def test_a_form_is_recognized_converted_and_its_broken_row_named(
    case: tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, Any], str], tmp_path: Path
) -> None:
    form, kind, example, expected, broken, error = case
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (example, broken)))
    config = kind(sources=[str(path)], apply_chat_template="history" in example)
    assert [reading.form for _, reading in config.readings()] == [form]
    assert config.broken_rules() == []  # the columns of the form replace those of the keys
    (source,) = open_rows(config)
    for key, value in expected.items():
        assert source[0].values[key] == value
    with pytest.raises(DataError) as caught:
        _ = source[1]
    assert f"{path}:2: as " in str(caught.value) and error in str(caught.value)
    assert next(kind(sources=[str(path)], form="columns").readings())[1].form == "columns"


def test_two_readings_are_an_error_that_names_both_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text(json.dumps({**ALPACA, "text": "Add. 3"}) + "\n")
    (problem,) = SFTDataConfig(sources=(str(path),)).broken_rules()
    assert "columns (text) or Alpaca (instruction, input, output)" in problem
    assert "set form to columns or alpaca" in problem
    assert SFTDataConfig(sources=(str(path),), form="alpaca").broken_rules() == []
    (problem,) = SFTDataConfig(sources=(str(path),), form="gsm8k").broken_rules()
    assert "form=gsm8k needs the columns question and answer" in problem


def test_own_keys_and_present_columns_take_precedence_over_forms() -> None:
    row = Row({**ALPACA, "prompt": "p"}, "f:1")
    assert form_of_row(row, PromptDataConfig(sources=("f",))) == "columns"
    only = PromptDataConfig(sources=("f",), prompt_template="{instruction}")
    assert form_of_row(Row(ALPACA, "f:1"), only) == "columns"
    renamed = SFTDataConfig(sources=("f",), prompt_key="instruction", response_key="output")
    assert form_of_row(Row(ALPACA, "f:1"), renamed) == "columns"


def test_chat_forms_use_messages_and_plain_instructions() -> None:
    chat = SFTDataConfig(sources=("f",), apply_chat_template=True)
    values = in_columns(Row(ALPACA, "f:1"), "alpaca", chat).values
    assert values["prompt"] == "Add.\n\n1 and 2"
    pairs = PreferenceDataConfig(sources=("f",), apply_chat_template=True)
    row = Row({"chosen": HH + " See you", "rejected": HH + " No"}, "f:1")
    values = in_columns(row, "implicit_prompt", pairs).values
    assert values["prompt"] == [USER, SAYS, {"role": "user", "content": "Bye"}]
    assert values["rejected"] == [{"role": "assistant", "content": "No"}]


def test_label_patterns_read_the_last_match(tmp_path: Path, chars: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "gsm.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "label": "#### 1, no: #### 2 "}) + "\n")
    config = PromptDataConfig(sources=(str(path),), label_pattern="#### ([^,]+)")
    assert load_prompts(config, chars)[0].label == "2"
    other = PromptDataConfig(sources=(str(path),), label_pattern="= (.+)")
    with pytest.raises(DataError, match=r"gsm.jsonl:1: .*label_pattern='= \(.\+\)' finds no label"):
        load_prompts(other, chars)
    for bad, why in (("(", "not a regular expression"), ("####", "has 0 groups")):
        problems = PromptDataConfig(sources=(str(path),), label_pattern=bad).broken_rules()
        assert why in problems[0]


def test_transcripts_train_only_the_last_answer(
    tmp_path: Path, chars: PreTrainedTokenizerBase
) -> None:
    """The implicit prompt gives exactly the rows of the same data with a prompt column."""
    first = {"chosen": HH + " See you", "rejected": HH + " No"}
    second = {"prompt": HH, "chosen": " See you", "rejected": " No"}
    (tmp_path / "implicit.jsonl").write_text(json.dumps(first))
    (tmp_path / "columns.jsonl").write_text(json.dumps(second))
    batches = [
        load_batch(PreferenceDataConfig(sources=(str(tmp_path / name),)), chars)
        for name in ("implicit.jsonl", "columns.jsonl")
    ]
    assert batches[0].tokens.tolist() == batches[1].tokens.tolist()
    assert batches[0].action_mask.tolist() == batches[1].action_mask.tolist()


@pytest.mark.parametrize(("suffix", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
def test_compressed_lines_are_read_like_plain_ones(
    suffix: str, codec: str, tmp_path: Path, chars: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    lines = "".join(json.dumps({"prompt": f"{i}+1"}) + "\n\n" for i in range(5))
    with pa.CompressedOutputStream(str(path), codec) as file:
        file.write(lines.encode())
    config = PromptDataConfig(sources=(str(path),))
    assert config.broken_rules() == []
    assert total_rows(config) == 5
    (source,) = open_rows(config)
    assert (source.name, source[3].where) == ("rows", f"{path}:7")
    assert [p.text for p in load_prompts(config, chars)] == [f"{i}+1" for i in range(5)]
    assert [row.where for row in first_rows(config.sources[0], 2)] == [f"{path}:1", f"{path}:3"]
    few = PromptDataConfig.model_validate({"sources": [{"path": str(path), "max_samples": 2}]})
    assert total_rows(few) == len(open_rows(few)[0]) == 2
    path.write_bytes(b"not compressed")
    with pytest.raises(DataError, match="cannot be decompressed"):
        open_rows(config)
    with pytest.raises(DataError, match="cannot be read"):
        first_rows(config.sources[0])


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 10**400, None])
def test_a_comparison_without_a_finite_score_has_no_better_response(score: Any) -> None:
    row = {"question": "Q", "answer_0": "a", "answer_1": "b", "score_0": score, "score_1": 1.0}
    form = comparison_of(row)
    assert form is not None and first_is_better(form, row) is None
    assert first_is_better(form, row | {"score_0": 2}) is True


def test_a_solution_without_a_final_answer_is_refused(tmp_path: Path) -> None:
    config = PromptDataConfig(sources=(str(tmp_path / "rows.jsonl"),))
    row = Row({"question": "1+1?", "answer": "It is 2.\n#### "}, "rows.jsonl:1")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*no final answer"):
        in_columns(row, "gsm8k", config)


@pytest.mark.parametrize("text", ["", "I look it up."])
def test_a_tool_call_with_or_without_text_is_neither_a_response_nor_a_label(
    text: str, tmp_path: Path
) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    answer = {"role": "assistant", "content": text, "tool_calls": [call]}
    row = Row({"messages": [CHAT[0], answer]}, "rows.jsonl:1")
    path = str(tmp_path / "rows.jsonl")
    prompt = in_columns(row, "messages", PromptDataConfig(sources=(path,)))
    assert "label" not in prompt.values
    for config in (
        ResponseDataConfig(sources=(path,)),
        ClassesDataConfig(sources=(path,), kind="classes"),
    ):
        with pytest.raises(DataError, match=r"rows.jsonl:1: .*ends with a tool call"):
            in_columns(row, "messages", config)


def test_reasoning_that_is_not_in_a_response_is_counted(tmp_path: Path) -> None:
    row = Row({"messages": [CHAT[0], CHAT[1] | {"reasoning": "2 and 2"}]}, "rows.jsonl:1")
    config = ResponseDataConfig(sources=(str(tmp_path / "rows.jsonl"),))
    with collecting() as notes:
        assert in_columns(row, "messages", config).values["response"] == "4"
    assert list(notes) == ["reasoning_ignored"]


CHAT = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
SCORED = [
    {"messages": CHAT, "id": 7},
    {"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}], "n": 1},
    {"instruction": "Add", "input": "2 and 2", "output": "4", "n": 1},
    {"question": "2+2?", "answer": "It is\n#### 4", "level": "easy"},
    {"prompt": "2+2=", "response": "4", "messages": "kept", "n": [1, {"a": None}]},
]


@pytest.mark.parametrize("row", SCORED)
def test_scored_and_generated_rows_keep_all_columns_of_their_file(
    row: dict[str, Any], chars: PreTrainedTokenizerBase, jsonl: Any
) -> None:
    path = jsonl([row])
    (scored,) = GivenResponses(ResponseDataConfig(sources=(path,)), chars).take(0, 1)
    assert scored.columns == row
    (prompt,) = GenerationPrompts(PromptDataConfig(sources=(path,)), chars).take(0, 1)
    assert prompt.columns == {k: v for k, v in row.items() if k not in OWN_COLUMNS}


@pytest.mark.parametrize("num_repeating", [0, 2, 3])
def test_score_warns_of_responses_that_repeat_their_prompt(
    num_repeating: int, chars: Any, jsonl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of four rows are three. The responses are scored as they are."""
    chars.chat_template = None
    rows = [
        {"prompt": f"{i}?", "response": f"{i}? yes" if i < num_repeating else "yes"}
        for i in range(4)
    ]
    given = GivenResponses(ResponseDataConfig(sources=(jsonl(rows),)), chars)
    texts = [each.group.samples[0].text for each in given.take(0, 4)]
    assert texts == [row["response"] for row in rows]
    warnings = [r for r in caplog.records if "begin with their prompt" in r.getMessage()]
    assert len(warnings) == (num_repeating == 3)
