"""The column ``system`` (or ``system_prompt``) is the system message, in every form of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from burnish.data.config import DataConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.encoded import encoder_of
from burnish.data.forms import open_rows
from burnish.data.notices import collecting
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import load_prompts
from burnish.data.prompts.generation import GenerationPrompts
from burnish.data.rated.config import ClassesDataConfig
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.sources import DataError
from burnish.data.steps.config import StepsDataConfig
from burnish.data.stream import RowRef

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]
BEGIN = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n"
USER, SAYS = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
ASKED = {"prompt": "2+2"}
PAIR = {"chosen": "4", "rejected": "5"}
PAIR_OF_MESSAGES = {"chosen": [USER, SAYS], "rejected": [USER, {**SAYS, "content": "5"}]}
CHAT = {"apply_chat_template": True}

ROWS: list[tuple[type[DataConfig], dict[str, Any], dict[str, Any]]] = [
    (SFTDataConfig, ASKED | {"response": "4"}, CHAT),
    (SFTDataConfig, {"prompt": [USER], "response": "4"}, {}),
    (SFTDataConfig, {"messages": [USER, SAYS]}, {}),
    (SFTDataConfig, {"instruction": "2+2", "output": "4"}, CHAT),
    (SFTDataConfig, {"question": "2+2", "answer": "#### 4"}, CHAT),
    (PreferenceDataConfig, ASKED | PAIR, CHAT),
    (PreferenceDataConfig, {"question": "2+2"} | PAIR, CHAT | {"prompt_key": "question"}),
    (PreferenceDataConfig, PAIR_OF_MESSAGES, {}),
    (PreferenceDataConfig, ASKED | {"response": "4", "label": True}, CHAT | {"label_key": "label"}),
    (ClassesDataConfig, ASKED | {"response": "4", "passed": True}, CHAT | {"kind": "classes"}),
    (StepsDataConfig, ASKED | {"steps": ["4"], "labels": [1]}, CHAT | {"kind": "steps"}),
    (PromptDataConfig, ASKED | {"label": "4"}, CHAT),
    (PromptDataConfig, {"messages": [USER, SAYS]}, {}),
    (PromptDataConfig, {"prompt": [USER]}, {}),
    (ResponseDataConfig, ASKED | {"response": "4"}, CHAT),
    (ResponseDataConfig, {"messages": [USER, SAYS]}, {}),
]


def first_ids(config: DataConfig, tokenizer: Tok) -> list[int]:
    sources = open_rows(config)
    item = encoder_of(config, tokenizer, sources).encode(sources[0][0], RowRef("rows", 0, 0))
    for name in ("chosen", "row", "group"):
        item = vars(item).get(name, item)
    item = vars(item).get("prompt", item)
    return list(vars(item).get("ids", vars(item).get("token_ids")))


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(("kind", "row", "options"), ROWS)
def test_the_column_is_the_system_message(
    kind: Any, row: dict[str, Any], options: Any, column: str, chars: Tok, jsonl: Jsonl
) -> None:
    config = kind(sources=(jsonl([{column: "Be kind.", **row}]),), **options)
    assert chars.decode(first_ids(config, chars)).startswith(BEGIN)
    with_key = config.model_copy(update={"system_prompt": "Be kind."})
    assert first_ids(with_key, chars) == first_ids(config, chars)
    with pytest.raises(DataError, match=r"different system messages in system.* and the key"):
        first_ids(config.model_copy(update={"system_prompt": "Be rude."}), chars)
    empty = kind(sources=(jsonl([{column: "", **row}]),), **options)
    none = kind(sources=(jsonl([row]),), **options)
    assert first_ids(empty, chars) == first_ids(none, chars)
    assert "system" not in chars.decode(first_ids(none, chars))


PARTS = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
LOGGED = {"response": {"choices": [{"message": SAYS, "finish_reason": "stop"}]}}


@pytest.mark.parametrize("system", ["Be kind.", PARTS])
def test_the_system_message_of_every_form_is_a_text_or_text_parts(
    system: Any, chars: Tok, jsonl: Jsonl
) -> None:
    """Requests of Anthropic's API have parts."""
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"messages": [USER, SAYS], "system": system}, {}),
        ({"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]}, {}),
        ({"instruction": "2+2", "output": "4"}, CHAT),
        (LOGGED | {"request": {"messages": [USER], "system": system}}, {}),
    ]
    for row, options in rows:
        values = row if "request" in row else row | {"system": system}
        config = SFTDataConfig(sources=(jsonl([values]),), **options)
        assert chars.decode(first_ids(config, chars)).startswith(BEGIN)


def test_a_log_with_another_system_message_in_a_column_is_refused(chars: Tok, jsonl: Jsonl) -> None:
    row = LOGGED | {"request": {"messages": [USER], "system": PARTS}}
    for column in ("", None, PARTS):
        config = SFTDataConfig(sources=(jsonl([row | {"system": column}]),))
        assert chars.decode(first_ids(config, chars)).startswith(BEGIN)
    for wrong in (
        row | {"system": "Be rude."},
        LOGGED | {"request": {**row["request"], "system": {"a": 1}}},
    ):
        with pytest.raises(DataError, match="system"):
            first_ids(SFTDataConfig(sources=(jsonl([wrong]),)), chars)


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_text_parts_are_a_system_message_and_other_objects_are_refused(
    column: str, chars: Tok, jsonl: Jsonl
) -> None:
    row = {"messages": [USER, SAYS]}
    parts = SFTDataConfig(sources=(jsonl([row | {column: PARTS}]),))
    assert chars.decode(first_ids(parts, chars)).startswith(BEGIN)
    for value in ({"role": "system", "content": "Be kind."}, [{"role": "system", "content": "x"}]):
        config = SFTDataConfig(sources=(jsonl([row | {column: value}]),))
        with pytest.raises(DataError, match=f"column '{column}' is no text"):
            first_ids(config, chars)


def test_two_system_messages_of_a_row_are_equal_or_refused(chars: Tok, jsonl: Jsonl) -> None:
    row = {"messages": [{"role": "system", "content": "Be kind."}, USER, SAYS]}
    config = SFTDataConfig(sources=(jsonl([row | {"system": "Be kind."}]),))
    assert chars.decode(first_ids(config, chars)).startswith(BEGIN)
    config = SFTDataConfig(sources=(jsonl([row | {"system": "Be rude."}]),))
    with pytest.raises(DataError, match=r"different system messages in system and the first mess"):
        first_ids(config, chars)


def test_a_plain_prompt_with_a_system_column_is_refused_or_written_by_a_template(
    chars: Tok, jsonl: Jsonl
) -> None:
    path = jsonl([ASKED | {"system": "Be kind.", "response": "4"}])
    with pytest.raises(DataError, match=r"column system.*plain string.*apply_chat_template: true"):
        load_prompts(PromptDataConfig(sources=(path,)), chars)
    both = PromptDataConfig(sources=(path,), prompt_template="{system}\n{prompt}=")
    assert load_prompts(both, chars)[0].text == "Be kind.\n2+2="
    with collecting() as notes:
        ids = first_ids(SFTDataConfig(sources=(path,), prompt_template="{prompt}="), chars)
    assert "unused_system" in notes and "Be" not in chars.decode(ids)
    chat = SFTDataConfig(sources=(path,), prompt_template="{prompt}", apply_chat_template=True)
    assert chars.decode(first_ids(chat, chars)).startswith(BEGIN)


def test_generated_rows_contain_the_message_once(chars: Tok, jsonl: Jsonl) -> None:
    path = jsonl([ASKED | {"system": "Be kind."}])
    config = PromptDataConfig(sources=(path,), apply_chat_template=True)
    (prompt,) = GenerationPrompts(config, chars).take(0, 1)
    assert prompt.content == [{"role": "system", "content": "Be kind."}, USER]
    assert list(prompt.prompt.messages or ()) == prompt.content
    written = {"prompt": prompt.content, "response": "4", **prompt.columns}
    again = SFTDataConfig(sources=(jsonl([written], "again.jsonl"),))
    assert chars.decode(first_ids(again, chars)).startswith(BEGIN)
