"""The agent server over loopback: official clients, keys, disconnects, hostile requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_session import Session, call, check_rows, session, user, wait_for, words

from burnish.agents.episodes import Endpoint
from burnish.agents.server import EpisodeServer
from burnish.episodes.rows import episode_rows

MESSAGES = [user("hi")]
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def served(answer: Any = words, **limits: Any) -> AsyncIterator[tuple[Session, Endpoint]]:
    server = EpisodeServer("127.0.0.1", 0)
    await server.start()
    try:
        async with session(answer, **limits) as (backend, engine):
            yield (backend, engine), server.admit(backend)
    finally:
        await server.close()


def run(scenario: Callable[..., Awaitable[Any]], answer: Any = words, **limits: Any) -> Any:
    async def inside() -> Any:
        async with served(answer, **limits) as (backend_and_engine, endpoint):
            return await scenario(*backend_and_engine, endpoint)

    return asyncio.run(inside())


def chat_client(endpoint: Endpoint, **changes: Any) -> openai.AsyncOpenAI:
    options = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, **changes}
    return openai.AsyncOpenAI(**options)


async def post(endpoint: Endpoint, path: str = "chat/completions", **options: Any) -> Any:
    options.setdefault("headers", {"authorization": f"Bearer {endpoint.api_key}", **JSON})
    if "content" not in options:
        options.setdefault("json", {"model": "m", "messages": MESSAGES})
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        return await client.post(f"{endpoint.root_url}/{path}", **options)


async def chat_turn(client: openai.AsyncOpenAI, history: list[Any], stream: bool) -> Any:
    request: dict[str, Any] = {"model": "any", "messages": history}
    if not stream:
        return (await client.chat.completions.create(**request)).choices[0].message
    async with client.chat.completions.stream(**request) as events:
        return (await events.get_final_completion()).choices[0].message


async def responses_turn(client: openai.AsyncOpenAI, history: list[Any], stream: bool) -> Any:
    request: dict[str, Any] = {"model": "any", "input": history}
    if not stream:
        return (await client.responses.create(**request)).output
    async with client.responses.stream(**request) as events:
        return (await events.get_final_response()).output


async def messages_turn(
    client: anthropic.AsyncAnthropic, history: list[Any], stream: bool
) -> dict[str, Any]:
    request: dict[str, Any] = {"model": "any", "messages": history}
    assert (await client.messages.count_tokens(**request)).input_tokens > 10
    if stream:
        async with client.messages.stream(**request, max_tokens=30) as events:
            reply = await events.get_final_message()
    else:
        reply = await client.messages.create(**request, max_tokens=30)
    return {"role": "assistant", "content": plain(reply.content)}


def plain(items: Any) -> list[Any]:
    """Objects of a client as the JSON that agents send back."""
    return [item.model_dump(exclude_none=True) for item in items]


def test_official_clients_continue_conversations_on_exact_tokens() -> None:
    """Chat, Responses and Anthropic clients, with and without streams, three turns each: one row
    per conversation, with the engine's ids."""

    async def conversation(turn: Any, client: Any, *, stream: bool) -> None:
        history: list[Any] = [user(f"{turn.__name__} {stream}")]
        for number in range(3):
            reply = await turn(client, history, stream)
            reply = reply if isinstance(reply, list | dict) else plain([reply])
            reply = plain(reply) if turn is responses_turn else reply
            history += [*([reply] if isinstance(reply, dict) else reply), user(f"{number}")]

    async def scenario(backend: Any, engine: Any, endpoint: Endpoint) -> None:
        root, key = endpoint.root_url, endpoint.api_key
        for stream in (False, True):
            async with chat_client(endpoint) as client:
                await conversation(chat_turn, client, stream=stream)
                await conversation(responses_turn, client, stream=stream)
            sent = {"auth_token": key} if stream else {"api_key": key}
            async with anthropic.AsyncAnthropic(base_url=root, **sent) as other:
                await conversation(messages_turn, other, stream=stream)
        result = backend.result({})
        assert len(result.calls) == 18
        assert len(episode_rows(result.calls)) == 6
        check_rows(result, engine)

    run(scenario)


def test_keys_and_base_urls() -> None:
    async def scenario(backend: Any, engine: Any, endpoint: Endpoint) -> None:
        bare = endpoint.root_url.partition("/s/")[0]
        key = endpoint.api_key
        for root in (endpoint.root_url, f"{endpoint.root_url}/v1", bare, f"{bare}/v1"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                reply = await post(Endpoint(root, key), headers={**headers, **JSON})
                assert reply.status_code == 200, reply.text
        stale = {"authorization": f"Bearer {key}", "x-api-key": "from the environment"}
        assert (await post(endpoint, headers={**stale, **JSON})).status_code == 200
        wrong: list[tuple[str, dict[str, str]]] = [
            (endpoint.root_url, {}),
            (endpoint.root_url, {"authorization": "Bearer wrong"}),
            (endpoint.root_url, {"x-api-key": "wrong"}),
            (endpoint.root_url, {"authorization": f"Basic {key}"}),
            (f"{bare}/s/other", {"authorization": f"Bearer {key}"}),
        ]
        for root, headers in wrong:
            reply = await post(Endpoint(root, key), headers={**headers, **JSON})
            assert reply.status_code == 401
            assert reply.json()["error"]["type"] == "authentication_error"
        assert len(engine.log) == 9

    run(scenario)


def test_closed_episodes_refuse_with_410_and_clients_do_not_retry() -> None:
    async def inside() -> None:
        server = EpisodeServer("127.0.0.1", 0)
        await server.start()
        async with session() as (backend, _):
            first, other = server.admit(backend), server.admit(backend)
            server.dismiss(first)
            sent = []

            async def note(request: Any) -> None:
                sent.append(request)

            async with chat_client(first) as client:
                client._client.event_hooks["request"].append(note)
                with pytest.raises(openai.APIStatusError, match="has ended") as refused:
                    await client.chat.completions.create(model="m", messages=MESSAGES)
            assert refused.value.status_code == 410
            assert len(sent) == 1
            assert (await post(other)).status_code == 200
        await server.close()

    asyncio.run(inside())


def test_hostile_requests_get_errors_and_leave_no_trace() -> None:
    async def scenario(backend: Any, engine: Any, endpoint: Endpoint) -> None:
        deep = b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}"
        bodies: list[tuple[bytes, int]] = [
            (b"", 400),
            (b"{", 400),
            (b"\xff\xfe", 400),
            (b'{"model": "m", "messages": NaN}', 400),
            (b'{"temperature": 1e999}', 400),
            (b'{"model": "m"}', 400),
            (b'{"model": "m", "messages": []}', 400),
            (b'{"model": "m", "messages": [7]}', 400),
            (deep, 400),
            (b"[" * 100_000, 400),
            (b'{"a": "' + b"x" * (17 << 20) + b'"}', 413),
        ]
        for path in ("chat/completions", "completions", "messages", "responses"):
            for body, status in bodies:
                reply = await post(endpoint, path, content=body)
                assert reply.status_code == status, (path, body[:60], reply.text)
                assert reply.json()["error"]["message"]
                assert "Traceback" not in reply.text
        key = {"authorization": f"Bearer {endpoint.api_key}"}
        plain = await post(endpoint, content=b"{}", headers={**key, "content-type": "text/plain"})
        assert plain.status_code == 415
        foreign = await post(endpoint, headers={**key, **JSON, "host": "evil.example"})
        assert foreign.status_code == 421
        for refused in ({"n": 2}, {"logit_bias": {"5": 1}}, {"response_format": {"type": "json"}}):
            reply = await post(endpoint, json={"model": "m", "messages": MESSAGES, **refused})
            assert reply.status_code == 400
            assert next(iter(refused)) in reply.text
        unknown = {"model": "m", "messages": MESSAGES, "future_field": {"x": 1}, "user": "u"}
        assert (await post(endpoint, json=unknown)).status_code == 200
        assert len(engine.log) == 1

    run(scenario)


def test_endless_headers_and_a_body_that_never_comes_hold_nothing() -> None:
    """Timeouts of slow clients are those of the guard (tests/serve/test_guard.py)."""

    async def scenario(backend: Any, engine: Any, endpoint: Endpoint) -> None:
        port = int(endpoint.root_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")
        sent = 0
        while sent < 1 << 20 and not reader.at_eof():
            writer.write(b"X-Header: " + b"a" * 1000 + b"\r\n")
            sent += 1000
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        assert sent < 1 << 20
        writer.close()
        _, sending = await asyncio.open_connection("127.0.0.1", port)
        key = endpoint.api_key
        sending.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n\r\n{{".encode()
        )
        assert (await post(endpoint)).status_code == 200  # others are served meanwhile
        sending.close()
        assert len(engine.log) == 1

    run(scenario)


def test_ignored_parameters_are_in_a_header() -> None:
    async def scenario(backend: Any, engine: Any, endpoint: Endpoint) -> Any:
        return await post(
            endpoint, json={"model": "m", "messages": MESSAGES, "temperature": 0.1, "seed": 7}
        )

    reply = run(scenario)
    assert reply.headers["burnish-ignored"] == "temperature, seed"


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_disconnects_frees_its_request(stream: bool) -> None:
    async def scenario(backend: Any, engine: Any, endpoint: Endpoint) -> None:
        engine.poll = list  # the engine never finishes
        body = {"model": "m", "messages": MESSAGES, "stream": stream}
        sending = asyncio.create_task(post(endpoint, json=body))
        await wait_for(lambda: engine.busy)
        sending.cancel()
        await wait_for(lambda: not engine.busy)
        assert backend.result({}).calls == ()

    run(scenario)


def test_stream_shows_life_while_the_response_is_sampled() -> None:
    async def scenario(backend: Any, engine: Any, endpoint: Endpoint) -> None:
        poll, engine.poll = engine.poll, list
        made_of = {"model": "m", "messages": MESSAGES, "stream": True}
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        url = f"{endpoint.base_url}/chat/completions"
        async with (
            httpx.AsyncClient(verify=False) as client,
            client.stream("POST", url, json=made_of, headers=headers) as reply,
        ):
            lines = reply.aiter_lines()
            assert (await anext(lines)).startswith(": ")
            engine.poll = poll
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[0][6:])["object"] == "chat.completion.chunk"

    import burnish.agents.app as app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "WAIT_S", 0.1)
        run(scenario)


def test_thousand_calls_at_once_and_calls_beyond_the_turn_limit() -> None:
    async def scenario(backend: Any, engine: Any, endpoint: Endpoint) -> None:
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        url = f"{endpoint.base_url}/chat/completions"

        async def calls(first: int) -> list[int]:
            async with httpx.AsyncClient(timeout=60, verify=False) as client:
                bodies = [{"model": "m", "messages": [user(f"{first + i}")]} for i in range(40)]
                sent = [client.post(url, headers=headers, json=body) for body in bodies]
                return [reply.status_code for reply in await asyncio.gather(*sent)]

        groups = await asyncio.gather(*(calls(first) for first in range(0, 1000, 40)))
        codes = [code for group in groups for code in group]
        assert codes.count(200) == 600
        assert codes.count(410) == 400
        result = backend.result({})
        assert result.record.status == "max_turns"
        check_rows(result, engine)

    run(scenario, max_turns=600)


def test_call_of_the_session_equals_the_call_over_http() -> None:
    """The dialect adds nothing: the same messages give the same tokens."""

    async def direct(backend: Any, engine: Any, endpoint: Endpoint) -> Any:
        await backend.respond(call(*MESSAGES), digest=b"")
        return engine.log[0]

    async def http(backend: Any, engine: Any, endpoint: Endpoint) -> Any:
        assert (await post(endpoint)).status_code == 200
        return engine.log[0]

    (first, first_ids), (other, other_ids) = run(direct), run(http)
    assert (first.prompt_ids, first.seed, first_ids) == (other.prompt_ids, other.seed, other_ids)
