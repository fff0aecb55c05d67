"""Relations of the APIs: the same reply plain and streamed, in every API, and token by token.

The policy is scripted: what it samples is drawn, and the server is the real one without a network.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import cache
from typing import Any

import httpx
from agent_session import RENDERER, TOKENIZER, call, session, tool_call, user
from chat_families import chat_tokenizer
from metamorphic.base import Broken, Draw, equal, relation
from scripted_engine import Answer, ScriptedEngine

from burnish.agents.app import AgentApp
from burnish.agents.serving import OneModel, Renderers, ServingBackend
from burnish.episodes.renderer import ChatRenderer, TextCodec
from burnish.episodes.rows import episode_rows
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Sampling
from burnish.rollout.requests import StopRule
from burnish.serve.guard import RequestGuard, ServerLimits
from burnish.special_tokens import special_tokens

ADD = {"name": "add", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": ADD}
PIECES = (
    *("\n\n", "\n", "...", "!!", "STOP", " two ", "word", "<", "ä", "漢字", "🌦", "4"),
    *(tool_call("add", a=2), tool_call("add", a=1.5, b="x\ny"), "<tool_call>", "</tool_call>"),
    *("<think>\nI add.\n</think>\n\n", "<think>", "</think>", '{"name": "add"', " "),
)
STOPS = ("\n", ".", "!", "STOP", "tw", "word", "</tool_call>", "</think>", "字", '"a"')
PATHS = ("chat/completions", "messages", "responses")
Reply = dict[str, Any]


@cache
def family(name: str) -> tuple[Any, ChatRenderer]:
    """A tokenizer of a family and its renderer."""
    if name == "chatml":
        return TOKENIZER, RENDERER
    tokenizer = chat_tokenizer(name)
    return tokenizer, ChatRenderer(tokenizer, history="keep")


def served(
    name: str, answer: Answer, scenario: Callable[[httpx.AsyncClient], Awaitable[Any]]
) -> Any:
    """The result of ``scenario`` with a server of the model ``m``."""
    tokenizer, renderer = family(name)

    async def inside() -> Any:
        service = RolloutService(ScriptedEngine(answer, tokenizer))
        made = ServingBackend(
            service,
            TextCodec(tokenizer),
            Renderers(lambda _: renderer),
            names=("m",),
            max_len=4000,
            max_queue=8,
        )
        app = AgentApp(OneModel(made, None), RequestGuard(ServerLimits(), token=None))
        transport = httpx.ASGITransport(app.asgi)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await scenario(http)
        finally:
            made.close()
            service.close()

    return asyncio.run(inside())


async def post(http: httpx.AsyncClient, path: str, body: Reply) -> Reply:
    reply = await http.post(f"/v1/{path}", json={"model": "m", **body})
    if reply.status_code != 200:
        raise Broken(f"{path}: {reply.text}")
    return dict(reply.json())


async def events(http: httpx.AsyncClient, path: str, body: Reply) -> list[Reply]:
    reply = await http.post(f"/v1/{path}", json={"model": "m", "stream": True, **body})
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def sampled(draw: Draw, tokenizer: Any) -> list[int]:
    """Tokens of drawn text: tokens with several characters, parts of characters, other borders."""
    text = "".join(draw.rng.choices(PIECES, k=draw.rng.randint(1, 9)))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if draw.rng.random() < 0.3:  # one character per token
        ids = [i for c in text for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    for _ in range(draw.rng.choice((0, 0, 1, 3))):
        ids.insert(draw.rng.randint(0, len(ids)), draw.rng.choice(ordinary))
    draw.note(text=text, ids=ids)
    return ids


def body_of(path: str, *, tools: bool, stops: tuple[str, ...], limit: int) -> Reply:
    """A request for the same response in an API."""
    if path == "completions":
        return {"prompt": "What is 2 + 2?", "max_tokens": limit, "stop": list(stops) or None}
    given: Reply = {"max_tokens": limit, "messages": [user("What is 2 + 2?")]}
    if path == "responses":
        given = {"max_output_tokens": limit, "input": given["messages"]}
        return {**given, "tools": [{"type": "function", **ADD}] if tools else []}
    if path == "messages":
        made = [{"name": "add", "input_schema": ADD["parameters"]}] if tools else []
        thinks = {"type": "enabled", "budget_tokens": 1024}
        return {**given, "tools": made, "thinking": thinks, "stop_sequences": list(stops)}
    return {**given, "tools": [CHAT_TOOL] if tools else [], "stop": list(stops) or None}


def read(path: str, reply: Reply) -> tuple[str, str, list[Any], str]:
    """(reasoning, content, calls, finish reason) of a reply of any API."""
    if path == "completions":
        (choice,) = reply["choices"]
        return "", choice["text"], [], choice["finish_reason"]
    if path == "chat/completions":
        (choice,) = reply["choices"]
        message = choice["message"]
        made = [c["function"] for c in message.get("tool_calls") or ()]
        calls = [(f["name"], json.loads(f["arguments"])) for f in made]
        thought = message.get("reasoning_content") or ""
        return thought, message["content"] or "", calls, choice["finish_reason"]
    thought = text = ""
    calls = []
    for part in reply["content"] if path == "messages" else reply["output"]:
        if part["type"] in ("thinking", "reasoning"):
            thought += part.get("thinking") or part["content"][0]["text"]
        elif part["type"] in ("text", "message"):
            text += part["text"] if path == "messages" else part["content"][0]["text"]
        else:
            given = part["input"] if path == "messages" else json.loads(part["arguments"])
            calls.append((part["name"], given))
    if path == "messages":
        reasons = {"max_tokens": "length", "tool_use": "tool_calls"}
        return thought, text, calls, reasons.get(reply["stop_reason"], "stop")
    cut = reply["status"] == "incomplete"
    return thought, text, calls, "length" if cut else "tool_calls" if calls else "stop"


def _blocks(parts: list[Reply]) -> Reply:
    """The message of the events of Anthropic's API."""
    blocks: list[Reply] = []
    for part in parts:
        delta = part.get("delta", {})
        if part["type"] == "content_block_start":
            blocks.append(dict(part["content_block"]))
        for key in {"thinking", "text"} & set(delta):
            blocks[-1][key] += delta[key]
        if "partial_json" in delta:
            blocks[-1]["input"] = json.loads(delta["partial_json"])
    reason = next(p["delta"]["stop_reason"] for p in parts if p["type"] == "message_delta")
    return {"content": blocks, "stop_reason": reason}


def joined(path: str, parts: list[Reply]) -> tuple[str, str, list[Any], str]:
    """The same of the events of a stream."""
    if path == "responses":
        return read(path, parts[-1]["response"])
    if path == "messages":
        return read(path, _blocks(parts))
    message: Reply = {"content": "", "reasoning_content": "", "tool_calls": []}
    for part in parts:
        (choice,) = part["choices"]
        delta = choice.get("delta", {"content": choice.get("text")})
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for made in delta.get("tool_calls") or ():
            while len(message["tool_calls"]) <= made["index"]:
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            function = message["tool_calls"][made["index"]]["function"]
            function["name"] += made["function"].get("name", "")
            function["arguments"] += made["function"]["arguments"]
    last = {"finish_reason": parts[-1]["choices"][0]["finish_reason"]}
    return read(path, {"choices": [{"message": message, "text": message["content"], **last}]})


def setting(draw: Draw) -> tuple[list[int], dict[str, Any]]:
    """(sampled tokens, settings of the request)."""
    ids = sampled(draw, TOKENIZER)
    stops = tuple(draw.rng.sample(STOPS, k=draw.rng.choice((0, 0, 1, 2))))
    limit = draw.rng.choice((300, 300, draw.rng.randint(1, len(ids) + 1)))
    tools = draw.rng.random() < 0.7
    draw.note(stops=stops, limit=limit, tools=tools)
    return ids, {"stops": stops, "limit": limit, "tools": tools}


def ended(ids: list[int]) -> list[int]:
    return [*ids, TOKENIZER.eos_token_id]


@relation
def streamed_reply(draw: Draw) -> None:
    """A reply is exactly the joined parts of its stream, in all APIs, without any stop string."""
    ids, options = setting(draw)

    async def scenario(http: httpx.AsyncClient) -> None:
        for path in (*PATHS, "completions"):
            body = body_of(path, **options)
            plain = read(path, await post(http, path, body))
            equal(joined(path, await events(http, path, body)), plain, path)
            for stop in options["stops"] if path != "responses" else ():
                if stop in plain[0] or stop in plain[1]:
                    raise Broken(f"{path}: the stop string {stop!r} is in {plain}")

    served("chatml", lambda _: ended(ids), scenario)


@relation
def same_reply_in_every_api(draw: Draw) -> None:
    """Reasoning, content, calls and finish reason are exactly those of the other APIs. Without
    tools there are no calls, and a response that the limit cuts says so."""
    ids, options = setting(draw)
    options["stops"] = ()  # responses has none

    async def scenario(http: httpx.AsyncClient) -> list[Any]:
        return [read(path, await post(http, path, body_of(path, **options))) for path in PATHS]

    first, *others = served("chatml", lambda _: ended(ids), scenario)
    for path, other in zip(PATHS[1:], others, strict=True):
        equal(other, first, path)
    cut = len(ids) + 1 > options["limit"]
    equal(first[3] == "length", cut, "finish reason of a cut response")
    equal(bool(first[2]) and not options["tools"], False, "calls without tools")
    whole = TOKENIZER.decode(ids)
    for name, arguments in first[2]:
        if json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) not in whole:
            raise Broken(f"the call {name}({arguments}) is not in {whole!r}")


@relation
def tokens_are_the_text(draw: Draw) -> None:
    """The tokens of log-probs joined are exactly the text, offsets are their places, and the bytes
    are those of the text if all of them are characters."""
    name = draw.one(family=["chatml", "mistral", "xml"])
    tokenizer, _ = family(name)
    ids = sampled(draw, tokenizer)
    stops = tuple(draw.rng.sample(STOPS, k=draw.rng.choice((0, 0, 1))))
    draw.note(stops=stops)
    body = {"prompt": "Once", "max_tokens": len(ids), "stop": list(stops) or None, "logprobs": 0}

    async def scenario(http: httpx.AsyncClient) -> None:
        (choice,) = (await post(http, "completions", body))["choices"]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        equal("".join(tokens), choice["text"], "tokens joined")
        equal(len(tokens), len(choice["logprobs"]["token_logprobs"]), "number of tokens")
        for token, offset in zip(tokens, offsets, strict=True):
            equal(choice["text"][offset : offset + len(token)], token, "text at the offset")
        chat = {"messages": [user("Once")], "max_tokens": len(ids), "logprobs": True}
        (choice,) = (await post(http, "chat/completions", chat))["choices"]
        entries = choice["logprobs"]["content"]
        whole = "".join(entry["token"] for entry in entries)
        equal(len(entries), len(ids), "number of tokens")
        for part in (choice["message"]["content"], choice["message"].get("reasoning_content")):
            rest = iter(whole)  # several blocks of reasoning are joined with a newline
            if not all(character in rest for character in (part or "").replace("\n", "")):
                raise Broken(f"{part!r} is not a part of {whole!r}")
        data = bytes(byte for entry in entries for byte in entry["bytes"])
        if "\ufffd" not in whole:
            equal(data.decode(), whole, "bytes joined")

    served(name, lambda _: ids, scenario)


@relation
def stops_are_in_the_text(draw: Draw) -> None:
    """Sampling ends at the first token with which a stop string is in the text of the completion,
    which has no special tokens, unless a stop string names one. Exact."""
    tokenizer, _ = family(draw.one(family=["chatml", "mistral", "xml"]))
    ids = sampled(draw, tokenizer)
    special = special_tokens(tokenizer)
    for _ in range(draw.rng.choice((0, 1, 4))):
        ids.insert(draw.rng.randint(0, len(ids)), draw.rng.choice(list(special)))
    parts = [text.strip("<|>[]/") for text in special.values()]
    stops = draw.rng.choices([*STOPS, *parts, *special.values()], k=draw.rng.choice((1, 1, 2)))
    draw.note(ids=ids, stops=stops)
    hides = not any(text in stop for text in special.values() for stop in stops)
    rule = StopRule(tokenizer, Sampling(max_tokens=len(ids) + 1, stop=tuple(stops)), ())
    texts = (
        tokenizer.decode(ids[:end], skip_special_tokens=hides) for end in range(1, len(ids) + 1)
    )
    expected = next((i for i, text in enumerate(texts) if any(s in text for s in stops)), None)
    check = rule.begin()
    end = next((i for i, token in enumerate(ids) if check.add(token, len(ids) + 1)), None)
    equal(end, expected, "last token")


JAVASCRIPT = (1.0, 1, -0.0, 0.5, 1e22, 12345678901234567890, 2.0**53, 1e-7, 10**30, True, None)


def restringified(value: Any) -> Any:
    """A JSON value after JSON.parse and JSON.stringify of JavaScript, whose numbers are doubles
    that are written without a fraction if they have none."""
    if isinstance(value, dict):
        return {key: restringified(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restringified(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    number = float(value)
    if not number.is_integer() or abs(number) >= 1e21:
        return number
    return int(Decimal(repr(number)))  # the shortest digits, and zeros


@relation
def history_of_other_languages(draw: Draw) -> None:
    """A history that JavaScript rewrote continues the exact tokens: one row. So does one without
    its reasoning. One with other reasoning is a new row."""
    value = draw.rng.choice(JAVASCRIPT)
    arguments = {"a": value, "b": [value, {"c": draw.rng.choice(JAVASCRIPT)}]}
    thought = draw.one(thought=["", "<think>\nI add.\n</think>\n\n"])
    change = draw.one(change=["none", "none", "dropped", "reasoning"])
    draw.note(arguments=arguments)
    text = thought + tool_call("add", **arguments)
    tokens: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]

    async def scenario() -> int:
        async with session(lambda _: ended(tokens), turn_tokens=300) as (made, _):
            start = user("Go.")
            reply = await made.respond(call(start, tools=(CHAT_TOOL,)), digest=b"a")
            message = restringified(dict(reply.choices[0].message))
            if change == "dropped":
                message.pop("reasoning_content", None)
            if change == "reasoning":
                message["reasoning_content"] = "Something else."
            made_call = message["tool_calls"][0]
            named = {"tool_call_id": made_call["id"], "name": "add"}
            result = {"role": "tool", "content": "3", **named}
            await made.respond(call(start, message, result, tools=(CHAT_TOOL,)), digest=b"b")
            return len(episode_rows(made.result({}).calls))

    equal(asyncio.run(scenario()), 2 if change == "reasoning" else 1, "rows")
