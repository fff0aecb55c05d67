"""Worker processes of multi-turn environments."""

from __future__ import annotations

import asyncio
import pickle
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from burnish.environments import worker_set
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.host import WorkerHost
from burnish.environments.pool import (
    EnvironmentPool,
    EnvironmentSpec,
    EpisodeFailedError,
    OpenEpisode,
    check_start,
)
from burnish.environments.process import start_process
from burnish.runtime.ray.environment_workers import RemoteWorker

HOSTILE = str(Path(__file__).with_name("hostile.py"))
SAY = {"role": "assistant", "content": "abc"}


@asynccontextmanager
async def pool(
    name: str, options: dict[str, Any] | None = None, *, python: str | None = None, workers: int = 1
) -> AsyncIterator[EnvironmentPool]:
    environments = EnvironmentPool(
        EnvironmentSpec(f"{HOSTILE}:{name}", options or {}, python), workers=workers
    )
    try:
        await environments.start()
        yield environments
    finally:
        await environments.close()


def test_async_environment_in_an_interpreter_without_packages(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    closings = tmp_path / "closings"

    async def play() -> list[float]:
        async with pool("Async", {"path": str(closings)}, python=str(bare)) as environments:
            episodes = [await environments.open({"prompt": "p"}, 1, timeout_s=30) for _ in range(5)]
            assert episodes[0].start.messages == ({"role": "user", "content": "p"},)
            steps = await asyncio.gather(*(e.step(SAY, timeout_s=30) for e in episodes))
            for episode in episodes:
                await episode.close()
            return [step.rewards["length"] for step in steps if step.done]

    assert asyncio.run(play()) == [3.0] * 5
    assert closings.read_text() == "closed\n" * 5


def test_failures_have_a_status_and_the_pool_recovers() -> None:
    """Each failing episode ends with a status; workers that died or hang are replaced."""

    few = asyncio.Semaphore(4)

    async def one(environments: EnvironmentPool, seed: int, salt: str) -> str:
        async with few:
            return await attempt(environments, seed, salt)

    async def attempt(environments: EnvironmentPool, seed: int, salt: str) -> str:
        try:
            episode = await environments.open({"salt": salt}, seed, timeout_s=1)
        except EpisodeFailedError as failed:
            return failed.status
        try:
            while not (await episode.step(SAY, timeout_s=1)).done:
                pass
            return "done"
        except EpisodeFailedError as failed:
            return failed.status
        finally:
            await episode.close()

    async def play() -> tuple[list[str], list[str]]:
        async with pool("Hostile", {"rate": 0.3}, workers=2) as environments:
            failing = await asyncio.gather(*(one(environments, i, "a") for i in range(40)))
        async with pool("Hostile", {"rate": 0.0}, workers=2) as environments:
            return failing, [await one(environments, i, "b") for i in range(3)]

    failing, working = asyncio.run(asyncio.wait_for(play(), 100))
    assert len(failing) == 40
    outcomes = set(failing)  # (a step that hangs can also lose its worker to another episode)
    assert {"done", "env_error", "infra_error"} == outcomes - {"timeout"}
    assert working == ["done"] * 3
    assert not workers()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("WithoutStep", {}, "no method step"),
        ("Missing", {}, "has no 'Missing'"),
        ("Hostile", {"rates": 1}, "rates"),
    ],
)
def test_unusable_environments_are_refused_at_start(
    name: str, options: dict[str, Any], message: str
) -> None:
    async def play() -> None:
        async with pool(name, options):
            pass

    with pytest.raises(EnvironmentSetupError, match=message):
        asyncio.run(play())


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true"])
def test_an_interpreter_that_does_not_start_is_refused(python: str) -> None:
    async def play() -> None:
        async with pool("Async", python=python):
            pass

    with pytest.raises(EnvironmentSetupError, match="worker"):
        asyncio.run(play())


GOOD: dict[str, Any] = {"start": [{"role": "user", "content": "a"}], "step": {"done": True}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": []}, "no messages"),
        ({"start": [{"role": "user"}]}, "expected a list of"),
        ({"start": "text"}, "expected a list of"),
        ({"start": [{"role": "user", "content": [{"type": "image"}]}]}, "only text parts"),
        ({"step": {"done": 1}}, "done=1"),
        ({"step": {"messages": []}}, "nothing to respond|nothing to"),
        ({"step": {"done": True, "rewards": {"a": "1"}}}, "finite numbers"),
        ({"step": {"done": True, "rewards": {"a": float("nan")}}}, "finite numbers"),
        ({"step": {"done": True, "rewards": {"a": 10**400}}}, "finite numbers"),
        ({"step": {"done": True, "reward": 1}}, "unknown keys? reward"),
        ({"step": 5}, "returned int 5"),
    ],
)
def test_invalid_results_are_errors_of_the_environment(
    change: dict[str, Any], message: str
) -> None:
    async def play() -> None:
        async with pool("Fixed") as environments:
            episode = await environments.open({**GOOD, **change}, 0, timeout_s=30)
            await episode.step(SAY, timeout_s=30)

    with pytest.raises(EpisodeFailedError, match=message) as failed:
        asyncio.run(play())
    assert failed.value.status == "env_error"


class Actor:
    """A worker behind a transport that pickles arguments and results, as Ray's actors do."""

    def __init__(self) -> None:
        self.host = WorkerHost()

    def __getattr__(self, method: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            try:
                copied = pickle.loads(pickle.dumps(arguments))
                return pickle.loads(pickle.dumps(await getattr(self.host, method)(*copied)))
            except Exception as error:
                raise ConnectionError("the transport failed") from error

        return SimpleNamespace(remote=remote)


async def behind_an_actor(python: str | None) -> RemoteWorker:
    ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=ConnectionError), kill=lambda _: None)
    worker = RemoteWorker(ray, Actor())
    await worker.start(python)
    return worker


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("start_worker", [start_process, behind_an_actor])
def test_deeply_nested_values_are_errors_of_the_environment_and_not_of_its_worker(
    start_worker: Any,
) -> None:
    """What user code sent or returned does not end the other episodes of the worker."""

    async def play() -> list[str]:
        spec = EnvironmentSpec(f"{HOSTILE}:Fixed", {})
        environments = EnvironmentPool(spec, workers=1, start_worker=start_worker)
        await environments.start()
        try:
            other = await environments.open(GOOD, 0, timeout_s=30)
            outcomes = [await attempt(environments, levels) for levels in (100, 300, 900, 100_000)]
            await other.step(SAY, timeout_s=30)
            return outcomes
        finally:
            await environments.close()

    async def attempt(environments: EnvironmentPool, levels: int) -> str:
        start = [{**GOOD["start"][0], "extra": nested(levels)}]
        try:
            episode = await environments.open({**GOOD, "start": start}, 0, timeout_s=30)
        except EpisodeFailedError as failed:
            return failed.status
        await episode.close()
        assert episode.start.messages[0]["extra"] == start[0]["extra"]
        return "played"

    assert asyncio.run(play()) == ["played", "env_error", "env_error", "env_error"]


async def odd_step(environments: EnvironmentPool, kind: str, timeout_s: float = 20.0) -> str:
    """Return the answer of one step, or the status and the message of its failure."""
    episode = await environments.open({"kind": kind}, 0, timeout_s=30)
    try:
        step = await episode.step(SAY, timeout_s=timeout_s)
        return str(step.messages[0]["content"])
    except EpisodeFailedError as failed:
        return f"{failed.status}: {failed}"
    finally:
        await episode.close()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("huge_reply", "env_error: .* 20971.* bytes"),
        ("huge_error", "env_error: .*ValueError: aaa"),
        ("error_without_text", "env_error: .*its text raised RuntimeError"),
        ("child_reads_stdin", "the child read b''"),
    ],
)
def test_an_odd_step_does_not_disturb_the_other_episodes_of_its_worker(
    kind: str, expected: str
) -> None:
    async def play() -> list[str]:
        async with pool("Odd") as environments:
            return await asyncio.gather(*(odd_step(environments, k) for k in (kind, "is_slow")))

    odd, other = asyncio.run(asyncio.wait_for(play(), 60))
    assert re.match(expected, odd, re.DOTALL) and len(odd) < 30_000
    assert other == "slow"


def test_a_worker_with_a_step_that_takes_too_long_is_replaced() -> None:
    async def play() -> tuple[str, str]:
        async with pool("Odd") as environments:
            slow = await odd_step(environments, "is_slow", 0.1)
            return slow, await odd_step(environments, "works")

    slow, other = asyncio.run(asyncio.wait_for(play(), 60))
    assert re.match("timeout: .* took more than 0.1 s", slow) and other == "works"


@pytest.mark.parametrize("kind", ["fork_survives", "child_holds_pipes"])
def test_processes_that_hold_the_pipes_of_a_worker_do_not_delay_its_end(kind: str) -> None:
    """A fork or a child with a session of its own outlives the worker, whose pipes it has. The
    step of the killed worker fails at once, long before its limit of 20 s."""

    async def play() -> tuple[str, str]:
        async with pool("Odd") as environments:
            return await odd_step(environments, kind), await odd_step(environments, "works")

    started = time.monotonic()
    first, second = asyncio.run(asyncio.wait_for(play(), 60))
    assert time.monotonic() - started < 15
    if kind == "child_holds_pipes":
        psutil.Process(int(first)).kill()
    else:
        assert first.startswith("infra_error: ")
    assert second == "works"


def test_content_in_parts_is_joined_to_text() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    start = check_start({"messages": [{"role": "user", "content": parts, "name": "x"}]})
    assert start.messages == ({"role": "user", "content": "a b", "name": "x"},)


def test_a_worker_that_started_is_not_forgotten_if_another_one_fails(tmp_path: Path) -> None:
    """Two workers start; the one that takes the lock file first fails to import the environment."""
    code = tmp_path / "half.py"
    code.write_text(
        "import os\n\ntry:\n    os.close(os.open(__file__ + '.lock', os.O_CREAT | os.O_EXCL))\n"
        "except FileExistsError:\n    pass\nelse:\n    raise ImportError('the first fails')\n\n\n"
        "class Half:\n    reset = step = lambda self, *args: None\n"
    )

    async def play() -> tuple[int, int]:
        environments = EnvironmentPool(EnvironmentSpec(f"{code}:Half", {}), workers=2)
        with pytest.raises(EnvironmentSetupError, match="the first fails"):
            await environments.start()
        started = len(workers())
        await environments.close()
        return started, len(workers())

    assert asyncio.run(asyncio.wait_for(play(), 60)) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "timeouts", "expected"),
    [
        # The blocking step is charged; its worker is ended, so the other one does not wait for 60 s
        ("blocks", (0.1, 60), ("timeout: .*blocks all episodes.*in blocks", "infra_error: .*died")),
        # The other step ends first; the blocking one may still return
        ("blocks", (60, 0.1), ("running", "infra_error: .*another episode blocks")),
        # Without an answer of the process nobody can be charged, unless there is only one episode
        ("stops", (0.1, 60), ("infra_error: .*another episode", "infra_error: .*died")),
        ("stops", (0.1,), ("timeout: .*took more than 0.1 s$",)),
        ("waits", (0.1, 0.1), ("timeout: .*took more than 0.1 s$",) * 2),
    ],
)
def test_an_episode_that_blocks_its_worker_does_not_let_others_time_out(
    kind: str,
    timeouts: tuple[float, ...],
    expected: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step blocks, the second one waits."""
    monkeypatch.setattr(worker_set, "PING_TIMEOUT_S", 2.0 if kind == "stops" else 60.0)
    begun = tmp_path / "begun"

    async def step(episode: OpenEpisode, timeout_s: float) -> str:
        try:
            await episode.step(SAY, timeout_s=timeout_s)
        except EpisodeFailedError as failed:
            return f"{failed.status}: {failed}"
        return "returned"

    async def play() -> list[str]:
        async with pool("Shared") as environments:
            episodes = [
                await environments.open({"kind": k, "path": str(begun)}, 0, timeout_s=30)
                for k in (kind, "waits")[: len(timeouts)]
            ]
            first = asyncio.create_task(step(episodes[0], timeouts[0]))
            while kind == "blocks" and not begun.exists():
                await asyncio.sleep(0.01)
            rest = [await step(*pair) for pair in zip(episodes[1:], timeouts[1:], strict=True)]
            ended = timeouts[0] < 60
            outcomes = [await first if ended else "running", *rest]
            first.cancel()
            for episode in episodes:
                await episode.close()
            return outcomes

    outcomes = asyncio.run(asyncio.wait_for(play(), 60))
    for text, pattern in zip(outcomes, expected, strict=True):
        assert re.match(pattern, text, re.DOTALL), text


def workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [p for p in children if any("environments/worker.py" in a for a in p.cmdline())]


def test_a_blocked_worker_ends_with_its_children_after_its_parent(tmp_path: Path) -> None:
    """The parent gets SIGKILL while a coroutine blocks the event loop of the worker."""
    pids = tmp_path / "pids"
    code = (
        "import asyncio\nfrom burnish.environments.pool import *\n\n\nasync def play():\n"
        f"    p = EnvironmentPool(EnvironmentSpec({HOSTILE + ':Blocking'!r}, "
        f"{{'path': {str(pids)!r}}}), workers=1)\n    await p.start()\n"
        "    await (await p.open({}, 0, timeout_s=30)).step({}, timeout_s=60)\n\n\n"
        "asyncio.run(play())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"), 60)
    finally:
        parent.kill()
        parent.wait()
    left = [int(pid) for pid in pids.read_text().split()]
    wait_for(lambda: not any(is_running(pid) for pid in left), 20)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.05)
