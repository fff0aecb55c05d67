"""One DPO step of SmolLM2-135M against TRL's DPOTrainer: user-CPU seconds, interleaved.

    python benchmarks/dpo_vs_trl.py [--dtype fp32|bf16] [--steps 5] [--pairs 8] [--threads 1]

Same model, same pairs in the same order (sums of 2 to 8 terms: worked out and right, or a short or
wrong answer, so that lengths differ as they do in practice), the reference's log-probs computed
before the first step on both sides, AdamW at lr 1e-6, no gradient checkpointing. Burnish runs
packed, and with the prompt of a pair computed once (``shared_prefix``, its default); TRL padded (in
1.16 ``padding_free`` has no effect), in bf16 as autocast over fp32 weights. Needs the extra
``bench``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from common import (
    TRL_QUIET,
    Turns,
    Worker,
    cpu_seconds,
    held,
    inline_runtime,
    interleave,
    median,
    model_folder,
    peak_rss_mb,
    versions,
)

QUESTION = "Question: What is {sum}? Work it out step by step.\nAnswer:"
MAX_LEN = 512
WARMUP = 1


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """``count`` rows with ``prompt``, ``chosen`` (every partial sum) and ``rejected`` (one number,
    or partial sums of which one is wrong)."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        terms = [draw.randint(1, 999) for _ in range(draw.randint(2, 8))]
        wrong = _answer(terms, slip=draw.randint(1, 9)) if draw.random() < 0.5 else f" {terms[0]}."
        rows.append(
            {
                "prompt": QUESTION.format(sum=" + ".join(map(str, terms))),
                "chosen": _answer(terms),
                "rejected": wrong,
            }
        )
    return rows


def _answer(terms: list[int], slip: int = 0) -> str:
    """The sum, one addition after another; ``slip`` is added at the last one."""
    total, lines = terms[0], []
    for i, term in enumerate(terms[1:], start=2):
        result = total + term + (slip if i == len(terms) else 0)
        lines.append(f" {total} plus {term} is {result}.")
        total = result
    return "".join(lines) + f" The answer is {total}."


def run_burnish(args: argparse.Namespace) -> None:
    """Worker: one training step per turn."""
    import json

    import torch

    from burnish.config import PreferenceConfig, load_config
    from burnish.driver.base import EvalTimes
    from burnish.jobs.preference import build_preference
    from burnish.steps.supervised import SupervisedLoop

    torch.set_num_threads(args.threads)
    folder = Path(tempfile.mkdtemp())
    lines = [json.dumps(row) for row in pairs((WARMUP + args.steps) * args.pairs, seed=1)]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    config = load_config(
        {
            "job": "preference",
            "run_dir": str(folder / "run"),
            "max_steps": WARMUP + args.steps,
            "model": {"path": str(model_folder())},
            "precision": {"dtype": args.dtype},
            "data": {
                "sources": [str(folder / "pairs.jsonl")],
                "shuffle": False,
                "max_len": MAX_LEN,
            },
            "reference": {"precompute": True},
            "train": {
                "train_batch_size": args.pairs,
                "lr": 1e-6,
                "lr_scheduler": "constant",
                "layout": args.layout,
            },
        }
    )
    assert isinstance(config, PreferenceConfig)
    (folder / "run").mkdir()
    runtime = inline_runtime(config, args.device)
    run = build_preference(config, runtime, folder / "run")
    loop = SupervisedLoop(run, EvalTimes())
    turns, step = Turns(), 0
    while turns.wait():
        step += 1
        cpu, wall = cpu_seconds(), time.perf_counter()
        metrics = loop.step(step)
        turns.done(
            cpu_s=cpu_seconds() - cpu,
            wall_s=time.perf_counter() - wall,
            rss_mb=peak_rss_mb(),
            tokens=metrics["train/tokens"],
            loss=metrics["train/loss"],
        )


def run_trl(args: argparse.Namespace) -> None:  # house: ok TRL's config is one long call
    """Worker: TRL's own training loop, held at each step's begin until it is its turn."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(args.threads)
    turns = Turns()

    seen: dict[str, float] = {}

    class Told(DPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            seen["tokens"] = float(inputs["attention_mask"].sum())
            loss = super().compute_loss(model, inputs, *rest, **more)
            seen["loss"] = float((loss[0] if isinstance(loss, tuple) else loss).detach())
            return loss

    config = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.pairs,
        max_length=MAX_LEN,
        precompute_ref_log_probs=True,
        learning_rate=1e-6,
        max_steps=WARMUP + args.steps,
        bf16=args.dtype == "bf16",
        train_sampling_strategy="sequential",
        **TRL_QUIET | {"use_cpu": args.device == "cpu"},
    )
    trainer = Told(
        model=AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_folder()),
        args=config,
        train_dataset=Dataset.from_list(pairs((WARMUP + args.steps) * args.pairs, seed=1)),
        callbacks=[held(turns, lambda: seen)],
    )
    trainer.train()


def main() -> None:
    """Parse, run the workers in turn, print the table and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--worker", choices=["burnish", "trl"])
    parser.add_argument("--layout", default="packed")
    args = parser.parse_args()
    if args.worker:
        return {"burnish": run_burnish, "trl": run_trl}[args.worker](args)
    model_folder()
    passed = {name: str(value) for name, value in vars(args).items() if value is not None}
    rivals = [("burnish", "packed"), ("burnish", "shared_prefix"), ("trl", "padded")]
    workers = {}
    for side, layout in rivals:
        options = {**passed, "worker": side, "layout": layout}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        workers[f"{side} ({layout})"] = Worker(__file__, *words, threads=args.threads)
    try:
        results = interleave(workers, warmup=WARMUP, steps=args.steps)
    finally:
        for worker in workers.values():
            worker.close()
    print(versions("torch", "transformers", "trl"))
    print(
        f"{args.dtype}, {args.pairs} pairs, {args.threads} threads, medians of {args.steps} steps"
    )
    for name, rows in results.items():
        print(
            f"  {name:24s} user-CPU {median(rows, 'cpu_s'):6.2f} s   wall "
            f"{median(rows, 'wall_s'):6.2f} s   peak RSS {median(rows, 'rss_mb'):6.0f} MB   tokens "
            f"{median(rows, 'tokens'):.0f}   first loss {rows[0]['loss']:.6f}"
        )
    cost = {name: median(rows, "cpu_s") for name, rows in results.items()}
    theirs = cost.pop("trl (padded)")
    for name, ours in cost.items():
        print(f"ratio of user-CPU time, {name} / trl: {ours / theirs:.3f}")


if __name__ == "__main__":
    main()
