"""Config of a reward server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.paths import client_advice, client_problems
from burnish.rewards.config import RewardSettings

_EXAMPLE = "http://host:5000/get_reward"


class RemoteReward(RewardSettings):
    """A reward server over HTTP, compatible with OpenRLHF's.

    ``POST {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}`` returns
    ``{"rewards": [number, ...]}``, optionally with ``"scores"`` and ``"extra_logs": {name: number
    or list}``, whose means are the metrics ``reward/<name>/scores`` and ``reward/<name>/<key>``.
    ``burnish serve-reward MODEL`` is such a server."""

    runs_alone: ClassVar[bool] = False
    has_check: ClassVar[bool] = True

    kind: Literal["remote"] = "remote"
    urls: tuple[str, ...] = Field(min_length=1)
    """Full addresses (``http://host:5000/get_reward``) of equivalent servers; the least busy one
    gets a request. http is unencrypted, token included: use https outside a private network."""
    batch_size: int = Field(32, ge=1)
    """Maximum responses per request."""
    max_concurrency: int = Field(16, ge=1)
    """Maximum concurrent requests, over all ``urls``."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Timeout of opening a connection."""
    read_timeout_s: float = Field(180.0, gt=0)
    """Timeout from request to the last byte of its reply."""
    retries: int = Field(5, ge=0)
    """Retries after a connection error, a timeout, or status 408, 425, 429 or 5xx, plus one per
    additional URL. After other failures, each URL not yet tried gets the request once (see
    ``on_reward_failure.retries``)."""
    backoff_s: float = Field(1.0, ge=0)
    """Wait before the first retry if no other URL is left; doubles each time, and half is random. A
    longer Retry-After takes precedence."""
    max_backoff_s: float = Field(30.0, ge=0)
    """Maximum wait, even with a longer Retry-After."""
    rest_s: float = Field(10.0, ge=0)
    """Seconds without requests to a failed URL while another one works."""
    max_reply_bytes: int = Field(4 << 20, ge=1)
    """Maximum size of a reply. A longer one is a failure, not read to its end."""
    token_env: str | None = None
    """Environment variable with the token for ``Authorization: Bearer``. Set its name, not the
    token: the recipe is written to the run folder. None: no token."""
    special_tokens: bool = True
    """Include the response's special tokens, such as its end token, in ``query``, to show
    truncation. False: text without them, as for function rewards."""
    use_proxy: bool = False
    """Use the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY. False: ignore them."""

    def rules(self) -> Iterator[str]:
        yield from client_problems(self, _EXAMPLE)

    def advice(self) -> Iterator[str]:
        yield from client_advice(self)
