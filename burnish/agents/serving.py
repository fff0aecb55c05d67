"""A served model: answers calls by themselves, with the sampling parameters of the client.

Nothing is kept between calls. Every call renders all its messages; vLLM's prefix cache then finds
the tokens that it computed for an earlier turn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from hmac import compare_digest
from typing import Any, TypeVar

from burnish.agents.accepted import refused_tools
from burnish.agents.calls import (
    Arrival,
    Arrivals,
    Backend,
    CallError,
    Choice,
    ContextLengthError,
    ModelCall,
    ModelReply,
    Progress,
    check_supported,
    invalid,
    key_digest,
)
from burnish.agents.replies import (
    checked_ids,
    make_choice,
    make_reply,
    make_start,
    with_stop,
)
from burnish.agents.streaming import ResponseStreams, TokenReader
from burnish.data.left_out import with_lost_texts
from burnish.episodes.loop import call_seed, sample
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.renderer import ChatRenderer, TextCodec, TooLongError
from burnish.episodes.streaming import before_stop
from burnish.episodes.template import RendererError
from burnish.episodes.token_texts import TokenPart
from burnish.errors import BurnishError
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Completion, Request, Sampling
from burnish.types import Ids

log = logging.getLogger("burnish")

T = TypeVar("T")

COMPLETION_TOKENS = 16
"""Most sampled tokens of a completion whose client sets no limit, as in OpenAI's API. A chat
completion without a limit may use all that the model reads."""
_MIN_TEMPERATURE = 1e-3
"""Lower temperatures are greedy: scaled logits would not be finite."""
_MAX_RENDERERS = 8
_RETRY_AFTER_S = 1.0


class NoChatError(BurnishError, ValueError):
    """The model cannot answer chat messages. The message contains the reason."""


class Renderers:
    """Renderers of one model: one for each set of variables of its chat template.

    ``make`` returns a renderer for the variables, or raises BurnishError if the template does not
    read one of them or cannot be used. Renderers are made again on another day, because templates
    may write the date.
    """

    def __init__(self, make: Callable[[Mapping[str, Any]], ChatRenderer]) -> None:
        self._make = make
        self._cache: OrderedDict[str, ChatRenderer] = OrderedDict()
        self.problem: str | None = None
        """Why the model cannot answer chat messages; None: it can."""
        try:
            self.find({})
        except BurnishError as error:
            self.problem = error.for_server if isinstance(error, RendererError) else str(error)

    def find(self, variables: Mapping[str, Any]) -> ChatRenderer:
        """Return the renderer for the variables. Raises NoChatError, or BurnishError for unusable
        variables."""
        if self.problem is not None:
            raise NoChatError(
                f"this model answers no chat messages, only completions: {self.problem}"
            )
        name = f"{datetime.now().date()} {json.dumps(variables, sort_keys=True)}"
        if name not in self._cache:
            self._cache[name] = self._make(variables)
        self._cache.move_to_end(name)
        while len(self._cache) > _MAX_RENDERERS:
            self._cache.popitem(last=False)
        return self._cache[name]


@dataclass(frozen=True)
class _Prompt:
    """The prompt of a call."""

    ids: Ids
    renderer: ChatRenderer | None
    """None: a completion, without a chat template."""
    left_out: tuple[str, ...] = ()
    """Kinds of notices about what the chat template leaves out of the messages."""


class ServingBackend:
    """Answers the calls of all clients of one model. Implements
    :class:`burnish.agents.calls.Backend`."""

    def __init__(
        self,
        service: RolloutService,
        codec: TextCodec,
        renderers: Renderers,
        *,
        names: Sequence[str],
        max_len: int,
        max_queue: int,
    ) -> None:
        """``names``: accepted names of the model; the first one is shown. ``max_len``: most tokens
        of prompt and response. ``max_queue``: most responses that are sampled or wait."""
        self._service, self._codec, self._renderers = service, codec, renderers
        self._names, self._max_len, self._max_queue = tuple(names), max_len, max_queue
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="rendering")
        self._arrivals = Arrivals()
        self._num_calls = 0
        self.num_open = 0
        """Responses that are sampled or wait."""
        self._has_reported = False

    def close(self) -> None:
        """End the thread of the renderers."""
        self._rendering.shutdown()

    @property
    def is_ready(self) -> bool:
        return self._service.error is None

    # ---- Backend ---------------------------------------------------------------------------

    @property
    def models(self) -> tuple[str, ...]:
        return self._names[:1]

    def arrive(self) -> Arrival:
        """Return the place of a call. Calls do not wait for each other."""
        arrival = self._arrivals.arrive()
        arrival.passed()
        return arrival

    async def respond(
        self,
        call: ModelCall,
        *,
        digest: bytes,
        is_retry: bool = False,
        progress: Progress | None = None,
        arrival: Arrival | None = None,
    ) -> ModelReply:
        """Answer a call. ``digest``, ``is_retry`` and ``arrival`` are not used: without a seed, a
        retry may sample another response. ``progress``: see :class:`Progress`."""
        self._check(call)
        if (count := call.num_responses) > self._max_queue:
            raise invalid(
                "n",
                f"n and the prompts ask for {count} responses, but the server samples at most "
                f"{self._max_queue} responses at once (--max-queue)",
            )
        if self.num_open + count > self._max_queue:
            raise CallError(
                f"{self.num_open} responses are sampled or wait, and the limit is "
                f"{self._max_queue}; retry later",
                status=429,
                kind="rate_limit_error",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_open += count
        try:
            return await self._answer(call, progress)
        finally:
            self.num_open -= count

    async def count_tokens(self, call: ModelCall) -> int:
        self._check(call)
        return len((await self._prompt(call)).ids)

    def undelivered(self, reply: ModelReply, digest: bytes) -> None:
        """Do nothing: replies are not kept."""

    # ---- one call --------------------------------------------------------------------------

    def _check(self, call: ModelCall) -> None:
        if call.model not in self._names:
            message = f"there is no model {call.model!r}; this server has {self._names[0]!r}"
            raise CallError(message, status=404, kind="not_found_error", param="model")
        check_supported(call)
        if call.server_tools:
            raise refused_tools(call)

    async def _answer(self, call: ModelCall, progress: Progress | None) -> ModelReply:
        prompts = [await self._prompt(call)]
        for text in call.more_prompts:
            prompts.append(await self._prompt(replace(call, prompt=text)))
        self._num_calls += 1
        name = f"call-{self._num_calls}"
        sampled = [prompt for prompt in prompts for _ in range(call.n)]
        requests = self._requests(call, name, prompts)
        start = make_start(
            call,
            sum(len(prompt.ids) for prompt in prompts),
            f"{name}-{secrets.token_hex(6)}",
            ignored=(
                *call.ignored,
                *["tool_choice"] * (call.tool_choice == "required"),
                *(f"template_{kind}" for kind in prompts[0].left_out),
            ),
        )
        most = max(request.max_tokens or 0 for request in requests)
        sampling = _sampling(call, most, prompts[0].renderer)
        if progress is None:
            completions = await self._sample(requests, sampling)
        else:
            live = ResponseStreams([await self._in_thread(self._reader, call, p) for p in sampled])
            requests = [
                replace(request, on_tokens=live.listener(i)) for i, request in enumerate(requests)
            ]
            async with live.followed(progress, start, self._in_thread):
                completions = await self._sample(requests, sampling)
        pairs = zip(sampled, completions, strict=True)
        choices = [await self._choice(call, prompt, completion) for prompt, completion in pairs]
        cached = sum(completion.cached_tokens for completion in completions[:: call.n])
        return make_reply(start, choices, cached_tokens=cached)

    def _requests(self, call: ModelCall, name: str, prompts: Sequence[_Prompt]) -> list[Request]:
        """Return ``n`` requests for each prompt. Raises CallError for a prompt without room for a
        response."""
        seed = secrets.randbits(63) if call.seed is None else call.seed
        requests: list[Request] = []
        attempts: Counter[Ids] = Counter()
        for prompt in prompts:
            room = self._max_len - len(prompt.ids)
            if room <= 0:
                raise self._too_long(len(prompt.ids))
            max_tokens = call.max_tokens or (room if prompt.renderer else COMPLETION_TOKENS)
            for _ in range(call.n):
                request = Request(
                    f"{name}/{len(requests)}",
                    prompt.ids,
                    seed=call_seed(seed, prompt.ids, attempts[prompt.ids]),
                    max_tokens=min(max_tokens, room),
                )
                attempts[prompt.ids] += 1
                requests.append(request)
        return requests

    def _reader(self, call: ModelCall, prompt: _Prompt) -> TokenReader:
        if prompt.renderer is None:
            return self._codec.stream_text(prompt.ids, call.stop)
        return prompt.renderer.stream(prompt.ids, has_tools=bool(call.shown_tools), stops=call.stop)

    async def _sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample all responses. If one fails or the wait is cancelled, the others are dropped."""
        tasks = [asyncio.create_task(sample(self._service, each, sampling)) for each in requests]
        try:
            return await asyncio.gather(*tasks)
        except Exception as error:  # becomes the answer of this call
            if self.is_ready:
                raise invalid(None, f"the engine refuses this request: {error}") from error
            if not self._has_reported:
                log.exception("the engine has failed")
            self._has_reported = True
            message = "the engine of this server has failed; restart it"
            raise CallError(message, status=503, kind="api_error") from error
        finally:
            for task in tasks:
                task.cancel()

    async def _prompt(self, call: ModelCall) -> _Prompt:
        """Return the prompt of a call. Raises CallError if it cannot be rendered."""
        try:
            if call.prompt is None:
                renderer = await self._renderer(call.template_kwargs)
                ids, left_out = await self._in_thread(
                    with_lost_texts,
                    *(renderer.render, call.messages, call.shown_tools),
                    max_tokens=self._max_len,
                )
                return _Prompt(ids, renderer, left_out)
            if isinstance(call.prompt, str):
                encode = self._codec.encode
                ids = await self._in_thread(encode, call.prompt, max_tokens=self._max_len)
            elif len(call.prompt) > self._max_len:
                raise self._too_long(len(call.prompt))
            else:
                ids = call.prompt
            return _Prompt(checked_ids(ids, self._codec), None)
        except TooLongError as error:
            raise self._too_long(error.num_tokens) from error
        except CallError:
            raise
        except RendererError as error:
            raise invalid("messages", error.for_server) from error
        except BurnishError as error:
            raise invalid("messages", str(error)) from error

    def _too_long(self, num_tokens: int) -> ContextLengthError:
        return ContextLengthError(num_tokens, self._max_len, "--max-len")

    async def _renderer(self, variables: Mapping[str, Any]) -> ChatRenderer:
        try:
            return await self._in_thread(self._renderers.find, variables)
        except NoChatError as error:
            raise invalid("messages", str(error)) from error
        except BurnishError as error:
            raise invalid("chat_template_kwargs", str(error)) from error

    async def _choice(self, call: ModelCall, prompt: _Prompt, completion: Completion) -> Choice:
        renderer, ids = prompt.renderer, completion.token_ids
        if renderer is None:
            whole = await self._in_thread(self._codec.response_text, prompt.ids, ids)
            text, stop = before_stop(whole, call.stop)
            parsed = ParsedMessage({"role": "assistant", "content": text}, None, stop)
        else:
            parsed = await self._in_thread(
                renderer.parse,
                ids,
                call.shown_tools,
                prompt_ids=prompt.ids,
                stops=call.stop,
                ended=completion.finish_reason == "stop",
                calls="read",
            )
        parts: tuple[TokenPart, ...] = ()
        if call.logprobs:
            read = self._codec.text_parts if renderer is None else renderer.message_parts
            options = {} if renderer is None else {"ended": completion.finish_reason == "stop"}
            parts = await self._in_thread(read, prompt.ids, ids, call.stop, **options)
        return make_choice(call, completion, parsed, parts)

    async def _in_thread(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function that uses the tokenizer in the one thread that may do so."""
        call = partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._rendering, call)


def _sampling(call: ModelCall, max_tokens: int, renderer: ChatRenderer | None) -> Sampling:
    """Return the client's sampling parameters. Those that it does not give are off."""
    temperature = 1.0 if call.temperature is None else call.temperature
    plain = Sampling(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < _MIN_TEMPERATURE else temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        top_k=call.top_k or 0,
    )
    if renderer is not None:
        plain = replace(plain, stop_token_ids=tuple(sorted(renderer.stop_token_ids)))
    return with_stop(plain, call.stop)


@dataclass(frozen=True)
class OneModel:
    """Finds the backend of a server with one model. Implements
    :class:`burnish.agents.app.Resolve`."""

    backend: Backend
    token: str | None
    """Secret that requests must contain. None: none."""

    def __call__(self, key: str | None, name: str | None) -> Backend:
        """Return the backend. Raises CallError for a wrong key (401) or a path of episodes
        (404). Compares in constant time."""
        if self.token is not None and not compare_digest(
            key_digest(key or ""), key_digest(self.token)
        ):
            message = (
                "the server's token is missing or wrong; send it as 'Authorization: Bearer TOKEN' "
                "or as 'x-api-key: TOKEN'"
            )
            raise CallError(message, status=401, kind="authentication_error")
        if name is not None:
            message = "this server has a model, not episodes; use its address without /s/..."
            raise CallError(message, status=404, kind="not_found_error")
        return self.backend
