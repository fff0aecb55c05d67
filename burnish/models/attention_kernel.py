"""Choice of the attention of training passes (``train.attention``): FlashAttention over segment
lengths (``flash.py``), by torch's own kernels or newer ones (``flash_versions.py``), or torch's
scaled-dot-product attention over rectangles (``sdpa.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from burnish.config.model import Dtype
from burnish.models.attention import packed_attention, plan_segments
from burnish.models.cache_attention import Options
from burnish.models.dropout import noise_of
from burnish.models.flash import FlashSwitch, has_kernel, schema_problem, size_problem
from burnish.models.flash_versions import (
    PACKAGES,
    TITLES,
    Newer,
    activation_problem,
    is_installed,
    newer_for,
    select,
)
from burnish.models.gpu import KernelHangsError, limited_trial
from burnish.models.load import DTYPES
from burnish.models.paths import ModelError
from burnish.models.sdpa import Kernels
from burnish.models.segments import Segment
from burnish.oom import is_out_of_memory

Setting = Literal["auto", "flash", "sdpa"]
AMPERE = (8, 0)
AttentionRate = Literal["attention", "newer_attention", "deterministic_attention"]
"""Key of the share of the peak that FlashAttention reaches (``plan/hardware.yaml``)."""
_SOFTCAPS = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_softcapping")


@dataclass(frozen=True)
class Choice:
    """Attention of one model in one run."""

    kernel: Literal["flash", "sdpa"]
    reason: str
    """Why ``auto`` did not take flash; empty if it did, or if the recipe names one."""
    newer: Newer | None = None
    """FlashAttention whose kernels replace torch's own."""
    newer_problem: str = ""
    """Why they do not, on a GPU for which there are any."""
    deterministic: bool = False
    """True if repeated passes have equal bits."""

    @property
    def rate(self) -> AttentionRate:
        """Rate of attention without masks."""
        if self.kernel == "flash" and self.deterministic:
            return "deterministic_attention"
        return "attention" if self.newer is None else "newer_attention"

    @property
    def sentence(self) -> str:
        """The choice for logs and the run folder."""
        if self.kernel == "sdpa":
            reason = f" instead of FlashAttention: {self.reason}" if self.reason else ""
            return f"torch's scaled-dot-product attention{reason}"
        title = "FlashAttention" if self.newer is None else TITLES[self.newer]
        problem = self.newer_problem
        kernels = f" by torch's own kernels, because {problem}" if problem else ""
        bits = ", deterministic" if self.deterministic else ""
        return f"{title} over the lengths of rows{bits}{kernels}"


@dataclass(frozen=True)
class Use:
    """How a model computes attention."""

    dtype: Dtype
    kernels: Kernels | None
    """Attention kernels of the GPU. None on a CPU."""
    layout: str = "packed"
    """Layout of the rows: that of the recipe, or padded if the model cannot pack."""
    dropout: bool = False
    """True if training passes apply the dropout of the model's config."""
    deterministic: bool = False
    """True if repeated passes have equal bits (``train.deterministic``)."""
    device: torch.device | None = None
    """The GPU on which a small call is tried. None: none is."""
    own_only: bool = False
    """True if only torch's own kernels are used."""


def choose_kernel(setting: Setting, config: PretrainedConfig | None, use: Use) -> Choice:
    """Return the attention of a model. Raises ModelError if ``flash`` is set and cannot be used.

    ``config``: the model's; None if it is unknown (``flash`` is then checked again when it is).
    """
    if setting == "sdpa":
        return Choice("sdpa", "")
    problem = flash_problem(config, use)
    if problem is None:
        newer, newer_problem = _choose_newer(config, use)
        return Choice("flash", "", newer, newer_problem, use.deterministic)
    if setting == "flash":
        raise ModelError(
            f"train.attention=flash: {problem}; use auto (which takes sdpa here) or sdpa"
        )
    return Choice("sdpa", problem)


def flash_problem(config: PretrainedConfig | None, use: Use) -> str | None:
    """Return why FlashAttention cannot compute the attention of a model, or None if it can."""
    problem = schema_problem()
    if problem is not None:
        return problem
    if use.kernels is None and not has_kernel("cpu"):
        return "it has no kernel for a CPU"
    if use.kernels is not None:
        if use.kernels.hip:
            return "its operators were not tried on AMD GPUs"
        if use.kernels.capability < AMPERE:
            major, minor = use.kernels.capability
            return f"it needs a GPU of compute capability 8.0, and this one has {major}.{minor}"
        if use.dtype == "fp32":
            return "it computes in bf16 and fp16 only, and precision.dtype is fp32"
    if use.layout == "padded":
        return "rows are padded (train.layout, or a model that cannot be packed)"
    if config is None:
        return None
    return _model_problem(config, use) or _trial_problem(config, use)


def _choose_newer(config: PretrainedConfig | None, use: Use) -> tuple[Newer | None, str]:
    """Return the FlashAttention whose kernels replace torch's own in a model, or None and why."""
    name = newer_for(use.kernels)
    if name is None or use.own_only:
        return None, ""
    if use.deterministic:
        return None, f"the deterministic kernels of {TITLES[name]} were not tried"
    if use.device is None:  # a plan
        return (name, "") if is_installed(name) else (None, f"{TITLES[name]} is not installed")
    try:
        problem = activation_problem(name) or _newer_problem(name, config, use.device, use.dtype)
    finally:
        select(None)
    return (None, problem) if problem else (name, "")


def _newer_problem(
    name: Newer, config: PretrainedConfig | None, device: torch.device, dtype: Dtype
) -> str | None:
    """Return why the kernels of ``name`` cannot compute the attention of a model, or None."""
    fields = {} if config is None else config.get_text_config().to_dict()
    group, window = _heads_per_key(fields), bool(fields.get("sliding_window"))
    for dim, _ in dict.fromkeys(_head_sizes(fields)):
        if problem := try_newer(name, device, dtype, dim, group, window=window):
            return problem
    return None


def _heads_per_key(fields: dict[str, Any]) -> int:
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    return max(1, heads // kv_heads) if isinstance(heads, int) and kv_heads else 1


def _trial_problem(config: PretrainedConfig, use: Use) -> str | None:
    sizes = _head_sizes(config.get_text_config().to_dict())
    if use.device is None or use.device.type != "cuda" or not sizes:
        return None
    return try_flash(use.device, use.dtype, sizes[0][0])


@cache
def try_flash(device: torch.device, dtype: Dtype, dim: int) -> str | None:
    """Compute a small call with shared prefixes and its gradients on ``device``, both ways. Return
    why torch's own FlashAttention cannot be used there, or None if it can."""
    try:
        return _difference(FlashSwitch(may_fall_back=False), device, dtype, dim)
    except RuntimeError as error:  # KernelHangsError is none
        if is_out_of_memory(error):
            raise
        return f"a small call raised {type(error).__name__}: {error}"


@cache
def try_newer(  # house: ok the properties of a model's calls
    name: Newer, device: torch.device, dtype: Dtype, dim: int, group: int, *, window: bool
) -> str | None:
    """Do the same with the kernels of ``name``, for ``group`` query heads per key/value head.
    ``window``: also for a layer with a sliding window."""
    switch = FlashSwitch(may_fall_back=False, newer=name)
    for length in (None, 40) if window else (None,):
        try:
            problem = _difference(switch, device, dtype, dim, group=group, window=length)
        except Exception as error:  # whatever the package raises
            if is_out_of_memory(error) or isinstance(error, KernelHangsError):
                raise
            problem = f"a small call raised {type(error).__name__}: {error}"
        if problem is not None:
            windowed = f" (window of {length} tokens)" if length else ""
            return f"{TITLES[name]}: {problem}{windowed}"
    return None


def _difference(
    switch: FlashSwitch,
    device: torch.device,
    dtype: Dtype,
    dim: int,
    *,
    group: int = 2,
    window: int | None = None,
) -> str | None:
    """Compute a small call and its gradients by FlashAttention and by sdpa. Return how they differ,
    or None if they do not."""
    segments = [Segment(0, 73), Segment(73, 20, 0, 33), Segment(93, 1, 0, 33), Segment(94, 150)]
    positions = torch.cat([torch.arange(s.prefix_len, s.k_len) for s in segments]).to(device)
    draw = torch.Generator(device).manual_seed(0)
    *qkv, grad = (
        torch.randn(len(positions), heads, dim, device=device, generator=draw).to(DTYPES[dtype])
        for heads in (2 * group, 2, 2, 2 * group)
    )
    options = Options(layer=0, scale=dim**-0.5, window=window, dropout=0.0, softcap=None)
    results = []
    select(None)
    newer = switch.newer
    title = "torch's FlashAttention" if newer is None else TITLES[newer]
    uninstall = "" if newer is None else f"uninstall {PACKAGES[newer]}, or "
    way_out = f"{uninstall}set train.attention=sdpa"
    with limited_trial(f"a small call of {title}", way_out, device):
        for used in (None, switch):
            plan = plan_segments(segments, positions, flash=used)
            leaves = tuple(x.detach().clone().requires_grad_() for x in qkv)
            with torch.enable_grad():
                out = packed_attention(plan, (leaves[0], leaves[1], leaves[2]), options)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for y, x in zip(*results, strict=True):
        error = float((x.float() - y.float()).abs().max() / y.float().abs().max())
        if not error <= _MOST_ERROR:
            return f"a small call differs by {error:.2g} of the largest value from sdpa"
    return None


_MOST_ERROR = 0.05
"""Largest difference of two results in half precision, of the largest value: several roundings."""


def _model_problem(config: PretrainedConfig, use: Use) -> str | None:
    fields = config.get_text_config().to_dict()
    for name in _SOFTCAPS:
        if fields.get(name):
            return f"the model caps its attention scores ({name}={fields[name]:g})"
    drops = {n: v for n, v in noise_of(config).items() if "att" in n and "drop" in n}
    if use.dropout and drops:
        name, value = next(iter(drops.items()))
        return f"training passes drop attention weights ({name}={value:g} in the model's config)"
    for dim, value_dim in _head_sizes(fields):
        if problem := size_problem(dim, value_dim):
            return f"the model's {problem}"
    return None


def _head_sizes(fields: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (head size of queries and keys, of values) of a config's layers, if it has them."""
    heads = fields.get("num_attention_heads") or fields.get("n_head") or fields.get("n_heads")
    width = fields.get("hidden_size") or fields.get("n_embd") or fields.get("d_model")
    dim = fields.get("head_dim")
    if fields.get("qk_nope_head_dim"):
        dim = fields["qk_nope_head_dim"] + (fields.get("qk_rope_head_dim") or 0)
    if not dim and isinstance(heads, int) and heads and isinstance(width, int):
        dim = width // heads
    sizes = [(dim, fields.get("v_head_dim") or dim)] if isinstance(dim, int) else []
    other = fields.get("global_head_dim")  # of full attention, in models that mix layers
    return sizes + ([(other, other)] if isinstance(other, int) else [])
