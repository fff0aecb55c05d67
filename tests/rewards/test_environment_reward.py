"""EnvironmentScorer: the prompt names the environment that scores it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.environments.make import make_environment
from burnish.rewards.base import RewardError, RewardInput
from burnish.rewards.environment.reward import EnvironmentScorer
from burnish.types import Group

MakeGroup = Callable[..., Group]
CHAIN = {
    "name": "reasoning_gym",
    "options": {"dataset": "chain_sum"},
    "size": 5,
    "seed": 1,
    "index": 2,
}
OWN = """
from burnish.environments.base import StepResult

class Own:
    name = "own"
    def __init__(self, options, *, size, seed):
        self.answer = options["answer"]
    def __len__(self):
        return 1
    def item(self, i):
        return {"prompt": "?", "label": "!"}
    def step(self, i, response):
        return self.answer if self.answer != "more" else StepResult(0.0, done=False)
"""


def _items(group: Group) -> list[RewardInput]:
    return [RewardInput(group.prompt, sample) for sample in group.samples]


def test_the_item_named_by_the_prompt_scores_the_response(make_group: MakeGroup) -> None:
    environment = make_environment("reasoning_gym", {"dataset": "chain_sum"}, size=5, seed=1)
    answer = environment.item(2)["label"]
    group = make_group(0, [f" {answer}\n", "no"], metadata={"environment": CHAIN})
    assert EnvironmentScorer().score(_items(group)) == [1.0, 0.0]


def test_an_environment_reads_the_answer_behind_the_reasoning(make_group: MakeGroup) -> None:
    """chain_sum gives a part of 1 to an answer with other text around it, less to a longer one."""
    environment = make_environment("reasoning_gym", {"dataset": "chain_sum"}, size=5, seed=1)
    answer = environment.item(2)["label"]
    begin, final = "<|channel|>analysis<|message|>I add.<|end|>", "<|channel|>final<|message|>"
    texts = [f"<think>I add.</think>\n\n{answer}", f"{begin}<|start|>assistant{final}{answer}"]
    group = make_group(0, [*texts, f"I add. {answer}"], metadata={"environment": CHAIN})
    scores = EnvironmentScorer().score(_items(group))
    assert scores[:2] == [1.0, 1.0] and 0 < scores[2] < 1


def test_a_prompt_without_an_environment_is_refused_with_the_reason(make_group: MakeGroup) -> None:
    with pytest.raises(RewardError, match="sources of kind environment") as caught:
        EnvironmentScorer().score(_items(make_group(0, ["a"], source="train")))
    assert "'train'" in str(caught.value) and "'q:0/0'" in str(caught.value)


@pytest.mark.parametrize(("answer", "message"), [("more", "done=False"), (1.0, "StepResult")])
def test_invalid_step_results_are_refused(
    answer: Any, message: str, tmp_path: Path, make_group: MakeGroup
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    origin = {**CHAIN, "name": f"{tmp_path}/own.py:Own", "options": {"answer": answer}}
    with pytest.raises(RewardError, match=message):
        EnvironmentScorer().score(_items(make_group(0, ["a"], metadata={"environment": origin})))
