"""Texts of a part of the tokens are those of the entire response: of a stream, of each token, and
behind the end of a prompt."""

from __future__ import annotations

import random
from typing import Any

import pytest
from chat_templates import PUBLISHED, published_tokenizer
from tokenizer_kinds import KINDS, response, tokenizer_of

from burnish.byte_tokens import byte_tokens
from burnish.data.chat import encode_completion, encode_prompt
from burnish.data.decoding import response_text
from burnish.episodes.renderer import ChatRenderer, TextCodec


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_parts_are_those_of_the_response(kind: str) -> None:
    """Random tokens, some of which continue a run of bytes that the prompt ends with."""
    tokenizer = tokenizer_of(kind)
    codec, values = TextCodec(tokenizer), {b: i for i, b in byte_tokens(tokenizer).items()}
    words = [i for i in range(2, len(tokenizer)) if i not in byte_tokens(tokenizer)]
    num_streamed = 0
    for seed in range(120):
        rng = random.Random(f"{kind}/{seed}")
        prompt, ids = response(tokenizer, rng) or [1], response(tokenizer, rng)
        if values and rng.random() < 0.5:
            prompt, ids = prompt + run(values, rng), run(values, rng) + ids
        else:  # texts behind prompts that end with bytes are not streamed
            prompt += rng.choices(words, k=8)
        if not ids:
            continue
        whole = response_text(tokenizer, prompt, ids)
        text = codec.response_text(prompt, ids)
        if "\ufffd" not in whole:  # else a run that is not UTF-8, of which only the end is read
            assert text == whole, (seed, prompt, ids)
        stream = codec.stream_text(prompt)
        sent = "".join(stream.feed([token])[1] for token in ids)
        num_streamed += bool(sent)
        assert text.startswith(sent), (seed, prompt, ids)
        parts = codec.text_parts(prompt, ids)
        assert "".join(part.text for part in parts) == text, (seed, prompt, ids)
    assert num_streamed > 12 or "removes" in kind


def run(values: dict[int, int], rng: random.Random) -> list[int]:
    """A run of byte tokens."""
    return [values[byte] for byte in ("漢字" * rng.choice((1, 2, 5, 30))).encode()]


def test_a_run_of_bytes_continues_behind_tokens_without_text() -> None:
    """ "AB" and the first byte of a character, an end token, the other two bytes, "C"."""
    tokenizer = tokenizer_of("SentencePiece")
    values = {byte: i for i, byte in byte_tokens(tokenizer).items()}
    data = "AB漢C".encode()
    ids = [values[byte] for byte in data]
    ids.insert(3, int(tokenizer.eos_token_id))
    (word,) = tokenizer.convert_tokens_to_ids(["the"])
    stream = TextCodec(tokenizer).stream_text([word])
    assert [stream.feed([token])[1] for token in [*ids, word]] == [*[""] * len(ids), "AB漢Cthe"]


def test_the_text_of_a_prompt_is_not_that_of_the_first_token() -> None:
    """The prompt ends with the byte "A", the response begins with the three bytes of a character:
    until it is complete, the run is not UTF-8."""
    tokenizer = tokenizer_of("SentencePiece")
    values = {byte: i for i, byte in byte_tokens(tokenizer).items()}
    (word,) = tokenizer.convert_tokens_to_ids(["the"])
    ids = [*(values[byte] for byte in "漢".encode()), word]
    parts = TextCodec(tokenizer).text_parts([values[ord("A")]], ids)
    assert [part.text for part in parts] == ["", "", "漢", "the"]


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_text_of_tokens_is_the_text_that_has_these_tokens(family: str) -> None:
    """Directly behind a special token, tokenizers of the SentencePiece form (mistral) write a space
    that is not in the text: ``[/INST]hello`` has the tokens ``[/INST] ▁hello``."""
    tokenizer = published_tokenizer(family)
    codec, renderer = TextCodec(tokenizer), ChatRenderer(tokenizer, history="keep")
    inner = PUBLISHED[family][0][-1]
    contents: list[Any] = [[{"role": "user", "content": "Hi"}], "a ", f"{inner}a"]
    for content in contents:
        prompt, head = encode_prompt(tokenizer, content)
        assert codec.decode(head).endswith(prompt.removeprefix(str(tokenizer.bos_token)))
        for text in ("hello", " hello", "  hello", "hello a"):
            row, _ = encode_completion(tokenizer, head, text, prompt=prompt, add_eos=False)
            ids = row[len(head) :]
            assert response_text(tokenizer, head, ids) == text, (content, ids)
            assert codec.response_text(head, ids) == text
            assert renderer._message_text(ids, head, (), ended=False)[0] == text
            assert codec.decode(row) == codec.decode(head) + text
            assert "".join(part.text for part in codec.text_parts(head, ids)) == text
            stream = codec.stream_text(head)
            sent = "".join(stream.feed([token])[1] for token in ids)
            assert sent == text


def test_special_tokens_inside_of_a_response_begin_texts() -> None:
    """``[TOOL_CALLS]`` is in the text that is parsed, and ``▁[`` behind it is ``[``."""
    tokenizer = published_tokenizer("mistral")
    renderer = ChatRenderer(tokenizer, history="keep")
    _, head = encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    written = "a[TOOL_CALLS][1]"
    row, _ = encode_completion(tokenizer, head, written, add_eos=False)
    ids = row[len(head) :]
    assert tokenizer.decode(ids) == "a[TOOL_CALLS] [1]"
    assert renderer._message_text(ids, head, (), ended=False)[0] == written
    assert "".join(part.text for part in renderer.message_parts(head, ids)) == written
    text = renderer.stream(head).text
    assert "".join(text.feed([token]) for token in ids) == written
    assert renderer.stream(head).text.feed(ids) == written
