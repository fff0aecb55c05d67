"""Reasoning of trained answers and responses: tags, blocks that a word closes, and cut blocks."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import byte_bpe
from chat_templates import REASONING_FORMS, published_tokenizer, reasoning_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from burnish.data.chat import encode_conversation
from burnish.data.notices import collecting
from burnish.data.rendering import tags_of
from burnish.data.sources import DataError
from burnish.episodes.renderer import ChatRenderer
from burnish.reasoning_tags import REASONING_TAGS, THINK, Tags
from burnish.rewards.math.text import after_reasoning
from burnish.rewards.python_code.tests import read_code

QUESTION = {"role": "user", "content": "Go."}
_TURNS = (
    "{% set ns = namespace(off=false) %}{% for m in messages %}"
    "{% if m.role != 'assistant' and '/no_think' in m.content %}{% set ns.off = true %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}ANSWER{% else %}"
    "{{ m.content | replace('/no_think', '') }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
_BY_KEY = "{% if m.reasoning_content %}BEGIN{{ m.reasoning_content }}END{% endif %}{{ m.content }}"
_BY_TEXT = "{{ m.content.split('END')[-1] }}"
_SWITCH = "{{ 'BEGINEND' if ns.off else 'BEGIN\n' }}"


def tokenizer_of(tags: Tags, *, answer: str, prompt: str = "") -> PreTrainedTokenizerFast:
    """Return a tokenizer whose template writes ``tags`` in answers and in its prompt."""
    tokenizer = byte_bpe(("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    template = _TURNS.replace("ANSWER", answer).replace("PROMPT", prompt)
    tokenizer.chat_template = template.replace("BEGIN", tags.begin).replace("END", tags.end)
    return tokenizer


def answer(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def trained(tokenizer: Any, *messages: Any, **options: Any) -> tuple[str, str]:
    """Return (text before the trained part, trained text) of a conversation."""
    ids, mask = encode_conversation(tokenizer, list(messages), **options)
    begin = mask.index(True)
    end = len(mask) - mask[::-1].index(True)
    assert all(mask[begin:end])
    return str(tokenizer.decode(ids[:begin])), str(tokenizer.decode(ids[begin:end]))


def read(tokenizer: Any, response: str, *start: Any) -> Any:
    """Return (reasoning, content) read from a response to ``start``, also while it is streamed."""
    renderer = ChatRenderer(tokenizer, history="template")
    prompt = renderer.render(list(start) or [QUESTION])
    ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    message = renderer.parse(ids, prompt_ids=prompt, ended=True).message
    stream = renderer.stream(prompt)
    reasoning, content = map("".join, zip(*(stream.feed([i]) for i in ids[:-1]), strict=True))
    full = str(message.get("reasoning_content", "")), str(message["content"])
    assert full[0].startswith(reasoning) and full[1].startswith(content)
    return full


@pytest.mark.parametrize("tags", REASONING_TAGS, ids=lambda tags: str(tags.begin))
def test_the_tags_of_every_family_are_read_and_trained(tags: Tags) -> None:
    by_key = tokenizer_of(tags, answer=_BY_KEY)
    by_text = tokenizer_of(tags, answer=_BY_TEXT, prompt="BEGIN\n")
    assert tags_of(by_key) == tags_of(by_text) == tags
    block = f"{tags.begin}why{tags.end}"
    assert read(by_key, f"{block}ans") == read(by_text, f"why\n{tags.end}\nans") == ("why", "ans")
    for message in (answer("ans", reasoning_content="why"), answer(f"{block}ans")):
        assert trained(by_key, QUESTION, message)[1] == f"{block}ans<|im_end|>"
        prompt, text = trained(by_text, QUESTION, message)
        assert prompt.endswith(f"{tags.begin}\n")
        assert text.startswith(f"why\n{tags.end}") and text.endswith("ans<|im_end|>")
        assert (text.count(tags.begin), text.count(tags.end)) == (0, 1)
    assert after_reasoning(f"{tags.begin}7{tags.end}4") == "4"
    code = "```python\n{}\n```"
    assert read_code(f"{tags.begin}{code.format(7)}{tags.end}{code.format(4)}", "all") == (
        code.format(4)
    )


@pytest.mark.parametrize("space", ["", "\n"])
def test_the_opening_of_an_answer_behind_its_reasoning_is_no_content(space: str) -> None:
    """Command A Reasoning writes <|START_RESPONSE|> behind the block of reasoning."""
    tags = REASONING_TAGS[6]
    tokenizer = tokenizer_of(tags, answer=_BY_KEY.replace("{{ m.content", "<|open|>{{ m.content"))
    tokenizer.add_tokens([AddedToken("<|open|>", special=True, normalized=False)])
    for reasoning in ("why", ""):
        response = f"{tags.begin}{reasoning}{tags.end}{space}<|open|>{space}ans <|open|>"
        assert read(tokenizer, response) == (reasoning, "ans <|open|>")
    assert read(tokenizer, f"<|open|>{space}ans <|open|>") == ("", "ans <|open|>")
    assert read(tokenizer, f"{tags.begin}why{tags.end}ans") == ("why", "ans")


def test_tags_that_a_template_only_describes_are_text() -> None:
    words = "{{ 'Write <reasoning>..</reasoning>' if false }}{{ m.content }}"
    tokenizer = tokenizer_of(THINK, answer=words)
    assert tags_of(tokenizer) is None
    assert read(tokenizer, "<reasoning>why</reasoning>4") == ("", "<reasoning>why</reasoning>4")


@pytest.mark.parametrize("tags", [THINK, REASONING_TAGS[2]], ids=["think", "seed"])
@pytest.mark.parametrize("role", ["system", "user"])
def test_a_word_of_the_prompt_closes_reasoning(tags: Tags, role: str) -> None:
    """The prompt opens a block, unless a message contains /no_think: then an answer is text."""
    tokenizer = tokenizer_of(tags, answer=_BY_TEXT, prompt=_SWITCH)
    off = [{"role": role, "content": "Be. /no_think"}, QUESTION]
    assert read(tokenizer, "ans", *off) == ("", "ans")
    assert read(tokenizer, "ans", QUESTION) == ("ans", "")
    assert read(tokenizer, f"why{tags.end}ans", QUESTION) == ("why", "ans")
    prompt, text = trained(tokenizer, *off, answer("ans"))
    assert prompt.endswith(f"{tags.begin}{tags.end}") and text == "ans<|im_end|>"
    with pytest.raises(DataError, match="/no_think"):
        trained(tokenizer, *off, answer("ans", reasoning_content="why"))


@pytest.mark.parametrize("tags", [THINK, REASONING_TAGS[2]], ids=["think", "seed"])
def test_reasoning_with_its_closing_tag_is_refused(tags: Tags) -> None:
    tokenizer = tokenizer_of(tags, answer=_BY_KEY)
    for reasoning in (f"why {tags.end} more", f"{tags.begin}why{tags.end}"):
        message = answer("ans", reasoning_content=reasoning)
        with pytest.raises(DataError, match=r"reasoning_content.*contains"):
            trained(tokenizer, QUESTION, message)
        later = (QUESTION, answer("4"))
        _, text = trained(tokenizer, QUESTION, {**message, "train": False}, *later)
        assert text == "4<|im_end|>"
    message = answer("ans", reasoning_content=f"why {tags.begin} more")
    assert read(tokenizer, trained(tokenizer, QUESTION, message)[1].removesuffix("<|im_end|>")) == (
        f"why {tags.begin} more",
        "ans",
    )
    other = next(t for t in REASONING_TAGS if t != tags)  # text of another family is text
    message = answer("ans", reasoning_content=f"why {other.end} more")
    assert f"why {other.end} more{tags.end}ans" in trained(tokenizer, QUESTION, message)[1]


CUT = {"finish_reason": "length"}
_PUBLISHED = ("qwen3", "qwq", "deepseek_r1")


@pytest.mark.parametrize("form", [*_PUBLISHED, *REASONING_FORMS])
def test_a_cut_answer_is_trained_as_far_as_the_model_wrote_it(form: str) -> None:
    """Without an invented end of its reasoning, and without what a template writes behind it."""
    published = form in _PUBLISHED
    tokenizer = published_tokenizer(form) if published else reasoning_tokenizer(form, thinking=True)
    for message in (answer("", reasoning_content="why unfi"), answer("<think>\nwhy unfi")):
        ignores = form in ("closed in the prompt alone", "closed in all answers")
        if ignores and not message["content"]:
            with pytest.raises(DataError, match="empty"):
                trained(tokenizer, QUESTION, message | CUT)
            continue
        with collecting() as notices:
            prompt, text = trained(tokenizer, QUESTION, message | CUT)
        assert "cut" in notices and "empty_reasoning" not in notices
        assert text.endswith("why unfi")
        assert (prompt + text).count("<think>") == 1 and "</think>" not in prompt + text
    for message in (answer("half an ", reasoning_content="why"), answer("half an ")):
        prompt, text = trained(tokenizer, QUESTION, message | CUT)
        assert text.endswith("half an ")
        opened = prompt.rstrip().endswith("<think>") and "reasoning_content" not in message
        assert not opened or text == "half an "


def test_a_part_of_an_answer_behind_its_end_token_is_refused() -> None:
    """Nemotron Nano v2 writes the tool calls of an answer with text as a second turn."""
    second = (
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% if m.content %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
        "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    )
    tokenizer = tokenizer_of(THINK, answer=second)
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "v"}}}
    with pytest.raises(DataError, match=r"look_up.*behind its end token"):
        trained(tokenizer, QUESTION, answer("I look.", tool_calls=[call]))
    _, text = trained(tokenizer, QUESTION, answer("", tool_calls=[call]))
    assert text == '<call>look_up{"key": "v"}</call><|im_end|>'


@pytest.mark.parametrize("cut", [False, True])
def test_an_empty_block_of_the_template_gives_way_to_the_block_of_a_text(cut: bool) -> None:
    """Kimi K2 Thinking writes one before every answer, and reads no key."""
    tokenizer = tokenizer_of(THINK, answer="BEGINEND{{ m.content }}")
    finish = {"finish_reason": "length"} if cut else {}
    text = "<think>why" if cut else "<think>why</think>4"
    assert trained(tokenizer, QUESTION, answer(text, **finish))[1] == (
        text if cut else f"{text}<|im_end|>"
    )
    assert trained(tokenizer, QUESTION, answer("4"))[1] == "<think></think>4<|im_end|>"
    with pytest.raises(DataError, match="twice"):  # the prompt of the last turn has both
        trained(tokenizer, QUESTION, answer("<think>why</think>4"), QUESTION, answer("5"))


@pytest.mark.parametrize("form", ["qwen3", *REASONING_FORMS])
@pytest.mark.parametrize("text", ["<think>", "<think>\n", "<thi"])
def test_an_answer_cut_at_its_opening_tag_is_not_closed(form: str, text: str) -> None:
    tokenizer = (
        published_tokenizer(form)
        if form in _PUBLISHED
        else reasoning_tokenizer(form, thinking=True)
    )
    ids, mask = encode_conversation(tokenizer, [QUESTION, answer(text, finish_reason="length")])
    written = str(tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]))
    assert "</think>" not in written and text.startswith(written.strip())


def test_a_template_with_channels_has_no_tags() -> None:
    """``<think>`` is text then, in the answer and in reasoning."""
    tokenizer = tokenizer_of(
        THINK,
        answer="{% if m.reasoning_content %}<|why|>{{ m.reasoning_content }}{% endif %}"
        "<|final|>{{ m.content }}",
    )
    cut = answer("<think>\nwhy", finish_reason="length")
    assert trained(tokenizer, QUESTION, cut)[1] == "<|final|><think>\nwhy"
    reasons = answer("4", reasoning_content="no </think> here")
    assert trained(tokenizer, QUESTION, reasons)[1] == "<|why|>no </think> here<|final|>4<|im_end|>"


def test_an_earlier_answer_that_was_cut_is_noticed() -> None:
    tokenizer = tokenizer_of(THINK, answer="{{ m.content }}")
    cut = answer("half", finish_reason="length")
    for messages, notices in (
        ([QUESTION, cut, QUESTION, answer("4")], {"cut_earlier"}),
        ([QUESTION, cut | {"train": False}, QUESTION, answer("4")], set()),
    ):
        with collecting() as noticed:
            encode_conversation(tokenizer, messages)
        assert noticed.keys() == notices
