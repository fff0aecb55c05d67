"""The full RLHF pipeline from its three recipes: SFT -> reward model -> PPO, with exports between
the stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import burnish
from burnish.observe.metrics import read_metrics

pytestmark = pytest.mark.slow

RunRecipe = Callable[..., Path]


def _values(run_dir: Path, metric: str) -> list[float]:
    return [line[metric] for line in read_metrics(run_dir) if metric in line]


def test_sft_reaches_the_entropy_of_its_demonstrations(sft: Any) -> None:
    """Half of the demonstrations are reversed: ln 2 nats per answer of 6 tokens, 0.12 per token,
    cannot be learned. Seeds 0 to 3 go from 2.8 to between 0.165 and 0.177; at 0.3 digits are
    still wrong, and below 0.1 the held-out answers were seen."""
    losses = _values(sft.run_dir, "eval/loss")
    assert losses[0] > 2.0
    assert 0.1 < losses[-1] < 0.3


def test_an_export_loads_with_plain_transformers_tokenizer_included(sft: Any) -> None:
    """And the model sorts, one way or the other, which garbled tokens could not do."""
    tokenizer = AutoTokenizer.from_pretrained(sft.model)
    model = AutoModelForCausalLM.from_pretrained(sft.model)
    assert tokenizer.decode(tokenizer("4213>")["input_ids"]) == "4213>"
    assert tokenizer.eos_token_id == model.config.eos_token_id
    prompt = tokenizer("4213>", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, 5:]
    assert tokenizer.decode(out, skip_special_tokens=True) in ("1234", "4321")


@pytest.fixture(scope="module")
def reward_model(
    run_recipe: RunRecipe, sft: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """(run folder, export) of recipes/tiny_2_rm.yaml."""
    folder = tmp_path_factory.mktemp("rm")
    run_dir = run_recipe("tiny_2_rm", f"run_dir={folder / 'run'}", f"model.path={sft.model}")
    return run_dir, burnish.export(run_dir, folder / "model", model="reward")


@pytest.mark.slow
def test_the_reward_model_ranks_held_out_pairs(reward_model: tuple[Path, Path]) -> None:
    """Seeds 0 to 3: 0.30 to 0.68 with the untrained head, 0.93 to 0.98 of 300 pairs at the end.
    0.85 is five standard errors (0.014) below the worst of them, and 9 above the best start."""
    accuracy = _values(reward_model[0], "eval/accuracy")
    assert accuracy[0] < 0.75, "it starts from a head without training"
    assert accuracy[-1] > 0.85


@pytest.mark.slow
def test_ppo_raises_the_reward_models_score_and_the_share_of_right_answers(
    run_recipe: RunRecipe, sft: Any, reward_model: tuple[Path, Path], tmp_path: Path
) -> None:
    """From the mean of the first 2 steps to that of the last 4, 64 samples a step. Seed 0: score
    -1.4 -> 4.5, right answers 0.50 -> 0.80 (standard error of the difference 0.05); seeds 1 to 3
    gain 5.8 to 6.7 and 0.26 to 0.31. The bounds are half and a third of what seed 0 gains."""
    run_dir = run_recipe(
        "tiny_3_ppo",
        f"run_dir={tmp_path / 'ppo'}",
        f"model.path={sft.model}",
        f"rewards.0.model.path={reward_model[1]}",
        "max_steps=20",
    )
    scores, right = _values(run_dir, "reward/rm"), _values(run_dir, "reward/sorted")
    assert fmean(scores[-4:]) > fmean(scores[:2]) + 3.0
    assert fmean(right[-4:]) > fmean(right[:2]) + 0.1
    values = _values(run_dir, "critic/value_loss")
    assert fmean(values[-4:]) < fmean(values[:2]), "the critic learns what to expect"
    # Nats per token; seeds 0 to 3: 0.17 to 0.22.
    assert fmean(_values(run_dir, "train/kl")[-4:]) < 0.5
