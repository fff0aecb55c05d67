"""The subjects of ``learning.py``: two tasks, eight algorithms, and the recipe of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import chain_sums, model_folder

ROOT = Path(__file__).resolve().parent.parent
SORT_MODEL = ROOT / "runs" / "tiny-sft-model"
"""The export of recipes/tiny_1_sft.yaml."""


@dataclass(frozen=True)
class Task:
    """Prompts with a label, a model to begin with, and how long and how fast it learns. Every
    algorithm and every library gets the same."""

    model: Path
    train: list[dict[str, str]]
    held_out: list[dict[str, str]]
    new_tokens: int
    steps: int
    prompts: int
    """A step's; each has ``samples``."""
    samples: int
    lr: float
    temperature: float
    """Of the held-out measurement; 0: greedy."""
    tries: int
    """Samples of each held-out prompt."""
    eval_every: int
    exact: bool
    """The response is the label, else it begins with it."""

    @property
    def stop(self) -> str | None:
        """Where a response ends that has no end token: answers that need not be exact are one
        line."""
        return None if self.exact else "\n"

    def reward(self, response: str, label: str) -> float:
        """1 for a right answer, else 0."""
        return float(response == label if self.exact else response.strip().startswith(label))


def sort_task() -> Task:
    """Sort four digits: the tiny recipes' task, a model of 0.4M parameters."""
    import json

    if not SORT_MODEL.is_dir():
        raise SystemExit(
            f"{SORT_MODEL} does not exist; create it: burnish sft recipes/tiny_1_sft.yaml && "
            "burnish export runs/tiny-sft --out runs/tiny-sft-model"
        )
    rows = [
        [json.loads(line) for line in (ROOT / "recipes" / "data" / name).read_text().splitlines()]
        for name in ("sort_prompts.jsonl", "sort_prompts_heldout.jsonl")
    ]
    return Task(
        SORT_MODEL, rows[0], rows[1][:100], new_tokens=8, steps=40, prompts=16, samples=8, lr=1e-4,
        temperature=1.0, tries=4, eval_every=5, exact=True,
    )  # fmt: skip


def chain_sum_task() -> Task:
    """Sums of two numbers: what ``burnish demo`` does, SmolLM2-135M-Instruct."""
    return Task(
        model_folder(), chain_sums(2000, seed=1), chain_sums(100, seed=1_000_003), new_tokens=8,
        steps=20, prompts=8, samples=8, lr=1e-5,
        temperature=0.0, tries=1, eval_every=5, exact=False,
    )  # fmt: skip


TASKS = {"sort": sort_task, "chain_sum": chain_sum_task}

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"algorithm": {"advantage": "dr_grpo", "loss_aggregation": "sequence_sum_constant"}},
    "rloo": {"algorithm": {"advantage": "rloo"}},
    "reinforce_pp_baseline": {"algorithm": {"advantage": "reinforce_pp_baseline"}},
    "dapo": {
        "algorithm": {"policy_loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28}},
        "rollout": {"dynamic_sampling": {"max_refills": 20}},
        "shaping": {"overlong": {"buffer_len": 2}},
    },
    "gspo": {"algorithm": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"}},
    "cispo": {"algorithm": {"policy_loss": "cispo"}},
    "ppo": {
        "algorithm": {"advantage": {"kind": "gae", "gamma": 1.0, "lam": 0.95}},
        "critic": {},  # its learning rate is the task's, five times
    },
}
"""By name: what differs from the recipe of :func:`recipe`. All but ppo have groups."""
TRL = "trl_grpo"


def recipe(task: Task, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """The recipe of a variant: two optimizer steps per rollout, no KL term."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for kind, rows in (("train", task.train), ("held_out", task.held_out)):
        files[kind] = folder / f"{kind}.jsonl"
        files[kind].write_text("\n".join(json.dumps(r) for r in rows))
    change = VARIANTS[name]
    total = task.prompts * task.samples
    groups = "critic" not in change
    tree: dict[str, Any] = {
        "job": "rl",
        "run_dir": str(folder / "run"),
        "seed": seed,
        "max_steps": task.steps,
        "model": {"path": str(task.model)},
        "data": {"sources": [str(files["train"])], "prompt_max_len": 64},
        "rollout": {
            "rollout_batch_size": task.prompts if groups else total,
            "n_samples_per_prompt": task.samples if groups else 1,
            "generate_max_len": task.new_tokens,
            **({} if task.stop is None else {"stop": [task.stop]}),
        },
        "rewards": [{"kind": "function"}],
        "algorithm": {"advantage": "grpo"},
        "train": {"train_batch_size": total // 2, "lr": task.lr},
        "eval": {
            "data": {"sources": [str(files["held_out"])], "prompt_max_len": 64},
            "temperature": task.temperature,
            "n_samples_per_prompt": task.tries,
        },
        "observe": {"samples_per_step": 0},
    }
    for part, values in change.items():
        tree[part] = {**tree.get(part, {}), **values}
    if not groups:
        tree["critic"] = {"lr": 5 * task.lr}
    return tree
