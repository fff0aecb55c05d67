"""Simulated speed of asynchronous runs: throughput, idle time, ages, and the cost of the schedule.

    python benchmarks/async_simulator.py [--workers 2 8 64 1000] [--sigmas 0.25 0.5 1 1.5]

Discrete events drive the real `StalenessSchedule`. Assumptions:

- A step trains one group per worker; a group has 8 responses; a worker runs 8 responses at once, at
  a speed that does not depend on how many it runs. Requests wait in one queue for a free place.
- Response times are log-normal with a mean of 10 s, or drawn from `--latencies` (a file with one
  time in seconds per line).
- Training a step takes `--balance` times the sampling time of the synchronous loop, whose steps
  sample, train and load weights one after the other (`max_staleness` 0: the same schedule).
- A load stops all workers for `--load-s` seconds (default: 5% of the mean response time), between
  two tokens. It begins when the step ends. The trainer does not wait for it.

Times are simulated seconds after the first steps, which fill the slots. The overhead of the
schedule is CPU time of this process, in all calls of the schedule, per trained group.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import markdown_table

from burnish.rollout.asynchronous.schedule import ScheduleLimits, StalenessSchedule

GROUP = 8
"""Responses of a group."""
PLACES = 8
"""Responses that a worker runs at once."""
WARM = 5
"""Steps before the measured ones."""

LOAD_FRAC = 0.05
"""Default duration of a load, as a share of the mean response time."""


@dataclass(frozen=True)
class Times:
    """A distribution of response times."""

    mean_s: float
    draw: Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Job:
    """Sizes and times, in seconds, of a simulated run."""

    workers: int
    stale: int
    train_s: float
    load_s: float
    steps: int
    """Measured steps."""
    oversample: float = 1.0
    ahead: int = 1
    """run_ahead; at most ``stale``"""

    @property
    def limits(self) -> ScheduleLimits:
        size = self.workers
        ahead = min(self.ahead, self.stale) * size
        slots = ahead + (math.ceil(self.oversample * size) if self.stale else size)
        # more steps than are simulated, so that admission does not end before the last of them
        return ScheduleLimits(size, slots, self.stale, WARM + self.steps + self.stale + 2, 0)


@dataclass
class Found:
    """Results of a simulated run, over its measured steps."""

    step_s: float
    trainer_idle: float
    workers_idle: float
    age_mean: float
    age_max: int
    cpu_us: float
    """CPU microseconds of the schedule, per trained group."""

    @property
    def cells(self) -> list[str]:
        """Return the idle fractions and ages for a table."""
        idle = [f"{max(0.0, 100 * share):.1f}" for share in (self.trainer_idle, self.workers_idle)]
        return [*idle, f"{self.age_mean:.2f}", str(self.age_max)]


@dataclass
class Simulation:
    """A run of the schedule in simulated time. Workers have a clock of their own, which stands
    still during loads."""

    job: Job
    times: np.ndarray
    """Response times in seconds [groups, GROUP]."""
    now: float = 0.0
    stalled: float = 0.0
    """Seconds of all loads so far."""
    loaded_at: float = 0.0
    """End of the newest load. The clock of the workers shows ``max(now, loaded_at) - stalled``."""
    events: list[tuple[float, int]] = field(default_factory=list)
    """(worker time at its end, group) of each running response."""
    queue: deque[tuple[int, float]] = field(default_factory=deque)
    left: dict[int, int] = field(default_factory=dict)
    """Group -> unfinished responses."""
    version_of: dict[int, int] = field(default_factory=dict)
    """Group -> version that sampled its first token."""
    busy_s: float = 0.0
    """Seconds of all places in which they sampled."""
    cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self.schedule = StalenessSchedule(self.job.limits)
        self.free = self.job.workers * PLACES

    @property
    def clock(self) -> float:
        """Return the time of the workers."""
        return max(self.now, self.loaded_at) - self.stalled

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call the schedule, and count its CPU time."""
        begin = time.process_time()
        result = method(*arguments)
        self.cpu_s += time.process_time() - begin
        return result

    def start(self) -> None:
        """Start the groups that may start, and queued responses in free places."""
        while self.call(self.schedule.may_start):
            group = self.call(self.schedule.start)
            self.left[group] = GROUP
            self.queue.extend((group, float(s)) for s in self.times[group])
        while self.free and self.queue:
            group, seconds = self.queue.popleft()
            self.version_of.setdefault(group, self.schedule.engine_version)
            heapq.heappush(self.events, (self.clock + seconds, group))
            self.free -= 1

    def advance(self, until: float) -> bool:
        """Advance to the next end of a response, or to ``until``. Return whether one ended."""
        before, used = self.clock, self.job.workers * PLACES - self.free
        ended = bool(self.events) and self.events[0][0] + self.stalled <= until
        if not ended and until == math.inf:
            raise RuntimeError(f"deadlock after {self.schedule.taken} steps of {self.job}")
        self.now = self.events[0][0] + self.stalled if ended else until
        self.busy_s += used * (self.clock - before)
        if not ended:
            return False
        _, group = heapq.heappop(self.events)
        self.free += 1
        self.left[group] -= 1
        if not self.left[group]:
            del self.left[group]
            self.call(self.schedule.finish, group, "ready")
        self.start()
        return True

    def load(self) -> None:
        """Stop the workers for a load of the newest weights. No token is sampled before its end,
        so that the schedule may have the version now."""
        self.loaded_at = max(self.now, self.loaded_at) + self.job.load_s
        self.stalled += self.job.load_s
        self.call(self.schedule.loaded, self.schedule.taken)

    def run(self) -> Found:
        """Simulate all steps."""
        job, size = self.job, self.job.workers
        begin, busy_before, cpu_before = 0.0, 0.0, 0.0
        ages: list[int] = []
        self.start()
        for step in range(WARM + job.steps):
            if step == WARM:
                begin, busy_before, cpu_before, ages = self.now, self.busy_s, self.cpu_s, []
            while (taken := self.call(self.schedule.take)) is None:
                self.advance(math.inf)
            ages += [step - self.version_of.pop(group) for group in taken.groups]
            self.start()
            end = self.now + job.train_s
            while self.advance(end):
                pass
            self.load()
            self.start()
        total = self.now - begin
        return Found(
            total / job.steps,
            1 - job.train_s * job.steps / total,
            1 - (self.busy_s - busy_before) / (total * size * PLACES),
            sum(ages) / len(ages),
            max(ages),
            1e6 * (self.cpu_s - cpu_before) / (job.steps * size),
        )


def log_normal(sigma: float) -> Times:
    """Return a distribution of times with a mean of 10 s."""
    location = math.log(10) - sigma**2 / 2
    return Times(10, lambda rng, count: rng.lognormal(location, sigma, count))


def measured(path: Path) -> Times:
    """Return the distribution of the times in a file, of which each draw takes one. Raises
    SystemExit if the file is not one positive number per line."""
    try:
        times = np.array([float(line) for line in path.read_text(encoding="utf-8").split()])
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--latencies {path}: {error}; give one time in seconds per line"
        ) from error
    if not times.size or not (np.isfinite(times) & (times > 0)).all():
        raise SystemExit(
            f"--latencies {path} has {times.size} times, of which some or all are not positive and "
            "finite; give one time in seconds per line"
        )
    return Times(float(times.mean()), lambda rng, count: rng.choice(times, count))


def simulate(
    workers: int, response: Times, args: argparse.Namespace, balance: float
) -> list[Found]:
    """Return the results for each of ``args.stale``, after those of the synchronous loop.
    ``balance``: training time of a step, in sampling times of the synchronous loop."""
    steps = args.steps if workers <= 100 else max(10, args.steps // 5)
    groups = (WARM + steps + max(args.stale) + 2) * workers
    times = response.draw(np.random.default_rng(args.seed), groups * GROUP).reshape(groups, GROUP)
    sampling_s = Simulation(Job(workers, 0, 0.0, 0.0, steps), times).run().step_s
    load_s = LOAD_FRAC * response.mean_s if args.load_s is None else args.load_s
    found = []
    for stale in (0, *args.stale):
        job = Job(workers, stale, balance * sampling_s, load_s, steps, args.oversample, args.ahead)
        found.append(Simulation(job, times).run())
    return found


def tables(args: argparse.Namespace) -> list[str]:
    """Simulate all cases and return the lines of the report."""
    shapes = {f"log-normal, sigma {sigma:g}": log_normal(sigma) for sigma in args.sigmas}
    if args.latencies:
        shapes = {args.latencies.name: measured(args.latencies)}
    speed, detail, cost = [], [], []
    for workers in args.workers:
        worst = [0.0] * len(args.stale)
        for balance, name in itertools.product(args.balance, shapes):
            sync, *runs = simulate(workers, shapes[name], args, balance)
            case = [str(workers), f"{balance:g}", name]
            speed.append([*case, *(f"{sync.step_s / run.step_s:.2f}" for run in runs)])
            worst = [max(old, run.cpu_us) for old, run in zip(worst, runs, strict=True)]
            detail += [
                [*case, str(stale), *run.cells] for stale, run in zip(args.stale, runs, strict=True)
            ]
        cost.append([str(workers), *(f"{us:.0f}" for us in worst)])
    case, bounds = (
        ["workers", "training/sampling", "response times"],
        [f"S={s}" for s in args.stale],
    )
    idle = ["S", "trainer idle, %", "workers idle, %", "mean age", "max age"]
    return [
        "Throughput, relative to the synchronous loop",
        *markdown_table([*case, *bounds], speed),
        "Idle fractions and ages of groups",
        *markdown_table([*case, *idle], detail),
        "CPU of the schedule, microseconds per trained group (the most of all cases)",
        *markdown_table(["workers", *bounds], cost),
    ]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 64, 1000])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.25, 0.5, 1.0, 1.5])
    parser.add_argument("--latencies", type=Path, help="file with one response time (s) per line")
    parser.add_argument("--stale", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--balance", type=float, nargs="+", default=[1.0, 1.25])
    parser.add_argument("--oversample", type=float, default=1.0)
    parser.add_argument("--ahead", type=int, default=1, help="run_ahead, at most the staleness")
    parser.add_argument("--load-s", type=float, help="default: 5%% of the mean time")
    parser.add_argument("--steps", type=int, default=100, help="a fifth above 100 workers")
    parser.add_argument("--seed", type=int, default=0)
    print("\n".join(tables(parser.parse_args())))


if __name__ == "__main__":
    main()
