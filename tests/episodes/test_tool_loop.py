"""The renderer and the environment with tools together, in every family's format of calls."""

from __future__ import annotations

import asyncio

import pytest
from chat_families import FAMILIES, encoded, kept, renderer_of

from burnish.environments.tools import ToolEnvironment


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Adder(ToolEnvironment):
    tools = (add,)


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a":  %d, "b": 3}}\n</tool_call>',
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n%d\n</parameter>\n<parameter=b>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": %d, "b": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": %d, "b": 3}}]',
    "harmony": "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.add <|constrain|>json<|message|>{"a": %d, "b": 3}',
}
END = {"llama3": "<|eot_id|>", "mistral": "</s>", "harmony": "<|call|>"}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_and_an_answer(family: str) -> None:
    """2 + 3 and 5 + 3, then an answer. All prompts extend each other."""
    renderer, tokenizer = renderer_of(family)
    environment = Adder()
    start = environment.reset({"prompt": "2 + 3 + 3?"}, 0)
    prompt = renderer.render(start.messages, start.tools)
    name = {"chatml": "hermes", "chatml_drops": "hermes", "llama3": "llama3_json"}.get(family)
    text = CALLS[name or family] + END.get(family, "<|im_end|>")
    for a, total in ((2, "5"), (5, "8")):
        sampled = encoded(tokenizer, text % a)
        found = renderer.parse(sampled, start.tools, prompt_ids=prompt)
        assert found.problem is None
        step = asyncio.run(environment.step(found.message))
        assert [message["content"] for message in step.messages] == [total]
        following = renderer.bridge(prompt, sampled, step.messages, start.tools)
        assert kept(prompt, sampled, following)
        prompt = following
    final = "<|channel|>final<|message|>8" if family == "harmony" else "8"
    found = renderer.parse(encoded(tokenizer, final), start.tools, prompt_ids=prompt)
    assert found.message["content"] == "8"
    assert asyncio.run(environment.step(found.message)).done
    environment.close()
