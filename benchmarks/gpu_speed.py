"""Steps of benchmarks/gpu_session.py that measure the 0.6B shape: training, memory, sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from gpu_model import (
    Group,
    free,
    make_batch,
    make_engine,
    make_recipe,
    nll,
    peak_flops,
    peak_gb,
    synchronize,
    train_flops,
    vocabulary_of,
)
from gpu_report import Report, Setup
from plan_accuracy import in_process, random_model

from burnish.doctor.calibrate import gpu_of
from burnish.models.gpu import set_up_gpu
from burnish.models.scratch import scratch_tokenizer
from burnish.oom import is_out_of_memory
from burnish.plan.hardware import load_tables
from burnish.rollout.base import Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine

STEPS = 3


@dataclass(frozen=True)
class Case:
    """Rows of one optimizer step, and how they are computed."""

    name: str
    groups: tuple[Group, ...]
    budget: int
    """max_tokens_per_micro_batch"""
    checkpointing: bool
    layout: str


def single(*lengths: int) -> tuple[Group, ...]:
    """Return rows that share no prompt. All tokens but the first are trained on."""
    return tuple(Group(1, (length - 1,)) for length in lengths)


def sft_cases(*, tiny: bool) -> list[Case]:
    """Return cases with two micro-batches of 16k tokens: rows of 8k, and ragged rows up to 8k."""
    k = 8 if tiny else 1024
    equal, ragged = single(*[8 * k] * 4), single(8 * k, 6 * k, 2 * k, 7 * k, 5 * k, 4 * k)
    return [
        Case("4 rows of 8k", equal, 16 * k, False, "packed"),
        Case("6 ragged rows, 2k to 8k", ragged, 16 * k, False, "packed"),
        Case("4 rows of 8k", equal, 16 * k, True, "packed"),
    ]


def rl_cases(*, tiny: bool) -> list[Case]:
    """Return groups with shared prompts: rows of about 2k, and ragged rows up to 16k."""
    k = 8 if tiny else 1024
    short = Group(k // 2, tuple(k + k * i // 4 for i in range(8)))
    long = Group(2 * k, (14 * k, 8 * k, 4 * k, 2 * k))
    return [
        Case("2 prompts x 8, rows of 1.5k to 3.3k", (short, short), 16 * k, False, "shared_prefix"),
        Case("2 prompts x 4, rows of 4k to 16k", (long, long), 32 * k, True, "shared_prefix"),
        Case("2 prompts x 4, rows of 4k to 16k", (long, long), 32 * k, False, "shared_prefix"),
    ]


def sft(setup: Setup, report: Report) -> None:
    """Measure tokens per second, MFU and peak memory of supervised fine-tuning."""
    _all(setup, report, "SFT", sft_cases(tiny=setup.tiny), with_entropy=False)


def rl(setup: Setup, report: Report) -> None:
    """Measure the same of an RL update, with entropies."""
    _all(setup, report, "RL", rl_cases(tiny=setup.tiny), with_entropy=True)


def _all(
    setup: Setup, report: Report, title: str, cases: list[Case], *, with_entropy: bool
) -> None:
    table = f"{title}, Qwen3-0.6B's shape" + (" (tiny)" if setup.tiny else "")
    lines = []
    for case in cases:
        with report.case(case.name):
            found = train_case(setup, case, with_entropy=with_entropy)
            named = {"rows": case.name, "checkpointing": case.checkpointing}
            report.row(table, **named, **found)
            if found["tokens_per_s"] is not None:
                mfu = "" if found["MFU"] is None else f", MFU {found['MFU']:.1%}"
                ck = ", checkpointing" if case.checkpointing else ""
                lines.append(f"{case.name}{ck}: {found['tokens_per_s']:.0f} tokens/s{mfu}")
            report.summary("; ".join(lines) or "no case fits")
        free(setup)


def train_case(setup: Setup, case: Case, *, with_entropy: bool) -> dict[str, Any]:
    """Measure one case. Return a note instead if it runs out of memory."""
    try:
        return _train_case(setup, case, with_entropy=with_entropy)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return {"tokens_per_s": None, "MFU": None, "note": "does not fit"}


def _train_case(setup: Setup, case: Case, *, with_entropy: bool) -> dict[str, Any]:
    free(setup)
    engine = make_engine(
        setup,
        with_entropy=with_entropy,
        layout=case.layout,
        gradient_checkpointing=case.checkpointing,
        max_tokens_per_micro_batch=case.budget,
    )
    batch = make_batch(case.groups, vocabulary_of(setup))

    def step() -> float:
        begun = time.perf_counter()
        engine.forward_backward(batch, nll)
        engine.optim_step()
        synchronize(setup)
        return time.perf_counter() - begun

    first = step()
    taken = [step() for _ in range(STEPS)]
    flops, peak = train_flops(setup, case.groups), peak_flops(setup)
    seconds, memory = median(taken), peak_gb(setup)
    tokens = sum(group.tokens for group in case.groups)
    return {
        "tokens_per_s": tokens / seconds,
        "row_tokens_per_s": sum(group.row_tokens for group in case.groups) / seconds,
        "TFLOP_per_s": flops / seconds / 1e12,
        "MFU": None if peak is None else flops / seconds / peak,
        "step_s": seconds,
        "slowest_s": max(taken),
        "first_s": first,
        "peak_GB": None if memory is None else memory[0],
        "reserved_GB": None if memory is None else memory[1],
    }


# ---- memory --------------------------------------------------------------------------------------


def plan_cases(*, tiny: bool) -> list[dict[str, Any]]:
    """Return some of the cases of benchmarks/plan_accuracy.py."""
    packed, shared = {"layout": "packed"}, {"layout": "shared_prefix"}
    sft, rl, rollout = {"job": "sft"}, {"job": "rl"}, {"job": "rollout"}
    if tiny:
        return [
            {**sft, "size": "0.1B", "micro": 8, "checkpointing": False, **packed},
            {**rollout, "size": "0.1B", "batch": 64},
        ]
    return [
        {**sft, "size": "0.6B", "micro": 4, "checkpointing": False, **packed},
        {**rl, "size": "0.5B", "micro": 8, "checkpointing": False, **shared},
        {**rollout, "size": "0.5B", "batch": 128},
        {**rl, "size": "1.5B", "micro": 8, "checkpointing": True, **shared},
        {**rl, "size": "1.5B", "micro": 4, "checkpointing": True, **packed, "lora": 32},
    ]


def plan(setup: Setup, report: Report) -> None:
    """Compare predicted with measured peaks of memory."""
    ratios = []
    for case in plan_cases(tiny=setup.tiny):
        settings = ", ".join(f"{k} {v}" for k, v in case.items() if k not in ("job", "size"))
        with report.case(f"{case['job']} {case['size']} {settings}"):
            found = in_process(case, tiny=setup.tiny)
            row = {"job": case["job"], "shape": case["size"], "how": settings}
            ratio = found["predicted"] / found["measured"] if found["measured"] else None
            sizes = {f"{n}_GB": v and v / 1e9 for n, v in found.items()}
            report.row("Plan", **row, **sizes, predicted_over_measured=ratio)
            ratios += [ratio] if ratio else []
    if ratios:
        report.summary(f"predicted / measured {min(ratios):.3f} to {max(ratios):.3f}")


# ---- sampling ------------------------------------------------------------------------------------


def rollout(setup: Setup, report: Report) -> None:
    """Measure new tokens per second of the local engine, with and without CUDA graphs."""
    recorded, launched = LocalEngine(), LocalEngine(cuda_graphs=False)
    sampling(setup, report, [(n, engine) for n in (1, 8) for engine in (recorded, launched)])


def sampling(setup: Setup, report: Report, cases: Sequence[tuple[int, LocalEngine]]) -> None:
    """Measure new tokens per second of the local engine. ``cases``: samples per prompt, config."""
    prompts, prompt, new = (2, 8, 8) if setup.tiny else (8, 512, 512)
    config = make_recipe(setup)
    set_up_gpu(torch.device(setup.device))
    torch.manual_seed(0)
    model = random_model(config, torch.device(setup.device))
    model = model.to(torch.float32 if setup.tiny else torch.bfloat16).eval()
    tokenizer = scratch_tokenizer("0123456789")
    lines = []
    for samples, engine_config in cases:
        requests = [
            Request(f"{i}", tuple(range(10, 10 + prompt)), n=samples, seed=i)
            for i in range(prompts)
        ]
        how = "graphs" if engine_config.cuda_graphs else "no graphs"
        how += ", compiled" if engine_config.compile == "layers" else ""
        with report.case(f"{prompts} x {samples}, {how}"):
            engine = LocalRolloutEngine(model, tokenizer, engine_config)
            found = sample_case(setup, engine, requests, new)
            limit = least_ms(setup, model, prompts * samples, prompt + new / 2)
            if limit is not None:
                found |= {"limit_ms": limit, "times_the_limit": found["ms_per_step"] / limit}
            case = {"requests": f"{prompts} x {samples}", "prompt": prompt, "new": new}
            report.row("Local rollout", **case, by=how, **found)
            lines.append(f"{prompts * samples} rows, {how}: {found['tokens_per_s']:.0f} tokens/s")
            report.summary("; ".join(lines))
            engine.close()
        free(setup)


def least_ms(setup: Setup, model: Any, rows: int, length: float) -> float | None:
    """Return the milliseconds in which the GPU reads the weights and the cache of ``rows`` of a
    mean ``length`` once, at the bandwidth of its data sheet; None if that is unknown."""
    if setup.tiny:
        return None
    memory = torch.cuda.get_device_properties(0).total_memory
    gpu = gpu_of(load_tables(), torch.cuda.get_device_name(0), memory)
    text = model.config.get_text_config()
    per_token = 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    num_bytes = sum(p.nbytes for p in model.parameters()) + rows * length * per_token
    return None if gpu is None else 1e3 * num_bytes / (gpu.memory_gbs * 1e9)


def sample_case(
    setup: Setup, engine: LocalRolloutEngine, requests: list[Request], new: int
) -> dict[str, Any]:
    """Measure a second call; the first records graphs."""
    seconds = []
    for _ in range(2):
        synchronize(setup)
        begun = time.perf_counter()
        done = list(engine.generate(requests, Sampling(max_tokens=new)))
        synchronize(setup)
        seconds.append(time.perf_counter() - begun)
    tokens, memory = sum(len(c.token_ids) for c in done), peak_gb(setup)
    return {
        "tokens_per_s": tokens / seconds[1],
        "ms_per_step": 1e3 * seconds[1] / new,
        "first_call_s": seconds[0],
        "peak_GB": None if memory is None else memory[0],
    }
