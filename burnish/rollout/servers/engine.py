"""The rollout engine of vLLM servers that were started before the run (``vllm serve``).

Reading order: ``VllmServerEngine.submit`` -> ``_tried`` -> ``_ask`` (one server) -> ``_read``;
``poll``; ``load_weights`` -> ``group.py``.

Exactness. Requests and replies are token ids with log-probs, and each sample has its own seed, as
with vLLM in this process. Weights travel as files that the workers of the servers read
(``vllm_weights.WorkerExtension``); the fingerprints of all stored weights are compared with those
that were sent. A server is paused while it loads: vLLM keeps the requests in progress, computes
their keys and values again, and reports which weights sampled each token. Their label contains a
random name of this engine. So a reply from a server that was restarted, or that loaded the weights
of another client, is detected, dropped and requested again.
"""

from __future__ import annotations

import asyncio
import math
import queue
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish import secret
from burnish.config.model import Dtype
from burnish.loop_thread import LoopThread
from burnish.models.load import ModelError
from burnish.rollout.base import Completion, Request, Sampling, SamplingError, generate
from burnish.rollout.requests import LiveSample, OpenRequests, StopRule, check_requests, end_tokens
from burnish.rollout.servers.client import (
    ABORT,
    GENERATE,
    Server,
    ServerClient,
    ServerError,
    TransientServerError,
    least_busy,
)
from burnish.rollout.servers.config import VllmServers
from burnish.rollout.servers.group import ServerGroup, all_respond
from burnish.rollout.vllm.model import longest_row, skeleton_of
from burnish.rollout.vllm.sampling import add_token, check_sampling, sampling_fields

_POLL_S = 0.1
"""A poll returns after this time, so that new requests and weights do not wait for a response."""
_FLOOR = -9999.0
"""Log-prob in replies for -inf and NaN, which JSON lacks."""


@dataclass
class _Home:
    """Server of the samples of a request, or of a conversation, which share its prefix cache."""

    server: Server | None = None


@dataclass(eq=False)
class _Open:
    """A sample that was requested."""

    request: Request
    index: int
    sampling: Sampling
    stop: StopRule
    home: _Home
    task: Future[Any] | None = None

    def fresh(self) -> LiveSample:
        """Return the sample without tokens."""
        return LiveSample(self.request, self.index, self.sampling, self.stop)


class _OtherWeightsError(Exception):
    """Tokens of a reply were sampled from weights that this engine did not send."""


class VllmServerEngine:
    """Samples with vLLM servers. Implements ``rollout.base.RolloutEngine``.

    Only the config and the generation config of ``model`` are used. ``dtype``: compute dtype that
    the servers must have. Waits for the servers; raises ModelError if one does not respond or has
    other settings than required.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: VllmServers,
        *,
        dtype: Dtype = "fp32",
        max_model_len: int | None = None,
    ) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.version = 0
        self.max_model_len = longest_row(model.config, max_model_len)
        self._end_tokens = end_tokens(model.generation_config, tokenizer)
        self._problem: str | None = "it has no weights yet; call load_weights first"
        self._requests = OpenRequests()
        self._open: set[_Open] = set()
        self._done: queue.SimpleQueue[tuple[_Open, Completion | Exception]] = queue.SimpleQueue()
        """Results of samples, from the event loop's thread."""
        self._homes: dict[str, _Home] = {}
        """Conversation -> home."""
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._closed = False
        try:
            token = None if config.token_env is None else secret.read_token(config.token_env)
        except ValueError as error:
            raise ModelError(f"rollout engine vllm_server: {error}") from error
        self._loop = LoopThread("vllm-servers")
        try:
            self._group = ServerGroup(
                ServerClient(config, token),
                skeleton_of(model),
                self._loop,
                dtype=dtype,
                max_len=self.max_model_len,
            )
            self._loop.run(self._group.connect)
        except BaseException:
            self._loop.close()
            raise

    # ---- the interface ---------------------------------------------------------------------

    @property
    def max_len(self) -> int | None:
        return self.max_model_len

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def keeps_cache_on_update(self) -> bool:
        """Return False: keys and values of older weights are discarded."""
        return self.config.keeps_cache_on_update

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Request the samples of ``requests``. Those of one request, and of one conversation, go to
        the same server.

        Raises ValueError, before any is requested, if a prompt is empty or does not fit, if a
        ``max_tokens`` is below 1, if vLLM would not use ``sampling`` exactly, or if an id or a
        conversation is already open. Raises RuntimeError if the servers have no verified weights.
        """
        check_requests(
            requests, sampling, limit=self.max_model_len, holder="the engine was started with"
        )
        check_sampling(sampling, max_recorded=self._group.max_recorded)
        if requests:
            self._check_ready()
        self._requests.add(requests)
        stop = StopRule(self.tokenizer, sampling, self._end_tokens)
        for request in requests:
            home = _Home()
            if request.conversation is not None:
                home = self._homes.setdefault(request.conversation, home)
            for index in range(request.n):
                new = _Open(request, index, sampling, stop, home)
                self._open.add(new)
                new.task = self._loop.spawn(self._sample, new)

    def poll(self) -> list[Completion]:
        """Wait for a response, at most 0.1 s; return those that are complete. Raises ServerError if
        all servers are lost or one refuses a request, and RuntimeError if the servers have no
        verified weights."""
        if not self.busy:
            return []
        self._check_ready()
        completions: list[Completion] = []
        wait_s = _POLL_S
        with suppress(queue.Empty):
            while True:
                sample, result = self._done.get(timeout=wait_s)
                if sample not in self._open:
                    continue  # canceled
                if isinstance(result, Exception) and completions:
                    self._done.put((sample, result))  # for the next poll
                    break
                if isinstance(result, Exception):
                    raise result
                self._open.remove(sample)
                self._requests.finish(result.request_id)
                completions.append(result)
                wait_s = 0.0
        return completions

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drop open requests: their connections are closed, and vLLM aborts them. Unknown ids are
        ignored."""
        gone = self._requests.drop(request_ids)
        for sample in [s for s in self._open if s.request.request_id in gone]:
            self._open.remove(sample)
            if sample.task is not None:
                sample.task.cancel()

    def release(self, conversations: Iterable[str]) -> None:
        """Forget the servers of conversations. vLLM's prefix cache evicts blocks by itself."""
        for name in conversations:
            self._homes.pop(name, None)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return generate(self, requests, sampling)

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        """Load new weights into all servers in one pass over ``tensors``, and verify them. Lost
        servers that respond again are used again. ``keep_cache`` has no effect.

        Each server is paused during the load. It keeps the tokens and random generators of
        responses in progress, and prefills them again. A server that fails is lost.

        Raises ValueError if a name is unknown, a shape differs, or a parameter is missing,
        StaleWeightsError if a server does not compute with the given weights, and ServerError if
        all servers are lost. Afterwards the engine keeps its version and cannot sample until a load
        succeeds; the servers stay paused.
        """
        self._problem = "their last load of weights failed: they may be partially loaded"
        self._group.load(version, tensors)
        self.version, self._problem = version, None

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Do nothing: the memory of the servers is their own."""

    def wake(self) -> None:
        """Do nothing, as :meth:`sleep`."""

    def close(self) -> None:
        """Cancel open requests and close the connections. The servers continue to run."""
        if self._closed:
            return
        self._closed, self._problem = True, "it was closed"
        self.cancel(list(self._requests.ids))
        try:
            self._loop.run(self._group.client.close)
        finally:
            self._loop.close()

    def _check_ready(self) -> None:
        if self._problem is not None:
            raise RuntimeError(f"the vLLM servers cannot sample: {self._problem} (weights)")

    # ---- samples, on the event loop ----------------------------------------------------------

    async def _sample(self, sample: _Open) -> None:
        """Put a completion, or an error, into the queue."""
        try:
            async with self._slots:
                result: Completion | Exception = await self._tried(sample)
        except Exception as error:  # poll raises it
            result = error
        self._done.put((sample, result))

    async def _tried(self, sample: _Open) -> Completion:
        """Request a sample until a server returns it: that of its request or conversation, or after
        a failure the least busy one. Raises ServerError."""
        while True:
            server = sample.home.server
            if server is None or server.lost is not None or server.backoff_until > time.monotonic():
                server = sample.home.server = least_busy(self._group.servers)
            begun = time.monotonic()
            server.in_flight += 1
            try:
                await asyncio.sleep(max(server.backoff_until - begun, 0.0))
                begun = time.monotonic()
                attempt = asyncio.create_task(self._ask(server, sample))
                server.attempts.add(attempt)
                try:
                    completion = await attempt
                finally:
                    attempt.cancel()
                    server.attempts.discard(attempt)
                server.failures = 0
                return completion
            except asyncio.CancelledError:
                if server.lost is None:  # the sample was canceled, not the attempt
                    raise
            except TransientServerError as error:
                server.fail(error, begun=begun, config=self.config)
            except _OtherWeightsError as error:
                server.lose(f"{server.url} {error}")
            finally:
                server.in_flight -= 1

    async def _ask(self, server: Server, sample: _Open) -> Completion:
        """Return the completion of one server."""
        body: dict[str, Any] = {
            "token_ids": list(sample.request.prompt_ids),
            "sampling_params": sampling_fields(sample.fresh(), vocab_size=self._group.vocab_size),
            "request_id": f"burnish-{secrets.token_hex(8)}",
        }
        if sample.sampling.stop:
            return await self._ask_for_events(server, sample, body)
        limit = self.config.read_timeout_s
        reply = await self._group.client.post(server, GENERATE, body, timeout_s=limit)
        (choice,) = reply["choices"]
        attempt = sample.fresh()
        attempt.cached_tokens = _cached_tokens(reply)
        self._read(attempt, [choice])
        return _finished(attempt, server, choice)

    async def _ask_for_events(
        self, server: Server, sample: _Open, body: dict[str, Any]
    ) -> Completion:
        """Return the completion of one server token by token, because stop strings are checked
        here. At a stop string vLLM is asked to abort the request; its last event has the versions
        of the weights."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        probe, attempt = sample.fresh(), sample.fresh()
        choices: list[Mapping[str, Any]] = []
        async with aclosing(self._group.client.events(server, GENERATE, body)) as events:
            async for event in events:
                attempt.cached_tokens = attempt.cached_tokens or _cached_tokens(event)
                choices += event["choices"]
                if not event["choices"] or probe.reason is not None:
                    continue
                choice = event["choices"][0]
                if _add(probe, choice, [0] * len(choice["token_ids"])):  # it is at its end
                    ids = {"request_ids": [f"generate-tokens-{body['request_id']}"]}
                    limit = self.config.connect_timeout_s
                    await self._group.client.post(server, ABORT, ids, timeout_s=limit)
        if not choices or choices[-1]["finish_reason"] is None:
            raise TransientServerError(f"{server.url} ended a reply before its last event")
        self._read(attempt, choices)
        return _finished(attempt, server, choices[-1])

    def _read(self, sample: LiveSample, choices: Sequence[Mapping[str, Any]]) -> None:
        """Append the tokens of a reply up to the one that ends the sample. Raises
        _OtherWeightsError if other weights than this engine's sampled them."""
        versions: list[int] = []
        for span in choices[-1]["weight_versions"] or ():
            name, _, version = span["version"].rpartition("-")
            if name != self._group.name or not version.isdecimal():
                raise _OtherWeightsError(
                    f"sampled from weights labeled {span['version']!r}, which this run did not "
                    "send: it was restarted, or another client has loaded weights into it"
                )
            versions += [int(version)] * (span["end"] - span["start"])
        if len(versions) != sum(len(choice["token_ids"]) for choice in choices):
            raise ServerError(
                "a vLLM server did not report which weights sampled each token; use vLLM 0.32 or "
                "newer"
            )
        for choice in choices:
            count = len(choice["token_ids"])
            if _add(sample, choice, versions[:count]):
                return
            versions = versions[count:]


def _add(sample: LiveSample, choice: Mapping[str, Any], versions: Sequence[int]) -> bool:
    """Append the tokens of a part of a reply. Return whether one of them ends the sample. Raises
    SamplingError for a token without a log-prob."""
    positions = choice["logprobs"]["content"]
    for token, position, version in zip(choice["token_ids"], positions, versions, strict=True):
        logprobs = {top["token_id"]: top["logprob"] for top in position["top_logprobs"]}
        logprobs[token] = position["logprob"]
        if logprobs[token] <= _FLOOR:
            raise SamplingError(
                f"vLLM sampled the token {token} with a log-prob of -inf or NaN; the weights have "
                "diverged, or a value overflows in the server's format"
            )
        logprobs = {i: -math.inf if value <= _FLOOR else value for i, value in logprobs.items()}
        add_token(sample, token, logprobs, version)
        if sample.reason is not None:
            return True
    return False


def _finished(sample: LiveSample, server: Server, last: Mapping[str, Any]) -> Completion:
    """Return the completion. Raises ServerError if vLLM ended the request before the sample is
    finished; only an abort is repeated."""
    if sample.reason is not None:
        return sample.completion()
    error = TransientServerError if last["finish_reason"] == "abort" else ServerError
    raise error(
        f"{server.url} ended request {sample.request.request_id} after {len(sample.tokens)} tokens "
        f"for the reason {last['finish_reason']!r}, but neither a stop condition nor the maximum "
        "length is reached"
    )


def _cached_tokens(reply: Mapping[str, Any]) -> int:
    """Return the prompt tokens read from the cache; 0 if the server does not report them
    (``--enable-prompt-tokens-details``)."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def make_engine(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: VllmServers,
    *,
    name: str,
    dtype: Dtype,
    max_len: int | None,
) -> VllmServerEngine:
    """Return the engine (see ``rollout/base.py``)."""
    return VllmServerEngine(network, tokenizer, config, dtype=dtype, max_model_len=max_len)


def wait_for_servers(config: VllmServers) -> None:
    """Wait until all servers respond. Raises ModelError."""

    async def wait() -> None:
        client = ServerClient(config, None)
        try:
            await all_respond(client)
        finally:
            await client.close()

    loop = LoopThread("vllm-servers")
    try:
        loop.run(wait)
    finally:
        loop.close()
