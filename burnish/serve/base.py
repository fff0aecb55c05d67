"""Settings of a server, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from burnish.config.model import Dtype
from burnish.errors import BurnishError


class ServeError(BurnishError, RuntimeError):
    """The server cannot start: what is wrong, and what to do."""


@dataclass(frozen=True)
class ServeOptions:
    """How a reward model is served. The defaults are those of ``burnish serve-reward``."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but this machine's own needs a token."""
    port: int = 5000
    """0: a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, beside this machine's own, under which clients may address the server."""
    token_env: str | None = None
    """Environment variable with the token that requests must bring. None: no token."""
    dtype: Dtype = "fp32"
    """Number format of the model."""
    device: str = "auto"
    """``auto`` (CUDA if there is one, else CPU), or a torch device."""
    max_batch_tokens: int = 16384
    """Tokens of one forward pass, and so the longest text as well."""
    max_wait_ms: float = 5.0
    """Longest time that a text waits for others to fill its pass."""
    max_len: int | None = None
    """Longest text in tokens. None: the model's positions, at most ``max_batch_tokens``."""
    max_chars: int | None = None
    """Longest text in characters, checked before it is tokenised. None: 32 per token of the longest
    text."""
    overlong: Literal["error", "truncate_left"] = "error"
    """What happens to a longer text: its request is refused, or tokens are cut off its left end
    (and counted in ``extra_logs``)."""
    append_eos: bool = False
    """End every text with the end token, whether it came with one or not. False: as it comes."""
    max_items: int = 1024
    """Texts in one request."""
    max_request_bytes: int = 16 << 20
    """Size of a request."""
    max_queue: int = 4096
    """Texts that may wait; a request that does not fit is told to come back later (429)."""
    shutdown_s: float = 30.0
    """Seconds that requests under way have to finish after SIGTERM."""

    def check(self) -> None:
        """Raise ServeError with every problem."""
        problems = list(self._problems())
        if problems:
            raise ServeError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        for name in ("max_batch_tokens", "max_items", "max_request_bytes", "max_queue"):
            if vars(self)[name] < 1:
                yield f"{name}={vars(self)[name]} must be at least 1"
        if self.max_len is not None and not 1 <= self.max_len <= self.max_batch_tokens:
            yield (
                f"max_len={self.max_len} must be between 1 and max_batch_tokens="
                f"{self.max_batch_tokens}: a text goes through the model whole"
            )
        if self.max_items > self.max_queue:
            yield (
                f"max_items={self.max_items} is more than max_queue={self.max_queue}, so such a "
                "request would never fit; lower the first or raise the second"
            )
        if self.max_chars is not None and self.max_chars < 1:
            yield f"max_chars={self.max_chars} must be at least 1"
        if not 0 <= self.port <= 65535:
            yield f"port={self.port} must be between 0 and 65535"
        if not 0 <= self.max_wait_ms <= 10_000:
            yield f"max_wait_ms={self.max_wait_ms:g} must be between 0 and 10000"
