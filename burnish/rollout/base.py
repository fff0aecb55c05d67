"""The contract of all rollout engines: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from burnish.compact import FloatArray, IntArray, IntLists, IntRuns
from burnish.config.base import module_of
from burnish.config.model import Dtype
from burnish.config.rollout import InFlight
from burnish.errors import BurnishError
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.transcript import FinishReason
from burnish.types import Ids, KeptIds, Logprobs, pack


class SamplingError(BurnishError, ArithmeticError):
    """The policy's log-probs are not finite, so no token can be sampled."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; ``config.rollout.SamplingConfig`` documents the fields."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    sampling_mask: bool = False
    """Record the tokens that top_p, top_k and min_p keep (:attr:`Completion.kept_ids`), and return
    log-probs of the distribution over them."""

    @property
    def is_cut(self) -> bool:
        """Return whether only a part of the tokens can be sampled."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class Request:
    """A request for ``n`` responses to a prompt.

    All randomness comes from ``seed``: the same request with the same weights gives the same
    tokens, independent of the rest of the batch.
    """

    request_id: str
    prompt_ids: Ids
    n: int = 1
    seed: int = 0
    max_tokens: int | None = None
    """Maximum new tokens per response. None: the value in :class:`Sampling`."""
    conversation: str | None = None
    """Requests of one conversation extend each other.

    After a completion the engine keeps the conversation's keys and values, while there is room,
    until :meth:`RolloutEngine.release`. A later request whose prompt begins with the cached tokens
    only prefills the rest. A conversation has at most one open request, with ``n`` = 1.
    """
    on_tokens: Callable[[Sequence[int]], object] | None = field(
        default=None, compare=False, repr=False
    )
    """Called in the engine's thread for each sampled token with all tokens of the response so far,
    except for the token that ends it; recorded steps (CUDA graphs) sample up to eight tokens before
    the calls for them. The list changes later; copy from it. For ``n`` = 1, and for engines of this
    process: others do not call it."""

    def __post_init__(self) -> None:
        pack(self, prompt_ids=IntArray)

    def limit(self, sampling: Sampling) -> int:
        """Return the maximum number of new tokens per response."""
        return sampling.max_tokens if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class VersionSpan:
    """Tokens ``[begin, end)`` of a response, sampled from one version of the weights.

    Example: weights 8 replaced weights 7 after 3 of 5 tokens: ``VersionSpan(7, 0, 3)`` and
    ``VersionSpan(8, 3, 5)``.
    """

    version: int
    begin: int
    end: int


@dataclass(frozen=True)
class Completion:
    """A finished response.

    ``logprobs`` [T] are those of the full distribution at the sampling temperature, before
    min-p, top-k and top-p; with ``Sampling.sampling_mask``, of the distribution over ``kept_ids``.
    The trainer computes the same for these tokens.
    """

    request_id: str
    index: int
    token_ids: Ids
    logprobs: Logprobs
    finish_reason: FinishReason
    text: str
    spans: tuple[VersionSpan, ...]
    """Versions of the weights that sampled the tokens; the spans cover ``token_ids`` in order."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were read from a cache."""
    kept_ids: KeptIds = ()
    """[T] Ids that min-p, top-k and top-p kept for each token. Empty: not recorded."""

    def __post_init__(self) -> None:
        pack(self, token_ids=IntArray, logprobs=FloatArray, kept_ids=IntLists)

    @property
    def version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.spans[-1].version

    @property
    def versions(self) -> IntRuns:
        """Version of each token, [T]."""
        return IntRuns.of_runs((span.version, span.end - span.begin) for span in self.spans)


class RolloutEngine(Protocol):
    """An engine that samples from one policy.

    Requests are open from :meth:`submit` until their last completion or :meth:`cancel`. All methods
    must be called from one thread at a time; ``rollout/asynchronous/service.py`` shares an engine
    between threads.
    """

    @property
    def version(self) -> int:
        """Return the version of its current weights."""
        ...

    @property
    def keeps_cache_on_update(self) -> bool:
        """Return whether ``load_weights(keep_cache=True)`` keeps caches of the old weights. The
        engine's config has the same property, for checks before a model is loaded."""
        ...

    @property
    def max_len(self) -> int | None:
        """Return the maximum length of prompt and response in tokens; None: unlimited."""
        ...

    @property
    def busy(self) -> bool:
        """Return whether any request is open."""
        ...

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Queue ``requests``, at any time. Open requests may have different ``sampling``.

        Raises ValueError, before any request is queued, if one of them cannot run
        (``requests.check_requests``) or if its id or conversation is already open.
        """
        ...

    def poll(self) -> list[Completion]:
        """Advance the open requests by one unit of work; return the completions that finished.

        An empty list is not the end: requests may still be open (:attr:`busy`). Raises the errors
        of the model and of workers. Requests may be open afterwards: cancel them.
        """
        ...

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drop open requests. Unknown ids are ignored."""
        ...

    def release(self, conversations: Iterable[str]) -> None:
        """Free the kept cache of conversations. Unknown names are ignored. If a conversation has an
        open request, its cache is freed when the request finishes."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as they finish, in any order; ``n`` per request. Raises like
        :meth:`submit`, before the first one.

        A loop over :meth:`submit` and :meth:`poll` (``rollout/base.py``).
        """
        ...

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        """Replace the weights; afterwards ``self.version == version``. After an error the engine
        cannot sample until a load succeeds.

        Open requests keep their tokens and continue with the new weights and the next random
        numbers; :attr:`Completion.spans` has the version of each token.

        By default nothing else that was computed from the previous weights is used afterwards:
        kept conversations are dropped, and the keys and values of the tokens of open requests are
        computed again. Every new token then has the log-prob that the new weights give it after
        these tokens.

        With ``keep_cache`` no key or value is computed again: responses in progress and the kept
        caches of conversations continue with those of the previous weights. Samples without tokens
        and new requests outside these conversations use the new weights only. If
        :attr:`keeps_cache_on_update` is False, ``keep_cache`` has no effect.
        """
        ...

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free caches (and device memory) until :meth:`wake` or the next poll. Kept conversations
        are dropped.

        With ``new_weights_follow`` the weights may be dropped too, because :meth:`load_weights`
        will be called before the next poll.
        """
        ...

    def wake(self) -> None:
        """Allocate the memory freed by :meth:`sleep` again."""
        ...

    def close(self) -> None:
        """Release the engine's processes and shared memory. It cannot be used afterwards."""
        ...


@dataclass(frozen=True)
class StagedWeights:
    """New weights that a rollout engine loads while the trainer continues.

    Example: ``staged = sync.stage("recompute")`` in the trainer's thread, then
    ``service.call(staged.load)``: the thread of the engine loads, or starts the load.
    """

    version: int
    """Number of optimizer steps that produced the weights."""
    metrics: Mapping[str, float]
    """``sync/*`` metrics of the part that the trainer waited for."""
    load: Callable[[RolloutEngine], None]
    """Function that the engine's thread calls, once, with the engine. The engine has loaded the
    weights when its ``version`` is :attr:`version` or one that was staged later: at return, or
    after later polls. Raises the errors of a transfer; later ones are raised by polls."""
    waits: bool = False
    """True if the trainer must not use its engines before ``load`` returns, because the load reads
    from them."""
    needs_idle: bool = False
    """True if ``load`` must be called while no request is open: the engine itself cannot finish
    running responses with the old weights (``in_flight: finish``)."""


class Sync(Protocol):
    """Transfer of one policy's weights to one rollout engine."""

    def push(self) -> dict[str, float]:
        """Transfer the policy's weights and version to the rollout engine. Return ``sync/*``
        metrics, or no metrics if nothing was moved."""
        ...

    def stage(self, in_flight: InFlight) -> StagedWeights:
        """Take a snapshot of the policy's weights for a load that overlaps with training.

        ``in_flight``: treatment of the responses that are open during the load
        (``rollout.asynchronous.in_flight``). The caller owns the policy. The load of an earlier
        snapshot may still be in progress; it is skipped by workers that have not begun it.
        """
        ...

    def settle(self) -> None:
        """Wait until nothing is loaded but the newest weights, so that :meth:`stage` need not wait.
        Called by the engine's thread while it does not poll."""
        ...

    def policy_idle(self) -> AbstractContextManager[None]:
        """Return a context in which the trainer does not use the policy, so that replaced workers
        can get its weights. Only for runs that :meth:`stage`."""
        ...


def generate(
    engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling
) -> Iterator[Completion]:
    """Submit ``requests``, poll until all are complete, and yield completions as they finish.

    Requests that are unfinished when the caller closes the iterator are canceled. Raises
    RuntimeError if other requests are open, because their completions would be lost, or if the
    requests are canceled meanwhile.
    """
    if engine.busy:
        raise RuntimeError(
            "generate needs a rollout engine without open requests, and this one has some: finish "
            "or close the other generate first, or use submit and poll "
            "(rollout/asynchronous/service.py shares an engine between threads)"
        )
    engine.submit(requests, sampling)
    left = sum(request.n for request in requests)
    try:
        while left:
            if not engine.busy:
                raise RuntimeError(
                    f"{left} samples of this generate were canceled (by cancel or close) before "
                    "they were finished; take all completions first"
                )
            for completion in engine.poll():
                left -= 1
                yield completion
    finally:
        if left:
            engine.cancel([request.request_id for request in requests])


def make_rollout_engine(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutEngineConfig,
    *,
    name: str,
    dtype: Dtype,
    max_len: int | None,
) -> RolloutEngine:
    """Return an engine that samples from a model.

    ``network``: the model; engines with tensors of their own use its names and shapes. ``name``: of
    the model, in messages. ``dtype``: format of the engine's weights. ``max_len``: maximum length
    of a row in tokens (None: the model's limit). Raises ModelError if the engine cannot run the
    model.
    """
    engine: RolloutEngine = module_of(config, "engine").make_engine(
        network, tokenizer, config, name=name, dtype=dtype, max_len=max_len
    )
    return engine


def wait_for_engine(config: RolloutEngineConfig) -> None:
    """Wait until running servers respond, before a job loads models. Other engines: return at once.
    Raises ModelError."""
    if config.on_servers:
        module_of(config, "engine").wait_for_servers(config)
