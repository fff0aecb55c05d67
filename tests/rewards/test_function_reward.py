"""FunctionScorer: the parameter names determine the arguments of a function."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from burnish.rewards.base import RewardError, RewardInput
from burnish.rewards.function.reward import FunctionScorer, OpenRLHFScorer
from burnish.rewards.reward_set import _call, _Failure
from burnish.transcript import Episode, Turn
from burnish.types import Group

MakeGroup = Callable[..., Group]


@pytest.fixture
def items(make_group: MakeGroup) -> list[RewardInput]:
    group = make_group(0, ["a", "bb"], label="L", metadata={"level": 3})
    return [RewardInput(group.prompt, sample) for sample in group.samples]


def _score(function: Callable[..., Any], items: list[RewardInput]) -> Any:
    reward = FunctionScorer(function, name="f")
    try:
        return reward.score(items)
    finally:
        reward.close()


def test_a_single_function_gets_one_response_per_call(items: list[RewardInput]) -> None:
    def f(prompt: str, response: str, label: Any, metadata: Any) -> float:
        assert (prompt, label, metadata) == ("question 0", "L", {"level": 3})
        return len(response)

    assert _score(f, items) == [1, 2]


def test_a_batch_function_gets_all_in_one_call(items: list[RewardInput]) -> None:
    def f(prompts: Any, responses: Any, labels: Any, metadatas: Any) -> list[float]:
        assert (prompts, labels) == (["question 0"] * 2, ["L"] * 2)
        assert metadatas == [{"level": 3}] * 2
        return [len(response) for response in responses]

    assert _score(f, items) == [1, 2]


def _change(*arguments: Any) -> None:
    """Change each argument in place, as far as it can be changed."""
    for value in arguments:
        if isinstance(value, dict):
            _change(*value.values())
            value["role"] = value["new"] = "changed"
        elif isinstance(value, list):
            _change(*value)
            value.append("changed")


def _changes(prompt: str, response: str, label: Any, metadata: Any, messages: Any) -> float:
    score = float(str((label, metadata, messages)).count("changed"))
    _change(label, metadata, messages)
    return score


def _changes_all(responses: Any, labels: Any, metadatas: Any, conversations: Any) -> list[float]:
    given = list(zip([""] * 2, responses, labels, metadatas, conversations, strict=True))
    return [_changes(*one) for one in given]


def reward_func(queries: Any, prompts: Any, labels: Any) -> list[float]:
    return [
        _changes(query, "", label, {}, []) for query, label in zip(queries, labels, strict=True)
    ]


@pytest.mark.parametrize(
    "function", [_changes, _changes_all, None], ids=["one", "batch", "openrlhf"]
)
def test_what_a_function_changes_reaches_nothing_else(
    function: Callable[..., Any] | None, make_group: MakeGroup
) -> None:
    """Samples share their prompt, and so do rewards and the rows that a job writes."""
    group = make_group(
        *(0, ["a", "bb"]),
        label=["x", {"y": ["z"]}],
        metadata={"level": 3, "tests": [{"in": [1]}]},
        messages=({"role": "user", "content": [{"type": "text", "text": "hi"}]},),
    )
    turn = Turn({"role": "assistant", "content": "a"}, ({"role": "tool", "content": "b"},))
    played = replace(
        group.samples[1], episode=Episode("done", group.prompt.messages, turns=(turn,))
    )
    items = [RewardInput(group.prompt, sample) for sample in (group.samples[0], played)]
    before = repr(items)
    if function is not None:
        assert _score(function, items) == [0, 0]
    else:
        items = [replace(item, sample=replace(item.sample, episode=None)) for item in items]
        before = repr(items)
        reward = OpenRLHFScorer(f"openrlhf:{__file__}", name="f", tokenizer=None)
        assert reward.score(items) == [0, 0]
        reward.close()
    assert repr(items) == before


def test_async_single_calls_wait_for_each_other_so_they_run_together(
    items: list[RewardInput],
) -> None:
    """Both calls must be inside at once before either may go on; one after the other would hang."""
    inside: list[str] = []

    async def f(response: str) -> float:
        inside.append(response)
        while len(inside) < 2:
            await asyncio.sleep(0)
        return len(response)

    assert _score(f, items) == [1, 2]


def test_an_async_batch_function_is_awaited(items: list[RewardInput]) -> None:
    async def f(responses: list[str]) -> list[int]:
        await asyncio.sleep(0)
        return [len(response) for response in responses]

    assert _score(f, items) == [1, 2]


def test_async_works_where_a_loop_already_runs(items: list[RewardInput]) -> None:
    async def f(response: str) -> float:
        return len(response)

    async def notebook() -> Any:
        return _score(f, items)

    assert asyncio.run(notebook()) == [1, 2]


def test_every_call_uses_the_same_loop_and_close_ends_its_thread(items: list[RewardInput]) -> None:
    loops: list[Any] = []

    async def f(response: str) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    reward = FunctionScorer(f, name="looped")
    reward.score(items)
    reward.score(items)
    assert len(set(map(id, loops))) == 1
    reward.close()
    assert "reward-looped" not in [thread.name for thread in threading.enumerate()]


def test_an_async_failure_names_its_sample(items: list[RewardInput]) -> None:
    async def f(response: str) -> float:
        return 1 / (len(response) - 2)

    with pytest.raises(RewardError, match="q:0/1") as caught:
        _score(f, items)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def _leaves(response: str) -> float:
    sys.exit(0)


def _all_leave(responses: list[str]) -> list[float]:
    sys.exit(3)


async def _leaves_later(response: str) -> float:
    sys.exit("out of quota")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_leaves, "raised SystemExit: 0"),
        (_all_leave, "raised SystemExit: 3"),
        (_leaves_later, "raised SystemExit: out of quota"),
    ],
)
def test_a_function_that_calls_exit_does_not_end_the_process(
    function: Callable[..., Any], said: str, items: list[RewardInput]
) -> None:
    """Its run would end with the function's exit code, without a word and without a checkpoint."""
    reward = FunctionScorer(function, name="f")
    failed = _call(reward, items)
    reward.close()
    assert isinstance(failed, _Failure) and said in failed.message and "q:0/0" in failed.message


def _kwargs(response: str, **rest: Any) -> float:
    return 0.0


def _misspelt(response: str, lable: str) -> float:
    return 0.0


def _mixed(prompts: Any, response: Any) -> float:
    return 0.0


def _blind(prompt: str) -> float:
    return 0.0


def _positional(response: str, /) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_kwargs, "rest"),
        (_misspelt, "unknown parameter 'lable'"),
        (_mixed, "mix the two kinds"),
        (_blind, "no parameter receives the response"),
        (_positional, "cannot be passed by name"),
    ],
)
def test_wrong_parameters_are_refused_with_the_accepted_names(
    function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(RewardError) as caught:
        FunctionScorer(function, name="f")
    assert message in str(caught.value) and "prompts, responses, labels" in str(caught.value)
    assert "test_function_reward.py:" in str(caught.value)


def test_a_value_that_is_not_callable_is_refused() -> None:
    with pytest.raises(RewardError, match="expected a function"):
        FunctionScorer(3, name="f")  # type: ignore[arg-type]


def test_settings_bound_by_partial_are_not_parameters(items: list[RewardInput]) -> None:
    def f(response: str, scale: float) -> float:
        return scale * len(response)

    assert _score(functools.partial(f, scale=3), items) == [3, 6]


def test_an_object_with_an_async_call_works(items: list[RewardInput]) -> None:
    class Judge:
        async def __call__(self, response: str) -> float:
            return len(response)

    assert _score(Judge(), items) == [1, 2]
