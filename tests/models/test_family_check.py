"""The check of model families: which way each mechanism runs, and that the check can fail."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

import burnish.models.attention as attention
import burnish.models.family_check as family_check
import burnish.models.support as support_module
from burnish.models.cache_attention import KVCache
from burnish.models.family import ModelSupport, keep
from burnish.models.family_check import check_family, largest_difference
from burnish.models.load import ModelError, choose_attention
from burnish.models.logit_scaling import LogitScaling, logit_scaling
from burnish.models.logprobs import Head, token_logprobs
from burnish.models.scalar_support import scalar_support
from burnish.models.shrink import build, shrink
from burnish.models.support import below_rope_border, model_support, row_limit
from burnish.rollout.local.engine import decoding_support


def tiny(model_type: str) -> PretrainedConfig:
    return below_rope_border(shrink(AutoConfig.for_model(model_type)))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite", "qwen3_moe", "phimoe"])
def test_families_whose_attention_takes_a_plan_are_packed(model_type: str) -> None:
    found = check_family(tiny(model_type))
    assert found.packed and not found.refusal
    assert set(found.differences) == {"padded", "packed", "shared_prefix"}
    assert max(found.differences.values()) < 2e-5


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3_5_text", "one row changes another"),  # a state flows on
        ("stablelm", "a later token changes earlier outputs"),  # the plan never arrives
        ("gpt_oss", "sinks"),
        ("deepseek_v32", "a selection of keys"),  # sparse attention
    ],
)
def test_families_that_cannot_be_packed_are_padded_with_the_reason(
    model_type: str, reason: str
) -> None:
    found = check_family(tiny(model_type))
    assert not found.packed and not found.refusal
    assert reason in found.reason and found.differences["padded"] < 2e-5
    assert found.reason in found.sentence()


@pytest.mark.parametrize("model_type", ["bert", "doge"])
def test_families_that_are_wrong_in_every_layout_are_refused(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    model = build(shrink(config))
    with pytest.raises(ModelError, match="some-model cannot be used: "):
        choose_attention(model, "some-model")


def test_a_model_that_reads_later_tokens_is_refused() -> None:
    config = AutoConfig.for_model("bert-generation")  # a decoder only if the config says so
    assert "a later token changes earlier outputs" in check_family(shrink(config)).refusal


# ---- the check can fail ------------------------------------------------------------------------


def _shift_mask(by: int) -> Callable[..., Any]:
    """A packing plan whose queries read ``by`` keys more (or fewer) than they may."""
    original = attention._bucket

    def wrong(*args: Any) -> Any:
        bucket = original(*args)
        return dataclasses.replace(bucket, reach=bucket.reach + by)

    return wrong


def test_a_mistake_in_the_packing_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_bucket", _shift_mask(1))
    assert not check_family(tiny("llama")).packed


def test_an_out_of_memory_error_is_not_a_check_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise "padded" would be kept for a family that packs."""

    def no_memory(segments: Any, device: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(attention, "_bucket", no_memory)
    with pytest.raises(RuntimeError, match="allocate memory"):
        check_family(tiny("llama"))


def test_keys_of_a_neighbor_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention._bucket

    def wrong(segments: Any, device: Any) -> Any:
        wider = [dataclasses.replace(s, prefix_start=0, prefix_len=s.q_start) for s in segments]
        return original(wider, device)

    monkeypatch.setattr(attention, "_bucket", wrong)
    assert "one row changes another" in check_family(tiny("llama")).reason


def test_a_missing_causal_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.functional.scaled_dot_product_attention

    def wrong(*args: Any, is_causal: bool = False, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", wrong)
    rows = family_check.LENGTHS
    monkeypatch.setattr(family_check, "LENGTHS", (rows[0],) * len(rows))  # no padding: no mask
    assert not check_family(tiny("llama")).packed


def test_a_state_that_is_not_reset_between_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.qwen3_5.modeling_qwen3_5 as modeling

    def flowing(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = hidden_states.shape[0]
        flat = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        out = original(self, flat)
        return out.reshape(rows, -1, out.shape[-1])

    original = modeling.Qwen3_5GatedDeltaNet.forward
    monkeypatch.setattr(modeling.Qwen3_5GatedDeltaNet, "forward", flowing)
    assert "one row changes another" in check_family(tiny("qwen3_5_text")).refusal


def test_a_dropped_logit_cap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_check, "logit_scaling", lambda _config: LogitScaling())
    for model_type in ("gemma2", "nanochat", "cohere"):
        assert "its logits are not the output projection" in check_family(tiny(model_type)).refusal


def test_decoding_that_forgets_its_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KVCache.write

    def wrong(self: Any, layer: int, slots: Any, positions: Any, kv: Any) -> None:
        original(self, layer, slots, positions * 0, kv)

    monkeypatch.setattr(KVCache, "write", wrong)
    monkeypatch.setattr(support_module, "_IN_MEMORY", {})
    assert decoding_support(LlamaConfig(), use_disk=False).decoding != "batched"


# ---- what else the answer depends on -----------------------------------------------------------


def test_the_result_does_not_depend_on_the_size_of_the_model() -> None:
    small = Qwen3Config(hidden_size=64, num_hidden_layers=30, vocab_size=300)
    large = Qwen3Config(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672)
    assert support_module._content(shrink(small)) == support_module._content(shrink(large))


def test_the_result_is_cached_on_disk_and_recomputed_if_the_file_is_invalid(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(support_module, "_IN_MEMORY", {})
    first = model_support(LlamaConfig())
    (file,) = (tmp_path / "burnish" / "families").iterdir()
    marked = dataclasses.replace(first, reason="read from the file")
    keep(file.stem, marked)
    monkeypatch.setattr(support_module, "_IN_MEMORY", {})
    assert model_support(LlamaConfig()) == marked
    file.write_text("{")
    monkeypatch.setattr(support_module, "_IN_MEMORY", {})
    assert model_support(LlamaConfig()) == first
    assert isinstance(first, ModelSupport)


@pytest.mark.parametrize("support", [model_support, decoding_support, scalar_support])
def test_a_check_draws_no_random_numbers_of_the_run(
    support: Callable[[PretrainedConfig], Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose family is checked for the first time must train as later runs do, whose dropout
    draws from the same generators."""
    seeds: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(support_module, "_IN_MEMORY", {})
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    assert not support(GPT2Config()).refusal
    assert any((tmp_path / "burnish" / "families").iterdir())
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeds


def test_rows_are_limited_to_the_length_at_which_the_rotary_embedding_changes() -> None:
    long = Phi3Config(
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        },
    )
    assert row_limit(long) == 4096
    dynamic = LlamaConfig(
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )
    assert row_limit(dynamic) == 2048
    assert row_limit(LlamaConfig(max_position_embeddings=8192)) == 8192
    assert row_limit(AutoConfig.for_model("mamba")) is None


@pytest.mark.parametrize("scaling", [LogitScaling(0.25), LogitScaling(3.0, softcap=2.0)])
def test_scaled_and_capped_log_probs_and_gradients_are_autograds(scaling: LogitScaling) -> None:
    """Against the formula in fp64: fp32 sums of 64 products of unit scale are right to 1e-5."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 64), torch.randn(50, 64)
    targets, upstream = torch.randint(50, (7,)), torch.randn(2, 7)

    def formula(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = h @ w.T * scaling.scale
        if scaling.softcap is not None:
            logits = scaling.softcap * torch.tanh(logits / scaling.softcap)
        log_p = (logits / 0.7).log_softmax(-1)
        return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    wanted = formula(*wide)
    torch.autograd.backward(wanted, tuple(upstream.double()))
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    head = Head(ours[1], temperature=0.7, chunk_tokens=3, scaling=scaling)
    logprobs, entropy = token_logprobs(ours[0], targets, head, with_entropy=True)
    assert entropy is not None
    torch.autograd.backward((logprobs, entropy), tuple(upstream))
    for found, right in zip((logprobs, entropy), wanted, strict=True):
        torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)
    for found, right in zip(ours, wide, strict=True):
        assert found.grad is not None and right.grad is not None
        torch.testing.assert_close(found.grad.double(), right.grad, atol=2e-5, rtol=1e-4)


def test_logit_scaling_is_read_from_the_fields_of_each_family() -> None:
    assert logit_scaling(AutoConfig.for_model("gemma2")).softcap == 30.0
    assert logit_scaling(AutoConfig.for_model("granite", logits_scaling=8.0)).scale == 1 / 8
    assert logit_scaling(AutoConfig.for_model("cohere")).scale == 0.0625
    assert logit_scaling(LlamaConfig()) == LogitScaling()


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rows_within_the_original_length_are_packed_exactly(rope: str) -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_parameters=parameters | (factors if rope == "longrope" else {}),
    )
    found = model_support(config, use_disk=False)
    assert found.packed, found.sentence()


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_is_checked_too(tmp_path: Path) -> None:
    """Its result is not kept on disk: the code may change under the same config."""
    (tmp_path / "own.py").write_text(REMOTE)
    fields = LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=99).to_dict()
    fields |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    fields["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnForCausalLM",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(str(tmp_path), trust_remote_code=True)
    assert model_support(config, trust=True).packed


def test_a_vocabulary_of_a_few_tokens_is_enough() -> None:
    assert model_support(LlamaConfig(vocab_size=6), use_disk=False).packed


def test_a_nan_difference_is_the_largest() -> None:
    """Python's ``max`` returns 0.5 for these three rows."""
    rows = [torch.tensor([x]) for x in (0.5, float("nan"), 0.25)]
    assert math.isnan(largest_difference(rows, [torch.zeros(1)] * 3))
