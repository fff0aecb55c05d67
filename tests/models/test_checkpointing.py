"""Gradient checkpointing, all and selective: equal gradients, and what backward computes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

import burnish.models.checkpointing as checkpointing
import burnish.models.flash as flash
from burnish.config.model import LoraConfig
from burnish.models.attention import ATTENTION_NAME, NO_MASK, plan_segments
from burnish.models.checkpointing import check_selective, enable_checkpointing
from burnish.models.dropout import start_training
from burnish.models.flash import FlashSwitch
from burnish.models.flash_reference import on_cpu
from burnish.models.kept_results import CHEAP, is_kept
from burnish.models.lora import add_adapters
from burnish.models.paths import ModelError
from burnish.models.segments import Segment

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": WINDOWS,
    "qwen3_moe": EXPERTS,
}
LAYOUTS = {
    "packed": [Segment(0, 9), Segment(9, 4), Segment(13, 7)],
    "shared_prefix": [
        *(Segment(0, 6), Segment(6, 3), Segment(9, 5)),
        *(Segment(14, 4, 0, 6), Segment(18, 1, 0, 6), Segment(19, 9, 9, 14)),
    ],
}
MODES = (False, True, "selective")


def body_of(kind: str, dtype: torch.dtype = torch.float32, *, lora: int = 0) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, **FAMILIES[kind]))
    model.set_attn_implementation(ATTENTION_NAME)
    if lora:
        add_adapters(model, LoraConfig(lora_rank=lora))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at the start
                torch.nn.init.normal_(parameter, std=0.1)
        model.get_decoder().enable_input_require_grads()  # transformers: so does checkpointing
    return model.get_decoder().to(dtype)


class Counted(TorchDispatchMode):
    """Calls of operators, by name; products that are cheap to compute again separately."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        cheap = name == "mm" and not is_kept(func, args)
        self.calls["cheap mm" if cheap else name] += 1
        return func(*args, **(kwargs or {}))


def gradients(
    body: Any, mode: Any, layout: str, *, with_flash: bool = False
) -> tuple[list[Tensor], Counter[str]]:
    """Gradients of a pass, and the operators of its backward."""
    if mode:
        enable_checkpointing(body, mode)
    start_training(body, dropout=False)
    segments = LAYOUTS[layout]
    positions = torch.cat([torch.arange(s.prefix_len, s.k_len) for s in segments])
    switch = FlashSwitch(may_fall_back=False) if with_flash else None
    plan = plan_segments(segments, positions, flash=switch)
    ids = torch.arange(len(positions))[None] * 7 % 32
    inputs: dict[str, Any] = {"position_ids": positions[None], "attention_mask": NO_MASK}
    hidden = body(input_ids=ids, use_cache=False, plan=plan, **inputs).last_hidden_state
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    with Counted() as backward:
        (hidden * weights).sum().backward()
    grads = {n: p.grad for n, p in body.named_parameters() if p.grad is not None}
    assert max(float(g.abs().max()) for g in grads.values()) > 1e-2, "there is something to compare"
    return list(grads.values()), backward.calls


@pytest.fixture(params=["sdpa", "flash"])
def with_flash(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Attention by torch's kernels, and by the reference of FlashAttention."""
    if request.param == "sdpa":
        yield False
        return
    with on_cpu():
        yield True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in FAMILIES),
        *((kind, torch.float64) for kind in FAMILIES if kind != "qwen3_moe"),  # no such experts
    ],
)
def test_gradients_of_all_modes_are_equal(
    kind: str, layout: str, dtype: torch.dtype, with_flash: bool
) -> None:
    """Bit by bit: recomputation and kept results are the same operations on the same tensors."""
    plain, *others = (
        gradients(body_of(kind, dtype), mode, layout, with_flash=with_flash)[0] for mode in MODES
    )
    for computed in others:
        assert all(torch.equal(x, y) for x, y in zip(plain, computed, strict=True))


PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "grouped_mm_fallback")
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward")


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_backward_computes_no_product_and_no_attention_again(
    kind: str, layout: str, lora: int, with_flash: bool
) -> None:
    """It does with full checkpointing, and both compute the norms again. With adapters of rank 4,
    only their second products are computed again, of inner size 4 and width 96 (and the adapted
    weights of experts, which are products of weights)."""
    plain, full, selective = (
        gradients(body_of(kind, lora=lora), mode, layout, with_flash=with_flash)[1]
        for mode in MODES
    )
    again = {name: selective[name] - plain[name] for name in (*PRODUCTS, *ATTENTION)}
    assert not any(again.values()), again
    assert sum(full[name] - plain[name] for name in ATTENTION) >= 2
    assert full["mm"] > plain["mm"]
    assert selective["rsqrt"] == full["rsqrt"] > plain["rsqrt"]
    cheap = selective["cheap mm"] - plain["cheap mm"]
    assert cheap == (4 if lora and kind != "qwen3_moe" else 0), "gate and up, of two layers"


def test_only_expensive_products_are_kept() -> None:
    mm = torch.ops.aten.mm
    wide, narrow = torch.empty(5, 8), torch.empty(8, 8 * CHEAP)
    assert is_kept(mm.default, (wide, narrow))
    assert not is_kept(mm.default, (wide, torch.empty(8, 8 * CHEAP + 1)))
    assert not is_kept(mm.out, (wide, narrow)), "its result is also written elsewhere"
    assert not is_kept(torch.ops.aten.bmm.default, (wide[None], narrow[None]))
    assert not is_kept(torch.ops.aten.mul.Tensor, (wide, wide))


def test_a_merge_that_overwrites_a_part_is_kept_as_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the kernel of a GPU does: merging twice would be another attention."""
    merge = flash.merge

    def in_place(prefix: Any, own: Any, reads: Tensor) -> Any:
        out, lse = merge(prefix, own, reads)
        own[0].copy_(out)
        return own[0], lse

    monkeypatch.setattr(flash, "merge", in_place)
    with on_cpu():
        plain, kept = (
            gradients(body_of("llama"), mode, "shared_prefix", with_flash=True)[0]
            for mode in (False, "selective")
        )
    assert all(torch.equal(x, y) for x, y in zip(plain, kept, strict=True))


# ---- before the model is loaded ------------------------------------------------------------------


def config(kind: str, **fields: Any) -> PretrainedConfig:
    made: PretrainedConfig = CONFIG_MAPPING[kind](**fields)
    return made


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "bloom", "gpt_oss"])
def test_a_small_copy_shows_that_a_family_can_keep_results(kind: str) -> None:
    """Also one whose rows are padded, and one that clamps products of its experts in place."""
    check_selective(config(kind))


@pytest.mark.parametrize("kind", ["qwen2", "bloom"])
def test_a_bias_that_is_added_in_place_is_added_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's stage 3 computes linear layers like this. The sum goes through a view that does
    not share the version of the product."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = x.matmul(weight.t())
        return product if bias is None else product.add_(bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    check_selective(config(kind, initializer_range=0.03))  # another key of the cache


def test_a_model_without_layers_to_recompute_is_refused() -> None:
    with pytest.raises(ModelError, match=r"selective: this model has no layers .*=true or false"):
        check_selective(config("ctrl"))


class _Doubles(torch.nn.Linear):
    """A product that is changed behind torch's back."""

    def forward(self, x: Tensor) -> Tensor:
        product = torch.nn.functional.linear(x, self.weight)
        product.detach().numpy()[...] *= 2.0
        return product


def test_a_model_whose_gradients_would_be_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = checkpointing.build

    def build(tiny: Any, **options: Any) -> Any:
        model = real(tiny, **options)
        for layer in model.get_decoder().layers:
            layer.mlp.up_proj.__class__ = _Doubles
        return model

    monkeypatch.setattr(checkpointing, "build", build)
    with pytest.raises(ModelError, match="gradients would be wrong"):
        check_selective(config("qwen3", rms_norm_eps=3e-6))  # another key of the cache
