"""The HTTP application: ``POST /get_reward``, compatible with OpenRLHF's reward servers, and
``GET /health``.

Limits on the content of a request are checked here, limits on connections in ``guard.py``. Errors
are returned as ``{"error": reason}``.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.serve.base import ServeOptions
from burnish.serve.batcher import Batcher, QueueFullError, ScoreError
from burnish.serve.guard import (
    RequestGuard,
    ServerLimits,
    come_back_later,
    refusal,
    while_connected,
)
from burnish.serve.scorer import EncodedText, TextError, TextScorer

REWARD_PATH = "/get_reward"


class RewardApp:
    """An HTTP application that serves one reward model. ``asgi`` is the ASGI application.

    The event loop only moves bytes. Requests are parsed and tokenized in one thread, and the model
    runs in another (``Batcher``).
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
        self._model, self._version = model, version
        self.batcher = Batcher(
            scorer.score,
            max_tokens=options.max_batch_tokens,
            max_wait_s=options.max_wait_ms / 1e3,
            max_queue=options.max_queue,
        )
        limits = ServerLimits(max_request_bytes=options.max_request_bytes)
        self.guard = RequestGuard(limits, token=token, names=(options.host, *options.allowed_hosts))
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self.asgi = Starlette(
            routes=[
                Route(REWARD_PATH, self._get_reward, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: refusal},
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
        """Return the health status. No token is needed, so that monitoring works without one."""
        ready = self.batcher.running
        state = {
            "ready": ready,
            "model": self._model,
            "version": self._version,
            "queue_length": self.batcher.queue_length,
        }
        return JSONResponse(state, status_code=200 if ready else 503)

    async def _get_reward(self, request: Request) -> Response:
        async with self.guard.json_body(request) as body:
            rows = await while_connected(request, self._rows(body))
        try:
            scores = await while_connected(request, self.batcher.scores(rows))
        except QueueFullError as error:
            raise come_back_later(str(error)) from error
        except ScoreError as error:
            raise HTTPException(500 if self.batcher.running else 503, str(error)) from error
        # JSON has no NaN. A null leaves only that text without a reward.
        rewards = [score if math.isfinite(score) else None for score in scores]
        logs = {
            "num_tokens": [len(row.ids) for row in rows],
            "truncated": [int(row.truncated) for row in rows],
        }
        return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": logs})

    async def _rows(self, body: bytearray) -> list[EncodedText]:
        """Tokenize the texts of a request, one at a time.

        Requests are interleaved, and a request whose client disconnects stops after the current
        text.
        """
        read = functools.partial(asyncio.get_running_loop().run_in_executor, self._reader)
        rows: list[EncodedText] = []
        for i, (query, prompt) in enumerate(await read(self._texts, body)):
            try:
                rows.append(await read(self._scorer.encode, query, prompt))
            except TextError as error:
                raise HTTPException(422, f"query[{i}] {error}") from error
        return rows

    def _texts(self, body: bytearray) -> list[tuple[str, str | None]]:
        """Return (query, prompt) of every text of a request."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the request is not JSON: {error}") from error
        queries = request.get("query") if isinstance(request, dict) else None
        _check_texts("query", queries)
        assert isinstance(queries, list)
        if len(queries) > self._options.max_items:
            raise HTTPException(
                413,
                f"{len(queries)} texts in one request, but the limit is {self._options.max_items}; "
                "send several requests",
            )
        prompts = request.get("prompts")
        if prompts is None:
            prompts = [None] * len(queries)
        else:
            _check_texts("prompts", prompts)
        if len(prompts) != len(queries):
            problem = f"'prompts' has {len(prompts)} entries but 'query' has {len(queries)}"
            raise HTTPException(422, problem)
        return list(zip(queries, prompts, strict=True))


def _check_texts(name: str, texts: Any) -> None:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        example = '{"query": ["prompt and response", ...], "prompts": ["prompt", ...]}'
        raise HTTPException(422, f"'{name}' must be a list of one or more texts: {example}")
