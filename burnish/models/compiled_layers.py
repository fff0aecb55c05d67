"""Decoder layers compiled by ``torch.compile`` (``train.compile: layers``).

A layer's norms, rotary embedding, activations and residual sums are many small kernels, which read
and write all hidden states each. Compiled, each group between two matrix products is one kernel.

The attention itself is not compiled: a plan (``attention.py``) has the lengths of rows as numbers
and lists, and its kernels are complete already. So a layer becomes a few graphs: up to the
attention, after it, and the rest of the layer. They are compiled once for all layers of a class
(and of a type, such as sliding attention), with dynamic lengths: neither the depth of the model nor
the rows of a micro-batch make another graph.

Passes of train engines are compiled, and decode steps of the local engine that are recorded as CUDA
graphs (``rollout.engine.compile``). Each has its own graphs, also over a module that both use, and
leaves the passes of the other to the layers as they are.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from burnish.config.model import Dtype
from burnish.models.attention import (
    ATTENTION_NAME,
    NO_MASK,
    DecodePlan,
    PackedPlan,
    SequenceParallelPlan,
    burnish_attention,
    plan_segments,
)
from burnish.models.family_check import failure_text
from burnish.models.gpu import KernelHangsError, limited_trial
from burnish.models.load import DTYPES
from burnish.models.paths import ModelError
from burnish.models.segments import Segment
from burnish.models.shrink import build, shrink
from burnish.models.support import below_rope_border, cached_result, model_support, runs_own_code
from burnish.models.units import layers_of
from burnish.oom import is_out_of_memory

log = logging.getLogger("burnish")

Setting = Literal["off", "layers"]
MOST_GRAPHS = 64
"""Graphs of one function of a model. Every role, mode (with and without gradient, adapters on and
off) and type of layer has its own. torch's default, 8, would leave the rest uncompiled."""
MOST_ERROR = 1e-5
"""Largest difference of outputs and gradients in the trial, of the largest value: fp32 in another
order."""


def is_training_plan(plan: object) -> bool:
    """Return whether a plan is that of a train engine's pass."""
    if isinstance(plan, SequenceParallelPlan):
        return True
    return isinstance(plan, PackedPlan) and plan.cache is None


def is_decode_plan(plan: object) -> bool:
    """Return whether a plan is that of a decode step."""
    return isinstance(plan, DecodePlan)


class CompiledLayers:
    """The compiled layers of one model."""

    backend: ClassVar[str] = "inductor"
    """Compiler of the graphs; tests that do not read its code use a faster one."""

    def __init__(
        self,
        body: PreTrainedModel,
        backend: str | None = None,
        *,
        takes: Callable[[object], bool] = is_training_plan,
    ) -> None:
        """Compile the layers of ``body`` at their first use in a pass whose attention plan
        ``takes`` accepts. Call this before checkpointing is enabled, so that a layer is recomputed
        by the same graphs."""
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
        self.takes = takes
        self.on = True
        """False in passes that must run module by module."""
        self.uses = 0
        """Number of calls of compiled layers."""
        self._reported = Compilations.so_far()
        AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(burnish_attention))
        for _, layer in layers_of(body):
            layer.forward = self._switched(layer, backend or self.backend)  # type: ignore[method-assign]

    def report(self, role: str) -> None:
        """Log the graphs that were compiled since the last report, if there are any."""
        now, before = Compilations.so_far(), self._reported
        if now.graphs > before.graphs:
            counts = now.graphs - before.graphs, now.seconds - before.seconds
            log.info("%s: compiled %d graphs of its layers in %.1f s", role, *counts)
        self._reported = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run layers as they are inside the ``with`` block, with the hooks of their modules."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def _switched(self, layer: Any, backend: str) -> Callable[..., Any]:
        plain = layer.forward
        inner, checkpoints = _without_checkpointing(layer)
        compiled = torch.compile(inner, dynamic=True, backend=backend)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.uses += 1
            return compiled(*args, **kwargs)

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (self.on and self.takes(kwargs.get("plan"))):
                return plain(*args, **kwargs)
            if checkpoints and layer.gradient_checkpointing and layer.training:
                recomputed = functools.partial(counted, **kwargs)
                return layer._gradient_checkpointing_func(recomputed, *args)
            return counted(*args, **kwargs)

        return forward


_CHECKPOINTED = "forward_with_checkpointing"
"""Name of the function in which transformers (from 5.2x) wraps the forward of a layer. Code that
torch must not compile is inside of it, so a graph would end before the layer begins."""


def _without_checkpointing(layer: Any) -> tuple[Callable[..., Any], bool]:
    """Return the forward of a layer without transformers' checkpointing, and whether there was
    any."""
    function = type(layer).forward  # (that of the layer may have been switched before)
    if function.__code__.co_name != _CHECKPOINTED:
        return MethodType(function, layer), False
    while function.__code__.co_name == _CHECKPOINTED:
        function = function.__wrapped__
    return MethodType(function, layer), True


@dataclass(frozen=True)
class Compilations:
    """Graphs that this process has compiled, and the time it took."""

    graphs: int
    seconds: float

    @classmethod
    def so_far(cls) -> Compilations:
        """Return those since the start of the process."""
        from torch._dynamo import utils

        spent = utils.cumulative_time_spent_ns.get("entire_frame_compile", 0)
        spent += utils.cumulative_time_spent_ns.get("entire_backward_compile", 0)
        return cls(utils.counters["stats"]["unique_graphs"], spent / 1e9)


# ---- before the model is loaded ----------------------------------------------------------------


def compiler_problem(device: torch.device) -> str | None:
    """Return why torch cannot compile for ``device`` on this machine, or None if it can."""
    if device.type == "cuda" and find_spec("triton") is None:
        return "kernels of a GPU need triton, which is not installed (pip install triton)"
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return (
            "torch.compile is disabled in this process by TORCHDYNAMO_DISABLE=1 in its "
            "environment; unset the variable"
        )
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        return f"no C++ compiler was found ({failure_text(error)}); install g++, or set CXX"
    return None


@dataclass(frozen=True)
class CompileSupport:
    """Result of compiling a small random copy of a model."""

    model_type: str
    refusal: str = ""
    """Why the layers of this model are not compiled; empty if they are."""
    graphs: int = 0
    """Graphs of its layers in training passes."""


def compile_support(config: PretrainedConfig, *, trust: bool = False) -> CompileSupport:
    """Compile a small random copy of the model with this ``config``, compare outputs and gradients,
    and count graphs. The result is cached like those of :func:`model_support`."""
    tiny = below_rope_border(shrink(config))

    def run() -> CompileSupport:
        with torch.enable_grad():
            return _try_to_compile(tiny, trust=trust)

    return cached_result(CompileSupport, tiny, run, trust=trust)


def check_compile(
    config: PretrainedConfig | None,
    device: torch.device,
    dtype: Dtype = "fp32",
    *,
    key: str = "train.compile",
) -> None:
    """Raise ModelError if the layers of a model (None: unknown) cannot be compiled on ``device``,
    or compute other numbers there in ``dtype``. ``key`` is the one that asks for it."""
    problem = compiler_problem(device)
    if problem is None and config is not None:
        trust = runs_own_code(config)
        support = model_support(config, trust=trust)
        problem = (
            compile_support(config, trust=trust).refusal
            if support.packed
            else f"layers are compiled for packed rows, and this model pads them ({support.reason})"
        )
        if not problem and device.type == "cuda":
            problem = device_problem(config, device, dtype, way_out=f"use {key}=off")
    if problem:
        raise ModelError(f"{key}=layers: {problem}; use {key}=off")


def _try_to_compile(tiny: PretrainedConfig, *, trust: bool) -> CompileSupport:
    from torch._dynamo import utils

    refused = functools.partial(CompileSupport, tiny.model_type)
    model = build(tiny, trust=trust)
    model.set_attn_implementation(ATTENTION_NAME)
    body: Any = model.get_decoder()
    plain = [_pass(body, lengths) for lengths in _ROWS]
    before = Compilations.so_far().graphs
    breaks = dict(utils.counters["graph_break"])
    try:
        CompiledLayers(body, backend="aot_eager")
        results, graphs = [], [before]
        for lengths in _ROWS:
            results.append(_pass(body, lengths))
            graphs.append(Compilations.so_far().graphs)
    except Exception as error:  # whatever a compiler raises
        return refused(f"torch.compile raised {failure_text(error)}")
    finally:
        reasons = [
            reason
            for reason, count in utils.counters["graph_break"].items()
            if count > breaks.get(reason, 0) and burnish_attention.__name__ not in reason
        ]
    if reasons:
        return refused(f"its layers break the graph ({reasons[0].splitlines()[0]})")
    if graphs[1] == before:
        return refused("its layers have no code that torch.compile takes")
    if graphs[-1] != graphs[2]:
        return refused("its layers are compiled again for rows of other lengths")
    for expected, computed in zip(plain, results, strict=True):
        for x, y in zip(expected, computed, strict=True):
            if not float((x - y).abs().max()) <= MOST_ERROR * max(float(x.abs().max()), 1.0):
                return refused("compiled layers compute other numbers")
    return CompileSupport(tiny.model_type, graphs=graphs[-1] - before)


def device_problem(
    config: PretrainedConfig,
    device: torch.device,
    dtype: Dtype,
    *,
    way_out: str = "use train.compile=off",
) -> str | None:
    """Compile a small random copy of the model by the compiler of runs. Return how it fails on
    ``device``, or None. Raises KernelHangsError if its kernels do not end."""
    tiny = below_rope_border(shrink(config))
    model = build(tiny, trust=runs_own_code(config))
    model.set_attn_implementation(ATTENTION_NAME)
    body: Any = model.get_decoder().to(device, DTYPES[dtype])
    trial = "a small copy of the model with compiled layers"
    with torch.enable_grad():
        plain = _pass(body, _ROWS[0])
        try:
            with limited_trial(trial, way_out, device, compiling_s=_COMPILING_S):
                CompiledLayers(body)
                results = _pass(body, _ROWS[0])
        except Exception as error:  # whatever a compiler raises
            if is_out_of_memory(error) or isinstance(error, KernelHangsError):
                raise
            return f"compiled layers raised {failure_text(error)} on {device}"
    most = 1e-4 if dtype == "fp32" else 0.05  # functions of a GPU; several roundings
    for expected, computed in ((plain[:1], results[:1]), (plain[1:], results[1:])):
        largest = max(float(x.abs().max()) for x in expected)
        for x, y in zip(expected, computed, strict=True):
            if not float((x - y).abs().max()) <= most * largest:
                return f"compiled layers compute other numbers on {device}"
    return None


_COMPILING_S = 100.0
"""Seconds in which a GPU's kernels of a small copy are compiled, on a slow host."""
_ROWS = ([7, 3], [5, 9, 2], [11, 6], [4, 2, 3, 8])
"""Lengths of rows in the passes of the trial."""


def _pass(body: Any, lengths: list[int]) -> list[Tensor]:
    """Return last hidden states and gradients of a packed row."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    segments = [Segment(s, n) for s, n in zip(starts, lengths, strict=True)]
    embeddings = body.get_input_embeddings()
    device = embeddings.weight.device
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    ids = torch.arange(len(positions), device=device)[None] % embeddings.num_embeddings
    body.zero_grad()
    plan = plan_segments(segments, positions)
    inputs = {"position_ids": positions[None], "attention_mask": NO_MASK.to(device)}
    hidden = body(input_ids=ids, use_cache=False, plan=plan, **inputs).last_hidden_state
    hidden.square().mean().backward()
    grads = [p.grad.clone() for p in body.parameters() if p.grad is not None]
    return [hidden.detach(), *grads]
