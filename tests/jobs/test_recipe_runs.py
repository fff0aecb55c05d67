"""Two steps of the tiny recipes that no other test runs, each checked for its defining property; a
round of iterative DPO from its recipes, and both rounds with the commands of its script."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import burnish
from burnish.config import load_config
from burnish.data.steps.config import StepsDataConfig
from burnish.driver.run_dir import REFERENCE_FILE
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ALPHABET = "0123456789>"
Lines = list[dict[str, float]]
Samples = list[dict[str, Any]]
Few = Callable[..., str]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Few:
    """``few("sort_pairs")``: the path of a file with the first rows of that data."""
    folder = tmp_path_factory.mktemp("few")

    def first(name: str, count: int = 48) -> str:
        lines = (ROOT / "recipes" / "data" / f"{name}.jsonl").read_text().splitlines()
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(lines[:count]) + "\n")
        return str(path)

    return first


@pytest.fixture
def two_steps(run_recipe: Any, tmp_path: Path) -> Callable[..., tuple[Lines, Samples]]:
    """Two steps of a recipe: its metrics, all finite, and the training samples of its first."""

    def run(name: str, *overrides: str) -> tuple[Lines, Samples]:
        run_dir = run_recipe(name, f"run_dir={tmp_path / 'run'}", "max_steps=2", *overrides)
        lines = read_metrics(run_dir)
        trained = [line for line in lines if "train/loss" in line]
        assert len(trained) == 2 and all(line["train/grad_norm"] > 0 for line in trained)
        assert all(math.isfinite(value) for line in lines for value in line.values())
        rows = read_samples(run_dir)
        return lines, [row for row in rows if row["split"] == "train" and row["step"] == 1]

    return run


@pytest.fixture
def rollout(sft: Any) -> list[str]:
    """Words that make an RL recipe small: 4 prompts x 8 samples, 4 held-out problems."""
    return [
        f"model.path={sft.model}",
        "rollout.rollout_batch_size=4",
        "train.train_batch_size=32",
        "eval.num_prompts=4",
        "observe.samples_per_step=1000",
    ]


def baselines(samples: Samples, *, others: bool = False) -> list[float]:
    """Each sample's reward minus the mean of its prompt's rewards (``others``: but its own)."""
    groups = defaultdict(list)
    for s in samples:
        groups[s["prompt_id"]].append(s["reward"])
    assert any(len(set(group)) > 1 for group in groups.values()), "nothing to learn from"
    n = 8 if others else 1
    factor = n / (n - 1) if others else 1.0
    return [factor * (s["reward"] - fmean(groups[s["prompt_id"]])) for s in samples]


def whitened(values: Sequence[float], samples: Samples) -> list[float]:
    """Mean 0 and variance 1 over all tokens; every token of a sample has its value."""
    pairs = [(v, s["response_tokens"]) for v, s in zip(values, samples, strict=True)]
    count = sum(n for _, n in pairs)
    mean = sum(v * n for v, n in pairs) / count
    std = math.sqrt(sum(n * (v - mean) ** 2 for v, n in pairs) / count)
    return [(v - mean) / std for v in values]


def advantages(samples: Samples) -> list[float]:
    return [s["advantage"] for s in samples]


def test_dr_grpo_is_the_reward_minus_the_mean(two_steps: Any, rollout: list[str]) -> None:
    _, samples = two_steps("tiny_dr_grpo", *rollout)
    # 1e-6: fp32, here and below
    assert advantages(samples) == pytest.approx(baselines(samples), abs=1e-6)


def test_rloo_is_the_reward_minus_the_mean_of_the_others(
    two_steps: Any, rollout: list[str]
) -> None:
    _, samples = two_steps("tiny_rloo", *rollout)
    assert advantages(samples) == pytest.approx(baselines(samples, others=True), abs=1e-6)


def test_reinforce_pp_baseline_whitens_the_reward_minus_the_mean(
    two_steps: Any, rollout: list[str]
) -> None:
    _, samples = two_steps("tiny_reinforce_pp_baseline", *rollout)
    # 1e-4: the variance has an epsilon
    expected = whitened(baselines(samples), samples)
    assert advantages(samples) == pytest.approx(expected, abs=1e-4)


def test_reinforce_pp_whitens_rewards_and_pays_for_kl(two_steps: Any, rollout: list[str]) -> None:
    """The KL of the first step is 0, the policy being its reference; that of the second is not."""
    lines, samples = two_steps("tiny_reinforce_pp", *rollout, "rollout.rollout_batch_size=32")
    expected = whitened([s["reward"] for s in samples], samples)
    assert advantages(samples) == pytest.approx(expected, abs=1e-4)  # as above
    first, second = (line["train/kl"] for line in lines if "train/kl" in line)
    assert first == pytest.approx(0.0, abs=1e-6) and second > 1e-6


def test_dapo_drops_groups_and_penalizes_length(two_steps: Any, rollout: list[str]) -> None:
    """Of groups of two, half have equal rewards."""
    small = ["rollout.n_samples_per_prompt=2", "train.train_batch_size=4"]
    lines, samples = two_steps("tiny_dapo", *rollout, *small)
    trained = [line for line in lines if "train/loss" in line]
    assert sum(line["rollout/groups_filtered"] for line in trained) > 0
    assert all(line["rollout/groups_kept_anyway"] == 0 for line in trained)
    assert all("reward/shaping" in line and "train/clip_frac" in line for line in trained)
    assert len({s["prompt_id"] for s in samples}) == 4
    right = [json.loads(s["reward_parts"])["sorted"] for s in samples]
    assert sorted(right) == [0.0] * 4 + [1.0] * 4, "one of each in every group"


@pytest.mark.parametrize(
    ("recipe", "metric"), [("tiny_gspo", "train/sequence_ratio"), ("tiny_cispo", "train/clip_frac")]
)
def test_gspo_and_cispo_take_two_updates_with_their_ratios(
    recipe: str, metric: str, two_steps: Any, rollout: list[str]
) -> None:
    lines, _ = two_steps(recipe, *rollout, "train.train_batch_size=16")
    trained = [line for line in lines if "train/loss" in line]
    assert all(metric in line and line["train/ratio_max"] > 1 for line in trained)


def test_dpo_begins_at_ln_2_with_kept_log_probs(
    two_steps: Any, sft: Any, few: Few, tmp_path: Path
) -> None:
    pairs, held_out = few("sort_pairs"), few("sort_pairs_heldout")
    data = [f"data.sources=[{pairs}]", f"eval.data.sources=[{held_out}]"]
    lines, _ = two_steps("tiny_dpo", f"model.path={sft.model}", *data, "train.train_batch_size=16")
    # 1e-6: the log-probs of policy and reference are the same sums
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[-1]["eval/loss"] < math.log(2) and lines[-1]["train/reward_margin"] != 0
    assert (tmp_path / "run" / REFERENCE_FILE).is_file()


def test_distillation_reduces_the_divergence_from_the_teacher(
    two_steps: Any, sft: Any, few: Few
) -> None:
    held_out = f"eval.data.sources=[{few('sort_demos_heldout')}]"
    lines, _ = two_steps("tiny_distill", f"teacher.model.path={sft.model}", held_out)
    assert 0 < lines[-1]["eval/teacher_kl"] < lines[0]["eval/teacher_kl"]


def test_on_policy_distillation_learns_from_the_teacher_alone(
    two_steps: Any, sft: Any, rollout: list[str]
) -> None:
    """An untrained policy samples tokens that are improbable under the teacher: advantages differ
    although rewards do not."""
    lines, samples = two_steps(
        "tiny_on_policy_distill",
        *rollout[1:],
        "rollout.rollout_batch_size=32",
        f"model={{scratch: {{alphabet: '{ALPHABET}', hidden_size: 32, num_layers: 1}}}}",
        f"teacher.model.path={sft.model}",
    )
    assert all(line["train/teacher_kl"] > 0 for line in lines if "train/loss" in line)
    assert {s["reward"] for s in samples} == {0.0} and len(set(advantages(samples))) > 8


def test_a_process_reward_model_scores_steps(two_steps: Any, few: Few) -> None:
    data = [f"{key}.sources=[{few(name)}]" for key, name in (
        ("data", "sort_steps"), ("eval.data", "sort_steps_heldout")
    )]  # fmt: skip
    lines, _ = two_steps("tiny_prm", *data, "train.train_batch_size=16", "train.lr=2e-4")
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    shares = {lines[-1][f"eval/{name}"] for name in ("step_accuracy", "good_steps", "row_exact")}
    assert all(0 <= share <= 1 for share in shares) and len(shares) > 1
    assert {n.removeprefix("eval/") for n in lines[-1] if n.startswith("eval/")} == set(
        StepsDataConfig.model_construct().metrics(weighted=False)
    )


def test_a_round_of_generate_and_preference_raises_accuracy(
    sft: Any, run_recipe: Any, tmp_path: Path
) -> None:
    """0.50 -> 0.88 with all 1,500 problems and six epochs of SFT (the header of the recipe)."""

    def accuracy(model: Path, name: str) -> float:
        run_dir = run_recipe("tiny_evaluate", f"model.path={model}", f"run_dir={tmp_path / name}")
        return read_metrics(run_dir)[-1]["eval/pass@1"]

    pairs = run_recipe(
        "tiny_iterative_1_pairs",
        f"model.path={sft.model}",
        f"run_dir={tmp_path / 'pairs'}",
        "num_prompts=800",
    )
    learned = run_recipe(
        "tiny_iterative_2_dpo",
        f"model.path={sft.model}",
        f"run_dir={tmp_path / 'dpo'}",
        f"data.sources=[{pairs / 'generated.jsonl'}]",
    )
    model = burnish.export(learned, tmp_path / "model")
    before, after = accuracy(sft.model, "before"), accuracy(model, "after")
    assert after > before + 0.1, (before, after)


TINY = {
    "evaluate": ["eval.num_prompts=4"],
    "generate": ["num_prompts=24"],
    "preference": ["train.train_batch_size=4", "max_steps=2"],
}


def test_both_rounds_of_iterative_dpo_run_from_the_scripts_own_commands(
    sft: Any, tmp_path: Path
) -> None:
    """Every command of the script, in order, in this process; each reads the output of an earlier
    one."""
    told, stub = tmp_path / "told", tmp_path / "burnish"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\t" "$@" >> {told}\necho >> {told}\n')
    stub.chmod(0o755)
    script = ROOT / "recipes" / "tiny_iterative_dpo.sh"
    runs = tmp_path / "runs"
    subprocess.run(
        ["bash", str(script), str(sft.model), str(runs)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "BURNISH": str(stub)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for line in told.read_text().splitlines():
            job, first, *words = line.split("\t")[:-1]
            if job == "export":
                burnish.export(Path(first), Path(words[words.index("--out") + 1]))
            else:
                burnish.run(load_config(first, [*words, *TINY[job]], job=job))
    for round_ in ("1", "2"):
        assert (runs / f"pairs-{round_}" / "generated.jsonl").read_text().count("\n") >= 8
        learned = read_metrics(runs / f"dpo-{round_}")
        assert [line["step"] for line in learned] == [1, 2]
        assert all(math.isfinite(line["train/loss"]) for line in learned)
        # the reference of each round is where it starts
        assert learned[0]["train/reward_margin"] == pytest.approx(0.0, abs=1e-5)
    weights = [runs / name / "model.safetensors" for name in ("model-1", "model-2")]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    for name in ("before", "after-1", "after-2"):
        assert 0 <= read_metrics(runs / name)[-1]["eval/pass@1"] <= 1
