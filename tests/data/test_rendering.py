"""Fields that published chat templates leave out are refused or counted, whatever their text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from chat_families import chat_tokenizer
from chat_templates import published_tokenizer

from burnish.chat_message import canonical
from burnish.data.batches import load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.left_out import check_rendering
from burnish.data.notices import collecting
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import load_prompts
from burnish.data.sources import DataError

Jsonl = Callable[..., str]
USER = {"role": "user", "content": "2+2?"}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"a": 2}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TEXT_AND_CALL = {**CALLED, "content": "I call f."}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "abcdefgh1", "name": "f"}
ANSWER = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}]


@cache
def tokenizer_of(family: str) -> Any:
    tokenizers = {"episodes_llama3": "llama3", "harmony": "harmony"}
    if family in tokenizers:
        return chat_tokenizer(tokenizers[family])
    return published_tokenizer(family)


@pytest.mark.parametrize(
    ("family", "role", "noticed"),
    [
        ("chatml", "human", True),
        ("chatml", "critic", True),
        ("smollm2", "observation", True),
        ("episodes_llama3", "User", True),
        ("chatml", "user", False),
        ("chatml", "developer", False),  # canonical messages have the role system
        ("chatml", "tool", False),
        ("harmony", "tool", False),
        ("llama3", "ipython", True),
    ],
)
def test_a_role_that_a_template_writes_without_naming_it_is_noticed(
    family: str, role: str, noticed: bool
) -> None:
    messages = [canonical({"role": role, "content": "Be brief."}), USER, ANSWER]
    with collecting() as notices:
        check_rendering(tokenizer_of(family), messages)
    assert ("unknown_role" in notices) == noticed


@pytest.mark.parametrize(
    ("family", "messages", "refused"),
    [
        *((f, [USER, CALLED], "tool calls") for f in ("chatml", "smollm2", "llama3", "gemma")),
        ("deepseek_r1", [USER, CALLED], "tool calls"),  # it reads null, which transformers drops
        *((f, [USER, CALLED, RESULT, ANSWER], None) for f in ("qwen3", "mistral", "harmony")),
        ("qwen3", [USER, TEXT_AND_CALL], None),
        ("mistral", [USER, TEXT_AND_CALL], "text of a message"),
        ("episodes_llama3", [USER, TEXT_AND_CALL], "text of a message"),
        ("episodes_llama3", [USER, CALLED], None),
        ("qwen3", [SYSTEM, USER, ANSWER], None),
        ("qwen3", [USER, {"role": "expert", "content": "x"}, ANSWER], "'expert'"),
        ("episodes_llama3", [USER, ANSWER, SYSTEM, USER, ANSWER], "'system'"),
        ("deepseek_r1", [SYSTEM, SYSTEM, USER, ANSWER], "'system'"),  # only the last one is kept
    ],
)
def test_text_and_tool_calls_that_a_template_drops_are_refused(
    family: str, messages: list[dict[str, Any]], refused: str | None
) -> None:
    if refused is None:
        check_rendering(tokenizer_of(family), messages)
        return
    with pytest.raises(DataError, match=f"leaves out .*{refused}"):
        check_rendering(tokenizer_of(family), messages)


@pytest.mark.parametrize(
    ("family", "messages", "tools", "notices"),
    [
        ("chatml", [USER, {**ANSWER, "reasoning_content": "x"}], None, {"reasoning_ignored"}),
        ("qwen3", [USER, {**ANSWER, "reasoning_content": "x"}], None, set()),
        ("deepseek_r1", [USER, {**ANSWER, "reasoning_content": "x"}], None, set()),
        ("harmony", [USER, {**ANSWER, "reasoning_content": "x"}], None, set()),
        ("chatml", [{**USER, "name": "ann"}, ANSWER], None, {"name_ignored"}),
        ("mistral", [USER, CALLED, RESULT, ANSWER], None, {"name_ignored"}),
        (
            "qwen3",
            [USER, CALLED, RESULT, ANSWER],
            None,
            {"name_ignored", "tool_call_id_ignored"},
        ),
        ("chatml", [USER, ANSWER], TOOLS, {"tools_ignored"}),
        (
            "qwen3",
            [{**USER, "functions": "f", "tools": []}, {**ANSWER, "function_calls": "f()"}],
            None,
            {"functions_ignored", "function_calls_ignored"},
        ),
        ("qwen3", [USER, ANSWER], TOOLS, set()),
        ("mistral", [USER, ANSWER], TOOLS, set()),
    ],
)
def test_other_fields_that_a_template_drops_are_noticed(
    family: str, messages: list[dict[str, Any]], tools: Any, notices: set[str]
) -> None:
    with collecting() as found:
        check_rendering(tokenizer_of(family), messages, tools)
    assert set(found) == notices


@pytest.mark.parametrize(
    ("answer", "noticed"),
    [
        ("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n", False),
        ("{%- generation -%}{{ m.content }}{%- endgeneration -%}<|im_end|>\n", False),
        ("Yes. {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n", True),
        (
            "{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{% else %}{{ m.content }}{% endif %}<|im_end|>\n",
            True,
        ),
        ("{{ m.content }}<|im_end|>\n", False),
    ],
)
def test_generation_blocks_of_a_template_that_are_not_the_answers_are_noticed(
    answer: str, noticed: bool
) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with collecting() as notices:
        check_rendering(tokenizer, [USER, ANSWER])
    assert set(notices) == ({"generation_blocks_ignored"} if noticed else set())


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_tool_calls_without_text_are_refused_in_every_kind_of_data(
    content: dict[str, Any], jsonl: Jsonl
) -> None:
    """A template without tool calls would train the end token alone."""
    tokenizer = tokenizer_of("smollm2")
    called = {"role": "assistant", "tool_calls": [CALL], **content}
    row = {
        "messages": [USER, called],
        "prompt": [USER, called, USER],
        "chosen": [called],
        "rejected": [ANSWER],
    }
    path = jsonl([row])
    for load in (
        lambda: load_batch(SFTDataConfig(sources=(path,)), tokenizer),
        lambda: load_prompts(PromptDataConfig(sources=(path,), form="columns"), tokenizer),
        lambda: load_batch(
            PreferenceDataConfig(sources=(jsonl([{**row, "prompt": [USER]}], "pairs.jsonl"),)),
            tokenizer,
        ),
    ):
        with pytest.raises(DataError, match=r"jsonl:1: .*leaves out the tool calls"):
            load()


def test_a_function_call_of_sharegpt_is_refused_if_it_is_not_rendered(jsonl: Jsonl) -> None:
    turns = [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": '{"name": "f", "arguments": "{\\"a\\": 2}"}'},
    ]
    config = SFTDataConfig(sources=(jsonl([{"conversations": turns}]),))
    with pytest.raises(DataError, match="leaves out the tool calls"):
        load_batch(config, tokenizer_of("smollm2"))
    batch = load_batch(config, tokenizer_of("qwen3"))
    assert '{"a": 2}' in tokenizer_of("qwen3").decode(batch.tokens.tolist())
