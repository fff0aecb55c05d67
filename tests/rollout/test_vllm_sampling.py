"""vLLM uses sampling parameters exactly as they are, or the recipe and the engines refuse them."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config import ConfigError, load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import load_tokenizer
from burnish.preflight.limits import vocabulary_problems
from burnish.rollout.base import Request, Sampling
from burnish.rollout.requests import LiveSample, StopRule
from burnish.rollout.vllm.sampling import check_sampling, sampling_fields

VOCAB = 48
ENGINES = (
    {"kind": "vllm"},
    {"kind": "vllm_server", "urls": ["http://127.0.0.1:8000"]},
)


def drawn(rng: random.Random) -> Sampling:
    """Values at and around every limit."""
    top_k = rng.choice([0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 1000])
    temperatures = [0, 1e-40, 1e-6, 1e-5, 0.005, 0.00999, 0.01, 0.7, 1.0, 2.0, 2.0001, 2.5, 100]
    return Sampling(
        max_tokens=rng.choice([1, 7]),
        temperature=rng.choice(temperatures),
        top_p=rng.choice([1e-9, 1e-6, 0.5, 1 - 1e-9, 1.0]),
        top_k=top_k,
        min_p=rng.choice([0.0, 1e-12, 0.1, 1.0]),
        stop_token_ids=tuple(rng.sample(range(VOCAB + 9), 3)),
        sampling_mask=bool(top_k) and rng.random() < 0.5,
    )


def sample_of(sampling: Sampling, seed: int) -> LiveSample:
    tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig()))
    return LiveSample(Request("a", (1,), seed=seed), 0, sampling, StopRule(tokenizer, sampling, ()))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_changes_no_parameter_that_is_accepted_and_refuses_or_changes_the_others() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    model: Any = SimpleNamespace(max_logprobs=-1, get_vocab_size=lambda: VOCAB)
    rng, refused = random.Random(1), 0
    for seed in range(400):
        sampling = drawn(rng)
        fields = sampling_fields(sample_of(sampling, seed), vocab_size=VOCAB)
        try:
            params = SamplingParams(**fields)
            params._validate_logprobs(model)
            params._validate_stop_token_ids(model)
            names = fields.keys() - (set() if sampling.temperature else {"top_p", "top_k", "min_p"})
            exact = all(getattr(params, name) == fields[name] for name in names)
        except VLLMValidationError:
            exact = False
        try:
            check_sampling(sampling, max_recorded=VOCAB)
            accepted = True
        except ValueError:
            accepted = False
            refused += 1
        assert accepted == exact, sampling
    assert 50 < refused < 350


@pytest.mark.parametrize("engine", ENGINES, ids=["vllm", "server"])
@pytest.mark.parametrize("temperature", [1e-6, 0.0099, 2.01])
@pytest.mark.parametrize("job", ["rl", "rl eval", "generate", "evaluate"])
def test_a_recipe_whose_temperature_vllm_would_change_is_refused_when_it_is_loaded(
    job: str, temperature: float, engine: dict[str, Any]
) -> None:
    data = {"sources": ["a.jsonl"]}
    tree: dict[str, Any] = {"model": {"scratch": {}}, "data": data, "job": job.split()[0]}
    held_out = {"data": data, "temperature": temperature, "generate_max_len": 8}
    sampled = {"engine": engine, "temperature": temperature}
    if job == "rl":
        tree |= {"rollout": {**sampled, "rollout_batch_size": 2, "n_samples_per_prompt": 2}}
        key = "rollout.temperature"
    elif job == "rl eval":
        rollout = {"engine": engine, "rollout_batch_size": 2, "n_samples_per_prompt": 2}
        tree |= {"rollout": rollout, "eval": held_out}
        key = "eval.temperature"
    elif job == "generate":
        tree |= {"rollout": sampled}
        key = "rollout.temperature"
    else:
        del tree["data"]
        tree |= {"engine": engine, "eval": held_out}
        key = "eval.temperature"
    if tree["job"] == "rl":
        tree |= {"max_steps": 1, "train": {"train_batch_size": 4}}
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    assert f"{key}={temperature:g}: vLLM" in str(caught.value) and "kind=local" in str(caught.value)
    for section in ("rollout", "eval"):
        if section in tree:
            tree[section].pop("engine", None)
    tree.pop("engine", None)
    load_config(tree)  # the way out of the message


def test_what_does_not_fit_the_vocabulary_is_found_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB}))
    rollout: dict[str, Any] = {"engine": ENGINES[0], "sampling_mask": True, "top_k": VOCAB + 1}
    rollout |= {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
    rollout["stop_token_ids"] = [VOCAB - 1, VOCAB]
    tree = {
        "job": "rl",
        "model": {"path": str(tmp_path)},
        "data": {"sources": ["a.jsonl"]},
        "rollout": rollout,
        "train": {"train_batch_size": 4},
        "max_steps": 1,
    }
    stop, top_k = vocabulary_problems(load_config(tree))
    assert stop.startswith(f"rollout.stop_token_ids contains {VOCAB},")
    assert top_k.startswith(f"rollout.top_k={VOCAB + 1} with sampling_mask")
    rollout |= {"top_k": VOCAB, "stop_token_ids": [VOCAB - 1]}
    assert list(vocabulary_problems(load_config(tree))) == []
