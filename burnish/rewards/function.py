"""A user's Python function as a reward: one response or a batch, sync or async."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from burnish.loop_thread import LoopThread
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.interface import late
from burnish.transcript import plain
from burnish.user_calls import CallTimeoutError, UserCalls

TIMEOUT_S = 1800.0
_SINGLE: dict[str, Callable[[RewardInput], Any]] = {
    "prompt": lambda item: item.prompt.text,
    "response": lambda item: item.sample.text,
    "label": lambda item: plain(item.prompt.label),
    "metadata": lambda item: plain(item.prompt.metadata),
    "messages": lambda item: [plain(message) for message in conversation(item)],
}
"""Parameter -> argument. Each call gets copies: a function may change them in place, and its prompt
is shared by all samples of the group, by other rewards and by the written rows."""
_BATCH = {
    "prompts": _SINGLE["prompt"],
    "responses": _SINGLE["response"],
    "labels": _SINGLE["label"],
    "metadatas": _SINGLE["metadata"],
    "conversations": _SINGLE["messages"],
}
_ACCEPTED = (
    f"accepted for one response: {', '.join(_SINGLE)} (returns a number); accepted for a batch: "
    f"{', '.join(_BATCH)} (returns a list of numbers). Take any subset of one kind that includes "
    "response or responses"
)


class FunctionReward:
    """A Python function as a reward.

    ``f(prompt, response, label)`` returns one number, ``f(prompts, responses, labels)`` a list. The
    parameter names select the kind. Either kind takes any subset of its names that includes
    ``response`` or ``responses``. ``metadata`` (``metadatas``) is a mapping with the other columns
    of the data row, ``messages`` (``conversations``) a list of all messages of the conversation.
    Arguments are passed by name.

    Coroutine functions run on one event loop in a dedicated thread, all responses concurrently.
    They therefore work inside a notebook, and a client object bound to an event loop can be reused
    across calls.

    All calls run in one thread, at most ``timeout_s`` seconds for all responses of a call of
    :meth:`score`.

    Raises RewardError if a parameter has another name or if the two kinds are mixed.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.name = name
        self.location = location_of(function)
        self._function = function
        self._parameters = _parameters(function, f"reward {name!r} ({self.location})")
        self.takes_label = bool({"label", "labels"} & set(self._parameters))
        self._loop: LoopThread | None = None
        self._calls = UserCalls(f"reward {name!r} ({self.location})", limit_s=timeout_s)
        self._current: RewardInput | None = None
        """The response of which the function is running."""

    def score(self, items: Sequence[RewardInput]) -> list[float]:
        """Return the unchecked results of the function.

        Raises SampleError if a function of one response raised, or if the function did not return
        in time.
        """
        self._current = None
        try:
            return self._calls.run(self._score, items)
        except CallTimeoutError as error:
            self._abandon_loop()
            raise late(self, self._current or items[0], len(items), error) from error

    def _score(self, items: Sequence[RewardInput]) -> list[float]:
        if "responses" in self._parameters:
            columns = {n: [_BATCH[n](item) for item in items] for n in self._parameters}
            (answer,) = self._finish([self._function(**columns)])
            if isinstance(answer, BaseException):
                raise answer
            return answer  # type: ignore[no-any-return]  # RewardSet checks it
        answers = self._finish([self._start(item) for item in items])
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, BaseException):
                raise self._failed(item, answer) from answer
        return answers

    def close(self) -> None:
        self._calls.close()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _abandon_loop(self) -> None:
        """Stop the event loop in a thread of its own: a coroutine that blocks would block it."""
        if self._loop is not None:
            threading.Thread(target=self._loop.close, daemon=True, name="abandon").start()
            self._loop = None

    def _start(self, item: RewardInput) -> Any:
        self._current = item
        try:
            return self._function(**{n: _SINGLE[n](item) for n in self._parameters})
        except BaseException as error:  # exit() must not end a run
            raise self._failed(item, error) from error

    def _failed(self, item: RewardInput, error: BaseException) -> SampleError:
        return SampleError(self, item, f"raised {type(error).__name__}: {error}")

    def _finish(self, answers: list[Any]) -> list[Any]:
        """Return ``answers`` with each awaitable replaced by its result or its exception."""
        self._current = None
        waiting = [i for i, answer in enumerate(answers) if inspect.isawaitable(answer)]
        if not waiting:
            return answers
        self._loop = self._loop or LoopThread(f"reward-{self.name}")
        results = self._loop.run(_gather, [answers[i] for i in waiting])
        finished = dict(zip(waiting, results, strict=True))
        return [finished.get(i, answer) for i, answer in enumerate(answers)]


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*map(_outcome, awaitables), return_exceptions=True)


async def _outcome(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except asyncio.CancelledError:  # (gather returns it)
        raise
    except BaseException as error:  # SystemExit would stop the loop of the other awaitables
        return error


def _parameters(function: Callable[..., Any], named: str) -> tuple[str, ...]:
    if not callable(function):
        raise RewardError(f"{named}: expected a function, got {type(function).__name__}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{named}: its parameters cannot be inspected ({error}); wrap it in a def"
        ) from error
    bound = function.keywords if isinstance(function, functools.partial) else {}
    free = [p for p in parameters if p.name not in bound]
    for p in free:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise RewardError(f"{named}: parameter {p} cannot be passed by name; {_ACCEPTED}")
        if p.name not in _SINGLE and p.name not in _BATCH:
            raise RewardError(
                f"{named}: unknown parameter {p.name!r}; {_ACCEPTED}. "
                "Bind your own settings with functools.partial(f, setting=value). A reward file of "
                "OpenRLHF, with reward_func(queries, prompts, labels), runs as it is: set function "
                "to openrlhf:path/to/file.py"
            )
    names = tuple(p.name for p in free)
    if not any(set(names) <= set(kind) for kind in (_SINGLE, _BATCH)):
        raise RewardError(
            f"{named}: the parameters {', '.join(names)} mix the two kinds; {_ACCEPTED}"
        )
    if "response" not in names and "responses" not in names:
        raise RewardError(f"{named}: no parameter receives the response; {_ACCEPTED}")
    return names


def conversation(item: RewardInput) -> list[Mapping[str, Any]]:
    """Return the conversation: all messages of an episode, or the prompt and its response."""
    if item.sample.episode is not None:
        return item.sample.episode.messages
    prompt: Sequence[Mapping[str, Any]] = item.prompt.messages or (
        {"role": "user", "content": item.prompt.text},
    )
    return [*prompt, {"role": "assistant", "content": item.sample.text}]


def location_of(function: Any) -> str:
    """Return ``function f at rewards.py:12``, or name and module if the source is not available."""
    target = function.func if isinstance(function, functools.partial) else function
    target = inspect.unwrap(target)
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        target = type(target)
    label = f"function {target.__qualname__}"
    try:
        return f"{label} at {inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (TypeError, OSError):
        return f"{label} of {target.__module__}"
