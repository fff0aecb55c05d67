"""Throughput of real asynchronous runs on Ray, compared with synchronous runs on the same cores.

    python benchmarks/async_throughput.py run [--sigmas 1 0.5 1.5] [--ahead 1 2] [--repeats 2]
    python benchmarks/async_throughput.py latencies --sigma 1 --to latencies.txt
    python benchmarks/async_simulator.py --latencies latencies.txt
    python benchmarks/async_throughput.py table

Needs two cores and nothing else on the machine. Every run is a process of its own, which adds a
line to ``--out`` (runs/async_throughput.jsonl) and keeps its run folder beside it.

Kinds of runs, all with one thread per process:

- ``sync``: one policy rank on core 0, one rollout engine on core 1, which take turns.
- ``async``: the same processes on the same cores, with ``rollout.asynchronous.max_staleness``
(``--stale``)
  and, in a run of its own each, the values of ``rollout.asynchronous.run_ahead`` (``--ahead``).
- ``both``: synchronous, two policy ranks and two rollout engines, so that both cores work in each
  phase.

The workers are pinned with ``sched_setaffinity``. The controller is not pinned. The model is made
from scratch. A step trains 32 prompts with one response each. Its lengths are log-normal with a
mean of ``MEAN`` tokens, drawn from the prompt's id, so all kinds sample the same lengths. (The end
token has a probability of about 1 in 2,000 per token.) A short synchronous run measures sampling
and training first; ``epochs_per_rollout`` is then the integer for which training takes about
``--balance`` times as long as sampling.

Throughput is trained tokens per second over the steps after the first ``WARM`` and before the last
``LAST`` (in which an asynchronous run has nothing left to sample). The kinds alternate within each
repeat.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import markdown_table, versions
from learning_results import spread

from burnish.rollout.base import Request
from burnish.rollout.runner import Runner, SampledGroup, prompt_seed

OUT = Path("runs/async_throughput.jsonl")
MEAN, LONGEST = 64, 768
"""Tokens per response: mean, and limit."""
PROMPTS = 32
WARM, LAST = 3, 2
KINDS = ("sync", "async", "both")
CORES = {"policy": 0, "rollout": 1}
Run = dict[str, Any]


class DrawnLengths(Runner):
    """Samples one response per prompt with a length drawn from the prompt's id, and notes the
    seconds from request to completion. Pins the workers before the first request."""

    sigma = 1.0
    latencies: list[float]
    """Seconds of the responses of an asynchronous run."""

    def _request(self, prompt: Any) -> Request:
        rng = np.random.default_rng(prompt_seed(1, prompt.id))
        length = rng.lognormal(math.log(MEAN) - self.sigma**2 / 2, self.sigma)
        tokens = min(LONGEST, max(1, round(length)))
        return Request(prompt.id, prompt.token_ids, 1, prompt_seed(self.seed, prompt.id), tokens)

    async def draw(self, prompt: Any, service: Any) -> SampledGroup:
        """Sample the group of one prompt."""
        begun = time.perf_counter()
        drawn = await super().draw(prompt, service)
        self.latencies.append(time.perf_counter() - begun)
        return drawn


def pin_workers(kind: str) -> dict[str, list[int]]:
    """Pin all threads of this run's Ray workers to their cores. Returns the worker names by core.
    Raises SystemExit if a role has no worker or the machine has too few cores."""
    import psutil

    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise SystemExit(f"needs two cores, and this process may use {allowed}")
    pinned: dict[str, list[int]] = {role: [] for role in CORES}
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        role = next((r for r, name in WORKERS.items() if title.startswith(f"ray::{name}")), None)
        if role is None:
            continue
        number = len(pinned[role]) if kind == "both" else CORES[role]
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {allowed[number]})
        pinned[role].append(allowed[number])
    if not all(pinned.values()):
        raise SystemExit(f"found no worker process of a role: {pinned}")
    return pinned


WORKERS = {"policy": "TrainWorker", "rollout": "RolloutWorker"}
"""Role -> class of its Ray actors, which is in the title of their processes."""


def recipe(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the recipe of a run."""
    both = args.kind == "both"
    alphabet = "".join(chr(0x4E00 + i) for i in range(2000))
    rows = [{"prompt": alphabet[i % 1000 : i % 1000 + 4], "label": ""} for i in range(4000)]
    data = folder.parent / "prompts.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    stale = {"asynchronous": {"max_staleness": args.stale, "run_ahead": args.ahead}}
    stale = stale if args.kind == "async" else {}
    return {
        "job": "rl",
        "run_dir": str(folder),
        "max_steps": WARM + args.steps + LAST,
        "model": {
            "scratch": {
                "alphabet": alphabet,
                "hidden_size": 128,
                "max_position_embeddings": LONGEST + 8,
            }
        },
        "data": {"sources": [str(data)], "prompt_max_len": 8},
        "rollout": {
            "rollout_batch_size": PROMPTS,
            "n_samples_per_prompt": 1,
            "generate_max_len": LONGEST,
            **stale,
        },
        "rewards": [{"kind": "function"}],
        "algorithm": {
            "advantage": "reinforce_pp",
            "correction": {"level": "token", "mode": "truncate"},
        },
        "train": {
            "train_batch_size": PROMPTS,
            "epochs_per_rollout": args.epochs,
            "lr": 1e-9,
        },
        "cluster": {
            "runtime": "ray",
            "layout": "colocate_all" if both else "separate",
            "policy_ranks": 2 if both else 1,
        },
        "checkpoint": {"every_n_steps": 0},
        "observe": {"samples_per_step": 0},
    }


def coin(prompt: str, response: str) -> float:
    """Return 0 or 1, by a hash of the response."""
    return float(hashlib.sha256(response.encode()).digest()[0] % 2)


def one(args: argparse.Namespace) -> None:
    """Make one run in this process and add it to the results."""
    import burnish
    from burnish.jobs import rl as rl_job
    from burnish.observe.metrics import read_metrics
    from burnish.observe.timeline import timed

    folder = Path(tempfile.mkdtemp(dir=folders(args.out))) / args.kind
    runners: list[DrawnLengths] = []

    def make_runner(engine: Any, rewards: Any, sampling: Any, pool: Any, **rest: Any) -> Runner:
        engine = timed(engine, rest["timeline"], {"generate": rest["options"].phase})
        made = DrawnLengths(engine, rewards, sampling, num_samples=1, seed=rest["options"].seed)
        made.sigma, made.latencies = args.sigma, []
        runners.append(made)
        print("pinned", pin_workers(args.kind), flush=True)
        return made

    config = burnish.load_config(recipe(args, folder))
    with mock.patch.object(rl_job, "make_runner", make_runner):
        burnish.run(config, rewards=coin)
    steps = list(read_metrics(folder))[WARM:-LAST]
    keys = ("time/step_s", "time/wait_s", "time/rollout_s", "time/train_s", "time/logprobs_s",
            "time/optim_s", "time/sync_s", "time/trainer_idle_frac", "time/rollout_idle_frac",
            "rollout/tokens", "rollout/age_mean", "rollout/age_max")  # fmt: skip
    found: Run = {"kind": args.kind, "sigma": args.sigma, "balance": args.balance}
    if args.kind == "async":
        found |= {"stale": args.stale, "ahead": args.ahead}
    found |= {"epochs": args.epochs}
    found |= {"repeat": args.repeat, "folder": str(folder), "load": os.getloadavg()[0]}
    found |= {"steps": [{key: step[key] for key in keys if key in step} for step in steps]}
    found |= {"latencies": [round(s, 4) for s in runners[0].latencies]}
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def folders(out: Path) -> Path:
    """Return the folder of the run folders."""
    found = out.with_suffix("")
    found.mkdir(parents=True, exist_ok=True)
    return found


# ---- all runs ------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Calibrate each sigma, then make the runs, kind after kind."""
    begun = time.monotonic()
    overlapped = [("async", ahead) for ahead in args.ahead]
    kinds = [("sync", 0), *overlapped, ("both", 0)]
    cases = [(sigma, args.idle_balance, *kind) for sigma in args.idle_sigmas for kind in overlapped]
    cases += [(sigma, args.balance, *kind) for sigma in args.sigmas for kind in kinds]
    costs = {sigma: _calibrate(args, sigma) for sigma in dict.fromkeys(c[0] for c in cases)}
    for repeat, (sigma, balance, kind, ahead) in itertools.product(range(args.repeats), cases):
        if time.monotonic() - begun > 60 * args.minutes:
            print(f"stopped after {args.minutes:g} minutes", flush=True)
            break
        epochs = epochs_for(costs[sigma], balance)
        options = {"balance": balance, "epochs": epochs, "repeat": repeat, "ahead": ahead}
        made = _start(args, kind, sigma, **options)
        name = f"{kind}, run_ahead {ahead}" if ahead else kind
        print(f"{name}, sigma {sigma:g}, {epochs} epochs: {speed(made):.0f} tokens/s, load "
              f"{made['load']:.1f}", flush=True)  # fmt: skip
    _predict(args)


def _start(args: argparse.Namespace, kind: str, sigma: float, **options: Any) -> Run:
    """Make a run in a process of its own and return its line of the results."""
    options = {"steps": args.steps, "stale": args.stale, **options}
    words = ["one", "--kind", kind, "--sigma", str(sigma)]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    call = [sys.executable, __file__, "--out", str(args.out), *words]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(call)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return read(args.out)[-1]


def _calibrate(args: argparse.Namespace, sigma: float) -> dict[str, float]:
    """Return seconds per step of a short synchronous run: sampling, an epoch, all else."""
    made = _start(args, "sync", sigma, balance=0, epochs=2, repeat=-1, steps=4, ahead=0)
    epoch = (median(made, "time/train_s") + median(made, "time/optim_s")) / 2
    sampling = median(made, "time/rollout_s")
    rest = median(made, "time/step_s") - sampling - 2 * epoch
    print(f"sigma {sigma:g}: sampling {sampling:.2f} s, an epoch {epoch:.3f} s, all else "
          f"{rest:.3f} s", flush=True)  # fmt: skip
    return {"sampling": sampling, "epoch": epoch, "rest": rest}


def epochs_for(cost: dict[str, float], balance: float) -> int:
    """Return the epochs for which all but sampling takes ``balance`` times as long as sampling.

    >>> epochs_for({"sampling": 1.0, "epoch": 0.2, "rest": 0.1}, 1.25)
    6
    """
    return max(1, round((balance * cost["sampling"] - cost["rest"]) / cost["epoch"]))


def _predict(args: argparse.Namespace) -> None:
    """Add the step times that ``burnish plan`` predicts for the asynchronous runs from the speeds
    of the synchronous run of the same repeat and sigma."""
    runs = read(args.out)
    sync = {(r["sigma"], r["repeat"]): r for r in runs if r["kind"] == "sync"}
    done = {_case(r) for r in runs if r["kind"] == "plan"}
    for found in (r for r in runs if r["kind"] == "async" and _case(r) not in done):
        timed = sync.get((found["sigma"], found["repeat"]))
        if timed is None:
            continue
        recipe, rates = Path(found["folder"]) / "config.yaml", timed["folder"]
        call = [sys.executable, "-m", "burnish", "plan", str(recipe), "--rates", rates, "--json"]
        text = subprocess.run(call, capture_output=True, text=True, check=True).stdout
        predicted = json.loads(text)["seconds_per_step"]
        line = {key: found[key] for key in ("sigma", "balance", "ahead", "repeat")}
        line |= {"kind": "plan", "predicted_s": predicted}
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def latencies(args: argparse.Namespace) -> None:
    """Write the response times of the asynchronous runs of a sigma, one per line, in seconds."""
    runs = [r for r in read(args.out) if r["kind"] == "async" and r["sigma"] == args.sigma]
    found = [seconds for run in runs for seconds in run["latencies"]]
    if not found:
        raise SystemExit(f"{args.out} has no asynchronous run with sigma {args.sigma:g}")
    args.to.write_text("".join(f"{seconds}\n" for seconds in found), encoding="utf-8")
    print(f"{args.to}: {len(found)} response times of {len(runs)} runs")


# ---- results -------------------------------------------------------------------------------------


def read(path: Path) -> list[Run]:
    """Return the lines of a results file. Raises SystemExit if it does not exist."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; make it with the subcommand run")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def median(made: Run, key: str) -> float:
    """Return the median of a metric over the measured steps; 0 if the run does not have it."""
    return statistics.median(step.get(key, 0.0) for step in made["steps"])


def mean(made: Run, key: str) -> float:
    """Return the mean of a metric over the measured steps."""
    return statistics.fmean(step[key] for step in made["steps"])


def speed(made: Run) -> float:
    """Return trained tokens per second over the measured steps.

    >>> speed({"steps": [{"rollout/tokens": 30, "time/step_s": 2}] * 2})
    15.0
    """
    tokens = sum(step["rollout/tokens"] for step in made["steps"])
    return float(tokens / sum(step["time/step_s"] for step in made["steps"]))


def _case(made: Run) -> tuple[float, ...]:
    return made["sigma"], made["balance"], made["ahead"], made["repeat"]


def table(args: argparse.Namespace) -> None:
    """Print the tables of docs/benchmarks.md."""
    print("\n".join([versions("torch", "ray"), "", *lines(read(args.out))]))


def lines(runs: Sequence[Run]) -> Iterator[str]:
    """Return the tables: throughput, asynchronous runs in detail, and the plan's step times."""
    runs = [r for r in runs if r["repeat"] >= 0]
    cases = sorted({(r["balance"], r["sigma"], r["ahead"]) for r in runs if r["kind"] == "async"})
    heads = ["sigma", "run_ahead", "training/sampling", "repeats", "tokens/s: sync", "async",
             "both cores", "async/sync", "async/both cores"]  # fmt: skip
    found = {case: _by_kind(runs, case) for case in cases}
    yield from markdown_table(
        heads, (_speeds(c, made) for c, made in found.items() if made["sync"])
    )
    yield ""
    heads = ["sigma", "run_ahead", "target ratio", "epochs", "step, s", "trainer idle, %",
             "engine idle, %", "mean age", "max age", "planned step, s",
             "planned/measured"]  # fmt: skip
    yield from markdown_table(heads, (_detail(c, made) for c, made in found.items()))


Case = tuple[float, float, int]
"""Target ratio of training and sampling, sigma, run_ahead."""


def _by_kind(runs: Sequence[Run], case: Case) -> dict[str, list[Run]]:
    """Return the runs to compare with the asynchronous ones of a case, by kind."""
    equal = [r for r in runs if (r["balance"], r["sigma"], r.get("ahead", case[2])) == case]
    return {kind: [r for r in equal if r["kind"] == kind] for kind in (*KINDS, "plan")}


def _speeds(case: Case, made: dict[str, list[Run]]) -> list[str]:
    sync, overlapped, both = (made[kind] for kind in KINDS)
    sides = [
        (mean(r, "time/step_s") - mean(r, "time/rollout_s")) / mean(r, "time/rollout_s")
        for r in sync
    ]
    cells = [[speed(r) for r in kind] for kind in (sync, overlapped, both)]
    ratios = [_ratio(overlapped, other) for other in (sync, both)]
    return [f"{case[1]:g}", str(case[2]), cell(sides, 2), str(len(overlapped)),
            *(cell(c, 0) for c in cells), *(cell(r, 2) for r in ratios)]  # fmt: skip


def _ratio(runs: Sequence[Run], others: Sequence[Run]) -> list[float]:
    """Return the ratio of speeds within each repeat."""
    of = {r["repeat"]: speed(r) for r in others}
    return [speed(r) / of[r["repeat"]] for r in runs if r["repeat"] in of]


def _detail(case: Case, made: dict[str, list[Run]]) -> list[str]:
    runs = made["async"]
    planned = {r["repeat"]: r["predicted_s"] for r in made["plan"]}
    matched = [r for r in runs if r["repeat"] in planned]
    share = [planned[r["repeat"]] / mean(r, "time/step_s") for r in matched]
    idle = [[100 * mean(r, f"time/{side}_idle_frac") for r in runs]
            for side in ("trainer", "rollout")]  # fmt: skip
    oldest = max((s["rollout/age_max"] for r in runs for s in r["steps"]), default=0)
    return [
        f"{case[1]:g}",
        str(case[2]),
        f"{case[0]:g}",
        "/".join(sorted({str(r["epochs"]) for r in runs})),
        cell([mean(r, "time/step_s") for r in runs], 2),
        *(cell(values, 1) for values in idle),
        cell([mean(r, "rollout/age_mean") for r in runs], 2),
        f"{oldest:.0f}",
        cell(list(planned.values()), 2),
        cell(share, 2),
    ]


def cell(values: Sequence[float], digits: int) -> str:
    """Return the mean, and the range if the values differ; "not run" without values."""
    return spread(values, digits) if values else "not run"


def main() -> None:
    """Parse the arguments and call the subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parts = parser.add_subparsers(required=True)
    every = parts.add_parser("run")
    every.add_argument("--sigmas", type=float, nargs="+", default=[1.0, 0.5, 1.5])
    every.add_argument("--balance", type=float, default=1.0, help="training/sampling")
    every.add_argument("--idle-sigmas", type=float, nargs="*", default=[1.0])
    every.add_argument("--idle-balance", type=float, default=1.5, help="where sampling is faster")
    every.add_argument("--repeats", type=int, default=2)
    every.add_argument("--minutes", type=float, default=60, help="no run is started after this")
    every.add_argument("--ahead", type=int, nargs="+", default=[1, 2], help="run_ahead")
    every.set_defaults(call=run)
    single = parts.add_parser("one")
    single.add_argument("--kind", choices=KINDS, required=True)
    single.add_argument("--sigma", type=float, required=True)
    single.add_argument("--balance", type=float, default=0)
    single.add_argument("--epochs", type=int, required=True)
    single.add_argument("--repeat", type=int, default=0)
    single.add_argument("--ahead", type=int, default=1, help="run_ahead, of the kind async")
    single.set_defaults(call=one)
    for part in (every, single):
        part.add_argument("--steps", type=int, default=16, help="measured steps")
        part.add_argument("--stale", type=int, default=4, help="max_staleness")
    written = parts.add_parser("latencies")
    written.add_argument("--sigma", type=float, required=True)
    written.add_argument("--to", type=Path, required=True)
    written.set_defaults(call=latencies)
    parts.add_parser("table").set_defaults(call=table)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
