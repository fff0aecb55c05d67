"""Admission and order of asynchronous rollouts, over thousands of simulated runs.

A simulated run draws everything that timing decides: which group finishes next, when the engines
load new weights and which of several they skip, what is lost, when the trainer asks, and when the
run is killed and resumed from an earlier state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from burnish.rollout.asynchronous.schedule import Outcome, ScheduleLimits, StalenessSchedule

RUNS = 5_000


@dataclass
class Simulation:
    """A run of the schedule with random times."""

    limits: ScheduleLimits
    draw: random.Random
    outcome_of: Callable[[int], Outcome]
    schedule: StalenessSchedule = field(init=False)
    sampled_at: dict[int, int] = field(default_factory=dict)
    """Group -> version of the engines at its start."""
    loads: list[int] = field(default_factory=list)
    """Versions that are on their way to the engines."""
    steps: list[tuple[int, ...]] = field(default_factory=list)
    lost: list[tuple[int, ...]] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    exhausted: bool = False

    def __post_init__(self) -> None:
        self.schedule = StalenessSchedule(self.limits)

    def run(self) -> Simulation:
        saved: tuple[Any, ...] = (self.schedule.state_dict(), 0)
        kills = self.draw.choice([0, 0, 2])
        while len(self.steps) < self.limits.total_steps and not self.exhausted:
            if kills and self.draw.random() < 0.05:
                kills -= 1
                self.resume(*saved)
            done = len(self.steps)
            self.advance()
            if len(self.steps) > done and self.draw.random() < 0.5:
                saved = (self.schedule.state_dict(), len(self.steps))
        return self

    def advance(self) -> None:
        """Start what may start; then a step takes its groups, a group ends, or a load does."""
        schedule = self.schedule
        while schedule.may_start():
            group = schedule.start()
            self.sampled_at[group] = schedule.engine_version
        taken = schedule.take()
        if taken is not None:
            for group in taken.groups:
                self.ages[len(self.steps) - self.sampled_at[group]] += 1
            self.steps.append(taken.groups)
            self.lost.append(taken.lost)
            self.loads.append(len(self.steps))
            return
        choices = [*schedule.running, *(["load"] * bool(self.loads))]
        if not choices:
            self.exhausted = True
            return
        chosen = self.draw.choice(choices)
        if chosen == "load":  # engines may skip a version when a newer one is there
            at = self.draw.randrange(len(self.loads))
            schedule.loaded(self.loads[at])
            del self.loads[: at + 1]
        else:
            schedule.finish(chosen, self.outcome_of(chosen))

    def resume(
        self, state: dict[str, Any], steps: int, limits: ScheduleLimits | None = None
    ) -> bool:
        """Go back to a saved state, as a killed run does, with the same or other limits. Return
        whether the finished groups were kept."""
        self.limits = limits or self.limits
        self.schedule = StalenessSchedule(self.limits)
        kept = self.schedule.load_state_dict(state)
        assert kept or limits is not None
        self.sampled_at |= {group: started for group, started in state["ready"]}
        self.loads = []
        del self.steps[steps:], self.lost[steps:]
        return kept


def simulation(seed: int, *, stale: int | None = None) -> Simulation:
    draw = random.Random(seed)
    size, most = draw.randint(1, 6), draw.randint(0, 5) if stale is None else stale
    slots = draw.randint(size, (most + 1) * size)
    losses = draw.choice([0.0, 0.0, 0.2, 0.6])
    limits = ScheduleLimits(size, slots, most, draw.randint(1, 12), draw.randint(0, 3))

    def outcome_of(group: int) -> Outcome:
        own = random.Random(f"{seed} {group}")
        return "ready" if own.random() >= losses else own.choice(["filtered", "failed"])

    return Simulation(limits, draw, outcome_of)


def test_the_bound_holds_no_group_is_lost_or_trained_twice_and_nothing_deadlocks() -> None:
    reached: Counter[int] = Counter()
    for seed in range(RUNS):
        run = simulation(seed).run()
        stale, size = run.limits.max_staleness, run.limits.groups_per_step
        assert all(0 <= age <= stale for age in run.ages), (seed, run.ages)
        reached[stale] += stale in run.ages
        assert all(len(set(groups)) == size for groups in run.steps), seed
        trained = [group for groups in run.steps for group in groups]
        lost = [group for groups in run.lost for group in groups]
        assert len({*trained, *lost}) == len(trained) + len(lost), seed
        state = run.schedule.state_dict()
        left = {*state["again"], *(group for group, _ in state["ready"])}
        assert left.isdisjoint([*trained, *lost]), seed
        assert {*trained, *lost, *left} == set(range(run.schedule.next_new)), seed
        if run.exhausted:  # every refill was used, and the engines have the newest weights
            assert run.schedule.is_exhausted and run.schedule.engine_version == len(run.steps), seed
            assert len(state["again"]) > run.limits.max_refills, seed
        else:
            assert len(run.steps) == run.limits.total_steps, seed
    assert all(reached[stale] > RUNS / 60 for stale in range(6)), reached


def test_a_resume_with_other_limits_keeps_the_bound_and_every_group() -> None:
    """Each run is resumed once with other limits from the state of a random step. Its finished
    groups are kept or sampled again; all ages are those of the new limits."""
    found: Counter[bool] = Counter()
    for seed in range(RUNS // 4):
        run, draw = simulation(seed), random.Random(f"limits {seed}")
        while len(run.steps) < run.limits.total_steps / 2 and not run.exhausted:
            run.advance()
        state, steps = run.schedule.state_dict(), len(run.steps)
        size, most = draw.randint(1, 6), draw.randint(0, 5)
        slots = draw.randint(size, (most + 1) * size)
        kept = run.resume(state, steps, ScheduleLimits(size, slots, most, steps + 6, 3))
        found[kept] += bool(state["ready"])
        run.ages.clear()
        while len(run.steps) < run.limits.total_steps and not run.exhausted:
            run.advance()
        assert all(0 <= age <= most for age in run.ages), (seed, run.ages)
        done = [group for groups in (*run.steps, *run.lost) for group in groups]
        state = run.schedule.state_dict()
        left = {*state["again"], *(group for group, _ in state["ready"])}
        assert len({*done, *left}) == len(done) + len(left), seed
        assert {*done, *left} == set(range(run.schedule.next_new)), seed
    assert min(found[True], found[False]) > RUNS / 100, found


def test_the_source_starts_a_group_whenever_a_slot_is_free() -> None:
    """Without losses, the number of groups that wait or run is always that of the slots that the
    trained groups leave, or all that the remaining steps need."""
    for seed in range(RUNS // 10):
        run = simulation(seed)
        run.outcome_of = lambda group: "ready"
        schedule, limits = run.schedule, run.limits
        while len(run.steps) < limits.total_steps:
            run.advance()
            while schedule.may_start():
                run.sampled_at[schedule.start()] = schedule.engine_version
            held = limits.groups_per_step * (len(run.steps) - schedule.engine_version)
            needed = limits.groups_per_step * (limits.total_steps - len(run.steps))
            waiting = len(schedule.running) + len(schedule.ready)
            assert waiting >= min(limits.slots - held, needed), seed


def synchronous(run: Simulation) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (groups, lost) of each step of a loop that fills a step in rounds, each of as many new
    groups as are missing."""
    steps, new = [], 0
    size = run.limits.groups_per_step
    for _ in range(run.limits.total_steps):
        outcomes: dict[int, Outcome] = {}
        ready: list[int] = []
        for _ in range(run.limits.max_refills + 1):
            fresh = range(new, new + size - len(ready))
            new = fresh.stop
            outcomes |= {group: run.outcome_of(group) for group in fresh}
            ready = [group for group, outcome in outcomes.items() if outcome == "ready"]
            if len(ready) == size:
                break
        filtered = [group for group, outcome in outcomes.items() if outcome == "filtered"]
        groups = (*ready, *filtered[len(filtered) - (size - len(ready)) :])
        if len(groups) < size:
            break
        steps.append((groups, tuple(group for group in outcomes if group not in groups)))
    return steps


def test_a_bound_of_zero_is_the_synchronous_loop() -> None:
    """Whatever finishes first: the same groups in the same order, also when refills run out."""
    kept_anyway = 0
    for seed in range(RUNS):
        run = simulation(seed, stale=0).run()
        expected = synchronous(run)
        assert list(zip(run.steps, run.lost, strict=True)) == expected, seed
        kept_anyway += any(list(groups) != sorted(groups) for groups, _ in expected)
    assert kept_anyway > RUNS / 50


def test_first_finished_is_first_trained_unless_a_deadline_is_near() -> None:
    """P = 2, S = 2, 6 slots. Groups 0 to 5 start at version 0. 4 and 5 finish first and are trained
    first. After that, 0 to 3 must be trained by the two steps that are left until their deadline,
    so groups of version 1 wait although they finish first."""
    schedule = StalenessSchedule(ScheduleLimits(2, 6, 2, 9, 0))
    assert [schedule.start() for _ in range(6)] == list(range(6)) and not schedule.may_start()
    for group in (5, 4):
        schedule.finish(group, "ready")
    taken = schedule.take()
    assert taken is not None and taken.groups == (4, 5)
    assert not schedule.may_start()  # the slots are free when the engines have the new weights
    schedule.loaded(1)
    for group in (schedule.start(), schedule.start()):
        schedule.finish(group, "ready")
    assert schedule.ready == (6, 7) and schedule.take() is None
    for group in (3, 1):
        schedule.finish(group, "ready")
    taken = schedule.take()
    assert taken is not None and taken.groups == (1, 3)


def test_ready_groups_that_other_limits_make_too_old_are_sampled_again() -> None:
    """Two groups of version 0 are ready at version 2. A run that resumes with S = 1 cannot use
    them."""
    schedule = StalenessSchedule(ScheduleLimits(1, 3, 3, 9, 0))
    for _ in range(3):
        schedule.finish(schedule.start(), "ready")
    for version in (1, 2):
        assert schedule.take() is not None
        schedule.loaded(version)
    state = schedule.state_dict()
    assert state["ready"] == [[2, 0]] and state["again"] == []
    same = StalenessSchedule(ScheduleLimits(1, 3, 2, 9, 0))
    assert same.load_state_dict(state) and same.ready == (2,)
    other = StalenessSchedule(ScheduleLimits(1, 2, 1, 9, 0))
    assert not other.load_state_dict(state)
    assert other.frontier == 2 == other.start() and other.start() == 3


@pytest.mark.parametrize(("slots", "stale"), [(1, 3), (9, 3)])
def test_slots_that_cannot_keep_the_bound_are_refused(slots: int, stale: int) -> None:
    with pytest.raises(ValueError, match="use 2 to 8"):
        StalenessSchedule(ScheduleLimits(2, slots, stale, 9, 0))
