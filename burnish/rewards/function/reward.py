"""A user's Python function as a reward: one response or a batch, sync or async.

:class:`OpenRLHFScorer` runs a reward file of OpenRLHF (``--reward.remote_url path/to/file.py``) as
it is. The file defines ``reward_func(queries, prompts, labels, **kwargs)``. It returns one reward
per query, as a tensor or list, or a mapping ``{"rewards", "scores", "extra_logs"}``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from burnish.data.thoughts import without_channels
from burnish.environments.importing import LoadError, load_object
from burnish.loop_thread import LoopThread
from burnish.rewards.base import Reward, RewardError, RewardInput, SampleError, late
from burnish.rewards.build import RewardInputs
from burnish.rewards.function.config import FunctionReward
from burnish.rewards.remote.client import ReplyLogs, checked_reply
from burnish.rewards.texts import prompt_and_query
from burnish.transcript import plain
from burnish.user_calls import CallTimeoutError, UserCalls

_OPENRLHF = "openrlhf:"
_OPENRLHF_FUNCTION = "reward_func"
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


class FunctionScorer:
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
        self, function: Callable[..., Any], *, name: str, timeout_s: float = 1800.0
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
            if self._loop is not None:  # in a thread: a coroutine that blocks would block it
                threading.Thread(target=self._loop.close, daemon=True, name="abandon").start()
                self._loop = None
            raise late(self, self._current or items[0], len(items), error) from error

    def _score(self, items: Sequence[RewardInput]) -> list[float]:
        if "responses" in self._parameters:
            columns = {n: [_BATCH[n](item) for item in items] for n in self._parameters}
            (answer,) = self._finish([self._function(**columns)])
            if isinstance(answer, BaseException):
                raise answer
            return answer  # type: ignore[no-any-return]  # RewardSet checks it
        started = []
        for item in items:
            self._current = item
            try:
                arguments = {n: _SINGLE[n](item) for n in self._parameters}
                started.append(self._function(**arguments))
            except BaseException as error:  # exit() must not end a run
                raise self._failed(item, error) from error
        answers = self._finish(started)
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, BaseException):
                raise self._failed(item, answer) from answer
        return answers

    def close(self) -> None:
        self._calls.close()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _failed(self, item: RewardInput, error: BaseException) -> SampleError:
        return SampleError(self, item, f"raised {type(error).__name__}: {error}")

    def _finish(self, answers: list[Any]) -> list[Any]:
        """Return ``answers`` with each awaitable replaced by its result or its exception."""
        self._current = None
        waiting = [i for i, answer in enumerate(answers) if inspect.isawaitable(answer)]
        if not waiting:
            return answers
        self._loop = self._loop or LoopThread(f"reward-{self.name}")
        results = self._loop.run(_results, [answers[i] for i in waiting])
        finished = dict(zip(waiting, results, strict=True))
        return [finished.get(i, answer) for i, answer in enumerate(answers)]


async def _results(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return the result or the exception of each."""

    async def result(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except asyncio.CancelledError:  # (gather returns it)
            raise
        except BaseException as error:  # SystemExit would stop the loop of the other awaitables
            return error

    return await asyncio.gather(*map(result, awaitables), return_exceptions=True)


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
    return [*prompt, without_channels({"role": "assistant", "content": item.sample.text})]


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


class OpenRLHFScorer:
    """Scores with ``reward_func`` of a file of OpenRLHF.

    ``queries`` are the texts of prompt and response with special tokens, ``labels`` the labels, or
    an empty string for a missing one. Means of ``scores`` and ``extra_logs`` become metrics.

    Raises RewardError if the file has no such function.
    """

    takes_label = True

    def __init__(
        self,
        spec: str,
        *,
        name: str,
        tokenizer: PreTrainedTokenizerBase | None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.name, self._tokenizer = name, tokenizer
        try:
            self._function = load_object(f"{spec.removeprefix(_OPENRLHF)}:{_OPENRLHF_FUNCTION}")
        except LoadError as error:
            raise RewardError(f"reward {name!r}: function {spec}: {error}") from error
        self.location = location_of(self._function)
        self._calls = UserCalls(f"reward {name!r} ({self.location})", limit_s=timeout_s)
        self._logs = ReplyLogs(name)

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """Return one score or SampleError per item. Raises SampleError if the call is late, and
        RewardError if its result has another form."""
        texts = [prompt_and_query(item, self._tokenizer) for item in items]
        queries, prompts = [query for _, query in texts], [prompt for prompt, _ in texts]
        labels = ["" if i.prompt.label is None else plain(i.prompt.label) for i in items]
        try:
            result = self._calls.run(self._call, queries, prompts, labels)
        except CallTimeoutError as error:
            raise late(self, items[0], len(items), error) from error
        try:
            reply = checked_reply(_plain(result), len(items))
        except ValueError as error:
            raise RewardError(
                f"reward {self.name!r} ({self.location}) returned {type(result).__name__}, "
                f"{error}; return {len(items)} rewards for {len(items)} queries, or a mapping "
                "with 'rewards'"
            ) from error
        self._logs.add(reply)
        return [
            value
            if isinstance(value, float)
            else SampleError(self, item, f"returned {value} instead of a finite number")
            for item, value in zip(items, reply.rewards, strict=True)
        ]

    def take_counts(self) -> Mapping[str, int]:
        """Return the number of invalid entries of ``extra_logs`` since the last call."""
        return {"bad_logs": self._logs.take_num_bad()}

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """Return (sum, count) of ``scores`` and each entry of ``extra_logs`` since the last
        call."""
        return self._logs.take_means()

    def close(self) -> None:
        self._calls.close()

    def _call(self, queries: list[str], prompts: list[str], labels: list[Any]) -> Any:
        result = self._function(queries, prompts, labels)
        return asyncio.run(_finished(result)) if inspect.isawaitable(result) else result


async def _finished(result: Any) -> Any:
    return await result


def _plain(value: Any) -> Any:
    """Return the result of a reward function as a mapping of lists and numbers."""
    result = dict(value) if isinstance(value, Mapping) else {"rewards": value}
    logs = result.get("extra_logs")
    plain = {key: _numbers(result[key]) for key in ("rewards", "scores") if key in result}
    if isinstance(logs, Mapping):
        return plain | {"extra_logs": {key: _numbers(log) for key, log in logs.items()}}
    return plain if logs is None else plain | {"extra_logs": logs}


def _numbers(value: Any) -> Any:
    """Return tensors and arrays as flat lists of numbers, those without dimension as numbers."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist() if value.ndim else value.item()
    if isinstance(value, (list, tuple)):
        return [_numbers(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def make_reward(config: FunctionReward, inputs: RewardInputs) -> Reward:
    """Return the reward of the function that the caller passed, else of the one that the recipe
    names. Raises RewardError if it cannot be loaded."""
    name, timeout_s, function = inputs.name, config.timeout_s, inputs.function
    if function is None and (config.function or "").startswith(_OPENRLHF):
        return OpenRLHFScorer(
            str(config.function), name=name, tokenizer=inputs.tokenizer, timeout_s=timeout_s
        )
    if function is None:
        try:
            function = load_object(config.function or "")
        except LoadError as error:
            raise RewardError(f"reward {name!r}: function {error}") from error
    return FunctionScorer(function, name=name, timeout_s=timeout_s)
