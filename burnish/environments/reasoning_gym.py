"""The task families of reasoning-gym (github.com/open-thought/reasoning-gym) as an environment.

reasoning-gym has more than 100 generators of verifiable tasks. Item i of a task depends only on the
task's parameters, the seed and i.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from burnish.config.explain import nearest
from burnish.environments.base import EnvironmentSetupError, StepResult

logger = logging.getLogger(__name__)


class ReasoningGym:
    """An environment with one task of reasoning-gym.

    ``options``: ``dataset`` (the task's name, e.g. ``chain_sum``), the task's parameters
    (``min_terms: 2``), and ``exact`` (default False), which turns partial credit into 0.

    Each scorer has its own rules for partial credit: "The answer is 7" for the label 7 scores 1/15
    in most tasks. If a scorer raises on an invalid response, the score is 0, because the response
    is wrong and the run is not. ``scorer_failures`` counts these cases, and the first is logged.

    Raises EnvironmentSetupError if reasoning-gym is not installed, a task or parameter is unknown,
    or the task refuses a value.
    """

    def __init__(self, options: Mapping[str, Any], *, size: int, seed: int) -> None:
        parameters = dict(options)
        for name in ("size", "seed"):
            if name in parameters:
                raise EnvironmentSetupError(
                    f"environment reasoning_gym: {name} is set in options, but it is a field of "
                    "the source; move it out of options"
                )
        task = parameters.pop("dataset", None)
        self._exact = bool(parameters.pop("exact", False))
        self._dataset = _create(task, {**parameters, "size": size, "seed": seed})
        self._size = size
        self._entries: dict[int, Mapping[str, Any]] = {}
        self.name: str = str(task)
        self.scorer_failures = 0

    def __len__(self) -> int:
        return self._size

    def item(self, i: int) -> Mapping[str, Any]:
        """Return item ``i`` as ``{"prompt": question, "label": answer}``. Raises IndexError."""
        entry = self._entry(i)
        return {"prompt": entry["question"], "label": entry["answer"]}

    def step(self, i: int, response: str) -> StepResult:
        """Return the task's own score of the stripped ``response``, usually in [0, 1]."""
        entry = self._entry(i)
        try:
            score = float(self._dataset.score_answer(response.strip(), entry))
        except Exception as error:
            self.scorer_failures += 1
            if self.scorer_failures == 1:
                logger.warning(
                    "reasoning_gym %s: the scorer raised %s: %s on item %d, response %.80r; it "
                    "counts as 0 (similar errors are not logged again)",
                    *(self.name, type(error).__name__, error, i, response),
                )
            score = 0.0
        if self._exact and score < 1.0:
            score = 0.0
        return StepResult(reward=score)

    def _entry(self, i: int) -> Mapping[str, Any]:
        if not 0 <= i < self._size:
            raise IndexError(
                f"environment {self.name} has items 0 to {self._size - 1}, but item {i} was "
                "requested"
            )
        if i not in self._entries:  # generation may be slow, and every sample of a group needs it
            self._entries[i] = self._dataset[i]
        return self._entries[i]


def _create(task: Any, parameters: Mapping[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise EnvironmentSetupError(
            f"environment reasoning_gym needs {error.name!r}; pip install 'burnish[demo]'"
        ) from error
    if task not in DATASETS:
        problem = f"there is no task {task!r}{nearest(str(task), DATASETS)}"
        if task is None:
            problem = "options.dataset is not set"
        raise EnvironmentSetupError(
            f"environment reasoning_gym: {problem}; set options.dataset to one of its "
            f"{len(DATASETS)} tasks, e.g. chain_sum"
        )
    known = [f.name for f in fields(DATASETS[task][1])]
    for name in parameters:
        if name not in known:
            raise EnvironmentSetupError(
                f"environment reasoning_gym: task {task} has no parameter {name!r}"
                f"{nearest(name, known)}; it has {', '.join(known)}, and exact"
            )
    try:
        return create_dataset(task, **parameters)
    except Exception as error:
        raise EnvironmentSetupError(
            f"environment reasoning_gym: task {task} rejects {dict(parameters)}: "
            f"{type(error).__name__}: {error}"
        ) from error
