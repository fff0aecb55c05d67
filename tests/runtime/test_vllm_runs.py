"""Whole jobs that sample with vLLM in the trainer's process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
import burnish.rollout.vllm.weights as weights_side
from burnish.config import JobConfig, load_config
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.rollout.vllm.engine import INSTALL
from burnish.rollout.weights import StaleWeightsError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_vllm_starts"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL),
]
MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
VLLM = [
    "rollout.engine.kind=vllm",
    "model.scratch.num_heads=1",
    "model.scratch.num_kv_heads=1",  # heads of 32
    "train.lr=1e-2",
]

MASKED = ["rollout.top_p=0.9", "rollout.top_k=9", "algorithm.correction={}"]


@pytest.mark.parametrize(
    "options",
    [[], ["model.lora.lora_rank=4"], ["model.scratch.tie_word_embeddings=false", *MASKED]],
    ids=["tied", "lora", "untied, over the tokens that top-p and top-k keep"],
)
def test_a_grpo_run_samples_from_the_weights_it_trains(
    options: list[str], rl: MakeConfig, reward: Reward, evaluation: list[str]
) -> None:
    config = rl(*VLLM, *options, "max_steps=3", *evaluation)
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    steps = [line for line in lines if "train/mismatch_max" in line]
    assert len(steps) == 3
    # fp32: log-probs of up to 5 by other kernels. Stale weights would be off by 1e-2 and more
    # after the first step of 1e-2.
    assert all(line["train/mismatch_max"] < 1e-5 for line in steps)
    assert any(line["train/grad_norm"] > 0 for line in steps)
    assert "eval/pass@1" in lines[-1]
    assert not torch.distributed.is_initialized(), "the engine was not closed"


def test_another_format_of_the_sampler_gets_new_weights_every_step(
    rl: MakeConfig, reward: Reward
) -> None:
    config = rl(*VLLM, "precision.rollout_dtype=bf16", "max_steps=3")
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    assert all(1e-5 < line["train/mismatch_abs"] < 0.03 for line in lines)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    options = [*VLLM, "checkpoint.every_n_steps=1"]
    whole = rl(*options, "max_steps=4", f"run_dir={tmp_path / 'whole'}")
    one = read_metrics(burnish.run(whole, rewards=reward).run_dir)
    run_dir = burnish.run(rl(*options, "max_steps=2"), rewards=reward).run_dir
    burnish.run(rl(*options, "max_steps=4"), rewards=reward, resume=run_dir)
    for line, other in zip(one, read_metrics(run_dir), strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "rollout/tokens"):
            assert line[name] == other[name], (line["step"], name)


def test_an_evaluation_samples_with_vllm_what_the_local_engine_samples(
    rl: MakeConfig, reward: Reward, evaluation: list[str], tmp_path: Path
) -> None:
    scores = {}
    for kind in ("local", "vllm"):
        tree = {
            "job": "evaluate",
            "run_dir": str(tmp_path / kind),
            "model": rl(*VLLM).model.model_dump(),
            "eval": {"generate_max_len": 4},
            "engine": {"kind": kind},
        }
        dropped = ("eval.n_samples", "eval.pass_k", "eval.temperature")
        plain = [e for e in evaluation if not e.startswith(dropped)]
        config = load_config(tree, [*plain, "eval.temperature=0"])
        scores[kind] = burnish.run(config, rewards=reward).metrics
    assert scores["vllm"]["eval/reward"] == scores["local"]["eval/reward"]


@pytest.mark.parametrize("job", ["rl", "evaluate"])
def test_weights_in_another_order_at_a_place_that_is_not_known_stop_the_run_at_its_start(
    job: str,
    rl: MakeConfig,
    reward: Reward,
    evaluation: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader of vLLM reverses the rows of the values' projection."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    config = rl(*VLLM, *evaluation, "model.scratch.tie_word_embeddings=false")
    model = load_causal_lm(config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)  # far from a uniform distribution
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(config.model).save_pretrained(tmp_path / "model")
    load = LlamaForCausalLM.load_weights

    def reverse(self: Any, weights: Any) -> Any:
        return load(self, ((n, t.flip(0) if "v_proj" in n else t) for n, t in weights))

    monkeypatch.setattr(LlamaForCausalLM, "load_weights", reverse)
    monkeypatch.setattr(weights_side, "places_of", lambda *_, **__: {})
    tree = config.model_dump()
    tree["model"] = {"path": str(tmp_path / "model")}
    if job == "evaluate":
        tree = {
            "job": "evaluate",
            "run_dir": str(tmp_path / "run"),
            "model": tree["model"],
            "eval": {**tree["eval"], "generate_max_len": 4},
            "engine": {"kind": "vllm"},
        }
    with pytest.raises(StaleWeightsError, match=r"differ by [0-9.e-]+ nats per token"):
        burnish.run(load_config(tree), rewards=reward)


def test_a_model_whose_heads_vllm_cannot_compute_stops_the_run_at_its_start(
    rl: MakeConfig, reward: Reward
) -> None:
    with pytest.raises(ModelError, match="no attention for heads of 8"):
        burnish.run(rl("rollout.engine.kind=vllm"), rewards=reward)
