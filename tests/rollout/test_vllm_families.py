"""Mixtures and models with persistent buffers on vLLM: tokens and log-probs of transformers after
every load, and weights that are stale on purpose."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.models.buffers import persistent_buffers
from burnish.models.load import ModelError, load_tokenizer
from burnish.models.lora import inject_lora
from burnish.models.lora_layers import merged_weights
from burnish.rollout.base import Request, Sampling
from burnish.rollout.vllm.config import VllmEngine
from burnish.rollout.vllm.engine import INSTALL, StaleWeightsError, VllmRolloutEngine
from burnish.rollout.vllm.model import check_head_dim

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_vllm_starts"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL),
]

TOKENIZER = load_tokenizer(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
PROMPTS = [(7,), (9, 12, 30), tuple(range(6, 40))]
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "head_dim": 32,  # vLLM on CPU has no smaller ones
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "glm4_moe": Glm4MoeConfig(
        **SIZES,
        **EXPERTS,
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "gemma4": Gemma4TextConfig(
        **SIZES,
        **{"global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
        **{"vocab_size_per_layer_input": len(TOKENIZER), "hidden_size_per_layer_input": 0},
        **{"num_kv_shared_layers": 0, "final_logit_softcapping": None, "pad_token_id": 0},
    ),
}


def made(family: str, seed: int) -> Any:
    """A random model; its buffers are other than those of a new one."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    for _, buffer in persistent_buffers(model):
        buffer.add_(torch.rand(buffer.shape) / 3)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[str, VllmRolloutEngine]]:
    """One engine for each family: a process has at most one."""
    config = VllmEngine(kind="vllm")
    model = made(request.param, 0)
    with closing(VllmRolloutEngine(model, TOKENIZER, config, max_model_len=128)) as engine:
        yield request.param, engine


def check_samples(engine: VllmRolloutEngine, model: Any) -> None:
    """Greedy tokens and log-probs are those of ``model`` in transformers."""
    requests = [Request(f"{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    for c in engine.generate(requests, Sampling(16, 0.0)):
        prompt = PROMPTS[int(c.request_id)]
        row = torch.tensor([[*prompt, *c.token_ids]])
        with torch.no_grad():
            logprobs = model(row).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
        assert logprobs.argmax(-1).tolist() == list(c.token_ids)
        own = logprobs.gather(-1, row[0, len(prompt) :, None])[:, 0]
        # fp32: log-probs of up to 10 through a paged cache instead of one pass
        torch.testing.assert_close(torch.tensor(c.logprobs), own, atol=1e-5, rtol=0)


def test_every_load_gives_the_tokens_and_logprobs_of_transformers(
    started: tuple[str, VllmRolloutEngine],
) -> None:
    family, engine = started
    for version in (1, 2):
        model = made(family, version)
        engine.load_weights(version, merged_weights(model))
        check_samples(engine, model)


def test_adapters_of_experts_are_transferred(started: tuple[str, VllmRolloutEngine]) -> None:
    family, engine = started
    model = made(family, 3)
    inject_lora(model, LoraConfig(lora_rank=4, target_modules=("down_proj", "q_proj")))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(0, 0.2)
    engine.load_weights(3, merged_weights(model))
    check_samples(engine, model)


def test_latent_attention_is_refused_on_a_cpu() -> None:
    """Its log-probs differ from those of transformers there."""
    with pytest.raises(ModelError, match="does not compute the latent attention of this deepseek"):
        check_head_dim(DeepseekV3Config(), [32])


def vllm_model(engine: VllmRolloutEngine) -> Any:
    return engine._llm.collective_rpc(lambda worker: worker.model_runner.model)[0]


def without(load: Callable[..., Any], word: str) -> Callable[..., Any]:
    """vLLM's loader, which loses the first weight with ``word`` in its name."""

    def lossy(weights: Iterator[tuple[str, Tensor]]) -> Any:
        lost = False

        def fewer() -> Iterator[tuple[str, Tensor]]:
            nonlocal lost
            for name, tensor in weights:
                if word in name and not lost:
                    lost = True
                    continue
                yield name, tensor

        return load(fewer())

    return lossy


LOST = {
    "qwen3_moe": ("experts.3.up_proj",),
    "glm4_moe": ("experts.3.up_proj", "e_score_correction_bias"),
    "gemma4": ("layer_scalar",),
}
"""Weights and buffers that a loader may lose."""


def test_a_weight_that_vllm_loses_is_found(
    started: tuple[str, VllmRolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, engine = started
    model = vllm_model(engine)
    for word in LOST[family]:
        engine.load_weights(4, merged_weights(made(family, 4)))
        with monkeypatch.context() as patch:
            patch.setattr(model, "load_weights", without(model.load_weights, word))
            with pytest.raises(StaleWeightsError, match="has other values than were sent"):
                engine.load_weights(5, merged_weights(made(family, 5)))


@pytest.mark.parametrize("started", ["qwen3_moe", "glm4_moe"], indirect=True)
@pytest.mark.parametrize(
    "pair",
    [("experts.0.gate_proj", "experts.0.up_proj"), ("experts.0.down_proj", "experts.1.down_proj")],
    ids=["gate and up", "two experts"],
)
def test_weights_of_experts_that_a_loader_exchanges_are_found(
    pair: tuple[str, str], started: tuple[str, VllmRolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, engine = started
    model, new = vllm_model(engine), made(family, 6)
    load, other = model.load_weights, {pair[0]: pair[1], pair[1]: pair[0]}

    def exchanging(weights: Iterator[tuple[str, Tensor]]) -> Any:
        state = dict(weights)
        names = {n: next((n.replace(a, b) for a, b in other.items() if a in n), n) for n in state}
        return load((name, state[names[name]]) for name in state)

    monkeypatch.setattr(model, "load_weights", exchanging)
    with pytest.raises(StaleWeightsError, match="in another order than they were sent"):
        engine.load_weights(4, merged_weights(new))
    monkeypatch.setattr(model, "load_weights", load)
    engine.load_weights(4, merged_weights(new))
    check_samples(engine, new)


@pytest.mark.parametrize("started", ["qwen3_moe", "glm4_moe"], indirect=True)
@pytest.mark.parametrize("leaf", ["w13_weight", "w2_weight"])
def test_experts_that_compute_with_a_copy_are_found(
    leaf: str, started: tuple[str, VllmRolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's kernels do that pack their weights at start."""
    family, engine = started
    layer = next(m for m in vllm_model(engine).modules() if "w13_weight" in m._parameters)
    place = ("w13_weight", "w2_weight").index(leaf)
    kernel = layer.quant_method.moe_kernel.fused_experts
    copy, apply = getattr(layer, leaf).clone(), kernel.apply

    def stale(*args: Any, **named: Any) -> None:
        given = list(args)
        if f"w{place + 1}" in named:
            named[f"w{place + 1}"] = copy
        else:
            given[2 + place] = copy
        apply(*given, **named)

    monkeypatch.setattr(kernel, "apply", stale, raising=False)
    with pytest.raises(StaleWeightsError, match=f"compute with a copy of {leaf}"):
        engine.load_weights(6, merged_weights(made(family, 6)))
