"""Compiled decoder layers (``train.compile``): graphs, recompilations, and equality with eager
layers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiling import compiles  # noqa: F401
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

import burnish.models.compiled_layers as compiled_layers
from burnish.models.attention import ATTENTION_NAME, NO_MASK, decode_plan, plan_segments
from burnish.models.cache_attention import KVCache
from burnish.models.compiled_layers import (
    Compilations,
    CompiledLayers,
    check_compile,
    compile_support,
    is_decode_plan,
)
from burnish.models.paths import ModelError
from burnish.models.segments import Segment
from burnish.train.row_layout import RowSize, place_rows, segments_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config(depth: int, **options: Any) -> Qwen3Config:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 8, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3Config(num_hidden_layers=depth, **sizes, **heads, **options)


def body_of(depth: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(depth, **options))
    model.set_attn_implementation(ATTENTION_NAME)
    return model.get_decoder()


def random_rows(draw: random.Random) -> list[Segment]:
    """Segments of one to four groups of one to four responses, as training lays them out."""
    rows = []
    for group in range(draw.randint(1, 4)):
        prompt = draw.randint(1, 20)
        rows += [
            RowSize(prompt + draw.randint(1, 20), prompt, group) for _ in range(draw.randint(1, 4))
        ]
    return segments_of(place_rows(rows, "shared_prefix"))


def run(body: Any, segments: list[Segment], *, grad: bool = True) -> list[Tensor]:
    """Last hidden states, and gradients of all weights."""
    positions = torch.cat([torch.arange(s.prefix_len, s.k_len) for s in segments])
    ids = torch.arange(len(positions))[None] * 7 % 64
    inputs: dict[str, Any] = {"position_ids": positions[None], "attention_mask": NO_MASK}
    plan = plan_segments(segments, positions)
    body.zero_grad()
    with torch.set_grad_enabled(grad):
        hidden = body(input_ids=ids, use_cache=False, plan=plan, **inputs).last_hidden_state
    if not grad:
        return [hidden]
    hidden.square().mean().backward()
    return [hidden.detach(), *(p.grad.clone() for p in body.parameters())]


def graphs_of(depth: int, patterns: int) -> list[int]:
    """New graphs after each of several passes over other rows, without and with gradient."""
    body, draw = body_of(depth), random.Random(0)
    CompiledLayers(body, backend="aot_eager")
    before, counts = Compilations.so_far().graphs, []
    for _ in range(patterns):
        segments = random_rows(draw)
        run(body, segments, grad=False)
        run(body, segments)
        counts.append(Compilations.so_far().graphs - before)
    return counts


def test_graphs_depend_neither_on_depth_nor_on_rows() -> None:
    """Four graphs of a layer (norm, queries to rotary, output projection, norm and MLP), with and
    without gradient: 8, all of them made in the first pass. A deeper model runs the same."""
    assert graphs_of(2, 20) == [8] * 20
    assert graphs_of(12, 3) == [0] * 3


def test_layers_of_two_types_are_compiled_once_each() -> None:
    types = ["full_attention", "sliding_attention"] * 2
    windows = {"layer_types": types, "sliding_window": 4, "use_sliding_window": True}
    body, draw = body_of(4, **windows), random.Random(0)
    expected = [run(body, random_rows(random.Random(seed))) for seed in range(3)]
    CompiledLayers(body, backend="aot_eager")
    counts = []
    for seed in range(3):
        results = run(body, random_rows(random.Random(seed)))
        counts.append(Compilations.so_far().graphs)
        for x, y in zip(expected[seed], results, strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)  # fp32, another order
    assert counts[1] == counts[0], "the window is an argument of the attention alone"
    assert draw


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_eager_layers(checkpointing: bool) -> None:
    segments = random_rows(random.Random(1))
    expected = run(body_of(3), segments)
    body = body_of(3)
    layers = CompiledLayers(body, backend="aot_eager")
    body.train()
    if checkpointing:
        body.activation_checkpointing_enable({"use_reentrant": False})
    for x, y in zip(expected, run(body, segments), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
    assert layers.uses == (6 if checkpointing else 3), "recomputed layers are compiled as well"


@pytest.mark.slow
def test_inductor_computes_the_numbers_of_eager_layers_in_few_kernels() -> None:
    """The compiler of runs, on a CPU: fp32 in another order. 1e-5 of the largest hidden state, and
    of the largest gradient. A layer is at most 60 kernels, forward and backward: 7 matrix products
    and 14 of gradients, 2 of FlashAttention, and the compiler's own."""
    from torch._inductor import config as inductor

    nodes: list[Any] = []

    def count(fused: list[Any]) -> list[Any]:
        nodes.extend(n for n in fused if "Nop" not in type(n).__name__)
        return fused

    draws = [random_rows(random.Random(seed)) for seed in range(3)]
    expected = [run(body_of(2), segments) for segments in draws]
    body = body_of(2)
    layers = CompiledLayers(body, backend="inductor")
    for segments, reference in zip(draws, expected, strict=True):
        with inductor.patch({"_post_fusion_custom_pass": count, "force_disable_caches": True}):
            results = run(body, segments)
        errors = [float((x - y).abs().max()) for x, y in zip(reference, results, strict=True)]
        assert errors[0] <= 1e-5 * float(reference[0].abs().max())
        assert max(errors[1:]) <= 1e-5 * max(float(x.abs().max()) for x in reference[1:])
    assert layers.uses == 6
    products = sum(node.is_extern() for node in nodes)
    assert products == 21 and len(nodes) + 2 <= 60


@pytest.mark.slow
def test_inductor_computes_the_decode_steps_of_eager_layers() -> None:
    """fp32 in another order: 1e-5 of the largest hidden state. Steps of 4, 1 and 6 rows, which read
    64 and 128 keys of a cache."""
    results = []
    for compiled in (False, True):
        body, cache = body_of(2), KVCache(8, 128)
        if compiled:
            layers = CompiledLayers(body, backend="inductor", takes=is_decode_plan)
        for rows, at, reach in ((4, 5, 64), (1, 9, 64), (6, 70, 128)):
            positions = torch.arange(rows) + at
            plan = decode_plan(cache, positions, reach)
            inputs = {"position_ids": positions[:, None], "attention_mask": NO_MASK}
            ids = torch.arange(rows)[:, None]
            with torch.no_grad():
                out = body(input_ids=ids, use_cache=False, plan=plan, **inputs)
            results.append(out.last_hidden_state)
    assert layers.uses == 6
    for expected, computed in zip(results[:3], results[3:], strict=True):
        assert float((expected - computed).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_passes_of_a_sampler_are_not_compiled() -> None:
    body = body_of(2)
    layers = CompiledLayers(body, backend="aot_eager")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        body(input_ids=ids, use_cache=False)
    assert layers.uses == 0


def test_paused_layers_call_the_hooks_of_their_modules() -> None:
    body, called = body_of(2), []
    layers = CompiledLayers(body, backend="aot_eager")
    run(body, random_rows(random.Random(0)))
    body.layers[1].mlp.register_forward_hook(lambda *_: called.append("mlp"))
    with layers.paused():
        run(body, random_rows(random.Random(0)))
    assert called == ["mlp"] and layers.on


# ---- before the model is loaded ----------------------------------------------------------------


def test_a_small_copy_shows_that_a_family_can_be_compiled() -> None:
    support = compile_support(config(2))
    assert support.refusal == "" and support.graphs == 4, "passes with gradient"


class _Reads(torch.nn.Module):
    """An activation that reads a number from its tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 if float(x.sum().detach()) > 0 else 1.5)


def test_a_model_that_breaks_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiled_layers.build

    def build(tiny: Any, **options: Any) -> Any:
        model = real(tiny, **options)
        for layer in model.get_decoder().layers:
            layer.mlp.act_fn = _Reads()
        return model

    monkeypatch.setattr(compiled_layers, "build", build)
    with pytest.raises(ModelError, match=r"train.compile=layers: its layers break the graph"):
        check_compile(config(2, rms_norm_eps=2e-6), CPU)  # another key of the cache


def test_a_small_copy_is_compiled_on_the_device_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """(Here on a CPU, without the code generator.)"""
    monkeypatch.setattr(CompiledLayers, "backend", "aot_eager")
    assert compiled_layers.device_problem(config(2), CPU, "fp32") is None
    assert compiled_layers.device_problem(config(2), CPU, "bf16") is None


def wrong(graph: Any, inputs: Any) -> Any:
    """A compiler whose code returns other numbers."""
    return lambda *args: [y * 1.2 if isinstance(y, Tensor) else y for y in graph(*args)]


def broken(graph: Any, inputs: Any) -> Any:
    raise ValueError("no such instruction")


@pytest.mark.parametrize(("backend", "named"), [(wrong, "other numbers"), (broken, "instruction")])
def test_code_that_fails_on_the_device_is_a_problem(
    backend: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledLayers, "backend", staticmethod(backend))
    problem = compiled_layers.device_problem(config(2), CPU, "fp32")
    assert problem is not None and named in problem


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def missing(*args: Any) -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(ModelError, match=r"no C\+\+ compiler .*; use train.compile=off"):
        check_compile(None, CPU)


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="triton"):
        check_compile(None, torch.device("cuda"))


def test_a_process_in_which_torch_compile_is_disabled_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise layers would silently stay as they are."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ModelError, match="TORCHDYNAMO_DISABLE"):
        check_compile(None, torch.device("cpu"))
