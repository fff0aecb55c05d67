"""Predicted against measured peaks of memory: SFT and RL train steps and rollouts.

    python benchmarks/plan_accuracy.py           # on a GPU: 26 cases of shapes from 0.1B to 8B
    python benchmarks/plan_accuracy.py --tiny    # on a CPU: the same logic on tiny shapes

Every case is a process of its own with random weights. On a GPU the measured peak is torch's
``max_memory_allocated`` (and ``max_memory_reserved`` beside it, which has the allocator's losses);
on a CPU it is what live tensors take, counted operation by operation. Predicted is what ``burnish
plan`` says of the same recipe, without what a process takes besides tensors. Cases that do not fit
into this GPU are said so and left out. The largest difference is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import markdown_table, versions

SHAPES = {
    "0.1B": "HuggingFaceTB/SmolLM2-135M",
    "0.3B": "google/gemma-3-270m",
    "0.5B": "Qwen/Qwen2.5-0.5B",
    "0.6B": "Qwen/Qwen3-0.6B",
    "1.5B": "Qwen/Qwen2.5-1.5B",
    "3B": "Qwen/Qwen2.5-3B",
    "7B": "Qwen/Qwen2.5-7B",
    "8B": "meta-llama/Meta-Llama-3-8B",
}
TINY = {
    "0.1B": {"hidden_size": 64, "num_layers": 4},
    "0.5B": {"hidden_size": 128, "num_layers": 6},
    "1.5B": {"hidden_size": 64, "num_layers": 12, "tie_word_embeddings": False},
}


def grid() -> list[dict[str, Any]]:
    """The cases: what is done, of what size, and how."""
    train = [
        {"job": job, "size": size, "micro": micro, "checkpointing": ck, "layout": layout}
        for job, size, micro, ck, layout in [
            ("sft", "0.1B", 8, False, "packed"),
            ("sft", "0.1B", 8, True, "padded"),
            ("sft", "0.3B", 4, False, "packed"),
            ("sft", "0.5B", 8, False, "padded"),
            ("sft", "0.5B", 16, True, "packed"),
            ("sft", "0.6B", 4, False, "packed"),
            ("sft", "1.5B", 4, False, "packed"),
            ("sft", "1.5B", 8, True, "padded"),
            ("sft", "3B", 4, True, "packed"),
            ("rl", "0.1B", 8, False, "shared_prefix"),
            ("rl", "0.1B", 16, True, "packed"),
            ("rl", "0.5B", 8, False, "shared_prefix"),
            ("rl", "0.5B", 8, True, "shared_prefix"),
            ("rl", "0.6B", 8, True, "padded"),
            ("rl", "1.5B", 4, False, "packed"),
            ("rl", "1.5B", 8, True, "shared_prefix"),
            ("rl", "3B", 2, True, "packed"),
        ]
    ]
    lora = [
        {
            "job": "rl",
            "size": size,
            "micro": 4,
            "checkpointing": True,
            "layout": "packed",
            "lora": 32,
        }
        for size in ("1.5B", "7B", "8B")
    ]
    rollout = [
        {"job": "rollout", "size": size, "batch": batch}
        for size, batch in [
            ("0.1B", 64), ("0.5B", 32), ("0.5B", 128), ("1.5B", 64), ("3B", 32), ("8B", 16),
        ]
    ]  # fmt: skip
    return [*train, *lora, *rollout]


def recipe(case: dict[str, Any], *, tiny: bool, folder: Path) -> dict[str, Any]:
    """The recipe of a case."""
    length = 64 if tiny else 1024
    if tiny:
        model: dict[str, Any] = {"scratch": {**TINY[case["size"]], "max_position_embeddings": 4096}}
    else:
        model = {"path": str(folder)}
    if case.get("lora"):
        model["lora"] = {"lora_rank": case["lora"] if not tiny else 4}
    half = {"dtype": "fp32" if tiny else "bf16"}
    base: dict[str, Any] = {"model": model, "precision": half}
    rollout: dict[str, Any] = {
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 8,
        "generate_max_len": length // 2,
        "engine": {"kind": "local", "max_batch_size": case.get("batch", 64)},
    }
    train: dict[str, Any] = {
        "train_batch_size": 2 * case.get("micro", 8),
        "micro_train_batch_size": case.get("micro", 8),
        "layout": case.get("layout", "packed"),
        "gradient_checkpointing": case.get("checkpointing", False),
    }
    if case["job"] == "sft":
        data = {"sources": ["rows.jsonl"], "max_len": length}
        return {**base, "job": "sft", "data": data, "train": train}
    data = {"sources": ["prompts.jsonl"], "prompt_max_len": length // 2}
    if case["job"] == "rl":
        rollout["rollout_batch_size"] = max(1, train["train_batch_size"] // 8) * 2
        train["train_batch_size"] = min(
            train["train_batch_size"], rollout["rollout_batch_size"] * 8
        )
    return {**base, "job": "rl", "max_steps": 1, "data": data, "rollout": rollout, "train": train}


def run_case(case: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """In a worker: predict, then do it and measure."""
    import torch

    from burnish.config import load_config
    from burnish.config.model import ModelConfig
    from burnish.plan.hardware import this_machine, visible_gpus
    from burnish.plan.predict import make_plan
    from burnish.plan.shapes import find_config

    gpu = torch.cuda.is_available() and not tiny
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not tiny:  # the config is all that a plan needs, and random weights all that a run does
            find_config(ModelConfig(path=SHAPES[case["size"]]))[0].save_pretrained(folder)
        config = load_config(recipe(case, tiny=tiny, folder=folder))
        hardware = (visible_gpus() if gpu else None) or this_machine()
        plan = make_plan(config, hardware)
        predicted = sum(r.bytes for r in _rows(plan, case) if r.item != "overhead")
        if gpu and predicted > 0.95 * hardware.limit:
            return {"predicted": predicted, "measured": None, "reserved": None}
        measured, reserved = _measure(config, case, gpu=gpu)
    return {"predicted": predicted, "measured": measured, "reserved": reserved}


def _rows(plan: Any, case: dict[str, Any]) -> list[Any]:
    """The rows of the phase that is measured."""
    rollout = case["job"] == "rollout"
    phase = "rollout" if rollout else "forward/backward"
    found = [r for r in plan.rows if r.where == "device"]
    own = [
        r
        for r in found
        if r.phase == phase and r.role.startswith("rollout" if rollout else "policy")
    ]
    if rollout:  # runs the policy's weights, which nothing else is measured of
        weights = [r for r in found if r.role == "policy" and r.phase == "forward/backward"]
        own += [r for r in weights if r.item == "parameters"]
    return own


def _measure(config: Any, case: dict[str, Any], *, gpu: bool) -> tuple[float, float]:
    """(peak of live tensors, peak that the allocator reserved) in bytes."""
    import torch

    from burnish.plan.tracking import LiveBytes

    torch.manual_seed(0)
    device = torch.device("cuda" if gpu else "cpu")
    model = random_model(config, device)
    if case["job"] == "rollout":
        work = _rollout(config, model)
        held = list(model.parameters())
    else:
        work, held = _train(config, model)
    if not gpu:
        with LiveBytes() as live:
            live.hold(held)
            work()
        return float(live.peak), float(live.peak)
    work()  # moments and workspaces are there from the first step on
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())


def random_model(config: Any, device: Any) -> Any:
    """The model of a recipe with random weights, as a train engine wants it."""
    from transformers import AutoModelForCausalLM

    from burnish.models.load import choose_attention, describe, place
    from burnish.models.lora import inject_lora
    from burnish.plan.shapes import find_config

    with device:
        model: Any = AutoModelForCausalLM.from_config(find_config(config.model)[0])
    trained_whole = config.model.lora is None
    model = place(model, dtype="fp32" if trained_whole else config.precision.dtype, device=device)
    choose_attention(model, describe(config.model))
    if not trained_whole:
        inject_lora(model, config.model.lora)
    return model


def _train(config: Any, model: Any) -> tuple[Any, list[Any]]:
    """One optimizer step's passes and the step, over rows of full length."""
    from burnish.config.roles import TrainRole
    from burnish.plan.role_base import positions
    from burnish.plan.shapes import shape_of
    from burnish.plan.train_role import largest_rows
    from burnish.train.spec import EngineSpec
    from burnish.train.torch.engine import TorchTrainEngine
    from burnish.types import Stats, rows_to_batch

    plan = config.batch_plan()
    spec = EngineSpec(
        TrainRole.alone(
            "policy",
            config.train,
            config.model,
            with_entropy=config.job == "rl",
            precision=config.precision,
        ),
        micro_batch_size=plan.micro_train_batch_size,
    )
    engine = TorchTrainEngine(model, spec)
    job = config.resolve()
    limit = positions(shape_of(config.model))
    micro = largest_rows(job, replace(job.role("policy"), ranks=1), limit)
    count = max(1, plan.train_batch_size // max(1, len(micro)))
    rows = [r for _ in range(count) for r in micro]
    batch = rows_to_batch(
        [[7] * r.length for r in rows],
        [[False] * r.prompt + [True] * (r.length - r.prompt) for r in rows],
        prompt_lens=[r.prompt for r in rows],
        group_ids=[i // 8 for i in range(len(rows))],
    )

    optimizer = engine.optimizer
    assert optimizer is not None

    def step() -> None:
        def loss(outputs: Any, batch: Any) -> Any:
            return -outputs.logprobs.sum() / batch.num_tokens, Stats()

        engine.forward_backward(batch, loss)
        engine.optim_step()
        engine.forward_backward(batch, loss)  # with the moments there
        optimizer.zero_grad()

    masters = list(optimizer.masters)
    return step, [*engine.model.parameters(), *engine.model.buffers(), *masters]


def _rollout(config: Any, model: Any) -> Any:
    """A generate of full length."""
    import torch

    from burnish.models.scratch import scratch_tokenizer
    from burnish.rollout.base import Request, Sampling
    from burnish.rollout.local.engine import LocalRolloutEngine

    model = model.to(torch.float32 if model.device.type == "cpu" else torch.bfloat16)
    model.generation_config.eos_token_id = None
    tokenizer = scratch_tokenizer("0123456789")
    engine = LocalRolloutEngine(model.eval(), tokenizer, config.rollout.engine)
    engine._end_tokens = set()  # rows of full length
    prompt = tuple([7] * config.data.prompt_max_len)
    count = -(-config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt // 8)
    requests = [Request(f"{i}", prompt, n=8, seed=i) for i in range(count)]
    sampling = Sampling(max_tokens=config.rollout.generate_max_len)
    return lambda: [None for _ in engine.generate(requests, sampling)]


def main() -> None:
    """Run every case in a process of its own and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(run_case(json.loads(args.case), tiny=args.tiny)))
        return
    rows, worst = [], 0.0
    cases = [c for c in grid() if not args.tiny or c["size"] in TINY]
    for case in cases:
        result = in_process(case, tiny=args.tiny)
        ratio = result["predicted"] / result["measured"] if result["measured"] else None
        worst = max(worst, abs(ratio - 1) if ratio else 0.0)
        settings = ", ".join(f"{k} {v}" for k, v in case.items() if k not in ("job", "size"))
        cells = [case["job"], case["size"], settings, f"{result['predicted'] / 1e9:.3f}"]
        if ratio is None:
            rows.append([*cells, "does not fit here", "", ""])
            continue
        more = [
            f"{result['measured'] / 1e9:.3f}",
            f"{result['reserved'] / 1e9:.3f}",
            f"{ratio:.3f}",
        ]
        rows.append([*cells, *more])
        print(f"{case['job']} {case['size']} {settings}: {ratio:.3f}", file=sys.stderr)
    head = [
        "job",
        "shape",
        "how",
        "predicted GB",
        "measured GB",
        "reserved GB",
        "predicted / measured",
    ]
    print("\n".join(markdown_table(head, rows)))
    print(f"\nlargest difference: {worst:.1%} of {len(rows)} cases")
    print(versions("torch", "transformers"))


def in_process(case: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """:func:`run_case` in a process of its own. Raises RuntimeError with its output if it fails."""
    command = [sys.executable, __file__, "--case", json.dumps(case), *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy())
    if done.returncode:
        raise RuntimeError(f"{case}:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
