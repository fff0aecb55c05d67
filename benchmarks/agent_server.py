"""Measure the server of agent programs with an engine that answers at once.

    OMP_NUM_THREADS=1 python benchmarks/agent_server.py [--calls 5000] [--episodes 1000]

Prints two tables. Calls: requests per second and CPU time of the server's process per call, for
each API. Clients are raw connections in a process of their own. Episodes: memory per open episode,
each with a conversation of three turns and a connection that is kept open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import psutil

from burnish.agents.server import EpisodeServer
from burnish.agents.session import TrainingSession
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.episodes.loop import EpisodeLimits, Policy, Task
from burnish.episodes.renderer import ChatRenderer
from burnish.models.load import load_tokenizer
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan

CONNECTIONS = 32
TURNS = 3
ANSWER = "The answer is 42, because the question is unknown."
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Question. " * 20}]},
    "messages": {"max_tokens": 64, "messages": [{"role": "user", "content": "Question. " * 20}]},
    "responses": {"input": "Question. " * 20},
}


class InstantService:
    """A rollout service that answers every request at once with the same tokens."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        """Return the finished completion."""
        future: Future[Completion] = Future()
        ids = self._ids
        span = (VersionSpan(0, 0, len(ids)),)
        future.set_result(
            Completion(request.request_id, 0, ids, (-1.0,) * len(ids), "stop", ANSWER, span)
        )
        return future

    def cancel(self, request_id: str) -> None:
        """Do nothing: no request is open."""

    def release(self, conversation: str) -> None:
        """Do nothing: nothing is cached."""


def make_policy(rendering: ThreadPoolExecutor) -> Policy:
    """Return a policy with a real renderer and an instant engine."""
    alphabet = "".join(chr(code) for code in range(32, 127))
    tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig(alphabet=alphabet)))
    service: Any = InstantService(tokenizer(ANSWER, add_special_tokens=False)["input_ids"])
    return Policy(service, ChatRenderer(tokenizer), Sampling(256), rendering)


async def call(
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str, key: str, body: Any
) -> Any:
    """Send one request on an open connection. Return the parsed reply."""
    reader, writer = streams
    content = json.dumps({"model": "policy", **body}).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    )
    writer.write(content)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].split("\r\n")[0])
    reply = json.loads(await reader.readexactly(length))
    if " 200 " not in head.split("\r\n")[0]:
        raise RuntimeError(f"the server refused a call: {reply}")
    return reply


def send_calls(port: int, path: str, keys: Sequence[str], *, count: int, done: Connection) -> None:
    """Send ``count`` calls over :data:`CONNECTIONS` connections (in a process of its own)."""

    async def one(number: int) -> None:
        streams = await asyncio.open_connection("127.0.0.1", port)
        for i in range(number, count, CONNECTIONS):
            body = BODIES[path]
            await call(streams, f"/v1/{path}", keys[i % len(keys)], body)
        streams[1].close()

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(CONNECTIONS)))

    asyncio.run(all_of_them())
    done.send(None)


async def measure_calls(server: EpisodeServer, policy: Policy, count: int) -> None:
    """Print requests per second and CPU time per call, for each API."""
    print(f"{'API':<18} {'calls/s':>8} {'CPU ms per call':>16}   ({count} calls, medians of 3)")
    for path in BODIES:
        rates, costs = [], []
        for _ in range(3):
            limits = EpisodeLimits(count + 1, 100_000, 60, 600)
            task = Task("bench", {}, 0, 0)
            sessions = [TrainingSession(task, policy, limits) for _ in range(CONNECTIONS)]
            endpoints = [server.admit(session) for session in sessions]
            keys = [endpoint.api_key for endpoint in endpoints]
            port = int(server.root_url.rpartition(":")[2])
            receiving, sending = multiprocessing.Pipe(duplex=False)
            clients = multiprocessing.get_context("spawn").Process(
                target=send_calls,
                args=(port, path, keys),
                kwargs={"count": count, "done": sending},
            )
            clients.start()
            sending.close()
            while not any(session.num_calls for session in sessions):
                await asyncio.sleep(0.01)
            begun, cpu = time.monotonic(), time.process_time()
            await asyncio.to_thread(receiving.recv)
            seconds, spent = time.monotonic() - begun, time.process_time() - cpu
            await asyncio.to_thread(clients.join)
            rates.append(count / seconds)
            costs.append(1e3 * spent / count)
            for endpoint, session in zip(endpoints, sessions, strict=True):
                server.dismiss(endpoint)
                await session.close()
        print(f"{path:<18} {statistics.median(rates):8.0f} {statistics.median(costs):16.2f}")


async def measure_episodes(server: EpisodeServer, policy: Policy, count: int) -> None:
    """Print the memory per open episode."""
    process, port = psutil.Process(), int(server.root_url.rpartition(":")[2])
    before = process.memory_info().rss
    limits = EpisodeLimits(TURNS, 100_000, 60, 600)
    sessions = [TrainingSession(Task(str(i), {}, 0, i), policy, limits) for i in range(count)]
    endpoints = [server.admit(session) for session in sessions]
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    begun = time.monotonic()

    async def one(number: int) -> None:
        messages: list[Any] = [{"role": "user", "content": "Question. " * 20}]
        for turn in range(TURNS):
            path = "/v1/chat/completions"
            body = {"messages": messages}
            reply = await call(connections[number], path, endpoints[number].api_key, body)
            answer = reply["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": f"Go on: {turn}"}]

    await asyncio.gather(*(one(number) for number in range(count)))
    seconds = time.monotonic() - begun
    used = process.memory_info().rss - before
    print(
        f"{count} open episodes of {TURNS} turns at once: {seconds:.1f} s, "
        f"{used / count / 1024:.0f} KiB of memory each, with both ends of their connections"
    )
    for streams in connections:
        streams[1].close()
    for endpoint, session in zip(endpoints, sessions, strict=True):
        server.dismiss(endpoint)
        await session.close()


async def main(calls: int, episodes: int) -> None:
    """Run both measurements."""
    server = EpisodeServer("127.0.0.1", 0)
    await server.start()
    try:
        with ThreadPoolExecutor(1) as rendering:
            policy = make_policy(rendering)
            await measure_calls(server, policy, calls)
            await measure_episodes(server, policy, episodes)
    finally:
        await server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--episodes", type=int, default=1000)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.calls, arguments.episodes))
