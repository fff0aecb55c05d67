"""The number, load and replacement of workers, with workers that are plain objects."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import Any

import pytest

from burnish.environments.worker_set import NoWorkerError, ReplyError, WorkerEndedError, WorkerSet
from burnish.errors import BurnishError


class FakeWorker:
    def __init__(self) -> None:
        self.alive, self.ended = True, False

    async def call(self, timeout_s: float, **request: Any) -> Any:
        return request

    async def end(self) -> None:
        self.alive, self.ended = False, True


class Starter:
    """Starts fake workers; the numbers in ``failing`` (from 1) fail."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.attempts = 0
        self.workers: list[FakeWorker] = []

    async def __call__(self) -> FakeWorker:
        self.attempts += 1
        if self.attempts in self.failing:
            raise BurnishError(f"start {self.attempts} failed")
        self.workers.append(FakeWorker())
        return self.workers[-1]


def test_sessions_go_to_the_worker_with_the_fewest() -> None:
    async def play() -> list[int]:
        starter = Starter()
        workers = WorkerSet(starter, 3)
        await workers.start()
        first = [await workers.acquire() for _ in range(6)]
        await workers.release(first[1])  # the second worker has one session, the others two
        sessions = [*first[:1], await workers.acquire(), *first[2:], await workers.acquire()]
        assert starter.attempts == 3
        await workers.close()
        assert all(worker.ended for worker in starter.workers)
        return [starter.workers.index(s.slot.worker) for s in sessions]

    assert asyncio.run(play()) == [0, 1, 2, 0, 1, 2, 0]


def test_a_retired_worker_is_replaced_at_once_and_ended_after_its_last_session() -> None:
    async def play() -> None:
        starter = Starter()
        workers = WorkerSet(starter, 1)
        sessions = [await workers.acquire() for _ in range(2)]
        sessions[0].slot.retired = True
        other = await workers.acquire()
        assert other.slot.worker is starter.workers[1] and starter.attempts == 2
        await workers.release(sessions[0])
        assert not starter.workers[0].ended
        await workers.release(sessions[1])
        assert starter.workers[0].ended and not starter.workers[1].ended
        await workers.release(other)
        assert not starter.workers[1].ended

    asyncio.run(play())


def test_a_failure_to_start_is_a_warning_while_a_worker_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play() -> None:
        starter = Starter(3)
        workers = WorkerSet(starter, 2)
        await workers.start()
        starter.workers[0].alive = False
        with caplog.at_level(logging.WARNING, "burnish"):
            assert (await workers.acquire()).slot.worker is starter.workers[1]
        assert "start 3 failed" in caplog.text and starter.workers[0].ended
        assert (await workers.acquire()).slot.worker is starter.workers[2]

    asyncio.run(play())


def test_the_third_failure_to_start_in_a_row_is_final() -> None:
    """Starts 1, 2 and 4 to 6 fail. Start 3 succeeds, so the count starts again."""

    async def play() -> None:
        starter = Starter(1, 2, 4, 5, 6)
        workers = WorkerSet(starter, 1)
        for number in (1, 2):
            with pytest.raises(NoWorkerError, match=f"start {number} failed"):
                await workers.acquire()
        await workers.acquire()
        starter.workers[0].alive = False
        for number in (4, 5):
            with pytest.raises(NoWorkerError, match=f"start {number} failed"):
                await workers.acquire()
        with pytest.raises(BurnishError, match="start 6 failed") as caught:
            await workers.acquire()
        assert not isinstance(caught.value, NoWorkerError)

    asyncio.run(play())


@pytest.mark.parametrize("error", [ReplyError("ValueError", "no", "at"), WorkerEndedError("died")])
def test_errors_of_calls_can_be_sent_to_another_process(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
