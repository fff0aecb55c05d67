"""Relations of requests to a served policy, in every API, and rows of data."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from chat_templates import PUBLISHED, named_tokenizer, published_tokenizer
from metamorphic.base import Broken, Draw, equal, relation
from metamorphic.draw_text import text_of

from burnish.agents.anthropic_messages import Messages
from burnish.agents.openai_chat import ChatCompletions
from burnish.agents.openai_responses import Responses
from burnish.chat_message import wrapped_tool
from burnish.data.chat import encode_prompt
from burnish.data.left_out import REFUSED_IN_PROMPTS
from burnish.data.sources import DataError
from burnish.episodes.renderer import ChatRenderer
from burnish.episodes.template import RendererError

Message = dict[str, Any]
_tokenizer = cache(lambda f: named_tokenizer() if f == "named" else published_tokenizer(f))
_ALL_KEYS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' ~ m.name if m.name else '' }}"
    "{{ '\n' ~ m.reasoning_content if m.reasoning_content else '' }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes every key but ids, which the policy does not read."""
_NAMES = ["find_it", "get_it", "hold_it"]


def _text(draw: Draw) -> str:
    return "a" + text_of(draw).replace("<", "") + "z"


def _conversation(draw: Draw) -> list[Message]:
    """Questions and answers; some answers have reasoning, and calls, which may share an id, with
    results that have no name."""
    messages: list[Message] = []
    if draw.rng.random() < 0.5:
        messages.append({"role": "system", "content": _text(draw)})
    for turn in range(draw.rng.randint(0, 2)):
        messages.append({"role": "user", "content": _text(draw)})
        answer: Message = {"role": "assistant", "content": _text(draw)}
        if draw.rng.random() < 0.3:
            answer["reasoning_content"] = _text(draw)
        messages.append(answer)
        if draw.rng.random() < 0.3:
            continue
        shared = draw.rng.random() < 0.4
        ids = [f"call{turn if not shared else 0}{0 if shared else i:04d}" for i in range(2)]
        answer["tool_calls"] = [
            {"id": each, "type": "function", "function": {"name": name, "arguments": {"x": turn}}}
            for each, name in zip(ids, draw.rng.sample(_NAMES, 2), strict=True)
        ]
        if draw.rng.random() < 0.5:
            answer["content"] = ""
        order = [0, 1] if shared or draw.rng.random() < 0.5 else [1, 0]
        messages += [
            {"role": "tool", "tool_call_id": ids[i], "content": _text(draw)} for i in order
        ]
        messages.append({"role": "assistant", "content": _text(draw)})
    messages.append({"role": "user", "content": _text(draw)})
    draw.note(messages=messages)
    return messages


def _as_chat(messages: list[Message], tools: list[Message], *, hidden: bool = False) -> Any:
    body = json.loads(json.dumps(messages))
    for call in (call for message in body for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    sent = {"model": "m", "messages": body, "tools": [wrapped_tool(tool) for tool in tools]}
    sent |= {"tool_choice": "none"} if hidden else {}
    return ChatCompletions().read(sent, max_messages=99)


def _as_messages(messages: list[Message], tools: list[Message], *, hidden: bool = False) -> Any:
    body: list[Message] = []
    top: Message = {}
    for message in messages:
        if message["role"] == "system":
            top = {"system": message["content"]}
        elif message["role"] == "user":
            body.append({"role": "user", "content": message["content"]})
        elif message["role"] == "tool":
            found = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            if not body or not isinstance(body[-1]["content"], list) or body[-1]["role"] != "user":
                body.append({"role": "user", "content": []})
            body[-1]["content"].append({"type": "tool_result", **found})
        else:
            blocks: list[Message] = []
            if thought := message.get("reasoning_content"):
                blocks.append({"type": "thinking", "thinking": thought, "signature": "s"})
            if message["content"]:
                blocks.append({"type": "text", "text": message["content"]})
            for call in message.get("tool_calls", ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                blocks.append(
                    {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}
                )
            body.append({"role": "assistant", "content": blocks})
    described = [{"name": t["name"], "input_schema": t["parameters"]} for t in tools]
    sent = {"model": "m", "max_tokens": 9, **top, "messages": body, "tools": described}
    sent |= {"tool_choice": {"type": "none"}} if hidden else {}
    return Messages().read(sent, max_messages=99)


def _as_responses(messages: list[Message], tools: list[Message], *, hidden: bool = False) -> Any:
    items: list[Message] = []
    top: Message = {}
    for number, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "system":
            top = {"instructions": content}
        elif message["role"] == "tool":
            found = {"call_id": message["tool_call_id"], "output": content}
            items.append({"type": "function_call_output", **found})
        elif message["role"] == "user":
            items.append({"role": "user", "content": content})
        else:
            if thought := message.get("reasoning_content"):
                text = [{"type": "summary_text", "text": thought}]
                items.append({"type": "reasoning", "id": f"rs_{number}", "summary": text})
            if content:
                said = {"role": "assistant", "content": content}
                items.append({"type": "message", "id": f"msg_{number}", **said})
            items += [
                {
                    "type": "function_call",
                    "id": f"fc_{number}_{i}",
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                }
                for i, call in enumerate(message.get("tool_calls", ()))
            ]
    described = [{"type": "function", **tool} for tool in tools]
    sent = {"model": "m", **top, "input": items, "tools": described}
    sent |= {"tool_choice": "none"} if hidden else {}
    return Responses().read(sent, max_messages=99)


def _prompt(tokenizer: Any, messages: Any, tools: Any, **options: Any) -> Any:
    try:
        return encode_prompt(tokenizer, list(messages), tools=list(tools) or None, **options)
    except DataError as error:
        return str(error)


@relation
def requests_are_rows(draw: Draw) -> None:
    """A conversation with reasoning, calls and results has the same prompt as a row of data and as
    a request in each API, and no request has a key that is not read. Exact."""
    tokenizer = _tokenizer(draw.one(family=["chatml", "named", *PUBLISHED]))
    own = tokenizer.chat_template
    if draw.one(all_keys=[True, False]):
        tokenizer.chat_template = _ALL_KEYS
    try:
        messages = _conversation(draw)
        tools = [
            {"name": name, "parameters": {"type": "object", "properties": {}}}
            for name in draw.rng.choice([(), _NAMES])
        ]
        row = _prompt(tokenizer, messages, [wrapped_tool(tool) for tool in tools])
        for api in (_as_chat, _as_messages, _as_responses):
            call = api(messages, tools)
            equal(_prompt(tokenizer, call.messages, call.tools), row, api.__name__)
            equal(call.ignored, (), f"keys that {api.__name__} does not read")
    finally:
        tokenizer.chat_template = own


_renderer = cache(lambda family: ChatRenderer(_tokenizer(family), history="keep"))


@relation
def requests_keep_their_calls(draw: Draw) -> None:
    """A conversation with calls, asked with tools, without, or with tool_choice none in each API,
    has the prompt of the row with the tools that it shows, and its calls are in it; or both are
    refused. The policy may write text beside calls, which some templates leave out. Exact."""
    family = draw.one(family=["named", "named", *PUBLISHED])
    tokenizer, messages = _tokenizer(family), _conversation(draw)
    tools = [
        {"name": name, "parameters": {"type": "object", "properties": {}}}
        for name in draw.one(tools=[(), _NAMES])
    ]
    hidden = draw.one(hidden=[True, False])
    shown = [] if hidden else [wrapped_tool(tool) for tool in tools]
    row = _prompt(tokenizer, messages, shown, refused=REFUSED_IN_PROMPTS)
    for api in (_as_chat, _as_messages, _as_responses):
        call = api(messages, tools, hidden=hidden)
        try:
            ids = list(_renderer(family).render(call.messages, call.shown_tools))
        except RendererError as error:
            if isinstance(row, str) or shown:  # a renderer also refuses tools that nobody sees
                continue
            raise Broken(f"{api.__name__} is refused, but the row is not: {error}") from error
        equal(ids, row if isinstance(row, str) else row[1], api.__name__)
        text = tokenizer.decode(ids)
        for made in (c for m in messages for c in m.get("tool_calls", ())):
            name = made["function"]["name"]
            equal(name in text, True, f"the call of {name} is in the prompt")
