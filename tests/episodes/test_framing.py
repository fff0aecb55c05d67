"""What a template writes between an answer and its end token is no part of the message."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chat_families import byte_bpe, chat_tokenizer, encoded, renderer_of

from burnish.data.messages import as_messages, as_rendered
from burnish.episodes.probing import TOOLS, assistant, user
from burnish.episodes.renderer import ChatRenderer

TOKENS = ("<|turn|>", "<|answer|>", "<|/answer|>", "<|/text|>", "<|/turn|>", "<|other|>")
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'


def framed(*, opened: bool, closing: str = "<|/answer|>") -> tuple[ChatRenderer, Any]:
    """A renderer of a template that writes ``<|answer|>`` before an answer (as a part of the prompt
    if ``opened``) and ``closing`` after it."""
    before, prompt = ("", "<|answer|>") if opened else ("<|answer|>", "")
    tokenizer = byte_bpe(TOKENS, eos="<|/turn|>")
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + f"{prompt}{before}{{{{ m.content }}}}"
        + "{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}"
        + f"{closing}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|/turn|>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|turn|>assistant\n{prompt}{{% endif %}}"
    )
    return ChatRenderer(tokenizer), tokenizer


def sent(renderer: ChatRenderer, ids: Any, *, seed: int) -> str:
    """All content that the stream of a response makes certain."""
    stream, draw, content = renderer.stream(()), random.Random(seed), ""
    while ids:
        length = draw.choice((1, 1, 2, 5))
        content += stream.feed(ids[:length])[1]
        ids = ids[length:]
    return content


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("end", ["<|/turn|>", "<|other|>", ""])
@pytest.mark.parametrize("closing", ["<|/answer|>", "<|/text|>\n<|/answer|>"])
@pytest.mark.parametrize("text", ["4", "", "a<|/answer|>b <|answer|>c", "<|/text|><|other|>"])
def test_a_response_is_the_message_without_its_framing(
    opened: bool, end: str, closing: str, text: str
) -> None:
    """Also if it is cut after a part of it. Special tokens in the middle stay."""
    renderer, tokenizer = framed(opened=opened, closing=closing)
    prompt = renderer.render([user("Hi.")])
    for written in {closing, closing.partition("\n")[0], closing + "\n", ""}:
        for before in ("",) if opened else ("<|answer|>", "\n<|answer|>", ""):
            ids = encoded(tokenizer, before + text + written + end)
            message = renderer.parse(ids, prompt_ids=prompt, ended=bool(end)).message
            assert message == assistant(text)
            parts = renderer.message_parts(prompt, ids, ended=bool(end))
            assert len(parts) == len(ids)
            assert "".join(part.text for part in parts).strip() == text
            assert b"".join(part.data for part in parts).decode().strip() == text
            for seed in range(3):
                certain = sent(renderer, ids[: len(ids) - bool(end)], seed=seed)
                assert text.startswith(certain) and certain[-1:] == text[-1:]


@pytest.mark.parametrize("stop", ["<|/answer|>", "b"])
def test_a_stop_string_may_be_in_the_framing(stop: str) -> None:
    renderer, tokenizer = framed(opened=False)
    ids = encoded(tokenizer, "<|answer|>ab<|/answer|>")
    parsed = renderer.parse(ids, stops=[stop])
    assert parsed.stop == stop and parsed.message == assistant("ab".partition(stop)[0])


def test_a_call_in_a_framing_is_read() -> None:
    renderer, tokenizer = framed(opened=False)
    ids = encoded(tokenizer, f"<|answer|>So.{CALL}<|/answer|><|/turn|>")
    parsed = renderer.parse(ids, TOOLS)
    assert parsed.problem is None and parsed.message["content"] == "So."
    assert [c["function"]["name"] for c in parsed.message["tool_calls"]] == ["look_up"]


@pytest.mark.parametrize("before", ["", "<|answer|>", "<|answer|>So."])
def test_text_behind_a_call_in_a_framing_is_rendered_as_it_was_sampled(before: str) -> None:
    renderer, tokenizer = framed(opened=False)
    message = renderer.parse(encoded(tokenizer, f"{before}{CALL} done<|/turn|>"), TOOLS).message
    (rendered,) = as_rendered(as_messages([message]))
    assert rendered["content"] == f"{before.removeprefix('<|answer|>')}{CALL} done"
    assert message["content"].endswith("done") and len(message["tool_calls"]) == 1


@pytest.mark.parametrize("written", ["", "<|/text|>", "<|/text|>\n<|/answer|>"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_cut_response_is_closed_once(written: str, ended: bool) -> None:
    """Also if another token of the model ended it."""
    closing = "<|/text|>\n<|/answer|>"
    renderer, tokenizer = framed(opened=True, closing=closing)
    prompt = renderer.render([user("Hi.")])
    ids = encoded(tokenizer, "4" + written + "<|other|>" * ended)
    text = tokenizer.decode(renderer.bridge(prompt, ids, [user("And?")], ended=ended))
    assert text.replace("<|other|>", "") == (
        f"<|turn|>user\nHi.<|/turn|><|turn|>assistant\n<|answer|>4{closing}<|/turn|>"
        "<|turn|>user\nAnd?<|/turn|><|turn|>assistant\n<|answer|>"
    )


def test_a_closing_that_ends_the_response_is_written_once() -> None:
    renderer, tokenizer = framed(opened=True)
    prompt = renderer.render([user("Hi.")])
    ids = encoded(tokenizer, "4<|/answer|>")
    text = tokenizer.decode(renderer.bridge(prompt, ids, [user("And?")], ended=True))
    assert text.count("<|/answer|>") == 1
    assert renderer.parse(ids, prompt_ids=prompt, ended=True).message == assistant("4")


def test_markers_that_a_format_reads_are_no_framing() -> None:
    """gpt-oss: the channel before an answer tells it from reasoning."""
    renderer, tokenizer = renderer_of("harmony")
    text = "<|channel|>final<|message|>4<|end|><|start|>assistant<|channel|>analysis<|message|>5"
    message = renderer.parse(encoded(tokenizer, text + "<|return|>")).message
    assert message == assistant("4", reasoning_content="5")


def test_a_turn_with_two_end_tokens() -> None:
    """Phi-3 ends a turn with ``<|end|>``, and the last one with another token too."""
    tokenizer = chat_tokenizer("harmony")
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% else %}<|return|>{% endif %}"
    )
    renderer = ChatRenderer(tokenizer, history="keep")
    prompt = renderer.render([user("Hi.")])
    for end in ("<|end|>", "<|end|>\n<|return|>", "<|end|><|return|>", "<|return|>"):
        ids = encoded(tokenizer, "4" + end)
        assert renderer.parse(ids, prompt_ids=prompt).message == assistant("4"), end


def test_published_template_of_cohere() -> None:
    trl = pytest.importorskip("trl.chat_template_utils")
    tokens = ("START_OF_TURN_TOKEN", "END_OF_TURN_TOKEN", "SYSTEM_TOKEN", "USER_TOKEN")
    tokens += ("CHATBOT_TOKEN", "START_RESPONSE", "END_RESPONSE")
    tokenizer = byte_bpe(tuple(f"<|{t}|>" for t in tokens), eos="<|END_OF_TURN_TOKEN|>")
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / "cohere2.jinja").read_text(encoding="utf-8")
    renderer = ChatRenderer(tokenizer, history="keep")
    prompt = renderer.render([user("Hi.")])
    ids = encoded(tokenizer, "4<|END_RESPONSE|><|END_OF_TURN_TOKEN|>")
    assert renderer.parse(ids, prompt_ids=prompt).message == assistant("4")
