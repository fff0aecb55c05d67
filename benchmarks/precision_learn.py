"""``precision.py learn``: the demo's recipe in fp32, bf16 and fp16, with the same seeds.

One process per run, run after run, each into ``OUT/<kind>/seed-<n>``. The kinds are ``fp32``,
``bf16`` and ``fp16`` (trainer and sampler in that format) and, with ``--control``,
``<trainer>-<sampler>`` in two formats. A run that is complete is not repeated; one that was
interrupted goes on from its checkpoint, or starts again where it has none. ``OUT/summary.json``
then holds the numbers of all complete runs below ``OUT``: the table and the figures are made from
it alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import markdown_table, model_folder, versions

DTYPES = ("fp32", "bf16", "fp16")
CONTROLS = ("fp32-bf16", "fp32-fp16", "bf16-fp32")
"""Trainer and sampler in different formats."""
LAST_STEPS = 10
"""The reward at the end is the mean of this many steps."""
INTERRUPTED = 130
"""Exit code of a run that was stopped by a signal and saved itself."""
PER_STEP = (
    "step",
    "eval/pass@1",
    "reward/mean",
    "train/mismatch_abs",
    "train/mismatch_max",
    "train/mismatch_k3",
    "train/loss_scale",
    "train/skipped_steps",
    "train/skipped_total",
    "train/overflows",
    "train/grad_norm",
    "train/entropy",
    "time/step_s",
    "time/eval_s",
    "time/rollout_s",
    "time/train_s",
    "memory/peak_rss_bytes",
    "memory/cuda_peak_bytes",
)
"""The metrics that ``summary.json`` keeps of every step, where a run has them."""
COLUMNS = {
    "accuracy_before": ("accuracy before", ".2f"),
    "accuracy": ("held-out accuracy at the end", ".3f"),
    "reward": (f"mean reward, last {LAST_STEPS} steps", ".3f"),
    "gap_mean": ("log-prob gap, mean (nats)", ".1e"),
    "gap_max": ("log-prob gap, max (nats)", ".1e"),
    "gap_k3": ("k3 (nats)", ".1e"),
    "skipped": ("skipped steps", ".1f"),
    "loss_scale": ("final loss scale", ".0f"),
    "step_s": ("wall s per step, median", ".2f"),
    "peak_rss_mb": ("peak RSS, MB", ".0f"),
    "peak_cuda_mb": ("peak GPU, MB", ".0f"),
}
"""Result -> (heading, format); every cell is mean ± sample sd over the seeds."""
_SCRIPT = Path(__file__).with_name("precision.py")


@dataclass(frozen=True)
class Run:
    """One run: its formats, its seed, its folder."""

    kind: str
    seed: int
    out: Path

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.out / self.kind / f"seed-{self.seed}"

    @property
    def done(self) -> Path:
        """Written last; its presence means that the run is complete."""
        return self.folder / "done.json"


def add_arguments(parts: Any) -> None:
    """The subcommand and its options."""
    parser = parts.add_parser("learn", help="the demo's recipe in each format, and the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--dtypes",
        choices=DTYPES,
        nargs="*",
        default=list(DTYPES),
        help="none: the table only",
    )
    parser.add_argument(
        "--control", action="store_true", help=f"also the mixed runs {', '.join(CONTROLS)}"
    )
    parser.add_argument("--steps", type=int, help="default: 30, and 2 with --tiny")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a scratch model and a toy reward")
    parser.add_argument(
        "--keep-checkpoints", action="store_true", help="1.6 GB per run of the real model"
    )
    parser.add_argument("--worker", metavar="KIND", help=argparse.SUPPRESS)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """All runs that are not complete yet, then the summary and the table."""
    args.steps = args.steps or (2 if args.tiny else 30)
    if args.worker:
        return run_one(Run(args.worker, args.seeds[0], args.out), args)
    _check_settings(args)
    if not args.tiny:
        model_folder()  # converted once, before any run needs it
    kinds = [*args.dtypes, *(CONTROLS if args.control else ())]
    failed = [
        run
        for seed in args.seeds
        for run in (Run(kind, seed, args.out) for kind in kinds)
        if not run.done.is_file() and not _run_in_process(run, args)
    ]
    summary = summarize(args.out)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\n".join(report(summary)))
    for run in failed:
        print(f"\n{run.kind}, seed {run.seed} failed and is not in the table: {_log_file(run)}")
    return 1 if failed else 0


def _check_settings(args: argparse.Namespace) -> None:
    """Runs in one folder are comparable: the settings of the first are those of all."""
    wanted = {
        "steps": args.steps,
        "threads": args.threads,
        "device": args.device,
        "tiny": args.tiny,
    }
    file = args.out / "settings.json"
    if not file.is_file():
        args.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted) + "\n")
    have = json.loads(file.read_text())
    if have != wanted:
        changed = [k for k in wanted if have[k] != wanted[k]]
        differ = ", ".join(f"{k} was {have[k]}, and is now {wanted[k]}" for k in changed)
        raise SystemExit(f"{args.out} has runs with other settings: {differ}; choose another --out")


# ---- one run -----------------------------------------------------------------------------------


def _run_in_process(run: Run, args: argparse.Namespace) -> bool:
    """Start the run in a process of its own and wait. False where it failed; a signal ends it, and
    this script, after the step under way is saved."""
    options = {
        "--worker": run.kind,
        "--seeds": run.seed,
        "--out": run.out,
        "--steps": args.steps,
        "--threads": args.threads,
        "--device": args.device,
    }
    command = [sys.executable, str(_SCRIPT), "learn"]
    command += [str(x) for pair in options.items() for x in pair]
    command += ["--tiny"] * args.tiny + ["--keep-checkpoints"] * args.keep_checkpoints
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    log = _log_file(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{run.kind}, seed {run.seed}: {args.steps} steps, log in {log}", flush=True)
    with log.open("a") as output:
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, lambda *_: process.terminate())
        code = process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if code in (INTERRUPTED, -signal.SIGTERM):
        raise SystemExit("stopped; repeat the command to continue")
    return code == 0


def _log_file(run: Run) -> Path:
    return run.folder.with_suffix(".log")


def run_one(run: Run, args: argparse.Namespace) -> int:
    """Worker: one run to its end, on from its checkpoint if there is one."""
    import torch

    import burnish
    from burnish.checkpoint import CheckpointStore
    from burnish.driver.errors import StoppedError
    from burnish.models.load import resolve_device

    torch.set_num_threads(args.threads)
    store = CheckpointStore(run.folder / "checkpoints", keep_last=1, best_mode="max")
    resume = run.folder if store.latest() is not None else None
    if resume is None:
        shutil.rmtree(run.folder, ignore_errors=True)
    config, stopped_at = recipe(run, args), None
    try:
        burnish.run(config, resume=resume, rewards=even_letters if args.tiny else None)
    except burnish.Interrupted as stopped:
        print(stopped)
        return INTERRUPTED
    except StoppedError as stop:  # numbers that are not finite: a result, not a mishap
        print(stop)
        stopped_at = str(stop).partition(":")[0]
    if not args.keep_checkpoints:
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    cuda = resolve_device(args.device).type == "cuda"
    done = {
        "kind": run.kind,
        "seed": run.seed,
        "dtype": config.precision.dtype,
        "rollout_dtype": config.precision.sampler_dtype,
        "stopped": stopped_at,
        "machine": versions("torch", "transformers"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
    }
    run.done.write_text(json.dumps(done) + "\n")
    return 0


def recipe(run: Run, args: argparse.Namespace) -> Any:
    """The demo's recipe (or a tiny one) with the run's formats and seed."""
    from importlib import resources

    from burnish.config import load_config

    dtype, _, sampler = run.kind.partition("-")
    overrides = [
        f"precision.dtype={dtype}",
        f"seed={run.seed}",
        f"max_steps={args.steps}",
        f"run_dir={run.folder}",
        f"train.engine.device={args.device}",
    ]
    if sampler:
        overrides.append(f"precision.rollout_dtype={sampler}")
    if args.tiny:
        return load_config(_tiny_recipe(run.out), overrides, job="rl")
    with resources.as_file(resources.files("burnish") / "demo.yaml") as file:
        return load_config(file, [*overrides, f"model.path={model_folder()}"], job="rl")


def _tiny_recipe(out: Path) -> dict[str, Any]:
    """A scratch model that is rewarded for letters; evaluated at every step."""
    prompts = out / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}="}) + "\n" for i in range(16)))
    data = {"sources": [str(prompts)]}
    return {
        "job": "rl",
        "model": {"scratch": {"hidden_size": 32, "max_position_embeddings": 32}},
        "data": data,
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 4},
        "train": {"train_batch_size": 16, "lr": 1e-3},
        "eval": {"data": data, "every_n_steps": 1, "pass_threshold": 0.25},
    }


def even_letters(response: str) -> float:
    """The toy reward: how many of four places hold every second letter."""
    return sum(c in "acegikmoqsuwy" for c in response) / 4


# ---- the summary -------------------------------------------------------------------------------


def summarize(out: Path) -> dict[str, Any]:
    """All complete runs below ``out``: what they came to, and the kept metrics of every step."""
    from burnish.observe.metrics import read_metrics

    runs = []
    for done in sorted(out.glob("*/seed-*/done.json"), key=_order):
        lines = [
            {k: line[k] for k in PER_STEP if k in line and math.isfinite(line[k])}
            for line in read_metrics(done.parent)
        ]
        runs.append({**json.loads(done.read_text()), "results": results(lines), "steps": lines})
    settings = json.loads((out / "settings.json").read_text())
    return {"settings": settings, "runs": runs}


def _order(done: Path) -> tuple[int, int]:
    kinds = [*DTYPES, *CONTROLS]
    return kinds.index(done.parent.parent.name), int(done.parent.name.removeprefix("seed-"))


def results(lines: list[dict[str, float]]) -> dict[str, float]:
    """One run's numbers; a name is left out where the run has no such metric.

    The gap's mean and k3 are means over steps of the means over tokens; its maximum is over all
    tokens of all steps. Step times are without the evaluation that some steps end with.
    """

    def values(name: str) -> list[float]:
        return [line[name] for line in lines if name in line]

    accuracy, rewards = values("eval/pass@1"), values("reward/mean")
    step_s = [x["time/step_s"] - x.get("time/eval_s", 0.0) for x in lines if "time/step_s" in x]
    found: dict[str, list[float]] = {
        "accuracy_before": accuracy[:1],
        "accuracy": accuracy[-1:],
        "reward": _some(statistics.fmean, rewards[-LAST_STEPS:]),
        "gap_mean": _some(statistics.fmean, values("train/mismatch_abs")),
        "gap_max": _some(max, values("train/mismatch_max")),
        "gap_k3": _some(statistics.fmean, values("train/mismatch_k3")),
        "skipped": values("train/skipped_total")[-1:],
        "loss_scale": values("train/loss_scale")[-1:],
        "step_s": _some(statistics.median, step_s),
        "peak_rss_mb": _some(max, values("memory/peak_rss_bytes"), 1e-6),
        "peak_cuda_mb": _some(max, values("memory/cuda_peak_bytes"), 1e-6),
    }
    return {name: value[0] for name, value in found.items() if value}


def _some(
    of: Callable[[list[float]], float], values: list[float], factor: float = 1.0
) -> list[float]:
    """``of(values)`` in a list; an empty list where there are no values."""
    return [of(values) * factor] if values else []


# ---- the table ---------------------------------------------------------------------------------


def report(summary: dict[str, Any]) -> Iterator[str]:
    """The lines to print: machine, settings, table, and differences to fp32 seed by seed."""
    runs = summary["runs"]
    if not runs:
        yield "no complete run"
        return
    yield from sorted({f"{r['machine']}, {r['gpu'] or 'no GPU'}" for r in runs})
    settings = summary["settings"]
    model = "a scratch model" if settings["tiny"] else "SmolLM2-135M-Instruct on chain_sum"
    yield (
        f"GRPO of {model}, {settings['steps']} steps, threads: {settings['threads']}; "
        "mean ± sample standard deviation over the seeds"
    )
    yield ""
    kinds = list(dict.fromkeys(r["kind"] for r in runs))
    columns = [c for c in COLUMNS if any(c in r["results"] for r in runs)]
    heads = ["trainer / sampler", "seeds", *(COLUMNS[c][0] for c in columns)]
    rows = []
    for kind in kinds:
        own = [r for r in runs if r["kind"] == kind]
        cells = [_cell([r["results"] for r in own], c) for c in columns]
        rows.append([f"{own[0]['dtype']} / {own[0]['rollout_dtype']}", _seeds(own), *cells])
    yield from markdown_table(heads, rows)
    yield from _differences(runs, kinds)


def _seeds(runs: list[dict[str, Any]]) -> str:
    stopped = sum(r["stopped"] is not None for r in runs)
    return f"{len(runs)}" + (f" ({stopped} stopped early)" if stopped else "")


def _cell(results: list[dict[str, float]], column: str) -> str:
    form = COLUMNS[column][1]
    values = [r[column] for r in results if column in r]
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def _differences(runs: list[dict[str, Any]], kinds: list[str]) -> Iterator[str]:
    """Accuracy minus fp32's with the same seed: what a format changes, with the seed's luck out."""
    accuracy = {(r["kind"], r["seed"]): r["results"]["accuracy"] for r in runs}
    for kind in kinds:
        pairs = [
            value - accuracy["fp32", seed]
            for (own, seed), value in accuracy.items()
            if own == kind != "fp32" and ("fp32", seed) in accuracy
        ]
        if pairs:
            yield ""
            yield (
                f"{kind}: held-out accuracy minus fp32's with the same seed, mean "
                f"{statistics.fmean(pairs):+.3f} ({min(pairs):+.3f} to {max(pairs):+.3f}, "
                f"seeds: {len(pairs)})"
            )
