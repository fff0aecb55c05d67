"""Trained turns of published templates: located where generation would produce them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from chat_families import byte_bpe, chat_tokenizer
from chat_templates import (
    PUBLISHED,
    REASONING_FORMS,
    published_tokenizer,
    reasoning_tokenizer,
    trl_tokenizer,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from burnish.data.batches import load_batch
from burnish.data.chat import encode_conversation, encode_prompt
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.notices import collecting
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.sources import DataError
from burnish.data.turns import locate_turns
from burnish.episodes.probing import TOOLS
from burnish.episodes.probing import call as probe_call
from burnish.episodes.renderer import ChatRenderer
from burnish.special_tokens import turn_end_ids
from burnish.templates import with_defaults

Jsonl = Callable[..., str]
Messages = list[dict[str, Any]]
tokenizer_of = cache(published_tokenizer)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **rest: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **rest}


def call(name: str = "f", call_id: str = "abcdefgh1", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(text: str, call_id: str = "abcdefgh1") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


TURNS = [user("2+2?"), answer("4"), user("3+3?"), answer("6")]
LOOP = [
    user("2+2?"),
    answer("", tool_calls=[call(a=2)]),
    result("4"),
    answer("It is 4."),
]
THOUGHTS = [
    user("2+2?"),
    answer("4", reasoning_content="two and two"),
    user("3+3?"),
    answer("6", reasoning_content="three and three"),
]


def segments(family: str, messages: Messages, **options: Any) -> list[tuple[str, bool]]:
    """(text, whether it is trained) of the runs of a row."""
    tokenizer = tokenizer_of(family)
    ids, mask = encode_conversation(tokenizer, messages, **options)
    runs = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    return [(tokenizer.decode([i for i, _ in run]), trained) for trained, run in runs]


def trained(family: str, messages: Messages, **options: Any) -> list[str]:
    return [text for text, is_trained in segments(family, messages, **options) if is_trained]


def check_prompts(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, turns: list[int], **options: Any
) -> None:
    """The ids before each trained turn are those of the RL prompt of the same history.

    A SentencePiece tokenizer writes another space if a text is tokenized in pieces: there the ids
    of the first turn are compared, and the texts of the others without spaces."""
    ids, mask = encode_conversation(tokenizer, messages, **options)
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    assert len(starts) == len(turns)
    for start, turn in zip(starts, turns, strict=True):
        _, prompt = encode_prompt(tokenizer, messages[:turn], tools=options.get("tools"))
        if turn != turns[0] and tokenizer.backend_tokenizer.normalizer is not None:
            texts = ["".join(tokenizer.decode(part).split()) for part in (ids[:start], prompt)]
            assert texts[0] == texts[1]
        else:
            assert ids[:start] == prompt


@pytest.mark.parametrize("family", [f for f in PUBLISHED if f not in ("deepseek_r1", "qwq")])
def test_all_answers_of_a_conversation_are_trained_after_their_rl_prompts(family: str) -> None:
    expected = ["4", "6"] if family != "qwen3" else ["4", "<think>\n\n</think>\n\n6"]
    found = trained(family, TURNS)
    special = PUBLISHED[family][0]
    for token in special:
        found = [text.replace(token, "") for text in found]
    assert [text.strip() for text in found] == expected
    check_prompts(tokenizer_of(family), TURNS, [1, 3])


@pytest.mark.parametrize("line", ["{{ '\\n' }}", ""])
def test_eos_behind_the_last_message_alone_is_not_trained(line: str) -> None:
    """Templates of Phi-3.5 (with a line) and Phi-4-mini: sampling stops before it."""
    tokenizer = published_tokenizer("chatml")
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}<|im_end|>LINE{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
    ).replace("LINE", line)
    ids, mask = encode_conversation(tokenizer, [*TURNS[:3], answer("end")])
    runs = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    texts = [tokenizer.decode([i for i, _ in run]) for on, run in runs if on]
    assert [text.replace("\n", "") for text in texts] == ["4<|im_end|>", "end<|im_end|>"]
    assert {tokenizer.decode(i) for i in turn_end_ids(tokenizer)} == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize("family", ["chatml", "xml"])
@pytest.mark.parametrize("before", ["", "Two calls."])
def test_a_response_cut_in_a_further_call_is_trained_as_written(family: str, before: str) -> None:
    """For every place of the cut, read as a response and trained as the message, without spaces."""
    tokenizer = chat_tokenizer(family)
    renderer = ChatRenderer(tokenizer)
    calls = [probe_call("look_up", {"key": key}, "probe0000") for key in "ab"]
    row = [user("q"), answer(before, tool_calls=calls)]
    ids, mask = encode_conversation(tokenizer, row, tools=TOOLS)
    begin, end = mask.index(True), len(mask) - mask[::-1].index(True)
    written = str(tokenizer.decode(ids[begin : end - 1]))
    for length in range(1, len(written) + 1):
        sampled = tokenizer(written[:length], add_special_tokens=False)["input_ids"]
        message = renderer.parse(sampled, TOOLS, prompt_ids=ids[:begin]).message
        cut = [user("q"), {**message, "finish_reason": "length"}]
        ids_of_cut, learned = encode_conversation(tokenizer, cut, tools=TOOLS)
        trained = [i for i, on in zip(ids_of_cut, learned, strict=True) if on]
        assert tokenizer.decode(trained).split() == tokenizer.decode(sampled).split()


@pytest.mark.parametrize("family", ["chatml", "xml"])
@pytest.mark.parametrize("behind", ["\n<tool_call>\n{oops", " I am done."])
@pytest.mark.parametrize("is_later", [False, True])
def test_text_behind_a_call_is_trained_where_it_was_sampled(
    family: str, behind: str, is_later: bool
) -> None:
    """Also in a response that a client answered with the result of the complete call."""
    tokenizer = chat_tokenizer(family)
    renderer = ChatRenderer(tokenizer)
    called = answer("First.", tool_calls=[probe_call("look_up", {"key": "a"}, "probe0000")])
    ids, mask = encode_conversation(tokenizer, [user("q"), called], tools=TOOLS)
    begin, end = mask.index(True), len(mask) - mask[::-1].index(True)
    written = str(tokenizer.decode(ids[begin : end - 1])) + behind
    sampled = [*tokenizer(written, add_special_tokens=False)["input_ids"], ids[end - 1]]
    message = renderer.parse(sampled, TOOLS, prompt_ids=ids[:begin], ended=True).message
    assert message["tool_calls"] and message["content"] != "First."
    row = [user("q"), message]
    if is_later:
        row += [result("4", message["tool_calls"][0]["id"]), answer("It is 4.")]
    ids, mask = encode_conversation(tokenizer, row, tools=TOOLS)
    trained = [i for i, on in zip(ids, mask, strict=True) if on]
    assert trained[: len(sampled)] == sampled
    _, prompt = encode_prompt(tokenizer, [*row, user("Go on.")], tools=TOOLS)
    assert str(tokenizer.decode(sampled)) in str(tokenizer.decode(prompt))


def test_qwen3_trains_a_tool_loop() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    called = '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    last = "<think>\n\n</think>\n\nIt is 4.<|im_end|>"
    assert trained("qwen3", LOOP, tools=tools) == [called, last]
    check_prompts(tokenizer_of("qwen3"), LOOP, [1, 3], tools=tools)
    thoughts = [LOOP[0], {**LOOP[1], "reasoning_content": "I call f."}, *LOOP[2:]]
    assert trained("qwen3", thoughts, tools=tools)[0] == f"<think>\nI call f.\n</think>\n\n{called}"
    check_prompts(tokenizer_of("qwen3"), thoughts, [1, 3], tools=tools)


def test_qwen3_trains_earlier_answers_without_their_reasoning_and_says_so() -> None:
    with collecting() as notices:
        found = trained("qwen3", THOUGHTS)
    assert found == ["4<|im_end|>", "<think>\nthree and three\n</think>\n\n6<|im_end|>"]
    assert set(notices) == {"reasoning_dropped"}
    check_prompts(tokenizer_of("qwen3"), THOUGHTS, [1, 3])
    with collecting() as notices:
        assert trained("qwen3", THOUGHTS, only_last=True) == found[1:]
        flagged = [THOUGHTS[0], {**THOUGHTS[1], "train": False}, *THOUGHTS[2:]]
        assert trained("qwen3", flagged) == found[1:]
    assert not notices
    inline = [*THOUGHTS[:3], answer("<think>\nthree and three\n</think>\n\n6")]
    assert trained("qwen3", inline, only_last=True) == found[1:]


def test_an_answer_before_untrained_ones_is_trained_as_the_last() -> None:
    """Generation renders the conversation up to the trained answer only."""
    flagged = [*THOUGHTS[:3], {**THOUGHTS[3], "train": False}]
    assert trained("qwen3", flagged) == ["<think>\ntwo and two\n</think>\n\n4<|im_end|>"]
    check_prompts(tokenizer_of("qwen3"), flagged, [1])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (answer("<think>\nwhy\n</think>\n\n4"), "why\n</think>\n\n4"),
        (answer("why</think>\n4"), "why\n</think>\n4"),
        (answer("4", reasoning_content="why"), "why\n</think>\n\n4"),
        (answer("4"), "\n</think>\n\n4"),
        (answer("<b>4</b>"), "\n</think>\n\n<b>4</b>"),
    ],
)
@pytest.mark.parametrize("family", ["deepseek_r1", "qwq"])
def test_reasoning_that_a_template_cuts_is_trained(
    family: str, message: dict[str, Any], expected: str
) -> None:
    """The generation prompt ends with ``<think>``, and the template renders the answer alone."""
    messages = [user("2+2?"), message]
    end = PUBLISHED[family][1]
    assert trained(family, messages) == [expected + end]
    assert segments(family, messages)[0][0].endswith("<think>\n")
    check_prompts(tokenizer_of(family), messages, [1])


def test_reasoning_is_trained_if_the_generation_prompt_does_not_open_it() -> None:
    tokenizer = published_tokenizer("deepseek_r1")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<think>\\n'}}{% endif %}", "'}}{% endif %}"
    )
    messages = [user("2+2?"), answer("<think>\nwhy\n</think>\n\n4")]
    ids, mask = encode_conversation(tokenizer, messages)
    text = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert text == "<think>\nwhy\n</think>\n\n4<｜end▁of▁sentence｜>"


_PROMPTED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "BLOCK{% endif %}{{ m.content }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
_KEY = "{{ '<think>' + (m.reasoning_content | default('')) + '</think>' }}"
_TEXT = "{% if '<think>' not in m.content %}{{ '<think></think>' }}{% endif %}"
_EMPTY = "{{ '<think></think>' }}"
_MARKED = _TEXT.replace("not in m.content", "not in m.content and '</think>' not in m.content")
_FILLED = "{{ '<think>\\n' + (m.reasoning_content | default('')) + '\\n</think>\\n\\n' }}"
_BLANK = "{{ '<think>\\n\\n</think>\\n\\n' }}"
_MENTION = "The </think> tag ends it."


@pytest.mark.parametrize(
    ("block", "message", "expected"),
    [
        (_KEY, answer("ans"), "\n</think>ans<|im_end|>"),
        (_KEY, answer("ans", reasoning_content="why"), "why\n</think>ans<|im_end|>"),
        (_TEXT, answer("ans"), "\n</think>ans<|im_end|>"),
        (_TEXT, answer("<think>why</think>ans"), "why\n</think>ans<|im_end|>"),
        (_TEXT, answer("<think>\nwhy\n</think>\n\nans"), "why\n</think>\n\nans<|im_end|>"),
        (_EMPTY, answer("ans", reasoning_content="why"), "why\n</think>ans<|im_end|>"),
        (_EMPTY, answer("<think>\nwhy\n</think>\n\nans"), "why\n</think>\n\nans<|im_end|>"),
        (_BLANK, answer("<think>why</think>ans"), "why\n</think>ans<|im_end|>"),
        (_FILLED, answer("<think>\nwhy\n</think>\n\nans"), "why\n</think>\n\nans<|im_end|>"),
        (_FILLED, answer("ans", reasoning_content="why"), "why\n</think>\n\nans<|im_end|>"),
        (_FILLED, answer("ans"), "\n</think>\n\nans<|im_end|>"),
        (
            _FILLED,
            answer(f"<think>why</think>{_MENTION}"),
            f"why\n</think>\n\n{_MENTION}<|im_end|>",
        ),
        (_MARKED, answer(f"<think>why</think>{_MENTION}"), f"why\n</think>{_MENTION}<|im_end|>"),
        (_MARKED, answer("why</think>ans"), "why\n</think>ans<|im_end|>"),
        (_MARKED, answer(_MENTION), "The \n</think> tag ends it.<|im_end|>"),
        ("", answer("ans"), "\n</think>\n\nans<|im_end|>"),
        ("", answer("use <think>"), "\n</think>\n\nuse <think><|im_end|>"),
    ],
)
def test_reasoning_is_trained_once_if_the_answer_has_a_block_in_another_form(
    block: str, message: dict[str, Any], expected: str
) -> None:
    tokenizer = published_tokenizer("qwen3")
    tokenizer.chat_template = _PROMPTED.replace("BLOCK", block)
    text, turns = locate_turns(tokenizer, [user("q"), message], [1])
    assert text[: turns[0].begin].endswith("<|im_start|>assistant\n<think>\n")
    assert text[turns[0].begin :].rstrip("\n") == expected


_WHY = [
    answer("ans", reasoning_content="why"),
    answer("<think>\nwhy\n</think>\n\nans"),
    answer("<think>why</think>ans"),
]
_BLANK_WHY = [
    answer("ans"),
    answer("ans", reasoning_content=""),
    answer("<think>\n\n</think>\n\nans"),
    answer("<think></think>ans"),
]
_NEVER_OPENS = ("closed in the prompt alone", "closed in all answers")
_READS_NO_KEY = (*_NEVER_OPENS, "last answer after the prompt")
_GAPS = {"bare end, key": "", "block in the last answer": "\n"}


@pytest.mark.parametrize("form", REASONING_FORMS)
@pytest.mark.parametrize("history", [[], [answer("Before."), user("And?")]], ids=["one", "two"])
def test_an_answer_continues_the_reasoning_of_its_prompt(form: str, history: Messages) -> None:
    """With reasoning in the prompt: it is closed once, after the reasoning. With closed reasoning:
    the answer alone, and reasoning is refused."""
    opens = reasoning_tokenizer(form, thinking=True)
    closes = reasoning_tokenizer(form, thinking=False)
    start = [user("q"), *history]

    def row(tokenizer: PreTrainedTokenizerFast, message: dict[str, Any]) -> str:
        check_prompts(tokenizer, [*start, message], [len(start)], only_last=True)
        ids, mask = encode_conversation(tokenizer, [*start, message], only_last=True)
        return str(tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]))

    if form not in _NEVER_OPENS:
        for message in (*_WHY, *_BLANK_WHY):
            expected = "why" if message in _WHY else ""
            with collecting() as notices:
                head, end, rest = row(opens, message).partition("</think>")
            assert (head.strip(), rest.strip()) == (expected, "ans<|im_end|>") and end
            assert "\n" not in head or "bare" not in form
            assert rest.startswith(_GAPS.get(form, "")) and "reasoning_ignored" not in notices
            assert ("empty_reasoning" in notices) is (not expected)
    if form == "block in the last answer":
        return  # its prompt always opens reasoning
    for message in _BLANK_WHY:
        assert row(closes, message) == "ans<|im_end|>"
    for message in _WHY:
        if form in _READS_NO_KEY and "reasoning_content" in message:
            with collecting() as notices:
                assert row(closes, message) == "ans<|im_end|>"
            assert "reasoning_ignored" in notices
            continue
        with pytest.raises(DataError, match=r"closes reasoning.*thinking: true"):
            row(closes, message)


_COHERE = ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
_BLOCKS = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")


@pytest.mark.parametrize("key", ["m.thinking", "''"], ids=["rendered", "never rendered"])
def test_command_a_closes_reasoning_without_white_space(key: str) -> None:
    """The model card of Command A Reasoning has the form with reasoning, without white space, and
    says how the prompt closes it. The turns here are from memory, as is whether answers without
    calls have reasoning."""
    tokenizer = byte_bpe((*_COHERE, *_BLOCKS), eos="<|END_OF_TURN_TOKEN|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}"
        "<|CHATBOT_TOKEN|>{% if THOUGHT %}<|START_THINKING|>{{ THOUGHT }}<|END_THINKING|>"
        "{% endif %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% else %}{{ m.content }}"
        "{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>{% endif %}"
    ).replace("THOUGHT", key)
    for reasoning, notices in (("", {"empty_reasoning"}), ("why", set())):
        row = [user("q"), answer("4", **({"reasoning_content": reasoning} if reasoning else {}))]
        with collecting() as noted:
            ids, mask = encode_conversation(tokenizer, row)
        trained = str(tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]))
        response = "<|START_RESPONSE|>4<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
        assert trained == f"{reasoning}<|END_THINKING|>{response}"
        assert set(noted) == notices
        reader = ChatRenderer(tokenizer, history="keep")
        prompt, sampled = ids[: -sum(mask)], ids[-sum(mask) :]
        assert reader.parse(sampled, prompt_ids=prompt, ended=True).message == row[1]


@pytest.mark.parametrize("family", ["qwen3", "qwq", "chatml", *REASONING_FORMS])
def test_reasoning_under_its_key_and_in_the_text_is_trained_once(family: str) -> None:
    is_form = family in REASONING_FORMS
    tokenizer = reasoning_tokenizer(family, thinking=True) if is_form else tokenizer_of(family)
    texts = []
    for message in (_WHY[1], {**_WHY[1], "reasoning_content": "why"}):
        with collecting() as notices:
            ids, mask = encode_conversation(tokenizer, [user("q"), message])
        text = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
        texts.append("".join(text.split()))
    assert texts[0].count("why") == 1 and texts[1] == texts[0]
    assert "double_reasoning" in notices and "reasoning_ignored" not in notices


_AFTER_RESULTS = (
    "{% for m in messages %}{% set before = messages[loop.index0 - 1].role %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n</think>' if before == 'user' }}"
    "{{ m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>{% else %}<|im_start|>{{ m.role }}\\n{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}"
    "<|im_start|>assistant\\n{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
"""DeepSeek-V3.1: no generation prompt after the result of a tool, where its answer continues."""


def test_reasoning_behind_a_result_is_refused_if_the_conversation_closes_reasoning() -> None:
    """The model never opens a block there. An answer without reasoning is trained as it is."""
    tokenizer = chat_tokenizer("chatml")
    start = LOOP[:-1]
    for thinking, expected in ((False, None), (True, "<think>\nwhy\n</think>\n\nans<|im_end|>")):
        tokenizer.chat_template = with_defaults(_AFTER_RESULTS, {"thinking": thinking})
        text, turns = locate_turns(tokenizer, [*start, answer("ans")], [3])
        assert text[turns[0].begin :] == "ans<|im_end|>"
        for message in _WHY[:2]:
            if expected is None:
                with pytest.raises(DataError, match="closes reasoning"):
                    locate_turns(tokenizer, [*start, message], [3])
            else:
                text, turns = locate_turns(tokenizer, [*start, message], [3])
                assert text[turns[0].begin :] == expected


def test_earlier_answers_that_leave_the_reasoning_of_their_prompt_open_are_refused() -> None:
    tokenizer = published_tokenizer("chatml")
    tokenizer.chat_template = _PROMPTED.replace("BLOCK", "{{ '<think>\\n' }}")
    with pytest.raises(DataError, match=r"message 1.*train: false"):
        encode_conversation(tokenizer, TURNS)
    closed = [TURNS[0], answer("why</think>4"), user("3+3?"), answer("so</think>6")]
    ids, mask = encode_conversation(tokenizer, closed)
    runs = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    texts = [tokenizer.decode([i for i, _ in run]) for is_trained, run in runs if is_trained]
    assert texts == ["why</think>4<|im_end|>", "so</think>6<|im_end|>"]
    ids, mask = encode_conversation(tokenizer, TURNS, only_last=True)
    text = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert text == "\n</think>\n\n6<|im_end|>"


def test_a_mark_at_the_end_of_a_question_opens_and_closes_nothing() -> None:
    tokenizer = published_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
        "{% endfor %}"
    )
    for mark in ("<think>", "</think>"):
        for message in (answer("ans"), answer("<think>why</think>ans")):
            text, turns = locate_turns(tokenizer, [user(f"Use {mark}"), message], [1])
            assert text[turns[0].begin :] == f"{message['content']}<|im_end|>"


@pytest.mark.parametrize(
    "calls",
    [
        "'' + c.function.arguments",  # DeepSeek V3: an object is an error
        "c.function.arguments",  # an object is Python source
        "c.function.arguments | tojson",
    ],
)
@pytest.mark.parametrize("condition", ["true", "m.content is not defined"])
def test_a_template_gets_tool_calls_in_the_form_that_it_reads(calls: str, condition: str) -> None:
    tokenizer = published_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls and "
        + condition
        + "%}{% for c in m.tool_calls %}{{ c.function.name }}({{ "
        + calls
        + " }}){% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ids, mask = encode_conversation(tokenizer, [user("2+2?"), answer("", tool_calls=[call(a=2)])])
    text = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert text == 'f({"a": 2})<|im_end|>'


def test_advice_for_a_turn_that_cannot_be_located_works(jsonl: Jsonl) -> None:
    """DeepSeek-R1's prompt for an earlier answer ends with ``<think>``, which the row lacks there;
    Qwen3 removes the reasoning of a tool loop before a later question."""
    loop = [LOOP[0], {**LOOP[1], "reasoning_content": "I call f."}, *LOOP[2:], *TURNS[2:]]
    for family, messages in (("deepseek_r1", TURNS), ("qwen3", loop)):
        tokenizer = tokenizer_of(family)
        path = jsonl([{"messages": messages}], f"{family}.jsonl")
        with pytest.raises(DataError, match=r"jsonl:1: .*train_on_turns: last.*train: false"):
            load_batch(SFTDataConfig(sources=(path,)), tokenizer)
        last = load_batch(SFTDataConfig(sources=(path,), train_on_turns="last"), tokenizer)
        flagged = [
            {**m, "train": False} if m["role"] == "assistant" and i < len(messages) - 1 else m
            for i, m in enumerate(messages)
        ]
        path = jsonl([{"messages": flagged}], "flags.jsonl")
        by_flag = load_batch(SFTDataConfig(sources=(path,)), tokenizer)
        ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        rows = [{"messages": messages[: end + 1]} for end in ends]
        path = jsonl(rows, "split.jsonl")
        split = load_batch(SFTDataConfig(sources=(path,), train_on_turns="last"), tokenizer)
        assert last.tokens.tolist() == by_flag.tokens.tolist()
        assert split.num_rows == len(ends)
        assert split.tokens.tolist()[-len(last.tokens) :] == last.tokens.tolist()


CALLED = ' to=functions.f<|channel|>commentary json<|message|>{"a": 2}<|call|>'
FINAL = "<|channel|>final<|message|>{}<|return|>"
THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
BARE = [THOUGHTS[0], {**THOUGHTS[1], "train": False}, *TURNS[2:]]


@pytest.mark.parametrize(
    ("family", "messages", "options", "expected"),
    [
        ("harmony", TURNS, {}, None),  # an earlier answer ends with <|end|>, not with <|return|>
        ("harmony", TURNS, {"only_last": True}, [FINAL.format("6")]),
        ("harmony", LOOP, {}, [CALLED, FINAL.format("It is 4.")]),
        ("harmony", THOUGHTS, {}, None),
        ("harmony", THOUGHTS, {"only_last": True},
         [THOUGHT.format("three and three") + FINAL.format("6")]),
        ("qwen3 without thinking", TURNS, {}, None),  # only the last answer has an empty <think>
        ("qwen3 without thinking", TURNS, {"only_last": True}, ["6<|im_end|>"]),
        ("qwen3 without thinking", TURNS[:2], {}, ["4<|im_end|>"]),
        ("qwen3 without thinking", LOOP, {}, None),
        ("qwen3 without thinking", LOOP, {"only_last": True}, ["It is 4.<|im_end|>"]),
        ("qwen3 without thinking", THOUGHTS, {"only_last": True}, None),
        ("qwen3 without thinking", BARE, {}, ["6<|im_end|>"]),
    ],
)  # fmt: skip
def test_templates_that_render_earlier_turns_otherwise_are_refused_or_trained_as_generated(
    family: str, messages: Messages, options: dict[str, Any], expected: list[str] | None
) -> None:
    if family == "harmony":
        tokenizer = chat_tokenizer(family)
    else:
        tokenizer = published_tokenizer("qwen3")
        tokenizer.chat_template = with_defaults(tokenizer.chat_template, {"enable_thinking": False})
    if expected is None:
        with pytest.raises(
            DataError, match=r"cannot be located|not match generation|closes reasoning"
        ):
            encode_conversation(tokenizer, messages, **options)
        return
    ids, mask = encode_conversation(tokenizer, messages, **options)
    runs = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    texts = [tokenizer.decode([i for i, _ in run]) for is_trained, run in runs if is_trained]
    assert texts == expected
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    learned = [i for i in turns if messages[i].get("train", True)]
    check_prompts(tokenizer, messages, learned[-len(expected) :], **options)


def test_pairs_may_differ_before_the_last_turn(jsonl: Jsonl) -> None:
    row = {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [answer("5"), *TURNS[2:]]}
    tokenizer = tokenizer_of("qwen3")
    batch = load_batch(PreferenceDataConfig(sources=(jsonl([row]),)), tokenizer)
    _, prompt = encode_prompt(tokenizer, TURNS[:1])
    for begin in batch.offsets.tolist()[:-1]:
        assert batch.tokens.tolist()[begin : begin + len(prompt)] == prompt
        assert batch.action_mask.tolist()[begin + len(prompt)]


CUTTING = ("qwen3", "qwq", "deepseek_r1")


@pytest.mark.parametrize("family", CUTTING)
@pytest.mark.parametrize(
    "message",
    [
        answer(f"<think>\nwhy\n</think>\n\n{_MENTION}"),
        answer(f"why</think>\n{_MENTION}"),
        answer("Write <think>x</think> then."),
        answer("a </think></think> b", reasoning_content="why"),
    ],
)
def test_text_that_a_template_loses_at_a_mark_is_refused(
    family: str, message: dict[str, Any]
) -> None:
    """These templates split a text at each mark, and drop what is between."""
    for messages in ([user("q"), message], [user("q"), message, user("r"), answer("b")]):
        if family == "qwen3" and "reasoning_content" in message:
            continue  # Qwen3 splits no text if the reasoning has its key
        with pytest.raises(DataError, match="leaves out text"):
            encode_conversation(tokenizer_of(family), messages, only_last=True)


def test_text_before_a_mark_counts_as_reasoning_and_a_notice_says_so() -> None:
    for family in CUTTING:
        with collecting() as notices:
            assert "The" in trained(family, [user("q"), answer(_MENTION)])[0]
        assert "reasoning_unopened" in notices
    with collecting() as notices:
        assert trained("chatml", [user("q"), answer(_MENTION)]) == [f"{_MENTION}<|im_end|>"]
    assert not notices


_text = st.text(st.sampled_from("ab <>/{}\n.:"), min_size=1, max_size=12).map(lambda t: t + "x")


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    """Two to four questions with answers, some with reasoning, flags or a tool call."""
    messages: Messages = []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(_text)))
        if draw(st.booleans()):
            made = [call(a=draw(_text))]
            thought = {"reasoning_content": draw(_text)} if draw(st.booleans()) else {}
            messages.append(answer("", tool_calls=made, **thought))
            messages.append(result(draw(_text)))
        options: dict[str, Any] = {}
        if draw(st.booleans()):
            options["reasoning_content"] = draw(_text)
        if draw(st.integers(0, 3)) == 0:
            options["train"] = False
        messages.append(answer(draw(_text), **options))
    return messages


@pytest.mark.parametrize("family", PUBLISHED)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=conversations(), only_last=st.booleans())
def test_the_ids_before_a_trained_turn_are_the_rl_prompt(
    family: str, messages: Messages, only_last: bool
) -> None:
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    learned = [i for i in turns[-1 if only_last else 0 :] if messages[i].get("train", True)]
    try:
        check_prompts(tokenizer_of(family), messages, learned, only_last=only_last)
    except DataError as error:
        cut = family in ("deepseek_r1", "qwq", "qwen3", "mistral") and "generation" in str(error)
        calls = any("tool_calls" in m for m in messages) and family not in ("qwen3", "mistral")
        assert not learned or cut or calls, error


def test_json_of_arguments_is_not_quoted_twice() -> None:
    as_text = json.loads(json.dumps(LOOP))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
    assert segments("qwen3", as_text) == segments("qwen3", LOOP)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = ""
    assert '"arguments": {}}' in segments("qwen3", as_text)[1][0]


CALLED = answer("", tool_calls=[probe_call("look_up", {"key": "a"}, "probe0000")])
RESULT = [result("4", "probe0000"), answer("It is 4. I look.")]


def trained_by_trl(name: str, messages: Messages) -> list[str]:
    """Trained texts with a template of the package trl."""
    pytest.importorskip("trl")
    tokenizer = trl_tokenizer(name)
    ids, mask = encode_conversation(tokenizer, messages, tools=TOOLS)
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for on, run in runs if on]


def test_reasoning_that_is_added_to_an_answer_of_gemma_has_its_white_space() -> None:
    """The first of these templates renders the reasoning of calls alone, the second that of all
    answers."""
    turn = "<|channel>thought\ntwo and two\n<channel|>4<turn|>"
    thought = [user("2+2?"), answer("4", reasoning_content="two and two")]
    for name in ("gemma4", "gemma4_v5"):
        assert trained_by_trl(name, thought) == [turn]


def test_a_text_behind_the_result_of_its_call_is_refused() -> None:
    """Also if a later message repeats it. Reasoning with a call, and no text, is trained."""
    called = {**CALLED, "reasoning_content": "hm"}
    found = trained_by_trl("gemma4", [user("2+2?"), called, *RESULT])
    assert found[0].startswith("<|channel>thought\nhm\n<channel|><|tool_call>")
    assert found[1] == "It is 4. I look.<turn|>"
    with pytest.raises(DataError, match=r"'I look\.'"):
        trained_by_trl("gemma4", [user("2+2?"), {**called, "content": "I look."}, *RESULT])


def test_a_turn_that_a_prompt_does_not_open_is_refused_before_reasoning() -> None:
    """Its reasoning would be trained twice: once where the model writes it, once rendered."""
    thought = {**RESULT[1], "reasoning_content": "so"}
    with pytest.raises(DataError, match=r"<\|turn>model"):
        trained_by_trl("diffusion_gemma", [user("2+2?"), CALLED, RESULT[0], thought])
