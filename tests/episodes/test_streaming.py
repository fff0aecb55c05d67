"""Text that is sent while a response is sampled is a beginning of the complete message, however the
tokens arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from chat_families import FAMILIES, chat_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from burnish.episodes.formats import FORMATS
from burnish.episodes.probing import TOOLS, user
from burnish.episodes.renderer import ChatRenderer

FORMAT_FAMILY = {"mistral": "mistral", "mistral_args": "mistral", "harmony": "harmony"}
TOKENIZERS = {family: chat_tokenizer(family) for family in FAMILIES}
RENDERERS: dict[str, ChatRenderer] = {
    name: ChatRenderer(
        TOKENIZERS[FORMAT_FAMILY.get(name, "chatml")], history="keep", tool_format=name
    )
    for name in FORMATS
}
PROMPTS = {
    name: renderer.render([user("How many?")], TOOLS) for name, renderer in RENDERERS.items()
}
CALL = '<tool_call>{"name": "look_up", "arguments": {"key": "a"}}</tool_call>'
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=look_up>", "</function>", "<parameter=key>"),
        *("</parameter>", "<think>", "</think>", "[TOOL_CALLS]", "look_up[ARGS]", "<arg_key>"),
        *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|call|>"),
        *("<|start|>assistant", "<|channel|>commentary<|message|>", "<|channel|>commentary"),
        *(" to=functions.look_up", "<|message|>", "<|cha", "<tool_", "[TOOL", "<th", "</thi"),
        *('{"name": "look_up", "arguments": {"key": "a"}}', '{"na', "{", "}", "[", "]"),
        *(" ", "\n", "\n\n", " " * 300, "ä", "🌦", "漢字", "a", "Hello", "hello there"),
        *("[" * 1100, '<function=look_up>{"name": "x"}'),
    ]
)


def split(ids: Sequence[int], draw: random.Random) -> list[list[int]]:
    """Cut tokens into batches."""
    found, at = [], 0
    while at < len(ids):
        length = draw.choice((1, 1, 1, 2, 5, 40))
        found.append(list(ids[at : at + length]))
        at += length
    return found


def sampled(name: str, text: str, draw: random.Random) -> list[int]:
    """Tokens of a text, now and then with a wrong one, or cut within a character."""
    tokenizer = TOKENIZERS[FORMAT_FAMILY.get(name, "chatml")]
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    for _ in range(draw.choice((0, 0, 0, 3))):
        ids.insert(draw.randint(0, len(ids)), draw.randrange(len(tokenizer)))
    return ids[: draw.choice((len(ids), len(ids), draw.randint(0, len(ids))))]


def streamed(name: str, ids: Sequence[int], draw: random.Random) -> tuple[str, str]:
    """All reasoning and content that the tokens before the last one make certain."""
    stream = RENDERERS[name].stream(PROMPTS[name])
    parts = [stream.feed(batch) for batch in split(ids[:-1], draw)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(PIECES | st.text(max_size=5), max_size=20),
    name=st.sampled_from([*FORMATS]),
    seed=st.integers(0, 2**32),
)
@example(["<think>a</think>b", *[CALL] * 65], "hermes", 1)
@example(["a", CALL, "bbbb", *[CALL] * 65], "hermes", 1)
def test_what_was_sent_is_a_beginning_of_the_message(
    pieces: list[str], name: str, seed: int
) -> None:
    draw = random.Random(seed)
    text = "".join(pieces).encode("utf-8", "replace").decode()
    ids = sampled(name, text, draw)
    reasoning, content = streamed(name, ids, draw)
    found = RENDERERS[name].parse(ids, TOOLS, prompt_ids=PROMPTS[name]).message
    assert found.get("reasoning_content", "").startswith(reasoning)
    assert found["content"].startswith(content)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", "<think>\nI look.\n</think>\n\n", ""),
        ("hermes", "", CALL),
        ("xml", "", "<tool_call>\n<function=look_up>\n<parameter=key>\na\n</parameter>"),
        ("glm", "", "<tool_call>look_up<arg_key>key</arg_key><arg_value>a</arg_value>"),
        ("llama3_json", "", ""),
        ("mistral", "", '[TOOL_CALLS][{"name": "look_up", "arguments": {"key": "a"}}]'),
        ("mistral_args", "", '[TOOL_CALLS]look_up[ARGS]{"key": "a"}'),
        ("harmony", "<|channel|>analysis<|message|>I.<|end|><|start|>assistant", "<|end|>"),
    ],
)
def test_content_is_sent_while_it_is_sampled(name: str, before: str, after: str) -> None:
    """Nothing that is certain is held: the reasoning once it is closed, then word after word."""
    words = [f"word{i} 漢字" for i in range(8)]
    text = " ".join(words)
    if name == "harmony":
        before += "<|channel|>final<|message|>"
    stream = RENDERERS[name].stream(PROMPTS[name])
    draw = random.Random(0)
    found: list[tuple[str, str]] = []
    for part in (before, text, after):
        tokenizer = TOKENIZERS[FORMAT_FAMILY.get(name, "chatml")]
        ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        found += [stream.feed(batch) for batch in split(ids, draw)]
    sent = [content for _, content in found if content]
    assert "".join(sent).startswith(text[:-2]) and len(sent) > 8
    assert "".join(sent).strip() in text
    wanted = {"hermes": "I look.", "harmony": "I."}.get(name, "") if before else ""
    assert "".join(reasoning for reasoning, _ in found) == wanted


@pytest.mark.parametrize("family", ["chatml", "mistral"])
def test_text_without_a_template(family: str) -> None:
    """Any tokens: characters in parts, invalid bytes, special tokens."""
    renderer = ChatRenderer(TOKENIZERS[family], history="keep")
    size, draw = len(TOKENIZERS[family]), random.Random(1)
    prompt = renderer.encode("Once upon a time")
    for _ in range(200):
        ids = [draw.randrange(size) for _ in range(draw.randint(1, 60))]
        stream = renderer.stream_text(prompt)
        sent = "".join(stream.feed(batch)[1] for batch in split(ids, draw))
        whole: Any = renderer.response_text(prompt, ids)
        assert whole.startswith(sent)
        if family == "chatml":  # at most one character is held
            assert len(whole) - len(sent) <= 1
