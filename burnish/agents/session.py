"""One episode of an agent program: answers its calls with the policy and records exact tokens.

A call that continues a recorded conversation extends its tokens: the previous prompt, the sampled
ids and the ids of the new messages. Every other call is rendered in full and begins a conversation
of its own, and later a training row of its own (``episodes/rows.py``).

The sampling parameters and seeds of the run apply, whatever the client asks for, because the
trainer's log-probs are those of this distribution. Only the client's token limit and stop strings
take effect.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from burnish.agents.arrivals import Arrival, Arrivals
from burnish.agents.calls import (
    CallError,
    ModelCall,
    ModelReply,
    Progress,
    check_supported,
    invalid,
)
from burnish.agents.matching import History, digests_of
from burnish.agents.replies import (
    checked_ids,
    make_choice,
    make_reply,
    make_start,
    stop_in,
    with_stop,
    without_stop,
)
from burnish.agents.retries import Retries
from burnish.chat_message import Message
from burnish.environments.pool import EpisodeFailedError
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.play import Call, Limits, Played, Policy, Task, call_seed
from burnish.episodes.template import RendererError
from burnish.rollout.base import Completion, Request
from burnish.transcript import Episode, EpisodeStatus, Turn
from burnish.types import Ids

MODEL = "policy"
"""Name of the model for clients. Every other name is accepted, too."""


@dataclass(eq=False)
class _Recorded:
    """One answered call."""

    number: int
    """Place of the call in the order of arrival."""
    tools: tuple[Mapping[str, Any], ...]
    prompt: _Prompt
    completion: Completion
    parsed: ParsedMessage
    token_texts: tuple[str, ...]
    """Text of each sampled token, if the client wants log-probs."""
    conversation: str
    began: float
    ended: float
    num_clients: int = 0
    """Clients that got the reply: more than one after retries."""
    is_continued: bool = False
    """True if a later call shows that the client got the reply."""

    @property
    def was_seen(self) -> bool:
        """Return whether the agent has seen the reply."""
        return self.num_clients > 0 or self.is_continued


@dataclass(frozen=True)
class _Prompt:
    """The prompt of a call."""

    ids: Ids
    messages: tuple[Message, ...]
    """The conversation. Prompts without a chat template are messages of a user."""
    parent: _Recorded | None = None
    """The call whose conversation this one continues."""
    num_known: int = 0
    """Number of messages in that conversation."""
    digest: bytes = b""
    """Digest of the conversation; empty if later calls are not compared with it."""
    text: str = ""
    """The prompt, if it has no chat template."""


class TrainingSession:
    """Answers the calls of one episode. Implements :class:`burnish.agents.calls.Backend`.

    All methods must be called in one event loop.
    """

    def __init__(self, task: Task, policy: Policy, limits: Limits) -> None:
        self.task, self.policy, self.limits = task, policy, limits
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the engine's error if it fails: the run cannot continue then."""
        self.counts: Counter[str] = Counter()
        """Numbers of events: ``replayed`` replies, ``refused`` calls, ``ignored_<parameter>``."""
        self._arrivals = Arrivals()
        self._recorded: dict[int, _Recorded] = {}
        """Place of a call in the order of arrival -> the call."""
        self._history: History[_Recorded] = History()
        self._texts: list[tuple[str, _Recorded]] = []
        """Calls without a chat template, each with the text of its prompt and response."""
        self._retries = Retries()
        self._began = time.monotonic()
        self._attempts: defaultdict[Ids, set[int]] = defaultdict(set)
        """Prompt -> attempts that are running or recorded."""
        self._latest: dict[str, _Recorded | None] = {}
        """Conversation of the engine's cache -> its last call; None while one is running."""
        self._turns_taken = 0
        self._num_requests = 0
        self._refused: dict[int, EpisodeStatus] = {}
        """Place of a refused call in the order of arrival -> the limit that it exceeded."""
        self._closed: str | None = None

    @property
    def num_calls(self) -> int:
        """Return the number of answered calls."""
        return len(self._recorded)

    # ---- Backend ---------------------------------------------------------------------------

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of the served models."""
        return (MODEL,)

    def arrive(self) -> Arrival:
        """Return the place of a call whose request has been received."""
        return self._arrivals.arrive()

    async def respond(
        self,
        call: ModelCall,
        *,
        digest: bytes,
        is_retry: bool = False,
        progress: Progress | None = None,
        arrival: Arrival | None = None,
    ) -> ModelReply:
        """Return the reply to a call. ``digest`` is that of the request's body. ``progress`` is not
        used: a reply may go to several clients. Raises CallError.

        A repetition gets the reply of the call that it repeats (``retries.py``).
        """
        place = self.arrive() if arrival is None else arrival
        try:
            return await self._respond(call, place, digest=digest, is_retry=is_retry)
        finally:
            place.passed()

    async def _respond(
        self, call: ModelCall, place: Arrival, *, digest: bytes, is_retry: bool
    ) -> ModelReply:
        self._check_open()
        old = self._retries.finished(digest, is_retry=is_retry)
        if old is not None:
            self.counts["replayed"] += 1
            self._find(old).num_clients += 1
            return old
        try:
            reply = await self._retries.run(
                digest,
                lambda: self._answer(call, place),
                is_retry=is_retry,
                attached=place.passed,
            )
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is None or not waiting.cancelling():
                self._check_open()  # the episode ended while this call waited
            raise
        self._find(reply).num_clients += 1
        return reply

    def undelivered(self, reply: ModelReply, digest: bytes) -> None:
        """Note that a client was gone before it got a reply. If no other client got it, the next
        equal call does. The call is recorded if that happens, or if a later call continues it."""
        found = self._find(reply)
        found.num_clients -= 1
        if not found.num_clients:
            self._retries.undelivered(digest, reply)

    async def count_tokens(self, call: ModelCall) -> int:
        """Return the number of prompt tokens of a call. Raises CallError."""
        self._check_open()
        return len((await self._prompt(call)).ids)

    def _find(self, reply: ModelReply) -> _Recorded:
        return self._recorded[int(reply.reply_id.rpartition("-")[2])]

    def _limit(self) -> EpisodeStatus | None:
        """Return the limit that the last call exceeded. The turns stay used up."""
        if "max_turns" in self._refused.values():
            return "max_turns"
        last = max(self._refused, default=-1)
        if last < max(self._recorded, default=0):  # the agent went on with a call that fits
            return None
        return self._refused[last] if self._recorded else "prompt_too_long"

    def _check_open(self) -> None:
        if self._closed is not None:
            raise CallError(self._closed, status=410, kind="episode_closed")

    # ---- the end of the episode ------------------------------------------------------------

    async def close(self, reason: str = "this episode has ended") -> None:
        """Refuse further calls, cancel running ones and free the engine's cache."""
        self._closed = self._closed or reason
        await self._retries.cancel()
        for conversation in self._latest:
            self.policy.service.release(conversation)
        if not self.failure.done():
            self.failure.cancel()

    def played(
        self, rewards: Mapping[str, float], error: EpisodeFailedError | None = None
    ) -> Played:
        """Return the finished episode, with its calls in the order of their arrival.

        ``rewards``: those that the agent gave, by name. ``error``: the failure of the agent. A
        limit that the last call exceeded takes precedence over an error of the agent's code, which
        may be its consequence.
        """
        recorded = [one for _, one in sorted(self._recorded.items()) if one.was_seen]
        limit = self._limit()
        if error is None and not recorded and limit is None:
            error = EpisodeFailedError("env_error", "the agent ended without calling the model")
        if limit is not None and (error is None or error.status == "env_error"):
            error = None
        status: EpisodeStatus = limit or "done" if error is None else error.status
        first = recorded[0] if recorded else None
        record = Episode(
            status=status,
            start=() if first is None else first.prompt.messages,
            tools=() if first is None else first.tools,
            turns=tuple(self._turns(recorded, rewards)),
            seconds=time.monotonic() - self._began,
            error="" if error is None else str(error),
        )
        return Played(
            record, tuple(Call(one.prompt.ids, one.completion) for one in recorded), error
        )

    def _turns(self, recorded: list[_Recorded], rewards: Mapping[str, float]) -> Iterator[Turn]:
        now = time.monotonic()
        for number, one in enumerate(recorded):
            follower = recorded[number + 1] if number + 1 < len(recorded) else None
            answer: tuple[Message, ...] = ()
            if follower is not None and follower.prompt.parent is one:
                answer = follower.prompt.messages[follower.prompt.num_known :]
            continues = number == 0 or one.prompt.parent is recorded[number - 1]
            until = now if follower is None else follower.began
            yield Turn(
                message=one.parsed.message,
                answer=answer,
                prompt=None if continues else one.prompt.messages,
                rewards=rewards if follower is None else {},
                counts=self.counts if follower is None else {},
                problem=one.parsed.problem or "",
                num_tokens=len(one.completion.token_ids),
                num_prompt_tokens=len(one.prompt.ids),
                cached_tokens=one.completion.cached_tokens,
                engine_s=one.ended - one.began,
                environment_s=max(0.0, until - one.ended),
            )

    # ---- one call --------------------------------------------------------------------------

    async def _answer(self, call: ModelCall, place: Arrival) -> ModelReply:
        """Sample the reply to a call and record it."""
        ignored = self._check_parameters(call)
        try:
            one = await self._sample(call, place)
        except (CallError, asyncio.CancelledError):
            raise
        except Exception as error:  # the engine has failed, and the run with it
            if not self.failure.done():
                self.failure.set_exception(error)
            what = "the rollout engine has failed"
            raise CallError(what, status=503, kind="api_error") from error
        self._record(one)
        name = f"{self.task.episode_id}-{one.number}"
        choice = make_choice(call, one.completion, one.parsed.message, one.token_texts)
        start = make_start(call, one.prompt.ids, name, ignored=ignored)
        return make_reply(start, [choice], cached_tokens=one.completion.cached_tokens)

    def _record(self, one: _Recorded) -> None:
        self._recorded[one.number] = one
        if one.prompt.parent is not None:
            one.prompt.parent.is_continued = True
        self._latest[one.conversation] = one
        if one.prompt.digest:
            self._history.add(one.prompt.digest, one.parsed.message, one, number=one.number)
        if one.prompt.text:
            self._texts.append((one.prompt.text + one.completion.text, one))

    async def _token_texts(self, call: ModelCall, completion: Completion) -> tuple[str, ...]:
        if not call.logprobs:
            return ()
        renderer = self.policy.renderer
        return await self.policy.in_renderer(renderer.token_texts, completion.token_ids)

    async def _sample(self, call: ModelCall, place: Arrival) -> _Recorded:
        prompt = await self._prompt(call)
        await place.turn()
        with self._turn(place):
            room = self.limits.max_tokens - len(prompt.ids)
            if room <= 0:
                what = (
                    f"the conversation has {len(prompt.ids)} tokens; with the response, at most "
                    f"{self.limits.max_tokens} are possible (episodes.max_tokens)"
                )
                error = CallError(
                    what, status=400, kind="context_length_exceeded", param="messages"
                )
                raise self._exceeded("max_tokens", place, error)
            return await self._sample_in(room, prompt, call, place)

    async def _sample_in(
        self, room: int, prompt: _Prompt, call: ModelCall, place: Arrival
    ) -> _Recorded:
        """Sample at most ``room`` tokens."""
        policy = replace(self.policy, sampling=with_stop(self.policy.sampling, call.stop))
        with self._attempt(prompt.ids) as attempt, self._conversation(prompt.parent) as name:
            place.passed()
            self._num_requests += 1
            request = Request(
                f"{self.task.episode_id}/{self._num_requests}",
                prompt.ids,
                seed=call_seed(self.task.sampling_seed, prompt.ids, attempt),
                max_tokens=min(call.max_tokens or room, room, policy.sampling.max_tokens),
                conversation=name,
            )
            began = time.monotonic()
            completion = await policy.respond(request)
            parsed = await self._parse(call, prompt.ids, completion)
            texts = await self._token_texts(call, completion)
        return _Recorded(
            number=place.number,
            tools=call.shown_tools,
            prompt=prompt,
            completion=completion,
            parsed=parsed,
            token_texts=texts,
            conversation=name,
            began=began,
            ended=time.monotonic(),
        )

    async def _parse(self, call: ModelCall, prompt: Ids, completion: Completion) -> ParsedMessage:
        """Return the response as the client gets it."""
        parsed = ParsedMessage({"role": "assistant", "content": completion.text}, None)
        if call.prompt is None:
            parse, tools = self.policy.renderer.parse, call.shown_tools
            parsed = await self.policy.in_renderer(
                parse, completion.token_ids, tools, prompt_ids=prompt
            )
        return without_stop(parsed, stop_in(completion, call.stop))

    def _check_parameters(self, call: ModelCall) -> tuple[str, ...]:
        """Return the parameters of a call that have no effect, after counting them. Raises
        CallError for those that cannot be ignored."""
        check_supported(call)
        if call.n > 1:
            raise invalid(
                "n",
                "n > 1 is not possible in training: every response of an episode is a turn of its "
                "own; send several requests, or raise rollout.n_samples_per_prompt",
            )
        run = self.policy.sampling
        wanted = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
        given = {name: vars(call)[name] for name in wanted}
        ignored = [*call.ignored]
        ignored += [n for n, value in given.items() if value is not None and value != wanted[n]]
        ignored += ["seed"] * (call.seed is not None)
        ignored += ["tool_choice"] * (call.tool_choice == "required")
        ignored += ["chat_template_kwargs"] * bool(call.template_kwargs)
        self.counts.update(f"ignored_{name}" for name in ignored)
        return tuple(ignored)

    def _exceeded(self, status: EpisodeStatus, place: Arrival, error: CallError) -> CallError:
        """Note the limit that a call exceeds. It is the status of the episode, unless the agent
        goes on with a call that fits."""
        self._refused[place.number] = status
        self.counts["refused"] += 1
        return error

    # ---- prompts ---------------------------------------------------------------------------

    async def _prompt(self, call: ModelCall) -> _Prompt:
        """Return the prompt of a call. Raises CallError if it cannot be rendered."""
        if isinstance(call.prompt, str):
            return await self._text_prompt(call.prompt)
        if call.prompt is not None:
            ids = checked_ids(call.prompt, self.policy.renderer)
            text = await self.policy.in_renderer(self.policy.renderer.decode, ids)
            return _Prompt(ids, (_said(text),), text=text)
        try:
            return await self._chat_prompt(call.messages, call.shown_tools)
        except RendererError as error:
            raise invalid("messages", str(error)) from error

    async def _chat_prompt(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]
    ) -> _Prompt:
        """Return the prompt of a conversation. Raises RendererError."""
        renderer, in_renderer = self.policy.renderer, self.policy.in_renderer
        if renderer.history == "template":
            return _Prompt(await in_renderer(renderer.render, messages, tools), messages)
        digests = await in_renderer(digests_of, messages, tools)
        found = self._history.find(messages, digests)
        if found is None:
            ids = await in_renderer(renderer.render, messages, tools)
            return _Prompt(ids, messages, digest=digests[-1])
        parent, known = found
        before, sampled = parent.prompt.ids, parent.completion.token_ids
        ids = await in_renderer(renderer.bridge, before, sampled, messages[known:], tools)
        return _Prompt(ids, messages, parent, known, digests[-1])

    async def _text_prompt(self, text: str) -> _Prompt:
        """Return a prompt without a chat template. If the text begins with that of a recorded call
        and its response, it continues their tokens."""
        encode = self.policy.renderer.encode
        found = [(known, one) for known, one in self._texts if text.startswith(known)]
        if not found:
            ids = await self.policy.in_renderer(encode, text)
            ids = checked_ids(ids, self.policy.renderer)
            return _Prompt(ids, (_said(text),), text=text)
        known, parent = max(found, key=lambda pair: (len(pair[0]), pair[1].number))
        new = text[len(known) :]
        more = await self.policy.in_renderer(encode, new, follows=True)
        ids = parent.prompt.ids + parent.completion.token_ids + more
        before = (*parent.prompt.messages, parent.parsed.message)
        return _Prompt(ids, (*before, _said(new)), parent, len(before), text=text)

    @contextmanager
    def _turn(self, place: Arrival) -> Iterator[None]:
        """Count a turn, unless it fails. Raises CallError if none is left."""
        if self._turns_taken >= self.limits.max_turns:
            what = f"the episode has used its {self.limits.max_turns} turns (episodes.max_turns)"
            error = CallError(what, status=410, kind="episode_closed")
            raise self._exceeded("max_turns", place, error)
        self._turns_taken += 1
        try:
            yield
        except BaseException:
            self._turns_taken -= 1
            raise

    @contextmanager
    def _attempt(self, prompt_ids: Ids) -> Iterator[int]:
        """Yield the number of this prompt among equal ones. It is free again if the call fails, so
        that a retry draws the same tokens."""
        taken = self._attempts[prompt_ids]
        attempt = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(attempt)
        try:
            yield attempt
        except BaseException:
            taken.remove(attempt)
            raise

    @contextmanager
    def _conversation(self, parent: _Recorded | None) -> Iterator[str]:
        """Yield the name of the engine's cache for a call: that of the call it continues, if no
        other call uses it."""
        name = f"{self.task.episode_id}/c{len(self._latest)}"
        if parent is not None and self._latest[parent.conversation] is parent:
            name = parent.conversation
        before = self._latest.get(name)
        self._latest[name] = None
        try:
            yield name
        except BaseException:
            self._latest[name] = before
            raise


def _said(text: str) -> Message:
    """Return text that the agent wrote as a message."""
    return {"role": "user", "content": text}
