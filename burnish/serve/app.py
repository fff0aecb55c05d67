"""The protocol: ``POST /get_reward`` in the form of OpenRLHF's reward servers, ``GET /health``, and
the limits in front of both. Whatever is refused is told why, as ``{"error": ...}``.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.serve.base import ServeOptions
from burnish.serve.batcher import Batcher, QueueFullError, ScoreError
from burnish.serve.scorer import Row, TextError, TextScorer

REWARD_PATH = "/get_reward"
_BODY_TIMEOUT_S = 60.0
_RETRY_AFTER_S = 1
_MAX_HELD = 16  # requests of the largest size that may arrive at a time


class RewardApp:
    """One reward model behind HTTP. ``asgi`` is the application.

    The event loop only moves bytes: requests are read and tokenised in one thread, and the model
    computes in another (``Batcher``).
    """

    def __init__(
        self,
        scorer: TextScorer,
        options: ServeOptions,
        *,
        token: str | None,
        model: str,
        version: str,
    ) -> None:
        self._scorer, self._options = scorer, options
        self._token = None if token is None else token.encode()
        self._model, self._version = model, version
        self.batcher = Batcher(
            scorer.score,
            max_tokens=options.max_batch_tokens,
            max_wait_s=options.max_wait_ms / 1e3,
            max_queue=options.max_queue,
        )
        self._held_bytes = 0
        """Size of the requests that have arrived, whole or in part, and are not tokenised yet."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self.asgi = Starlette(
            routes=[
                Route(REWARD_PATH, self._get_reward, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _refusal},
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.batcher.start()
        try:
            yield
        finally:
            await self.batcher.stop()
            await asyncio.to_thread(self._reader.shutdown)

    async def _health(self, _: Request) -> Response:
        """Answers without a token, so that whatever watches the server needs none."""
        ready = self.batcher.running
        state = {
            "ready": ready,
            "model": self._model,
            "version": self._version,
            "queue_length": self.batcher.queue_length,
        }
        return JSONResponse(state, status_code=200 if ready else 503)

    async def _get_reward(self, request: Request) -> Response:
        self._check_headers(request)
        loop, body = asyncio.get_running_loop(), bytearray()
        try:
            await self._read(request, body)
            rows = await loop.run_in_executor(self._reader, self._rows, body)
        finally:
            self._held_bytes -= len(body)
        try:
            scores = await self._scores(request, rows)
        except QueueFullError as error:
            raise _come_back_later(str(error)) from error
        except ScoreError as error:
            raise HTTPException(500 if self.batcher.running else 503, str(error)) from error
        # JSON has no NaN; null costs that text its reward, and no other.
        rewards = [score if math.isfinite(score) else None for score in scores]
        logs = {
            "num_tokens": [len(row.ids) for row in rows],
            "truncated": [int(row.truncated) for row in rows],
        }
        return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": logs})

    async def _scores(self, request: Request, rows: list[Row]) -> list[float]:
        """The scores of ``rows``. Where the client leaves they are not computed any more (uvicorn
        and Starlette let a handler run on)."""
        scores = asyncio.create_task(self.batcher.scores(rows))
        gone = asyncio.create_task(_has_left(request))
        try:
            await asyncio.wait([scores, gone], return_when=asyncio.FIRST_COMPLETED)
            if not scores.done():
                raise HTTPException(400, "the connection ended before the reply")
            return await scores
        finally:
            scores.cancel()
            gone.cancel()
            await asyncio.wait([scores, gone])

    def _check_headers(self, request: Request) -> None:
        if self._token is not None:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                raise HTTPException(
                    401,
                    "the header 'Authorization: Bearer TOKEN' is missing or has another token",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no web page can send to another server unasked
            raise HTTPException(415, "the header 'Content-Type: application/json' is needed")

    async def _read(self, request: Request, body: bytearray) -> None:
        """Fill ``body``."""
        limit = self._options.max_request_bytes
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                size = await self._collect(request, body, limit)
        except TimeoutError as error:
            what = f"the request did not arrive within {_BODY_TIMEOUT_S:g} s"
            raise HTTPException(408, what, headers={"Connection": "close"}) from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the connection ended before the request did") from error
        if size > limit:
            raise HTTPException(
                413, f"the request is larger than {limit} bytes; send fewer texts at a time"
            )

    async def _collect(self, request: Request, body: bytearray, limit: int) -> int:
        """Fill ``body`` up to ``limit``; returns how much came. Of a body that is too large a good
        part is read and thrown away: a client that is cut off while it writes may never see why."""
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                self._hold(body, chunk)
            elif size > 4 * limit:
                break
        return size

    def _hold(self, body: bytearray, chunk: bytes) -> None:
        if self._held_bytes + len(chunk) > _MAX_HELD * self._options.max_request_bytes:
            raise _come_back_later("too many large requests arrive at once")
        body += chunk
        self._held_bytes += len(chunk)

    def _rows(self, body: bytearray) -> list[Row]:
        """The texts of a request, tokenised."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the request is no JSON: {error}") from error
        queries = request.get("query") if isinstance(request, dict) else None
        _check_texts("query", queries)
        assert isinstance(queries, list)
        if len(queries) > self._options.max_items:
            raise HTTPException(
                413,
                f"{len(queries)} texts in one request, and the limit is {self._options.max_items}; "
                "send several requests",
            )
        prompts = request.get("prompts")
        if prompts is None:
            prompts = [None] * len(queries)
        else:
            _check_texts("prompts", prompts)
        if len(prompts) != len(queries):
            what = f"'prompts' has {len(prompts)} entries and 'query' has {len(queries)}"
            raise HTTPException(422, what)
        rows = []
        for i, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
            try:
                rows.append(self._scorer.encode(query, prompt))
            except TextError as error:
                raise HTTPException(422, f"query[{i}] {error}") from error
        return rows


async def _has_left(request: Request) -> None:
    """Return when the connection of a request that was read to its end is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_texts(name: str, texts: Any) -> None:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        example = '{"query": ["prompt and response", ...], "prompts": ["prompt", ...]}'
        raise HTTPException(422, f"'{name}' must be a list of one or more texts: {example}")


def _come_back_later(why: str) -> HTTPException:
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    return HTTPException(429, f"{why}; come back later", headers=headers)


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(
        {"error": error.detail}, status_code=error.status_code, headers=error.headers
    )
