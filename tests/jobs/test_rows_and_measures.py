"""Rows of data, ranks and measurements: several ranks see each row once, distillation measures the
response tokens, and the KL of samples is that of the distributions."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from burnish.config import load_config
from burnish.config.model import ModelConfig
from burnish.data.batches import BatchStream
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.train.batching import split_over_ranks
from burnish.types import Batch

STUDENT = {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}
TEACHER = {**STUDENT, "hidden_size": 48, "seed": 5}


def rows_file(folder: Path, size: int) -> str:
    path = folder / "rows.jsonl"
    rows = [
        {"prompt": f"{i}+{i}=", "response": str(2 * i), "chosen": str(2 * i), "rejected": "7" * i}
        for i in range(1, size + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def spans(batch: Batch) -> list[tuple[int, ...]]:
    """Tokens of every row."""
    return [tuple(batch.tokens[a:b].tolist()) for a, b in pairwise(batch.offsets.tolist())]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_ranks_together_see_each_row_once_per_epoch(
    tmp_path: Path, kind: str, ranks: int, budget: int | None
) -> None:
    """11 rows in steps of 4: the last step has 3, fewer than 5 ranks. The rows of a pair stay on
    one rank, next to each other."""
    tree: dict[str, Any] = {"job": kind, "model": {"scratch": STUDENT}, "max_epochs": 2}
    tree |= {"train": {"train_batch_size": 4}, "drop_last": False}
    config: Any = load_config(tree | {"data": {"sources": [rows_file(tmp_path, 11)]}})
    tokenizer = load_tokenizer(config.model)
    pairs = kind == "preference"
    stream = BatchStream(config.data, tokenizer, seed=0)
    seen: Counter[tuple[int, ...]] = Counter()
    steps = config.steps_for(stream.num_rows)
    for step in range(1, steps + 1):
        batch = stream.next(config.batch_size_at(step, stream.num_rows))
        rows = spans(batch)
        split = split_over_ranks(
            batch, ranks=ranks, micro_batch_size=2, max_tokens=budget, layout="packed"
        )
        assert len(split) == ranks and len({len(part) for part in split}) == 1
        taken = [row for part in split for micro in part for row in micro]
        assert sorted(taken) == list(range(batch.num_rows))
        for part in split:
            for micro in part:
                assert not pairs or all(b == a + 1 for a, b in zip(*[iter(micro)] * 2, strict=True))
        seen.update(rows[row] for row in taken)
    assert steps == 6 and sum(seen.values()) == 2 * 11 * (1 + pairs)
    assert set(seen.values()) == {2}


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' own forward of one row: log-probs after each token [T, V]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("wide", [False, True])
def test_distillation_measures_the_divergence_over_the_rows_as_by_hand(
    tmp_path: Path, wide: bool
) -> None:
    """Forward KL, per token of the responses (or of all but the first token), row by row."""
    data = {"sources": [rows_file(tmp_path, 6)], "train_on_prompt": wide}
    tree = {"job": "distill", "model": {"scratch": STUDENT}, "data": data, "eval": {"data": data}}
    tree |= {"teacher": {"model": {"scratch": TEACHER}}, "train": {"train_batch_size": 2}}
    config: Any = load_config(tree | {"run_dir": str(tmp_path / "run"), "max_steps": 1})
    burnish.run(config)
    models = [load_causal_lm(ModelConfig(scratch=made)) for made in (TEACHER, STUDENT)]
    teacher, student = (model.eval() for model in models)
    tokenizer, total, count = load_tokenizer(config.model), 0.0, 0
    for i in range(1, 7):
        prompt = list(tokenizer(f"{i}+{i}=")["input_ids"])
        answer = tokenizer(str(2 * i), add_special_tokens=False)["input_ids"]
        ids = [*prompt, *answer, tokenizer.eos_token_id]
        p, q = logprobs(teacher, ids), logprobs(student, ids)
        kl = (p.exp() * (p - q)).sum(-1)[(0 if wide else len(prompt) - 1) : -1]
        total, count = total + float(kl.sum()), count + len(kl)
    first = next(line for line in read_metrics(tmp_path / "run") if line["step"] == 0)
    assert first["eval/loss"] == pytest.approx(total / count, rel=1e-4)  # fp32 forward and sums


METRIC_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "distill": ("distill", {"teacher": {"model": {"scratch": TEACHER}}}),
    "pairs": ("rm", {}),
    "dpo": ("preference", {}),
    "kto": ("preference", {"loss": "kto"}),
}


@pytest.mark.parametrize("name", METRIC_RUNS)
def test_the_metrics_of_an_evaluation_are_those_that_the_config_names(
    tmp_path: Path, name: str
) -> None:
    """``checkpoint.best_metric`` is checked against these names at load."""
    job, more = METRIC_RUNS[name]
    data = {"sources": [rows_file(tmp_path, 6)]}
    tree = {"job": job, "model": {"scratch": STUDENT}, "data": data, **more}
    tree |= {
        "eval": {"data": data},
        "train": {"train_batch_size": 4},
        "run_dir": str(tmp_path / "run"),
        "max_steps": 1,
    }
    config: Any = load_config(tree)
    metrics = burnish.run(config).metrics
    found = {name.removeprefix("eval/") for name in metrics if name.startswith("eval/")}
    assert found == config.eval_metrics


def test_grpo_runs_with_kl_in_the_reward_and_measures_the_metrics_of_its_config(
    tmp_path: Path,
) -> None:
    """Equal rewards: the advantage is only the KL, which differs from token to token."""
    data = {"sources": [rows_file(tmp_path, 2)], "prompt_max_len": 16}
    tree: dict[str, Any] = {
        "job": "rl",
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": STUDENT},
        "reference": {"model": {"scratch": {**STUDENT, "seed": 9}}},
        "max_steps": 1,
        "data": data,
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 4},
        "rewards": [{"kind": "function", "name": "one"}, {"kind": "function", "name": "two"}],
        "algorithm": {"kl": {"init_kl_coef": 0.1, "placement": "reward", "estimator": "k3"}},
        "train": {"train_batch_size": 4},
        "eval": {"data": data, "n_samples_per_prompt": 2, "pass_k": [2], "temperature": 1.0},
    }
    config: Any = load_config(tree)
    same = {name: lambda prompt, response: 1.0 for name in ("one", "two")}
    metrics = burnish.run(config, rewards=same).metrics
    found = {name.removeprefix("eval/") for name in metrics if name.startswith("eval/")}
    assert found == config.eval_metrics
    assert metrics["rollout/kl"] > 0 and metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_of_samples_is_that_of_the_distributions(tmp_path: Path, estimator: str) -> None:
    """One token per response, 1,600 of them: the mean estimate is the mean exact KL of the first
    token over the prompts, within 5 standard errors of the exact spread of the estimator."""
    tree: dict[str, Any] = {
        "job": "rl",
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": STUDENT},
        "reference": {"model": {"scratch": {**STUDENT, "seed": 9}}},
        "max_steps": 1,
        "data": {"sources": [rows_file(tmp_path, 8)], "prompt_max_len": 16},
        "rollout": {"rollout_batch_size": 8, "n_samples_per_prompt": 200, "generate_max_len": 1},
        "algorithm": {"kl": {"init_kl_coef": 0.1, "estimator": estimator}},
        "train": {"train_batch_size": 1600, "lr": 1e-5},
    }
    burnish.run(load_config(tree), rewards=lambda prompt, response: float(len(response)))
    policy, reference = (
        load_causal_lm(ModelConfig(scratch={**STUDENT, "seed": seed})).eval() for seed in (0, 9)
    )
    tokenizer = load_tokenizer(ModelConfig(scratch=STUDENT))
    exact, variance = 0.0, 0.0
    for i in range(1, 9):
        ids = list(tokenizer(f"{i}+{i}=")["input_ids"])
        p, q = logprobs(policy, ids)[-1], logprobs(reference, ids)[-1]
        d = p - q
        each = d if estimator == "k1" else (-d).exp() - 1 + d
        mean = float((p.exp() * each).sum())
        assert mean == pytest.approx(float((p.exp() * d).sum()), abs=1e-12)  # both are unbiased
        exact += mean / 8
        variance += float((p.exp() * (each - mean) ** 2).sum()) / 8
    (line,) = [line for line in read_metrics(tmp_path / "run") if "train/kl" in line]
    assert abs(line["train/kl"] - exact) < 5 * math.sqrt(variance / 1600)
    if estimator == "k3":  # else 0 would pass; k1 is too noisy to tell
        assert exact > 5 * math.sqrt(variance / 1600)
