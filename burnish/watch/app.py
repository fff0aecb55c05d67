"""The HTTP application of ``burnish watch``: pages, JSON, and server-sent events. Read only.

Run folders are read in one thread, searches in two others; the event loop only moves bytes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from burnish.errors import BurnishError
from burnish.report.build import report_html
from burnish.serve.guard import RequestGuard, ServerLimits
from burnish.watch import views
from burnish.watch.library import Library, UnknownRunError
from burnish.watch.plain import login_page, message_page, plain_runs
from burnish.watch.scan import search

T = TypeVar("T")

COOKIE = "burnish_watch"
_ASSETS: Mapping[str, tuple[str, str]] = {
    **{
        f"{name}.js": ("burnish.watch", "text/javascript")
        for name in ("core", "runs", "run", "step", "tokens", "sample", "time", "main", "login")
    },
    "watch.css": ("burnish.watch", "text/css"),
    "page.css": ("burnish.report", "text/css"),
    "charts.js": ("burnish.report", "text/javascript"),
    "samples.js": ("burnish.report", "text/javascript"),
    "uPlot.iife.min.js": ("burnish.report", "text/javascript"),
    "uPlot.min.css": ("burnish.report", "text/css"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_RUNS_EVERY_S, _RUN_EVERY_S = 2.0, 1.0
_HEARTBEAT_S, _LOOK_EVERY_S = 15.0, 0.25
_LONGEST_QUERY = 1000


class WatchApp:
    """The application. ``asgi`` is the ASGI application."""

    def __init__(
        self, library: Library, *, token: str | None, names: tuple[str, ...], refresh_s: float = 1.0
    ) -> None:
        """``names``: further host names of this server. ``refresh_s``: factor of the intervals at
        which files are looked at."""
        self._library, self._token, self._refresh_s = library, token, refresh_s
        self.guard = RequestGuard(ServerLimits(), token=token, names=names)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._searchers = ThreadPoolExecutor(2, thread_name_prefix="search")
        self.is_closing: Callable[[], bool] = lambda: False
        """Whether streams have to end."""
        views_by_path = {
            "run": views.run_page,
            "curves": views.curves,
            "compare": views.compare,
            "steps": views.steps,
            "step": views.step,
            "sample": views.sample,
            "time": views.lanes,
        }
        self.asgi = Starlette(
            routes=[
                Route("/", self._page(self._index)),
                Route("/login", self._login, methods=["GET", "POST"]),
                Route("/plain", self._page(self._plain)),
                Route("/report", self._page(self._report)),
                Route("/assets/{name}", self._asset),
                Route("/api/runs", self._runs),
                Route("/api/events", self._events),
                Route("/api/search", self._search),
                *(Route(f"/api/{p}", self._json(view)) for p, view in views_by_path.items()),
            ],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _refusal},
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.is_closing = lambda: True
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._searchers.shutdown(wait=False, cancel_futures=True)

    async def _read(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    # ---- who may read --------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """Raise HTTPException 401 without the token, as a header or as the cookie of
        :meth:`_login`."""
        self.guard.check_token(request, cookie=COOKIE)

    async def _login(self, request: Request) -> Response:
        """Exchange the token for a cookie that scripts cannot read."""
        if request.method == "GET":
            return _html(login_page(""))
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LONGEST_QUERY:
                break
        token = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not self.guard.is_token(token):
            return _html(login_page("This is not the token."), status=401)
        reply = RedirectResponse("/", status_code=303, headers=_HEADERS)
        reply.set_cookie(COOKIE, token, httponly=True, samesite="lax", max_age=30 * 86400)
        return reply

    def _page(
        self, make: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def page(request: Request) -> Response:
            try:
                self._check(request)
            except HTTPException:
                return RedirectResponse("/login", status_code=303, headers=_HEADERS)
            return await make(request)

        return page

    # ---- pages ---------------------------------------------------------------------------------

    async def _index(self, _: Request) -> Response:
        return _html(_text("burnish.watch", "index.html"))

    async def _asset(self, request: Request) -> Response:
        """Return a script or style sheet. They contain nothing of a run, so none needs the
        token."""
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise HTTPException(404, "there is no such file")
        package, kind = _ASSETS[name]
        headers = {**_HEADERS, "Cache-Control": "no-cache"}
        return Response(_text(package, name), media_type=kind, headers=headers)

    async def _plain(self, _: Request) -> Response:
        """Return the runs as a table without scripts."""

        def rows() -> list[Mapping[str, Any]]:
            return [self._library.row(identifier) for identifier in self._library.scan()]

        return _html(plain_runs(await self._read(rows)))

    async def _report(self, request: Request) -> Response:
        """Return the report of a run, which is readable without scripts."""
        identifier = request.query_params.get("run", "")
        try:
            page = await self._read(lambda: report_html(self._library.run(identifier)))
        except (BurnishError, OSError) as error:
            return _html(message_page(str(error)), status=_status(error))
        # (The page has a policy of its own, with the nonce of its scripts.)
        return HTMLResponse(_encoded(page), headers=_HEADERS)

    # ---- data ----------------------------------------------------------------------------------

    def _json(
        self, view: Callable[[Library, Mapping[str, list[str]]], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def reply(request: Request) -> Response:
            self._check(request)
            parameters = parse_qs(request.url.query, keep_blank_values=True)
            try:
                return _reply(await self._read(partial(view, self._library, parameters)))
            except (BurnishError, OSError) as error:
                raise HTTPException(_status(error), str(error)) from error

        return reply

    async def _runs(self, request: Request) -> Response:
        """Stream the table of runs: ``run`` with a row that is new or changed, ``gone`` with the
        identifier of a run that was removed, ``all`` after every look at all folders."""
        self._check(request)
        return self._stream(self._run_rows())

    async def _run_rows(self) -> AsyncIterator[tuple[str, Any]]:
        sent: dict[str, Any] = {}
        while not self.is_closing():
            found = await self._read(self._library.scan)
            for identifier in sent.keys() - set(found):
                del sent[identifier]
                yield "gone", identifier
            for identifier in found:
                row = await self._read(partial(self._library.row, identifier))
                if sent.get(identifier) != row:
                    sent[identifier] = row
                    yield "run", row
            yield "all", {"runs": len(found), "folder": str(self._library.root), "now": time.time()}
            await asyncio.sleep(_RUNS_EVERY_S * self._refresh_s)

    async def _events(self, request: Request) -> Response:
        """Stream ``watching`` at the beginning, ``changed`` whenever the files of a run change, and
        ``gone`` when it is removed."""
        self._check(request)
        identifier = request.query_params.get("run", "")
        return self._stream(self._changes(identifier))

    async def _changes(self, identifier: str) -> AsyncIterator[tuple[str, Any]]:
        last: object = None
        while not self.is_closing():
            started = time.monotonic()
            try:
                await self._read(partial(self._library.run, identifier))
                signature = await self._read(partial(self._library.signature, identifier))
            except UnknownRunError as error:
                yield "gone", str(error)
                return
            except (BurnishError, OSError) as error:
                yield "problem", str(error)
                signature = str(error)
            if signature != last:
                yield "changed" if last is not None else "watching", {"time": time.time()}
            last = signature
            # Pages that take long to read are looked at less often.
            spent = time.monotonic() - started
            await asyncio.sleep(max(_RUN_EVERY_S, 5 * spent) * self._refresh_s)

    async def _search(self, request: Request) -> Response:
        """Stream the hits of a search over all samples of a run."""
        self._check(request)
        get = request.query_params.get
        text, how = get("text", "")[:_LONGEST_QUERY], get("how", "text")
        if not text or how not in ("text", "prompt_of"):
            raise HTTPException(400, "give text, and how=text or how=prompt_of")
        try:
            run = await self._read(partial(self._library.run, get("run", "")))
            if how == "prompt_of":
                step, split = get("step", ""), get("split", "train")
                text = await self._read(partial(views.prompt_of, run, step, split, text))
        except (BurnishError, OSError) as error:
            raise HTTPException(_status(error), str(error)) from error
        found = search(run.folder, text, how="text" if how == "text" else "prompt")
        return self._stream(self._hits(found))

    async def _hits(self, found: Iterator[dict[str, Any]]) -> AsyncIterator[tuple[str, Any]]:
        loop = asyncio.get_running_loop()
        while not self.is_closing():
            part = await loop.run_in_executor(self._searchers, next, found, None)
            if part is None:
                return
            yield "hits", part

    def _stream(self, events: AsyncIterator[tuple[str, Any]]) -> Response:
        """Return server-sent events, until the server ends. A comment is sent when there was none
        for some seconds, so that a connection whose client is gone ends."""

        async def lines() -> AsyncIterator[str]:
            waiting: asyncio.Task[tuple[str, Any]] | None = None
            last = time.monotonic()
            try:
                while not self.is_closing():
                    waiting = waiting or asyncio.ensure_future(anext(events))
                    done, _ = await asyncio.wait([waiting], timeout=_LOOK_EVERY_S)
                    if not done:
                        if time.monotonic() - last > _HEARTBEAT_S:
                            last = time.monotonic()
                            yield ": alive\n\n"
                        continue
                    try:
                        name, content = waiting.result()
                    except StopAsyncIteration:
                        yield "event: end\ndata: null\n\n"
                        return
                    waiting, last = None, time.monotonic()
                    yield f"event: {name}\ndata: {json.dumps(content, allow_nan=False)}\n\n"
            finally:
                if waiting is not None:
                    waiting.cancel()

        return StreamingResponse(lines(), media_type="text/event-stream", headers=_HEADERS)


def _text(package: str, name: str) -> str:
    return (resources.files(package) / "assets" / name).read_text(encoding="utf-8")


def _html(text: str, *, status: int = 200) -> Response:
    headers = {**_HEADERS, "Content-Security-Policy": _POLICY}
    return HTMLResponse(_encoded(text), status_code=status, headers=headers)


def _encoded(text: str) -> bytes:
    """Return a page as bytes. Texts and names of runs may contain surrogates."""
    return text.encode("utf-8", "replace")


def _reply(content: Any) -> Response:
    # (ASCII: texts of models may contain surrogates, which UTF-8 cannot encode.)
    body = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(body, media_type="application/json", headers=_HEADERS)


def _status(error: Exception) -> int:
    return 404 if isinstance(error, UnknownRunError) else 422


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reply = _reply({"error": error.detail})
    reply.status_code = error.status_code
    return reply
