"""Worker processes of multi-turn environments."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EnvironmentPool, EnvironmentSpec, EpisodeFailedError

HOSTILE = str(Path(__file__).with_name("hostile.py"))
SAY = {"role": "assistant", "content": "abc"}


@asynccontextmanager
async def pool(
    name: str, options: dict[str, Any] | None = None, *, python: str | None = None, workers: int = 1
) -> AsyncIterator[EnvironmentPool]:
    made = EnvironmentPool(
        EnvironmentSpec(f"{HOSTILE}:{name}", options or {}, python), workers=workers
    )
    try:
        await made.start()
        yield made
    finally:
        await made.close()


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
    assert {"done", "env_error", "timeout", "infra_error"} == set(failing)
    assert working == ["done"] * 3
    mine = psutil.Process().children(recursive=True)
    assert not [p for p in mine if any("environments/worker.py" in a for a in p.cmdline())]


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


GOOD = {"start": [{"role": "user", "content": "a"}], "step": {"done": True}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": []}, "no messages"),
        ({"start": [{"role": "user"}]}, "expected a list of"),
        ({"start": "text"}, "expected a list of"),
        ({"step": {"done": 1}}, "done=1"),
        ({"step": {"messages": []}}, "nothing to respond|nothing to"),
        ({"step": {"done": True, "rewards": {"a": "1"}}}, "finite numbers"),
        ({"step": {"done": True, "rewards": {"a": float("nan")}}}, "finite numbers"),
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
