"""Sources of scored groups for the RL step. Start here: :class:`RolloutSource`.

:class:`SyncSource` samples when a step asks for groups. ``asynchronous/source.py`` samples
all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from burnish.data.prompts.encode import PromptStream
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.base import RolloutEngine, Sync
from burnish.rollout.runner import Rollout, Runner

Metrics = dict[str, float]


class RolloutSource(Protocol):
    """Provides the groups of each RL step, and takes the weights after it."""

    @property
    def rewards(self) -> RewardSet:
        """Return the rewards of the groups."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the counts of the prompt stream, up to the newest group that was trained."""
        ...

    def next(self, step: int) -> Rollout:
        """Return the groups of RL step ``step`` (from 1). Raises the errors of engine, rewards and
        environments."""
        ...

    def update_weights(self) -> Metrics:
        """Announce that the policy has new weights. Return metrics of the transfer."""
        ...

    def evaluating(self) -> Any:
        """Return a context in which the engine samples from exactly the policy's weights, also for
        others."""
        ...

    def position(self) -> dict[str, Any]:
        """Return the state between two steps, for :meth:`plain` and :meth:`load`. Later steps do
        not change it."""
        ...

    def plain(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state from :meth:`position` for a file."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`plain` returned, and transfer the policy's weights. Raises
        ValueError if it does not fit this run."""
        ...

    def restart(self) -> None:
        """Transfer the policy's weights, after lost workers were replaced and before a step has
        sampled."""
        ...

    def close(self) -> None:
        """End what is running, and close runner and engine."""
        ...


class SyncSource:
    """Samples the groups of a step when it asks for them. Implements :class:`RolloutSource`."""

    def __init__(
        self,
        prompts: PromptStream,
        runner: Runner,
        sync: Sync,
        *,
        groups_per_step: int,
        sleeping_engine: RolloutEngine | None = None,
    ) -> None:
        """``sleeping_engine``: the engine, if it frees its memory after every rollout."""
        self.prompts, self.runner, self.sync = prompts, runner, sync
        self.groups_per_step, self.sleeping_engine = groups_per_step, sleeping_engine

    @property
    def rewards(self) -> RewardSet:
        return self.runner.rewards

    @property
    def counts(self) -> Mapping[str, int]:
        return self.prompts.counts

    def next(self, step: int) -> Rollout:
        rollout = self.runner.fill(self.prompts.next, self.groups_per_step)
        if self.sleeping_engine is not None:
            self.sleeping_engine.sleep(new_weights_follow=True)
        return rollout

    def update_weights(self) -> Metrics:
        return self.sync.push()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Do nothing: the engine has the policy's weights."""
        yield

    def position(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state_dict()}

    def plain(self, position: Mapping[str, Any]) -> dict[str, Any]:
        return dict(position)

    def load(self, state: Mapping[str, Any]) -> None:
        ahead = state.get("rollouts", {}).get("ahead", 0)
        if ahead:
            raise ValueError(
                f"it belongs to an asynchronous run, which has used {ahead} prompts that come "
                "after one that it has not trained; a synchronous run would train them again: set "
                "rollout.asynchronous.max_staleness as in that run"
            )
        self.prompts.load_state_dict(state["prompts"])
        self.sync.push()

    def restart(self) -> None:
        self.sync.push()

    def close(self) -> None:
        self.runner.close()
