"""Config of rewards: the functions, models and servers that score a response."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from burnish.config.base import Node
from burnish.config.model import ModelConfig

StepAggregation = Literal["min", "product", "last", "mean"]


class _Reward(Node):
    name: str | None = None
    """Name in metrics and samples. None: made from the kind."""
    weight: float = 1.0
    """The total reward is the weighted sum of all rewards."""
    running_norm: Literal["mean_std", "std"] | None = None
    """Before its weight, measure this reward in its own mean and spread over the run: all scores so
    far, those of the step included. mean_std: (score - mean) / std. std: score / std, which keeps
    the sign. Kept in checkpoints. Metrics, samples, the band of dynamic sampling and evaluation
    have the plain score; the job generate takes none. None: the score as it is."""


class FunctionReward(_Reward):
    """A Python function, sync or async, for one response or for a batch.

    One: ``def f(prompt, response, label) -> float``. Batch: ``def f(prompts, responses, labels) ->
    list[float]``. A parameter ``metadata`` (batch: ``metadatas``) gets the row's other columns. The
    parameter names decide."""

    kind: Literal["function"] = "function"
    function: str | None = None
    """``path/to/file.py:name`` or ``package.module:name``. None: a callable given to
    ``burnish.run``."""


class ModelReward(_Reward):
    """A reward model made by ``burnish rm``, or a HuggingFace sequence classifier with one
    output."""

    kind: Literal["model"] = "model"
    model: ModelConfig
    """Where it is loaded from."""
    micro_batch_size: int = Field(8, ge=1)
    """Rows per forward pass."""
    normalize: bool = False
    """(score - mean) / std with the ``reward_mean`` and ``reward_std`` in the model's config (of a
    process reward model ``process_reward_stats``), which ``burnish rm`` with ``eval_data`` measures
    and ``burnish export`` writes."""
    step_aggregation: StepAggregation | None = None
    """Process reward models (their config says ``process_reward``) give every step of a response a
    probability, and this makes one score of them: the least, the product, the last, the mean. None:
    min. Other models take none."""
    step_separator: str | None = Field(None, min_length=1)
    """Process reward models: text at which responses are split into steps. None: what the model was
    trained with."""

    def rules(self) -> Iterator[str]:
        if self.normalize and self.running_norm is not None:
            yield (
                f"normalize=true and running_norm={self.running_norm} measure the score twice; "
                "choose one (normalize: as on the held-out rows of burnish rm)"
            )


class MathReward(_Reward):
    """1 if the last answer in the response equals the label as mathematics (math-verify), else 0.
    The last answer is looked for after the last ``</think>``: the last box, ``<answer>`` or
    ``####``, or what follows "answer is"; unmarked, the last formula or number. Labels that are
    words or dates are compared as text; missing labels, lists of several and sentences are errors
    of the data."""

    kind: Literal["math"] = "math"
    timeout_s: float = Field(5.0, gt=0)
    """Seconds one comparison may take before it counts as wrong."""
    num_workers: int = Field(1, ge=1)
    """Worker processes."""


class EnvironmentReward(_Reward):
    """The score that the prompt's own environment gives."""

    kind: Literal["environment"] = "environment"


class RemoteReward(_Reward):
    """A reward server over HTTP, in the form that OpenRLHF's servers have.

    ``POST {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}`` is answered by
    ``{"rewards": [number, ...]}``, optionally with ``"scores"`` and ``"extra_logs": {name: number
    or list}``, whose means become the metrics ``reward/<name>/scores`` and
    ``reward/<name>/<key>``. ``burnish serve-reward MODEL`` is such a server."""

    kind: Literal["remote"] = "remote"
    urls: tuple[str, ...] = Field(min_length=1)
    """Full addresses (``http://host:5000/get_reward``) of servers that give the same rewards. A
    request goes to the least busy one. Through http a token and all texts can be read on the way:
    use https outside a network of your own."""
    batch_size: int = Field(32, ge=1)
    """Most responses in one request."""
    max_concurrency: int = Field(16, ge=1)
    """Most requests under way at a time, over all ``urls``."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Seconds a connection may take to open."""
    read_timeout_s: float = Field(180.0, gt=0)
    """Seconds from sending a request to the last byte of its reply."""
    retries: int = Field(5, ge=0)
    """Times a request is sent again after a connection error, a time-out, status 408, 425, 429 or
    5xx, and besides once more for every further URL. After any other failure it goes to the URLs
    that have not had it, once each (but see ``on_reward_failure.retries``)."""
    backoff_s: float = Field(1.0, ge=0)
    """Wait before the second try where no other URL is left to ask; it doubles with each further
    try. Half of it is random. A server's Retry-After is kept to if it is longer."""
    max_backoff_s: float = Field(30.0, ge=0)
    """No wait is longer than this many seconds, whatever Retry-After says."""
    rest_s: float = Field(10.0, ge=0)
    """Seconds during which a URL that failed is not asked while another one works."""
    max_reply_bytes: int = Field(4 << 20, ge=1)
    """A longer reply is a failure, and is not read to its end."""
    token_env: str | None = None
    """Name of the environment variable whose value is sent as ``Authorization: Bearer``. (The name,
    not the token: the recipe is written to the run folder.) None: no token."""
    special_tokens: bool = True
    """Write the special tokens of the response, such as its end token, into ``query``, so that the
    server can tell an ended response from one that was cut off. False: the text without them, as
    function rewards get it."""
    use_proxy: bool = False
    """Go through the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY name. False: straight to the
    server, whatever they say."""

    def rules(self) -> Iterator[str]:
        for i, url in enumerate(self.urls):
            yield from (f"urls[{i}] {problem}" for problem in _url_problems(url))
        if len(set(self.urls)) < len(self.urls):
            yield "urls has the same URL twice; give each once"
        if self.token_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.token_env):
            yield (
                "token_env is not the name of an environment variable (letters, digits and "
                "underscores); put the token into a variable, and the variable's name here"
            )
        if self.max_backoff_s < self.backoff_s:
            yield (
                f"max_backoff_s={self.max_backoff_s:g} is below backoff_s={self.backoff_s:g}; "
                "lower backoff_s, or raise max_backoff_s"
            )

    def advice(self) -> Iterator[str]:
        plain = [url for url in self.urls if url.startswith("http:") and not _is_local(url)]
        if self.token_env is not None and plain:
            host = urlsplit(plain[0]).hostname
            yield f"the token goes to {host} unencrypted (http); use https"


def _url_problems(url: str) -> Iterator[str]:
    """Yield the problems of a reward server's URL, without repeating a password in it."""
    example = "write it as http://host:5000/get_reward"
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:  # the port, or an IPv6 address
        yield f"has a host or port that cannot be read; {example}"
        return
    if parts.username is not None or parts.password is not None:
        yield "has a user name or password in it; use token_env"
    elif parts.scheme not in ("http", "https"):
        yield f"is {url!r}, which begins with neither http:// nor https://; {example}"
    elif not parts.hostname or not port_ok or re.search(r"[\s#\x00-\x1f]", url):
        yield f"is {url!r}, which is no address of a server; {example}"


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


RewardConfig = Annotated[
    FunctionReward | ModelReward | MathReward | EnvironmentReward | RemoteReward,
    Field(discriminator="kind"),
]


def weigh_nothing(rewards: Sequence[RewardConfig]) -> bool:
    """Return whether there are rewards and the weighted sum of them is 0 whatever they say."""
    return bool(rewards) and all(reward.weight == 0 for reward in rewards)


class FailurePolicy(Node):
    """Treatment of a reward that raises, or returns NaN, infinity, a number beyond fp32, or the
    wrong count or type."""

    retries: int = Field(0, ge=0)
    """Times the failed call is made again first."""
    then: Literal["fail", "drop_group"] = "fail"
    """``fail`` stops the run with the error; ``drop_group`` leaves the whole group out, counted in
    metrics."""


class ShapingConfig(Node):
    """Changes to the reward after the weighted sum, before any baseline.

    The order of everything: each reward's score, its ``normalize`` (reward models), its
    ``running_norm``, its ``weight``; the sum; ``reward_clip``; the penalties, which are not
    clipped away."""

    reward_clip: float | None = Field(None, gt=0)
    """Clip the weighted sum to [-c, c]. None: no clipping."""
    length_penalty: float = Field(0.0, ge=0)
    """Taken off for every token of a response (end token included). 0: length costs nothing."""
    truncation_penalty: float = Field(0.0, ge=0)
    """Taken off where the response hit the length limit."""
    overlong_buffer_len: int = Field(0, ge=0)
    """DAPO's soft length penalty (arXiv 2503.14476): rises linearly from 0 to ``overlong_penalty``
    over the last this many tokens before ``generate_max_len``. 0: off."""
    overlong_penalty: float = Field(1.0, ge=0)
    """The penalty at the limit."""

    def rules(self) -> Iterator[str]:
        if self.overlong_penalty != 1.0 and not self.overlong_buffer_len:
            yield (
                "overlong_penalty does nothing while overlong_buffer_len is 0; set both or neither"
            )
