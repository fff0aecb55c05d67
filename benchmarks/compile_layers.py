"""Graphs, kernels and compile time of ``train.compile: layers`` on this machine.

    python benchmarks/compile_layers.py [--layers 28] [--hidden 128]
    python benchmarks/compile_layers.py --decode

Compiles the layers of a model of Qwen3-0.6B's depth and small width for the CPU, over packed rows
of several lengths, and counts what one layer runs, forward and backward: operations without
compilation; kernels of the compiler, matrix products and the operations of the attention with it.
The last are counted as torch's scaled-dot-product attention computes them here; on a GPU
FlashAttention takes two to six calls instead. With ``--decode``, of a decode step of the local
engine (``rollout.engine.compile``).
"""

from __future__ import annotations

import argparse
import collections
import time
from typing import Any

import torch
from common import versions
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from burnish.models.attention import ATTENTION_NAME, NO_MASK, decode_plan, plan_segments
from burnish.models.cache_attention import KVCache
from burnish.models.compiled_layers import Compilations, CompiledLayers, is_decode_plan
from burnish.models.segments import Segment

VIEWS = ("view", "_unsafe_view", "t", "transpose", "unsqueeze", "expand", "slice", "select",
         "detach", "alias", "permute", "squeeze", "split", "as_strided", "unbind")  # fmt: skip
"""Operations that run no kernel."""


class Operations(TorchDispatchMode):
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def make_body(layers: int, hidden: int) -> Any:
    """Return the body of a small model."""
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
    }
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "vocab_size": 128,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(num_hidden_layers=layers, **sizes, **heads)
    )
    model.set_attn_implementation(ATTENTION_NAME)
    return model.get_decoder()


def run(body: Any, rows: list[int]) -> float:
    """Run a pass over packed rows, and return its seconds."""
    starts = [sum(rows[:i]) for i in range(len(rows))]
    positions = torch.cat([torch.arange(n) for n in rows])
    plan = plan_segments([Segment(s, n) for s, n in zip(starts, rows, strict=True)], positions)
    inputs: dict[str, Any] = {"position_ids": positions[None], "attention_mask": NO_MASK}
    ids = torch.arange(len(positions))[None] % 128
    begun = time.perf_counter()
    hidden = body(input_ids=ids, use_cache=False, plan=plan, **inputs).last_hidden_state
    hidden.square().mean().backward()
    return time.perf_counter() - begun


def operations(body: Any, rows: list[int]) -> collections.Counter[str]:
    """Return the operations of a pass."""
    with Operations() as mode:
        run(body, rows)
    return mode.counts


def decode(body: Any, cache: KVCache, rows: int = 4) -> None:
    """Run a decode step of rows at position 5."""
    positions = torch.full((rows,), 5)
    plan = decode_plan(cache, positions, 64)
    inputs: dict[str, Any] = {"position_ids": positions[:, None], "attention_mask": NO_MASK}
    ids = torch.ones(rows, 1, dtype=torch.long)
    with torch.no_grad():
        body(input_ids=ids, use_cache=False, plan=plan, **inputs)


def count_decode(hidden: int) -> None:
    """Print the kernels of a layer in a decode step in bf16 with ``rollout.engine.compile``."""
    from torch._inductor import config

    counts = []
    for depth in (2, 3):
        body, cache = make_body(depth, hidden).bfloat16().eval(), KVCache(4, 64)
        decode(body, cache)
        with Operations() as mode:
            decode(body, cache)
        counts.append(mode.counts)
    one = counts[1] - counts[0]
    attention = sum(n for name, n in one.items() if "scaled_dot" in name or "index" in name)
    fused: list[Any] = []

    def count(nodes: list[Any]) -> list[Any]:
        fused.extend(n for n in nodes if "Nop" not in type(n).__name__)
        return nodes

    CompiledLayers(body, takes=is_decode_plan)
    with config.patch({"_post_fusion_custom_pass": count, "force_disable_caches": True}):
        decode(body, cache)
    products = sum(node.is_extern() for node in fused)
    print(f"operations of a layer in a decode step, not compiled: {sum(one.values())}")
    print(
        f"compiled: {len(fused) - products} kernels of the compiler, {products} matrix products, "
        f"{attention} operations of attention and cache"
    )


def main(args: argparse.Namespace) -> None:
    """Print the counts."""
    from torch._inductor import config

    if args.decode:
        print(versions("torch", "transformers"))
        count_decode(args.hidden)
        return
    rows = [[33, 20, 7], [12, 51], [64, 5, 9, 3], [40]]
    counts = [operations(make_body(depth, args.hidden), rows[0]) for depth in (2, 3)]
    one = counts[1] - counts[0]
    body = make_body(args.layers, args.hidden)
    CompiledLayers(body)
    fused: list[Any] = []

    def count(nodes: list[Any]) -> list[Any]:
        fused.extend(n for n in nodes if not n.is_extern() and "Nop" not in type(n).__name__)
        return nodes

    begun = time.perf_counter()
    with config.patch({"_post_fusion_custom_pass": count, "force_disable_caches": True}):
        first = run(body, rows[0])
    done = Compilations.so_far()
    for other in rows[1:]:
        run(body, other)
    later = Compilations.so_far()
    products = one["mm"] + one["addmm"] + one["bmm"]
    attention = sum(n for name, n in one.items() if "scaled_dot" in name or "index" in name)
    print(versions("torch", "transformers"))
    print(f"operations of a layer, not compiled: {sum(one.values())} ({products} matrix products)")
    print(f"kernels of the compiler for a layer, forward and backward: {len(fused)}")
    print(f"attention (not compiled): at least {attention} operations")
    rest = time.perf_counter() - begun - first
    print(f"{args.layers} layers: {done.graphs} graphs, {done.seconds:.1f} s to compile")
    print(f"first pass {first:.1f} s, three others {rest:.2f} s")
    print(f"graphs after rows of other lengths: {later.graphs}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--decode", action="store_true")
    main(parser.parse_args())
