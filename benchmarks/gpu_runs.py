"""The step ``runs`` of benchmarks/gpu_session.py: short runs of several jobs and settings.

Tiny models from scratch on the tasks of recipes/data, all runs at the same time. A run has to end
without an error, and its loss has to be finite. Two pairs of runs are compared line by line: with
and without roles in host memory between phases, and a run with its repetition, which shows how much
the device differs from itself. Nothing but this checkout is needed.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_learn import REWARD
from gpu_report import TAIL_CHARS, Report, Setup

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6
TABLE = "Runs"
MODEL = (
    'model={scratch: {alphabet: "0123456789>", hidden_size: 64, num_layers: 2, num_heads: 4, '
    "num_kv_heads: 2, max_position_embeddings: 64}}"
)
DATA = {
    "sft": "data={sources: [recipes/data/sort_demos.jsonl], max_len: 16}",
    "preference": "data={sources: [recipes/data/sort_pairs.jsonl], max_len: 16}",
    "rm": "data={sources: [recipes/data/sort_pairs.jsonl], max_len: 16}",
    "rl": "data={sources: [recipes/data/sort_prompts.jsonl], prompt_max_len: 8}",
}
RL = (
    "rollout={rollout_batch_size: 8, n_samples_per_prompt: 4, generate_max_len: 8}",
    "rewards=[{kind: function, function: {reward}:sevens}]",
)
GRPO = (*RL, "algorithm.advantage=grpo")
PPO = (
    *RL,
    *("algorithm.advantage=gae", "critic.lr=1e-3", "algorithm.kl={init_kl_coef: 0.1}"),
    "rollout.engine.own_weights=true",
)


@dataclass(frozen=True)
class Run:
    """One run of a job."""

    name: str
    job: str
    words: tuple[str, ...] = ()
    """Keys of the recipe."""
    dtype: str = "bf16"
    launched: bool = False
    """By torchrun, with one rank."""
    package: str | None = None
    """Runs only if this package is installed."""


RUNS: tuple[Run, ...] = (
    Run("SFT, Muon", "sft", ("train.optimizer=muon",)),
    Run("SFT, Adafactor, fp32", "sft", ("train.optimizer=adafactor",), dtype="fp32"),
    Run("SFT, torchrun", "sft", ("train.engine.sharding=full",), launched=True),
    Run("reward model", "rm"),
    Run("DPO", "preference", ("loss.kind=dpo",)),
    Run("GRPO, fp16", "rl", GRPO, dtype="fp16"),
    Run("GRPO, LoRA", "rl", (*GRPO, "model.lora.lora_rank=4")),
    Run("GRPO, asynchronous", "rl",
        (*GRPO, "rollout.asynchronous.max_staleness=2", "rollout.engine.own_weights=true",
         "algorithm.correction={}")),
    Run("PPO", "rl", PPO),
    Run("PPO, repeated", "rl", PPO),
    Run("PPO, offloaded between phases", "rl",
        (*PPO, "cluster.offload_between_phases=[policy, critic, reference]")),
    Run("SFT, NF4 base", "sft", ("model.lora.lora_rank=4", "model.lora.quantization=nf4"),
        package="bitsandbytes"),
    Run("SFT, 8-bit AdamW", "sft", ("train.optimizer=adamw_8bit",), package="bitsandbytes"),
    Run("SFT, paged 8-bit AdamW", "sft", ("train.optimizer=paged_adamw_8bit",),
        package="bitsandbytes"),
    *(Run(f"SFT, DeepSpeed ZeRO-{stage}", "sft",
          ("train.engine.kind=deepspeed", f"train.engine.zero_stage={stage}",
           "train.engine.device=auto"),
          launched=True, package="deepspeed") for stage in (2, 3)),
)  # fmt: skip
SAME = (("PPO", "PPO, repeated"), ("PPO", "PPO, offloaded between phases"))
"""Runs whose metrics are compared."""
TINY = ("SFT, torchrun", *dict.fromkeys(name for pair in SAME for name in pair))
"""Runs with tiny shapes on a CPU, where tests cover the others."""
COMPARED = ("train/loss", "critic/value_loss", "reward/mean", "train/grad_norm")


def runs(setup: Setup, report: Report) -> None:
    """Start all runs, and report each as it ends."""
    folder = setup.work / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    begun = time.perf_counter()
    wanted = [run for run in RUNS if is_possible(setup, run)]
    processes = {run: start(setup, run, folder / str(i)) for i, run in enumerate(wanted)}
    metrics = dict[str, list[dict[str, Any]]]()
    for number, (run, process) in enumerate(processes.items()):
        with report.case(run.name):
            code = process.wait()
            metrics[run.name] = lines = read_metrics(folder / str(number))
            row = {"run": run.name, "exit code": code, "steps": len(lines), **ends(lines)}
            report.row(TABLE, **row, seconds=time.perf_counter() - begun)
            if code or len(lines) != STEPS:
                log = (folder / f"{number}.log").read_text(encoding="utf-8", errors="replace")
                report.problem(f"{run.name} exited with {code}: {log[-TAIL_CHARS:]}")
            elif not all(math.isfinite(line[name]) for line in lines for name in loss_of(line)):
                report.problem(f"{run.name}: its loss is not finite")
    for one, other in SAME:
        with report.case(f"{one} and {other}"):
            pairs = list(zip(metrics[one], metrics[other], strict=True))
            gap = {name: max(abs(a[name] - b[name]) for a, b in pairs) for name in COMPARED}
            report.row("Largest difference in 6 steps", of=one, to=other, **gap)
    good = sum(len(lines) == STEPS for lines in metrics.values())
    report.summary(f"{good} of {len(wanted)} runs ended after {STEPS} steps")
    report.add(not_run=[run.name for run in RUNS if run not in wanted])


def is_possible(setup: Setup, run: Run) -> bool:
    """Return whether the step makes this run here."""
    if setup.tiny:
        return run.name in TINY
    return run.package is None or find_spec(run.package) is not None


def start(setup: Setup, run: Run, folder: Path) -> subprocess.Popen[bytes]:
    """Start a run. Its output goes to a file beside its folder."""
    dtype = "fp32" if setup.tiny else run.dtype
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(f"job: {run.job}\n", encoding="utf-8")
    words = [f"run_dir={folder}", f"max_steps={STEPS}", f"precision.dtype={dtype}", MODEL]
    words += [DATA[run.job], "train.train_batch_size=32", "train.lr=1e-3"]
    words += [f"train.engine.device={setup.device}", "checkpoint.every_n_steps=0", "seed=1"]
    words += run.words  # the last of equal keys counts
    words = [word.replace("{reward}", str(folder.parent / "reward.py")) for word in words]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [sys.executable, *(launcher if run.launched else []), "-m", "burnish", run.job]
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(recipe), *words], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the steps of a run, none if it has written none."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line for line in map(json.loads, lines) if loss_of(line)]


def loss_of(line: dict[str, Any]) -> list[str]:
    """Return the names of the losses in a line of metrics."""
    return [name for name in line if name.endswith("/loss")]


def ends(lines: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the first and the last loss."""
    found = [line[loss_of(line)[0]] for line in lines]
    return {"first loss": found[0] if found else None, "last loss": found[-1] if found else None}
