"""Generated tokens per second of the local rollout engine against HuggingFace ``generate``.

    python benchmarks/rollout.py [--dtype fp32|bf16] [--rounds 3] [--prompts 8] [--samples 8]

SmolLM2-135M, prompts x samples requests, each with its own number of new tokens drawn from 8 to
256, the same for both. HuggingFace gets one left-padded batch and stops every row at its length by
a stopping criterion (the batch runs until its last row is done).
Rounds take turns; the ratio is of medians of tokens per user-CPU second, and of wall time beside
it.
"""

from __future__ import annotations

import argparse
import random
import time

from common import (
    Turns,
    Worker,
    chain_sums,
    cpu_seconds,
    interleave,
    median,
    model_folder,
    peak_rss_mb,
    versions,
)

LONGEST = 256


def lengths(count: int) -> list[int]:
    """New tokens of each request."""
    draw = random.Random(0)
    return [draw.randint(8, LONGEST) for _ in range(count)]


def run_burnish(args: argparse.Namespace) -> None:
    """Worker: the local engine, one request per prompt and length (samples of a prompt differ in
    length)."""
    import torch

    from burnish.config.model import ModelConfig
    from burnish.models.load import load_causal_lm, load_tokenizer
    from burnish.rollout.base import Request, Sampling
    from burnish.rollout.local.config import LocalEngine
    from burnish.rollout.local.engine import LocalRolloutEngine

    torch.set_num_threads(args.threads)
    config = ModelConfig(path=str(model_folder()))
    tokenizer = load_tokenizer(config)
    engine = LocalRolloutEngine(load_causal_lm(config, dtype=args.dtype), tokenizer, LocalEngine())
    engine._end_tokens = set()  # every request runs to its length, here and there
    rows = chain_sums(args.prompts, seed=1)
    wanted = lengths(args.prompts * args.samples)
    requests = [
        Request(str(i), tuple(tokenizer(rows[i % args.prompts]["prompt"])["input_ids"]), 1, i, n)
        for i, n in enumerate(wanted)
    ]
    turns = Turns()
    while turns.wait():
        cpu, wall = cpu_seconds(), time.perf_counter()
        done = list(engine.generate(requests, Sampling(max_tokens=LONGEST)))
        _report(turns, sum(len(c.token_ids) for c in done), cpu, wall)


def run_hf(args: argparse.Namespace) -> None:
    """Worker: ``generate`` on one batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

    torch.set_num_threads(args.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), padding_side="left")
    rows = chain_sums(args.prompts, seed=1)
    wanted = torch.tensor(lengths(args.prompts * args.samples))
    texts = [rows[i % args.prompts]["prompt"] for i in range(len(wanted))]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    start = batch["input_ids"].shape[1]

    class AtLength(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            return input_ids.shape[1] - start >= wanted

    turns = Turns()
    while turns.wait():
        cpu, wall = cpu_seconds(), time.perf_counter()
        model.generate(
            **batch,
            do_sample=True,
            max_new_tokens=LONGEST,
            stopping_criteria=[AtLength()],
            pad_token_id=tokenizer.pad_token_id,
        )
        _report(turns, int(wanted.sum()), cpu, wall)


def _report(turns: Turns, tokens: int, cpu: float, wall: float) -> None:
    spent, waited = cpu_seconds() - cpu, time.perf_counter() - wall
    turns.done(
        tokens=tokens,
        cpu_s=spent,
        wall_s=waited,
        per_cpu=tokens / spent,
        per_wall=tokens / waited,
        rss_mb=peak_rss_mb(),
    )


def main() -> None:
    """Parse, run both in turn, print tokens per second and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", choices=["burnish", "hf"])
    args = parser.parse_args()
    if args.worker:
        return {"burnish": run_burnish, "hf": run_hf}[args.worker](args)
    model_folder()
    passed = [f"--{n}={vars(args)[n]}" for n in ("dtype", "prompts", "samples", "threads")]
    names = ("burnish", "hf")
    workers = {n: Worker(__file__, "--worker", n, *passed, threads=args.threads) for n in names}
    try:
        results = interleave(workers, warmup=0, steps=args.rounds)
    finally:
        for worker in workers.values():
            worker.close()
    print(versions("torch", "transformers"))
    print(
        f"{args.dtype}, {args.prompts} x {args.samples} requests, 8 to {LONGEST} new tokens, "
        f"{args.threads} threads, medians of {args.rounds} rounds"
    )
    for name, rows in results.items():
        print(
            f"  {name:8s} {median(rows, 'per_wall'):7.1f} tokens/s wall   "
            f"{median(rows, 'per_cpu'):7.1f} per user-CPU s   "
            f"{median(rows, 'tokens'):.0f} tokens   peak RSS {median(rows, 'rss_mb'):.0f} MB"
        )
    for key, label in (("per_cpu", "per user-CPU second"), ("per_wall", "wall")):
        ratio = median(results["burnish"], key) / median(results["hf"], key)
        print(f"ratio, burnish / generate, {label}: {ratio:.2f}")


if __name__ == "__main__":
    main()
