"""One GRPO step of SmolLM2-135M against TRL's GRPOTrainer: user-CPU seconds, interleaved.

    python benchmarks/grpo_vs_trl.py [--dtype fp32|bf16] [--steps 5] [--max-tokens 8] [--threads 2]

Same model, same prompts (8 x 8 samples of two-term sums), same number of new tokens, temperature
1, no KL, AdamW at lr 1e-5, one optimizer step per rollout, no gradient checkpointing on either
side. In bf16 TRL runs twice, as autocast over fp32 weights (its default) and with bf16 weights;
the faster of the two is what the ratio is against. Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from common import (
    TRL_QUIET,
    Turns,
    Worker,
    chain_sums,
    cpu_seconds,
    held,
    inline_runtime,
    interleave,
    median,
    model_folder,
    peak_rss_mb,
    versions,
)

PROMPTS, SAMPLES = 8, 8


def reward(prompt: str, response: str, label: str) -> float:
    """1 if the response begins with the right sum."""
    return float(response.strip().startswith(label))


def run_burnish(args: argparse.Namespace) -> None:
    """Worker: one ``rl_step`` per turn."""
    import json

    import torch

    from burnish.config import RLConfig, load_config
    from burnish.jobs.rl import build_rl
    from burnish.steps.rl import rl_step

    torch.set_num_threads(args.threads)
    folder = Path(tempfile.mkdtemp())
    rows = chain_sums(512, seed=1)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    config = load_config(
        {
            "job": "rl",
            "run_dir": str(folder / "run"),
            "max_steps": 1000,
            "model": {"path": str(model_folder())},
            "precision": {"dtype": args.dtype},
            "data": {"sources": [str(folder / "prompts.jsonl")], "shuffle": False},
            "rollout": {
                "rollout_batch_size": PROMPTS,
                "n_samples_per_prompt": SAMPLES,
                "generate_max_len": args.max_tokens,
            },
            "train": {"train_batch_size": PROMPTS * SAMPLES, "lr": 1e-5},
            "observe": {"samples_per_step": 0},
        }
    )
    assert isinstance(config, RLConfig)
    runtime = inline_runtime(config, args.device)
    parts, _ = build_rl(config, runtime, {"": reward}, folder / "run")
    turns, step = Turns(), 0
    while turns.wait():
        step += 1
        cpu, wall = cpu_seconds(), time.perf_counter()
        metrics = rl_step(parts, step)
        turns.done(
            cpu_s=cpu_seconds() - cpu,
            wall_s=time.perf_counter() - wall,
            rss_mb=peak_rss_mb(),
            tokens=metrics["rollout/tokens"],
        )


def run_trl(args: argparse.Namespace) -> None:  # house: ok TRL's config is one long call
    """Worker: TRL's own training loop, held at each step's begin until it is its turn."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    turns = Turns()
    tokens = 0

    def score(
        prompts: list[str], completions: list[str], label: list[str], completion_ids: Any, **_: Any
    ) -> list[float]:
        nonlocal tokens
        tokens = sum(len(ids) for ids in completion_ids)
        return [reward(p, c, a) for p, c, a in zip(prompts, completions, label, strict=True)]

    autocast = args.dtype == "bf16" and args.trl_bf16 == "autocast"
    dtype = torch.bfloat16 if args.dtype == "bf16" and not autocast else torch.float32
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=args.max_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-5,
        max_steps=1000,
        bf16=autocast,
        shuffle_dataset=False,
        **TRL_QUIET | {"use_cpu": args.device == "cpu"},
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder(), dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(model_folder()),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(chain_sums(512, seed=1)),
        callbacks=[held(turns, lambda: {"tokens": tokens})],
    )
    trainer.train()


def main() -> None:
    """Parse, run the workers in turn, print the table and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-bf16", choices=["autocast", "weights"], default="autocast")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--worker", choices=["burnish", "trl"])
    args = parser.parse_args()
    if args.worker:
        return {"burnish": run_burnish, "trl": run_trl}[args.worker](args)
    model_folder()
    common = [
        "--dtype",
        args.dtype,
        "--max-tokens",
        str(args.max_tokens),
        "--threads",
        str(args.threads),
        "--device",
        args.device,
    ]
    rivals = ["autocast", "weights"] if args.dtype == "bf16" else ["fp32"]
    workers = {"burnish": Worker(__file__, "--worker", "burnish", *common, threads=args.threads)}
    for kind in rivals:
        extra = ["--trl-bf16", kind] if args.dtype == "bf16" else []
        workers[f"trl ({kind})"] = Worker(
            __file__, "--worker", "trl", *common, *extra, threads=args.threads
        )
    try:
        results = interleave(workers, warmup=1, steps=args.steps)
    finally:
        for worker in workers.values():
            worker.close()
    print(versions("torch", "transformers", "trl"))
    print(
        f"{args.dtype}, {PROMPTS} x {SAMPLES} samples, {args.max_tokens} new tokens, "
        f"{args.threads} threads, medians of {args.steps} steps"
    )
    for name, rows in results.items():
        print(
            f"  {name:16s} user-CPU {median(rows, 'cpu_s'):6.2f} s   wall "
            f"{median(rows, 'wall_s'):6.2f} s   "
            f"peak RSS {median(rows, 'rss_mb'):6.0f} MB   tokens {median(rows, 'tokens'):.0f}"
        )
    best = min((median(rows, "cpu_s"), name) for name, rows in results.items() if name != "burnish")
    ratio = median(results["burnish"], "cpu_s") / best[0]
    print(f"ratio of user-CPU time, burnish / {best[1]}: {ratio:.3f}")


if __name__ == "__main__":
    main()
