"""The step ``grpo`` of benchmarks/gpu_session.py: ``burnish rl`` on a task of one minute.

A random model of 100 thousand parameters has to write as many sevens as it can; the reward is their
share of the response. Nothing but this checkout is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from gpu_report import TAIL_CHARS, Report, Setup

STEPS = 30
LEARNED = 0.3
"""The mean reward of the last five steps is above that of the first five by so much."""
REWARD = '''"""The share of sevens in a response."""


def sevens(prompt: str, response: str, label: str) -> float:
    return response.count("7") / max(1, len(response))
'''
RECIPE = """job: rl
seed: 1
run_dir: {folder}/run
max_steps: {steps}
model: {{scratch: {{hidden_size: 64, num_layers: 2, alphabet: "0123456789 "}}}}
precision: {{dtype: {dtype}}}
data: {{sources: [{folder}/prompts.jsonl], prompt_max_len: 16}}
rollout: {{rollout_batch_size: 8, n_samples_per_prompt: 8, generate_max_len: 16}}
rewards: [{{kind: function, function: "{folder}/reward.py:sevens"}}]
algorithm: {{advantage: grpo}}
train: {{train_batch_size: 64, lr: 3e-3, engine: {{device: {device}}}}}
checkpoint: {{every_n_steps: 0}}
"""


def write_job(setup: Setup, folder: Path) -> Path:
    """Write the recipe and the files that it reads. Return the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{i} {i + 1}", "label": "7"} for i in range(64)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    recipe = folder / "recipe.yaml"
    dtype = "fp32" if setup.tiny else "bf16"
    recipe.write_text(RECIPE.format(folder=folder, steps=STEPS, dtype=dtype, device=setup.device))
    return recipe


def grpo(setup: Setup, report: Report) -> None:
    """Train, and compare the first rewards with the last."""
    import shutil

    folder = setup.work / "grpo"
    shutil.rmtree(folder, ignore_errors=True)
    recipe = write_job(setup, folder)
    command = [sys.executable, "-m", "burnish", "rl", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = folder / "run" / "metrics.jsonl"
    if done.returncode or not lines.is_file():
        report.problem(f"burnish rl exited with {done.returncode}: {done.stderr[-TAIL_CHARS:]}")
        return
    found = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    rewards = [line["reward/mean"] for line in found if "reward/mean" in line]
    first, last = mean(rewards[:5]), mean(rewards[-5:])
    gap = max(line["train/mismatch_max"] for line in found if "train/mismatch_max" in line)
    report.add(rewards=rewards, last_metrics=found[-1], mismatch_max=gap)
    report.summary(
        f"reward {first:.2f} -> {last:.2f} in {len(rewards)} steps; sampler and trainer differ by "
        f"{gap:.2g} nats at most"
    )
    if last < first + LEARNED:
        report.problem(
            f"the reward changed from {first:.3f} to {last:.3f}, less than the required increase "
            f"of {LEARNED}"
        )
