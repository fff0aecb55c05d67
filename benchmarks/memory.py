"""Peak memory of one train step of SmolLM2-135M: chunked log-probs against full logits, layouts,
checkpointing.

    python benchmarks/memory.py [--rows 16] [--prompt 64] [--response 192] [--dtype fp32|bf16|fp16]

Each case runs in a process of its own and reports its peak resident memory over two train steps,
and how much of it came after the model and its gradients, master weights and moments were there
(model state by arithmetic). ``full logits`` is the same engine with one chunk for all tokens: what
a loss over [tokens, vocab] costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from common import cpu_seconds, model_folder, peak_rss_mb, versions

VOCAB = 49152
CASES: dict[str, dict[str, Any]] = {
    "chunked, shared prefix": {"layout": "shared_prefix"},
    "chunked, packed": {"layout": "packed"},
    "chunked, padded": {"layout": "padded"},
    "full logits, shared prefix": {"layout": "shared_prefix", "logprob_chunk_tokens": 1 << 30},
    "chunked, shared prefix, checkpointing": {
        "layout": "shared_prefix",
        "gradient_checkpointing": True,
    },
    "chunked, shared prefix, micro-batches of a quarter": {"layout": "shared_prefix", "micro": 4},
}


def run_case(args: argparse.Namespace) -> None:
    """Worker: two steps of one case on random tokens, groups of 8 rows behind one prompt."""
    import torch

    from burnish.config.model import ModelConfig, PrecisionConfig
    from burnish.config.roles import TrainRole
    from burnish.config.train import TrainConfig
    from burnish.models.load import load_causal_lm
    from burnish.train.spec import EngineSpec
    from burnish.train.torch.engine import TorchTrainEngine
    from burnish.types import Stats, rows_to_batch

    case = dict(CASES[args.case])
    divide = case.pop("micro", None)
    micro = args.rows // divide if divide else None
    config = ModelConfig(path=str(model_folder()))
    model = load_causal_lm(config)
    train, precision = TrainConfig(lr=1e-6, **case), PrecisionConfig(dtype=args.dtype)
    spec = EngineSpec(
        TrainRole.alone("policy", train, config, precision=precision), micro_batch_size=micro
    )
    engine = TorchTrainEngine(model, spec)
    generator = torch.Generator().manual_seed(0)
    rows, groups = [], []
    for i in range(args.rows):
        if i % 8 == 0:
            prompt = torch.randint(0, VOCAB, (args.prompt,), generator=generator).tolist()
        length = args.response // 4 + i * 37 % (args.response * 3 // 4)  # ragged: a quarter to all
        rows.append(prompt + torch.randint(0, VOCAB, (length,), generator=generator).tolist())
        groups.append(i // 8)
    masks = [[False] * args.prompt + [True] * (len(r) - args.prompt) for r in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[args.prompt] * len(rows), group_ids=groups)
    started = cpu_seconds()
    for _ in range(2):
        engine.forward_backward(batch, lambda o, b: (-o.logprobs.sum() / b.num_tokens, Stats()))
        engine.optim_step()
    print(
        json.dumps(
            {
                "rss_mb": peak_rss_mb(),
                "cpu_s": (cpu_seconds() - started) / 2,
                "tokens": int(batch.tokens.numel()),
                "actions": batch.num_tokens,
                "parameters": sum(p.numel() for p in model.parameters()),
            }
        )
    )


def main() -> None:
    """Run every case in its own process and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=192)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--case", choices=list(CASES))
    args = parser.parse_args()
    if args.case:
        return run_case(args)
    model_folder()
    print(versions("torch", "transformers"))
    sizes = [f"--{n}={vars(args)[n]}" for n in ("rows", "prompt", "response", "dtype")]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    for i, case in enumerate(CASES):
        command = [sys.executable, __file__, *sizes, "--case", case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
        result = json.loads(done.stdout.splitlines()[-1])
        state = result["parameters"] * (16 if args.dtype == "fp32" else 18) / 1e6
        if i == 0:
            logits = result["actions"] * VOCAB * 4 / 1e6
            print(
                f"{args.dtype}, {args.rows} rows, {result['tokens']} tokens of which "
                f"{result['actions']} are "
                f"trained on; full fp32 logits of those would take {logits:.0f} MB, a chunk of 512 "
                f"{512 * VOCAB * 4 / 1e6:.0f} MB; model state {state:.0f} MB"
            )
        rest = result["rss_mb"] - state
        print(
            f"  {case:52s} peak RSS {result['rss_mb']:6.0f} MB   without model state {rest:6.0f} MB"
            f"   user-CPU {result['cpu_s']:5.1f} s per step"
        )


if __name__ == "__main__":
    main()
