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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from burnish.agents.accepted import Accepted
from burnish.agents.calls import (
    Arrival,
    Arrivals,
    CallError,
    ContextLengthError,
    ModelCall,
    ModelReply,
    Progress,
    check_supported,
    invalid,
)
from burnish.agents.prompts import CallPrompt, Prompts, RecordedCall
from burnish.agents.replies import finish_reason_of, make_choice, make_reply, make_start, with_stop
from burnish.agents.retries import Retries
from burnish.chat_message import Message
from burnish.environments.pool import EpisodeFailedError
from burnish.episodes.loop import EngineCall, EpisodeLimits, EpisodeResult, Policy, Task, call_seed
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.renderer import TooLongError
from burnish.episodes.streaming import before_stop
from burnish.episodes.token_texts import TokenPart
from burnish.rollout.base import Completion, Request
from burnish.transcript import Episode, EpisodeStatus, Turn
from burnish.types import Ids

MODEL = "policy"
"""Name of the model for clients. Every other name is accepted, too."""


_MIN_LOOP = 6
"""Conversations of an episode from which on it may be a loop of summaries."""


class TrainingSession:
    """Answers the calls of one episode. Implements :class:`burnish.agents.calls.Backend`.

    All methods must be called in one event loop.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        limits: EpisodeLimits,
        accepted: Accepted = Accepted(),
    ) -> None:
        self.task, self.policy, self.limits, self.accepted = task, policy, limits, accepted
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the engine's error if it fails: the run cannot continue then."""
        self.counts: Counter[str] = Counter()
        """Numbers of events: ``replayed`` replies, ``refused`` calls, ``failed_after_cut`` and
        ``failed_after_refusal`` (errors of the agent behind a limit), ``ignored_<parameter>``."""
        self._arrivals = Arrivals()
        self._recorded: dict[int, RecordedCall] = {}
        """Place of a call in the order of arrival -> the call."""
        self._prompts = Prompts(policy, max_tokens=limits.max_tokens)
        self._retries = Retries()
        self._began = time.monotonic()
        self._attempts: defaultdict[Ids, set[int]] = defaultdict(set)
        """Prompt -> attempts that are running or recorded."""
        self._latest: dict[str, RecordedCall | None] = {}
        """Conversation of the engine's cache -> its last call; None while one is running."""
        self._turns_taken = 0
        self._num_requests = 0
        self._refused: dict[int, EpisodeStatus] = {}
        """Place of a refused call in the order of arrival -> the limit that it exceeded."""
        self._closed: str | None = None

    @property
    def num_calls(self) -> int:
        return len(self._recorded)

    # ---- Backend ---------------------------------------------------------------------------

    @property
    def models(self) -> tuple[str, ...]:
        return (MODEL,)

    def arrive(self) -> Arrival:
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
        recorded = self._find(reply)
        recorded.num_clients -= 1
        if not recorded.num_clients:
            self._retries.undelivered(digest, reply)

    async def count_tokens(self, call: ModelCall) -> int:
        self._check_open()
        try:
            return len((await self._prompts.find(self.accepted.apply(call, Counter()))).ids)
        except TooLongError as error:
            raise self._too_long(error.num_tokens) from error

    def _find(self, reply: ModelReply) -> RecordedCall:
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

    def result(
        self, rewards: Mapping[str, float], error: EpisodeFailedError | None = None
    ) -> EpisodeResult:
        """Return the finished episode, with its calls in the order of their arrival.

        ``rewards``: those that the agent gave, by name, which a failed episode does not have.
        ``error``: the failure of the agent. A limit takes precedence, if the failure may be its
        consequence.
        """
        seen = [call for _, call in sorted(self._recorded.items()) if call.was_seen]
        recorded = [call for call in seen if call.is_trained]
        left_out = [call for call in seen if not call.is_trained]
        limit = self._limit()
        if error is None and not recorded and limit is None:
            text = "the agent ended without calling the model"
            if left_out:
                text = (
                    f"none of the {len(left_out)} calls of the agent is trained: they have no "
                    f"tools, or another model's name than {MODEL!r}; set episodes.train_calls: all"
                )
            error = EpisodeFailedError("env_error", text)
        text = "" if error is None else str(error)
        if error is not None:
            limit = self._limit_behind(error, recorded)
            error = error if limit is None else None
        status: EpisodeStatus = limit or "done" if error is None else error.status
        first = recorded[0] if recorded else None
        record = Episode(
            status=status,
            start=() if first is None else first.prompt.messages,
            tools=() if first is None else first.tools,
            turns=tuple(self._turns(recorded, rewards if error is None else {})),
            untrained=tuple(
                _turn(call, prompt=call.prompt.messages, tools=call.tools) for call in left_out
            ),
            seconds=time.monotonic() - self._began,
            error=text,
        )
        return EpisodeResult(
            record, tuple(EngineCall(call.prompt.ids, call.completion) for call in recorded), error
        )

    def _limit_behind(
        self, error: EpisodeFailedError, recorded: Sequence[RecordedCall]
    ) -> EpisodeStatus | None:
        """Return the limit of which a failure of the agent may be the consequence: one that the
        last call exceeded, one that cut the last response, or a full context that it could not
        shorten. None if there is none, and for the end of its process by something else."""
        if error.status != "env_error":
            return None
        if (limit := self._limit()) is not None:
            return limit
        if not recorded or not error.is_crash:
            return None
        if recorded[-1].completion.finish_reason == "length":
            self.counts["failed_after_cut"] += 1
            return "max_turn_tokens"
        last = max(self._refused, default=None)
        if last is not None and sum(number > last for number in self._recorded) <= 1:
            self.counts["failed_after_refusal"] += 1
            return "max_tokens"
        return None

    def summary_loop(self) -> str | None:
        """Return a warning if the program used all turns, and its conversation began again in most
        calls and did not grow: then it may be summarizing it for ever, because the limit at which
        it does so is below its first prompt. None otherwise."""
        recorded = [call for _, call in sorted(self._recorded.items())]
        lengths = [len(call.prompt.ids) for call in recorded if call.prompt.parent is None]
        if self._limit() != "max_turns" or len(lengths) < max(_MIN_LOOP, len(recorded) * 3 / 4):
            return None
        if min(lengths[len(lengths) // 2 :]) > 2 * lengths[0]:  # it rewrites what it has
            return None
        return (
            f"an agent used all turns of its episode, and {len(lengths)} of {len(recorded)} calls "
            "began a conversation of their own, none much longer than the first. If it summarizes "
            "its conversation for ever, the context limit in its own settings is too small: its "
            f"prompts have up to {max(lengths)} tokens before any work, so set that limit to at "
            f"least {2 * max(lengths)}, and episodes.max_tokens (now {self.limits.max_tokens}) "
            "above it"
        )

    def _turns(self, recorded: list[RecordedCall], rewards: Mapping[str, float]) -> Iterator[Turn]:
        now = time.monotonic()
        for number, call in enumerate(recorded):
            follower = recorded[number + 1] if number + 1 < len(recorded) else None
            answer: tuple[Message, ...] = ()
            if follower is not None and follower.prompt.parent is call:
                answer = follower.prompt.messages[follower.prompt.num_known :]
            continues = number == 0 or call.prompt.parent is recorded[number - 1]
            until = now if follower is None else follower.began
            yield _turn(
                call,
                answer=answer,
                prompt=None if continues else call.prompt.messages,
                tools=None if continues else call.tools,
                rewards=rewards if follower is None else {},
                counts=dict(sorted(self.counts.items())) if follower is None else {},
                environment_s=max(0.0, until - call.ended),
            )

    # ---- one call --------------------------------------------------------------------------

    async def _answer(self, call: ModelCall, place: Arrival) -> ModelReply:
        """Sample the reply to a call and record it."""
        ignored = self._check_parameters(call)
        call = self.accepted.apply(call, self.counts)
        try:
            recorded = await self._sample(call, place)
        except (CallError, asyncio.CancelledError):
            raise
        except Exception as error:  # the engine has failed, and the run with it
            if not self.failure.done():
                self.failure.set_exception(error)
            message = "the rollout engine has failed"
            raise CallError(message, status=503, kind="api_error") from error
        parent = recorded.prompt.parent
        keeps = self.policy.renderer.history == "keep"
        if keeps and parent is not None and parent.parsed.stop is not None:
            self.counts["stop_kept_in_prompt"] += 1
        left_out = [f"template_{kind}" for kind in recorded.prompt.left_out]
        self.counts.update(f"ignored_{name}" for name in left_out)
        if reason := self.accepted.left_out(call, self.models):
            recorded.is_trained = False
            self.counts[reason] += 1
        self._recorded[recorded.number] = recorded
        self._latest[recorded.conversation] = recorded
        self._prompts.record(recorded)
        name = f"{self.task.episode_id}-{recorded.number}"
        choice = make_choice(call, recorded.completion, recorded.parsed, recorded.parts)
        start = make_start(call, len(recorded.prompt.ids), name, ignored=(*ignored, *left_out))
        return make_reply(start, [choice], cached_tokens=recorded.completion.cached_tokens)

    async def _parts(
        self, call: ModelCall, prompt: Ids, completion: Completion
    ) -> tuple[TokenPart, ...]:
        if not call.logprobs:
            return ()
        renderer, read = self.policy.renderer, self.policy.in_renderer
        ids = completion.token_ids
        if call.prompt is not None:
            return await read(renderer.text_parts, prompt, ids, call.stop)
        ended = completion.finish_reason == "stop"
        return await read(renderer.message_parts, prompt, ids, call.stop, ended=ended)

    async def _sample(self, call: ModelCall, place: Arrival) -> RecordedCall:
        prompt: CallPrompt | None = None
        try:
            prompt = await self._prompts.find(call)
            num_tokens = len(prompt.ids)
        except TooLongError as error:
            num_tokens = error.num_tokens
        await place.turn()
        with self._turn(place):
            room = self.limits.max_tokens - num_tokens
            if prompt is None or room <= 0:
                raise self._exceeded("max_tokens", place, self._too_long(num_tokens))
            return await self._sample_in(room, prompt, call, place)

    def _too_long(self, num_tokens: int) -> ContextLengthError:
        return ContextLengthError(num_tokens, self.limits.max_tokens, "episodes.max_tokens")

    async def _sample_in(
        self, room: int, prompt: CallPrompt, call: ModelCall, place: Arrival
    ) -> RecordedCall:
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
            parsed, text = await self._parse(call, prompt.ids, completion)
            parts = await self._parts(call, prompt.ids, completion)
        return RecordedCall(
            number=place.number,
            tools=call.shown_tools,
            prompt=prompt,
            completion=completion,
            parsed=parsed,
            text=text,
            parts=parts,
            conversation=name,
            began=began,
            ended=time.monotonic(),
        )

    async def _parse(
        self, call: ModelCall, prompt: Ids, completion: Completion
    ) -> tuple[ParsedMessage, str]:
        """Return (response as the client gets it, its text if the prompt has no chat template)."""
        renderer, ids = self.policy.renderer, completion.token_ids
        if call.prompt is None:
            parsed = await self.policy.in_renderer(
                renderer.parse,
                ids,
                call.shown_tools,
                prompt_ids=prompt,
                stops=call.stop,
                ended=completion.finish_reason == "stop",
            )
            return parsed, ""
        whole = await self.policy.in_renderer(renderer.response_text, prompt, ids)
        text, stop = before_stop(whole, call.stop)
        return ParsedMessage({"role": "assistant", "content": text}, None, stop), whole

    def _check_parameters(self, call: ModelCall) -> tuple[str, ...]:
        """Return the parameters of a call that have no effect, after counting them. Raises
        CallError for those that cannot be ignored."""
        check_supported(call)
        if call.num_responses > 1:
            raise invalid(
                "n" if call.n > 1 else "prompt",
                "n > 1 and several prompts are not possible in training: every response of an "
                "episode is a turn of its own; send several requests, or raise "
                "rollout.n_samples_per_prompt",
            )
        sampling = self.policy.sampling
        values = {
            "temperature": (call.temperature, sampling.temperature),
            "top_p": (call.top_p, sampling.top_p),
            "top_k": (call.top_k, sampling.top_k),
        }
        ignored = [*call.ignored]
        ignored += [
            name
            for name, (requested, applied) in values.items()
            if requested not in (None, applied)
        ]
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

    @contextmanager
    def _turn(self, place: Arrival) -> Iterator[None]:
        """Count a turn, unless it fails. Raises CallError if none is left."""
        if self._turns_taken >= self.limits.max_turns:
            message = f"the episode has used its {self.limits.max_turns} turns (episodes.max_turns)"
            error = CallError(message, status=410, kind="episode_closed")
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
    def _conversation(self, parent: RecordedCall | None) -> Iterator[str]:
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


def _turn(call: RecordedCall, *, answer: tuple[Message, ...] = (), **more: Any) -> Turn:
    """Return the turn of a call."""
    return Turn(
        message=call.parsed.message,
        answer=answer,
        is_text=call.prompt.text is not None,
        finish_reason=finish_reason_of(call.completion, call.parsed),
        problem=call.parsed.problem or "",
        num_tokens=len(call.completion.token_ids),
        num_prompt_tokens=len(call.prompt.ids),
        cached_tokens=call.completion.cached_tokens,
        engine_s=call.ended - call.began,
        **more,
    )
