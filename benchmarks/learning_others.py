"""The parts of ``learning.py`` that are not reinforcement learning with a verifier: preference
optimisation on pairs that a verifier made, and a reward that can be cheated."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from common import inline_runtime, model_folder
from learning_results import Results, run_in_process
from learning_tasks import ROOT, SORT_MODEL

LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"loss": {"kind": "dpo", "beta": 0.1}},
    "dpo, nll_coef 1": {"loss": {"kind": "dpo", "beta": 0.1}, "nll_coef": 1.0},
    "kto": {"loss": {"kind": "kto", "beta": 0.1}},
}
KL_COEFS = (0.0, 0.1, 0.3)
OPENINGS = (
    "The film begins", "My flight was", "This restaurant", "The hotel room", "I bought a phone "
    "that",
    "The meeting today", "Our new neighbour", "The weather this week", "The book I read", "Her "
    "cooking",
    "The bus driver", "A letter from the bank", "The dentist", "The match last night", "My old car",
    "The school play",
)  # fmt: skip


# ---- preferences --------------------------------------------------------------------------------


def preference(args: argparse.Namespace) -> None:
    """DPO on pairs, KTO on their two halves; win rate on held-out problems before and after.

    The tiny model samples 8 answers to each of 1,000 problems; the verifier pairs a right one with
    a wrong one. A win is an answer with a higher verdict than one of the model before; equal
    verdicts are half a win, so that the model against itself has 0.5.
    """
    results = Results(args.out)
    for seed in args.seeds:
        missing = [k for k in LOSSES if not results.has("preference", k, seed)]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as work:
            data = _verified(Path(work), seed)
            before = _verdicts(SORT_MODEL, Path(work) / "before", seed)
            for kind in missing:
                single = kind == "kto"
                rows = data["singles" if single else "pairs"]
                model = _preferred(kind, rows, Path(work) / kind, seed)
                after = _verdicts(model, Path(work) / f"after-{kind}", seed)
                found = {"task": "preference", "name": kind, "seed": seed}
                found |= {"rows": len(rows.read_text().splitlines())}
                found |= {"before": _mean(before), "after": _mean(after)}
                found["win_rate"] = win_rate(after, before)
                results.add(found)
                print(kind, seed, found["win_rate"], flush=True)


def win_rate(after: dict[str, list[float]], before: dict[str, list[float]]) -> float:
    """Over all pairs of answers to the same prompt: wins, and half of the draws."""
    won = [
        1.0 if a > b else 0.5 * (a == b)
        for prompt, ours in after.items()
        for a in ours
        for b in before[prompt]
    ]
    return sum(won) / len(won)


def _mean(verdicts: dict[str, list[float]]) -> float:
    flat = [v for row in verdicts.values() for v in row]
    return sum(flat) / len(flat)


def _samples(model: Path, run_dir: Path, seed: int, **eval_data: Any) -> list[dict[str, Any]]:
    """Return the model's answers to prompts, each with the verifier's score, from an ``evaluate``
    job."""
    import burnish
    from burnish.observe.samples import read_samples

    tree = {
        "job": "evaluate",
        "run_dir": str(run_dir),
        "seed": seed,
        "model": {"path": str(model)},
        "rewards": [
            {
                "kind": "function",
                "function": f"{ROOT}/recipes/rewards/sort_reward.py:sorted_right",
            }
        ],
        "eval": {"generate_max_len": 8, "temperature": 1.0, **eval_data},
    }
    burnish.run(burnish.load_config(tree))
    return list(read_samples(run_dir))


def _verdicts(model: Path, run_dir: Path, seed: int) -> dict[str, list[float]]:
    data = {"sources": [f"{ROOT}/recipes/data/sort_prompts_heldout.jsonl"], "prompt_max_len": 8}
    found: dict[str, list[float]] = {}
    for sample in _samples(model, run_dir, seed, data=data, n_samples_per_prompt=4):
        found.setdefault(sample["prompt"], []).append(sample["reward"])
    return found


def _verified(work: Path, seed: int) -> dict[str, Path]:
    """Pairs for dpo, and single responses with verdicts for kto, of the model's own samples."""
    data = {"sources": [f"{ROOT}/recipes/data/sort_prompts.jsonl"], "prompt_max_len": 8}
    options = {"data": data, "n_samples_per_prompt": 8, "num_prompts": 1000}
    right: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for sample in _samples(SORT_MODEL, work / "sampled", seed, **options):
        (right if sample["reward"] else wrong).setdefault(sample["prompt"], sample["response"])
    both = sorted(set(right) & set(wrong))
    pairs = [{"prompt": p, "chosen": right[p], "rejected": wrong[p]} for p in both]
    singles = [
        {"prompt": p, "response": r, "label": good}
        for p in both
        for r, good in ((right[p], True), (wrong[p], False))
    ]
    out = {}
    for name, rows in (("pairs", pairs), ("singles", singles)):
        out[name] = work / f"{name}.jsonl"
        out[name].write_text("\n".join(json.dumps(r) for r in rows))
    return out


def _preferred(kind: str, data: Path, folder: Path, seed: int) -> Path:
    import burnish

    single = {"label_key": "label"} if kind == "kto" else {}
    tree = {
        "job": "preference",
        "run_dir": str(folder / "run"),
        "seed": seed,
        "model": {"path": str(SORT_MODEL)},
        "data": {"sources": [str(data)], "max_len": 16, **single},
        **LOSSES[kind],
        "max_epochs": 3,
        "train": {"train_batch_size": 32, "lr": 1e-4},
    }
    run = burnish.run(burnish.load_config(tree))
    return burnish.export(run.run_dir, folder / "model")


# ---- a reward that can be cheated ---------------------------------------------------------------


def hacking(args: argparse.Namespace) -> None:
    """SmolLM2 goes on from neutral openings; VADER's sentiment is the reward. Without a KL term it
    learns to repeat one happy word, with a strong one it stays a language model."""
    for seed in args.seeds:
        for kl in KL_COEFS:
            if Results(args.out).has("hacking", f"{kl:g}", seed):
                continue
            run_in_process(args.out, "one-hacking", "--kl", str(kl), "--seed", str(seed))
            print("KL weight", kl, "seed", seed, flush=True)


def one_hacking(args: argparse.Namespace) -> None:
    """One run: reward, KL to the model of the beginning, distinct words, and some text."""
    import torch
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    from burnish.config import RLConfig, load_config
    from burnish.driver.base import seed_everything
    from burnish.jobs.rl import build_rl
    from burnish.steps.rl import rl_step

    torch.set_num_threads(1)
    analyzer = SentimentIntensityAnalyzer()
    responses: list[str] = []

    def sentiment(prompt: str, response: str) -> float:
        responses.append(prompt + response)
        return float(analyzer.polarity_scores(response)["compound"])

    folder = Path(tempfile.mkdtemp())
    config = load_config(_sentiment_recipe(args.kl, args.seed, folder))
    assert isinstance(config, RLConfig)
    seed_everything(args.seed)
    runtime = inline_runtime(config)
    parts, _ = build_rl(config, runtime, {"": sentiment}, folder / "run")
    steps = []
    for step in range(1, config.num_steps + 1):
        responses.clear()
        metrics = rl_step(parts, step)
        kl = {"kl": metrics["train/kl"]} if math.isfinite(metrics.get("train/kl", math.nan)) else {}
        line = {"step": step, "reward": metrics["reward/mean"], **kl}
        steps.append(line | {"distinct": distinct(responses), "entropy": metrics["train/entropy"]})
    found = {"task": "hacking", "name": f"{args.kl:g}", "seed": args.seed}
    Results(args.out).add({**found, "steps": steps, "samples": responses[:2]})


def distinct(texts: list[str]) -> float:
    """Different words of each text over its words, on average."""
    shares = [len(set(t.lower().split())) / max(1, len(t.split())) for t in texts]
    return sum(shares) / len(shares)


def _sentiment_recipe(kl: float, seed: int, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": opening} for opening in OPENINGS]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    return {
        "job": "rl",
        "run_dir": str(folder / "run"),
        "seed": seed,
        "max_steps": 25,
        "model": {"path": str(model_folder())},
        "precision": {"dtype": "bf16"},
        "data": {"sources": [str(folder / "prompts.jsonl")], "prompt_max_len": 16},
        "rollout": {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "generate_max_len": 16},
        "rewards": [{"kind": "function"}],
        "algorithm": {
            "advantage": "grpo",
            # measured in both runs; the weight that is almost 0 changes nothing
            "kl": {"init_kl_coef": kl or 1e-9, "placement": "loss", "estimator": "k3"},
        },
        "train": {"train_batch_size": 64, "lr": 1e-4},
        "observe": {"samples_per_step": 0},
    }
