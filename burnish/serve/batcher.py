"""Batching of the rows of many requests into forward passes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from burnish.errors import BurnishError
from burnish.serve.scorer import EncodedText

log = logging.getLogger("burnish")


class QueueFullError(BurnishError, RuntimeError):
    """The request would exceed the limit of waiting rows."""


class ScoreError(BurnishError, RuntimeError):
    """The forward pass of a row failed, or the server is stopping."""


@dataclass(frozen=True)
class _Waiting:
    row: EncodedText
    answer: asyncio.Future[float]
    since: float
    """time.monotonic seconds"""


class Batcher:
    """A queue of rows that are scored in batches.

    A forward pass starts when the waiting rows fill ``max_tokens``, or when the oldest has waited
    ``max_wait_s``. ``score`` runs in a dedicated thread, so the event loop is never blocked and one
    pass runs at a time. Rows that arrive during a pass wait for the next one.

    All methods must run on one event loop. At most ``max_queue`` rows wait.
    """

    def __init__(
        self,
        score: Callable[[Sequence[EncodedText]], list[float]],
        *,
        max_tokens: int,
        max_wait_s: float,
        max_queue: int,
    ) -> None:
        self._score = score
        self._max_tokens, self._max_wait_s, self._max_queue = max_tokens, max_wait_s, max_queue
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None
        self.num_passes = 0
        """Number of completed forward passes."""

    @property
    def queue_length(self) -> int:
        """Number of waiting rows."""
        return len(self._queue)

    @property
    def running(self) -> bool:
        """Return whether waiting rows will be scored."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Start scoring rows from the queue."""
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop the thread after the current pass. Rows without a score get a ScoreError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for waiting in self._queue:
            _fail(waiting, "the server is stopping")
        self._queue.clear()
        await asyncio.to_thread(self._thread.shutdown)

    async def scores(self, rows: Sequence[EncodedText]) -> list[float]:
        """Return one score per row.

        Raises QueueFullError if the rows do not fit into the queue, ScoreError if a pass failed.
        """
        if not self.running:
            raise ScoreError("the server is stopping")
        if len(self._queue) + len(rows) > self._max_queue:
            raise QueueFullError(
                f"{len(self._queue)} texts are waiting, and the limit is {self._max_queue}"
            )
        loop, now = asyncio.get_running_loop(), time.monotonic()
        answers = [loop.create_future() for _ in rows]
        self._queue += [_Waiting(r, a, now) for r, a in zip(rows, answers, strict=True)]
        self._arrived.set()
        try:
            scores = await asyncio.gather(*answers, return_exceptions=True)
        except asyncio.CancelledError:  # the answers are cancelled too: remove their rows at once
            self._queue = deque(w for w in self._queue if not w.answer.done())
            raise
        for score in scores:
            if isinstance(score, BaseException):
                raise score
        return [score for score in scores if isinstance(score, float)]

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._fill()
            batch = self._take()
            if not batch:
                continue
            try:
                rows = [waiting.row for waiting in batch]
                scores = await loop.run_in_executor(self._thread, self._score, rows)
                scored = list(zip(batch, scores, strict=True))
            except Exception as error:  # becomes the answer of every row in the pass
                log.exception("a pass over %d texts failed", len(batch))
                for waiting in batch:
                    _fail(waiting, f"the model failed ({type(error).__name__})", error)
                continue
            except BaseException:
                for waiting in batch:
                    _fail(waiting, "the server is stopping")
                raise
            self.num_passes += 1
            for waiting, score in scored:
                if not waiting.answer.done():
                    waiting.answer.set_result(score)

    async def _fill(self) -> None:
        """Wait until a pass can start."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        until = self._queue[0].since + self._max_wait_s
        while sum(len(w.row.ids) for w in self._queue) < self._max_tokens:
            left = until - time.monotonic()
            if left <= 0:
                return
            self._arrived.clear()
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """Take the oldest rows that fit into one pass, and discard cancelled ones."""
        batch: list[_Waiting] = []
        room = self._max_tokens
        while self._queue:
            waiting = self._queue[0]
            if waiting.answer.done():
                self._queue.popleft()
                continue
            room -= len(waiting.row.ids)
            if batch and room < 0:
                break
            batch.append(self._queue.popleft())
        return batch


def _fail(waiting: _Waiting, reason: str, cause: Exception | None = None) -> None:
    if not waiting.answer.done():
        error = ScoreError(reason)
        error.__cause__ = cause
        waiting.answer.set_exception(error)
