"""Streams of a served model: the joined parts of their events are the reply without a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from agent_session import backend_of, call, says, tool_call, user, words
from chat_families import chat_tokenizer

from burnish.agents.app import AgentApp
from burnish.agents.calls import (
    CallError,
    Choice,
    Delta,
    ModelCall,
    ModelReply,
    ReplyStart,
)
from burnish.agents.openai_responses import Responses
from burnish.agents.serving import OneModel
from burnish.episodes.renderer import ChatRenderer
from burnish.serve.guard import RequestGuard, ServerLimits

MESSAGES = [user("What is 2 + 2?")]
ADD = {"name": "add", "parameters": {"type": "object"}}
STREAMED = [
    "<think>\nI add.\n</think>\n\nIt is  five. ",
    "<think>\nI add.\n</think>\n\nLet me see.\n" + tool_call("add", a=2) + tool_call("add", a=3),
    tool_call("add", a=2),
    "<think>first</think>One<think>second</think> two <think>",
    "<think>no end",
    " ",
    "One two STOP three",
]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": MESSAGES,
        "stop": "STOP",
        "tools": [{"type": "function", "function": ADD}],
    },
    "responses": {"input": MESSAGES, "tools": [{"type": "function", **ADD}]},
    "messages": {
        "messages": MESSAGES,
        "max_tokens": 300,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["STOP"],
    },
    "completions": {"prompt": "Once", "max_tokens": 300, "stop": ["STOP"]},
}


def parts_of(item: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """Reasoning, content and calls in a reply, or in an event of its stream, of any API."""
    if "choices" in item:
        (choice,) = item["choices"] or [{}]
        found = choice.get("message") or choice.get("delta") or {}
        calls = [made["function"] for made in found.get("tool_calls") or ()]
        content = choice.get("text") or found.get("content") or ""
        return found.get("reasoning_content") or "", content, calls
    delta = item.get("delta")
    if isinstance(delta, dict):  # Anthropic
        given = [{"arguments": delta["partial_json"]}] if "partial_json" in delta else []
        return delta.get("thinking", ""), delta.get("text", ""), given
    if isinstance(delta, str):  # Responses
        kind = item["type"].split(".")[1]
        texts = [delta if kind == wanted else "" for wanted in ("reasoning_text", "output_text")]
        return *texts, [{"arguments": delta}] if kind.startswith("function") else []
    reasoning, content, calls = "", "", []
    for block in item.get("content" if item.get("type") == "message" else "output") or ():
        text = block["content"][0]["text"] if "content" in block else block.get("text", "")
        reasoning += block.get("thinking", "") or (text if block["type"] == "reasoning" else "")
        content += text if block["type"] in ("text", "message") else ""
        if block["type"] in ("tool_use", "function_call"):
            given = block.get("arguments") or json.dumps(block["input"])
            calls.append({"arguments": given})
    return reasoning, content, calls


def joined(items: list[dict[str, Any]]) -> tuple[str, str, list[Any]]:
    parts = [parts_of(item) for item in items]
    calls = [json.loads(c["arguments"]) for part in parts for c in part[2] if c["arguments"]]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts), calls


def test_streams_of_every_api_have_the_parts_of_the_reply() -> None:
    """Reasoning, content, calls and stop texts, token by token. Reasoning after content, too."""
    for text in STREAMED:
        asyncio.run(check(text))


async def check(text: str) -> None:
    with backend_of(says(lambda _: text)) as backend:
        web = AgentApp(OneModel(backend, None), RequestGuard(ServerLimits(), token=None))
        transport = httpx.ASGITransport(web.asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for path, body in BODIES.items():
                await check_api(http, path, {"model": "gpt", **body})


async def check_api(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> None:
    whole = (await http.post(f"/v1/{path}", json=body)).json()
    stream = await http.post(f"/v1/{path}", json={**body, "stream": True})
    lines = [line[6:] for line in stream.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not whole.get("error") and not events[-1].get("error"), path
    skipped = ("message_start", "response.completed", "response.created")
    sent = [event for event in events if event.get("type") not in skipped and "item" not in event]
    assert joined(sent) == joined([whole])
    if path == "responses":
        assert joined([events[-1]["response"]]) == joined([whole])
        assert returned(events[-1]["response"]) == returned(whole)


def returned(response: Mapping[str, Any]) -> Any:
    """The response as it is read from a client that sends its items back."""
    body = {"model": "gpt", "input": [*response["output"], user("Go on.")]}
    read = Responses().read(json.loads(json.dumps(body)), max_messages=100)
    *answers, question = read.messages
    assert question == user("Go on.")
    return [
        {**answer, "tool_calls": [call["function"] for call in answer.get("tool_calls", ())]}
        for answer in answers
    ]


def test_streamed_items_of_one_response_are_one_message() -> None:
    """Channels may have reasoning after text. Items of other responses are other messages."""
    deltas = [("I add.", ""), ("", "Let me see."), ("\nAgain.", ""), ("", "\nFour.")]
    message = {
        "role": "assistant",
        "content": "Let me see.\nFour.",
        "reasoning_content": "I add.\nAgain.",
    }
    output = []
    for name in ("e-1", "e-2"):
        asked = ModelCall("m", show_reasoning=True)
        writer = Responses().writer(asked, ReplyStart(name, 1, "m", 9))
        for reasoning, content in deltas:
            list(writer.add(Delta(0, reasoning, content)))
        reply = ModelReply(name, 1, "m", (Choice(message, "stop"),), 9, 4, 2)
        last = list(writer.finish(reply))[-1]
        output += json.loads(last.partition("data: ")[2])["response"]["output"]
    assert len(output) == 8
    assert returned({"output": output}) == [{**message, "tool_calls": []}] * 2


@pytest.mark.parametrize("content", [None, []])
def test_reasoning_in_a_summary_is_read_if_there_is_no_other(content: Any) -> None:
    """Burnish sends it as content; clients and other servers write it as the summary."""
    summary = [{"type": "summary_text", "text": "why"}]
    thought = {"type": "reasoning", "id": "rs_1", "summary": summary, "content": content}
    answer = {"type": "message", "id": "msg_1", "role": "assistant", "content": "4"}
    [message] = returned({"output": [thought, answer]})
    assert (message["reasoning_content"], message["content"]) == ("why", "4")
    thought["content"] = [{"type": "reasoning_text", "text": "all of it"}]
    assert returned({"output": [thought, answer]})[0]["reasoning_content"] == "all of it"


def test_several_prompts_are_answered_in_order() -> None:
    """Each as if it were alone; equal prompts are different samples. Streams have them all."""

    async def scenario() -> None:
        with backend_of(words) as backend:
            web = AgentApp(OneModel(backend, None), RequestGuard(ServerLimits(), token=None))
            transport = httpx.ASGITransport(web.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                for prompts in (["One", "Two"], ["One", [5, 6]], ["One", "One"]):
                    await check_prompts(http, prompts)

    asyncio.run(scenario())


async def check_prompts(http: httpx.AsyncClient, prompts: list[Any]) -> None:
    async def post(prompt: Any, **more: Any) -> httpx.Response:
        body = {"model": "gpt", "prompt": prompt, "seed": 4, "max_tokens": 9, **more}
        return await http.post("/v1/completions", json=body)

    reply = (await post(prompts)).json()
    texts = [choice["text"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    alone = [(await post(prompt)).json() for prompt in prompts]
    first = [one["choices"][0]["text"] for one in alone]
    assert texts[0] == first[0] and (texts[1] == first[1]) == (prompts[0] != prompts[1])
    tokens = [one["usage"]["prompt_tokens"] for one in alone]
    assert reply["usage"]["prompt_tokens"] == sum(tokens)
    lines = (await post(prompts, stream=True)).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = ["", ""]
    for event in events:
        parts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert parts == texts


NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
NO_CALLS = NO_TOOLS + "{{ tools or '' }}"
LAST_ONLY = "{{ messages[-1].content }}<|im_end|>"


@pytest.mark.parametrize("template", [NO_TOOLS, NO_CALLS, LAST_ONLY])
def test_errors_of_a_server_name_no_keys_of_recipes(template: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    generate = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.chat_template = template + generate

    async def scenario() -> None:
        with backend_of(words, lambda _: ChatRenderer(tokenizer, history="template")) as backend:
            tools = ({"type": "function", "function": ADD},)
            with pytest.raises(CallError) as refused:
                await backend.respond(call(*MESSAGES, tools=tools), digest=b"")
            said = refused.value.message
            assert refused.value.status == 400 and "--chat-template" in said
            for word in ("tool_format", "model.", "history:", "environment"):
                assert word not in said

    asyncio.run(scenario())
