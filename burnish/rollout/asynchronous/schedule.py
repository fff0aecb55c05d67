"""Admission and order of the groups of an asynchronous run: a state machine without clock or
threads.

Groups are numbered in the order of their prompts. Versions count RL steps: version v is the weights
after v RL steps, and step v + 1 trains them. A group that is started while the engines have version
e gets the *deadline* e + S (S: ``max_staleness``): it is trained by step e + S + 1 at the latest,
so its age, the trained version minus the oldest version of its tokens, is at most S.

- Admission: a group holds a slot from its start until the engines have the weights of the step
  that trained it, or until it is lost (filtered out, or failed). There are at most C slots, with
  P <= C <= (S + 1) P for steps of P groups.
- Order: a step takes the groups that finished first, but so that the others can still meet their
  deadlines: for every d, at most P (d - v) of the groups that are left have a deadline of at most
  d. If that needs a group that is still running, the step waits for it.

docs/async.md proves that the bound holds and that the schedule cannot deadlock.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["ready", "filtered", "failed"]
"""``filtered``: left out by dynamic sampling, but usable. ``failed``: without scores."""


@dataclass(frozen=True)
class Taken:
    """The groups of one step."""

    groups: tuple[int, ...]
    """Groups to train, in the order of the batch."""
    kept_anyway: int
    """How many of ``groups``, the last ones, had been filtered out."""
    lost: tuple[int, ...]
    """Groups that were lost since the step before and are not trained, in order."""


@dataclass(frozen=True)
class ScheduleLimits:
    """Sizes and bounds of a schedule."""

    groups_per_step: int
    """P."""
    slots: int
    """C: maximum number of groups that hold a slot."""
    max_staleness: int
    """S, in RL steps."""
    total_steps: int
    """RL steps of the entire run. No group is started that no step would train."""
    max_refills: int
    """Rounds in which lost groups are replaced, per step."""

    def __post_init__(self) -> None:
        most = (self.max_staleness + 1) * self.groups_per_step
        if not self.groups_per_step <= self.slots <= most:
            raise ValueError(
                f"{self.slots} slots for steps of {self.groups_per_step} groups with "
                f"max_staleness={self.max_staleness}: use {self.groups_per_step} to {most}"
            )


class StalenessSchedule:
    """Decides when groups start and which groups a step trains."""

    def __init__(self, limits: ScheduleLimits, *, version: int = 0) -> None:
        """``version``: RL steps done before."""
        self.limits = limits
        self.taken = version
        """RL steps that have taken their groups. The next one trains this version."""
        self.engine_version = version
        """Version that all engines have."""
        self._next = 0
        self._again: list[int] = []
        """Groups that were started before a resume and have to be started again, in order."""
        self._running: dict[int, int] = {}
        """Running group -> version at its start."""
        self._num_running: Counter[int] = Counter()
        """Version -> number of running groups that were started at it."""
        self._ready: dict[int, int] = {}
        """Group that waits to be trained -> version at its start, in the order of finishing."""
        self._lost: dict[int, Outcome] = {}
        """Groups lost since the last step."""
        self._lost_sorted: list[int] = []
        """The same groups, in order."""
        self._unused: list[int] = []
        """Groups that are started or lost and that no step has used up, in order."""

    def rebase(self, version: int) -> None:
        """Begin after ``version`` RL steps. Raises RuntimeError if a group was started."""
        if self._next or self._again:
            raise RuntimeError("groups were started already")
        self.taken = self.engine_version = version

    # ---- starting ----------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Return whether a group may start now."""
        if self._num_waiting >= self._room():
            return False
        return not self._lost or bool(self._again) or not self._no_refill_left()

    def start(self) -> int:
        """Start a group and return its number. Numbers are consecutive, except that groups that a
        resumed run has to repeat come first. Raises RuntimeError unless :meth:`may_start`."""
        if not self.may_start():
            raise RuntimeError("no group may start now")
        if self._again:
            group = self._again.pop(0)
        else:
            group, self._next = self._next, self._next + 1
            self._unused.append(group)
        self._running[group] = self.engine_version
        self._num_running[self.engine_version] += 1
        return group

    @property
    def _num_waiting(self) -> int:
        """Number of groups that are started and not taken."""
        return len(self._running) + len(self._ready)

    def _room(self) -> int:
        """Return the maximum number of groups that are started and not taken, now."""
        limits = self.limits
        held = limits.groups_per_step * (self.taken - self.engine_version)
        return min(limits.slots - held, limits.groups_per_step * (limits.total_steps - self.taken))

    def _no_refill_left(self) -> bool:
        """Return whether the next new group would be of a round above ``max_refills``: round 0 if
        it fills a free slot, r + 1 if it replaces a group of round r that was lost.

        Rounds are counted as if each had begun only after the one before had finished: the first
        groups, as many as there is room for, are round 0, as many as were lost of them follow as
        round 1, and so on. As long as groups are running, fewer are known to be lost, and the
        number may be too large, never too small.
        """
        room = end = self._room()
        for _ in range(self.limits.max_refills + 1):
            if end > len(self._unused):
                return False
            end = room + bisect_right(self._lost_sorted, self._unused[end - 1])
        return True

    # ---- results -----------------------------------------------------------------------------

    def finish(self, group: int, outcome: Outcome) -> None:
        """Record that a running group has ended."""
        started = self._running.pop(group)
        self._num_running[started] -= 1
        if outcome == "ready":
            self._ready[group] = started
        else:
            self._lost[group] = outcome
            insort(self._lost_sorted, group)

    def take(self) -> Taken | None:
        """Return the groups of the next step, or None if it has to wait for running groups.

        If too many groups were lost (:attr:`is_exhausted`), the newest groups that had been
        filtered out complete the step; None if there are not enough of them.
        """
        size = self.limits.groups_per_step
        numbers: list[int] = []
        if self.is_exhausted:
            filtered = sorted(g for g, why in self._lost.items() if why == "filtered")
            numbers = filtered[len(filtered) - (size - len(self._ready)) :]
            if len(self._ready) + len(numbers) < size:
                return None
            chosen = sorted(self._ready)
        else:
            if len(self._ready) < size or not self._others_can_wait():
                return None
            chosen = sorted(self._choose())
        for group in chosen:
            del self._ready[group]
        lost = tuple(sorted(set(self._lost) - set(numbers)))
        self._lost, self._lost_sorted = {}, []
        self._unused = sorted([*self._running, *self._ready, *self._again])
        self._num_running = +self._num_running  # without versions that have none
        self.taken += 1
        return Taken((*chosen, *numbers), len(numbers), lost)

    @property
    def is_exhausted(self) -> bool:
        """Return whether nothing is running, nothing may start, and too few groups are ready."""
        few = len(self._ready) < self.limits.groups_per_step
        room = self._num_waiting < self._room()  # otherwise slots will be free after a load
        return few and room and not self._running and not self.may_start()

    def _others_can_wait(self) -> bool:
        """Return whether the running groups can still meet their deadlines after a step that takes
        ready groups: at most P (d - v) of them have a deadline of at most d, for every d."""
        size, due = self.limits.groups_per_step, 0
        for started in sorted(self._num_running):
            due += self._num_running[started]
            if due > size * (started + self.limits.max_staleness - self.taken):
                return False
        return True

    def _choose(self) -> list[int]:
        """Return a step's groups: those that finished first, among the choices that leave no
        deadline impossible to meet. There is one (:meth:`_others_can_wait`)."""
        size, stale = self.limits.groups_per_step, self.limits.max_staleness
        waiting = self._num_running + Counter(self._ready.values())
        chosen: dict[int, None] = {}
        due = 0
        for started in sorted(waiting):
            due += waiting[started]
            needed = due - size * (started + stale - self.taken)
            for group, state in self._ready.items():
                if len(chosen) >= needed:
                    break
                if state <= started:
                    chosen.setdefault(group)
        for group in self._ready:
            if len(chosen) == size:
                break
            chosen.setdefault(group)
        return list(chosen)

    # ---- versions ----------------------------------------------------------------------------

    def loaded(self, version: int) -> None:
        """Record that all engines have ``version``, which frees the slots of the groups that the
        steps before it trained."""
        if not self.engine_version <= version <= self.taken:
            raise ValueError(
                f"the engines have version {self.engine_version} and {self.taken} steps took their "
                f"groups, so the engines cannot load version {version}"
            )
        self.engine_version = version

    # ---- state -------------------------------------------------------------------------------

    @property
    def running(self) -> tuple[int, ...]:
        """Running groups, in order."""
        return tuple(sorted(self._running))

    @property
    def ready(self) -> tuple[int, ...]:
        """Finished groups that wait to be trained, in the order of finishing."""
        return tuple(self._ready)

    @property
    def frontier(self) -> int:
        """The first group whose prompt is not used up: of the groups that wait, run, or were lost
        since the last step, or the next new one."""
        return min([*self._running, *self._ready, *self._lost, *self._again], default=self._next)

    @property
    def next_new(self) -> int:
        """Number of the next new group."""
        return self._next

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`, between two steps. JSON-serializable.

        Running groups, and those lost since the last step, are to be started again."""
        again = [*self._again, *self._running, *self._lost]
        return {
            "version": self.taken,
            "next": self._next,
            "again": sorted(again),
            "ready": [[group, started] for group, started in self._ready.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state; the engines have the version of the trainer. Return whether the ready
        groups of the state are kept.

        They are not if they cannot meet their deadlines under other limits than before; they are
        then to be started again.
        """
        self.taken = self.engine_version = int(state["version"])
        self._next, self._running, self._lost = int(state["next"]), {}, {}
        self._num_running, self._lost_sorted = Counter(), []
        self._again = [int(group) for group in state["again"]]
        self._ready = {int(group): int(started) for group, started in state["ready"]}
        self._unused = sorted([*self._again, *self._ready])
        size, stale = self.limits.groups_per_step, self.limits.max_staleness
        fits = len(self._ready) <= self._room() and all(
            sum(s <= started for s in self._ready.values())
            <= size * (started + stale - self.taken + 1)
            for started in self._ready.values()
        )
        if not fits:
            self._again = sorted([*self._again, *self._ready])
            self._ready = {}
        return fits
