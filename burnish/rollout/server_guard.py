"""ASGI middleware for ``vllm serve --middleware``: the token for every path of a server.

vLLM's ``--api-key`` protects the paths below ``/v1`` and ``/inference`` alone. The development
endpoints, through which weights are loaded and methods of the workers are called, would accept
requests of everybody who reaches the port. Nothing here imports vllm.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from burnish import secret

VARIABLE = "VLLM_API_KEY"
"""Environment variable with the token, from which vLLM reads it too."""
_OPEN = ("/health",)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class TokenGuard:
    """Refuses requests without ``Authorization: Bearer TOKEN`` with status 401, except for
    ``/health``. Raises ValueError if the variable is not set."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = _digest(f"Bearer {secret.read_token(VARIABLE)}".encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan" or scope.get("path") in _OPEN:
            await self._app(scope, receive, send)
            return
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        if scope["type"] == "http" and hmac.compare_digest(_digest(authorization), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _digest(text: bytes) -> bytes:
    """Return a hash, so that a comparison does not depend on the length of the token."""
    return hashlib.sha256(text).digest()
