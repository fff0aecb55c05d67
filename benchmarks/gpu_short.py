"""Steps that only ``benchmarks/gpu_session.py --preset short`` has: a larger model, a mixture of
experts, copies of weights, sampling with CUDA graphs, the newest tests, and TRL."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_checks import run_tests
from gpu_compare import BEST, engine_of, measure
from gpu_engines import fingerprints
from gpu_kernels import operators
from gpu_model import free, make_batch, nll, synchronize, vocabulary_of
from gpu_report import Report, Setup
from gpu_speed import Case, rl_cases, sampling, sft_cases
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from burnish.host_copies import to_host
from burnish.models.scratch import scratch_tokenizer
from burnish.rollout.local.config import LocalEngine
from burnish.sync.checksum import word_sums

HERE = Path(__file__).resolve().parent
NEW_TESTS = (
    "test_gpu_head.py",
    "test_gpu_copies.py",
    "test_gpu_engines.py::test_recorded_draws_are_those_of_single_steps",
    "test_gpu_flash.py::test_two_runs_with_train_deterministic_have_equal_bits",
    "test_gpu_flash.py::test_an_installed_newer_flash_attention_agrees_with_sdpa",
    "test_gpu_engines.py::test_compiled_steps_are_those_of_single_steps",
    "test_gpu_compile.py",
)
"""Tests of tests/gpu that were not run on a GPU before; compilers last, which may take the rest of
the limit."""
LARGE_GPU = 120e9
"""Bytes of a GPU for which a 4B model is measured instead of a 1.7B one: 14 bytes per parameter."""
MIXTURE = "30B-A3B, 4 layers"


# ---- models --------------------------------------------------------------------------------------


def larger(setup: Setup, report: Report) -> None:
    """Measure a larger model with the best setting: rows of 8k, and RL rows of up to 16k."""
    size = "1.7B"
    if setup.device == "cuda" and torch.cuda.get_device_properties(0).total_memory > LARGE_GPU:
        size = "4B"
    cases = [sft_cases(tiny=setup.tiny)[2], rl_cases(tiny=setup.tiny)[1]]
    lines = []
    with operators(setup):
        for case, with_entropy in zip(cases, (False, True), strict=True):
            with report.case(f"{size}, {case.name}"):
                row = _train_row(setup, case, size, with_entropy=with_entropy)
                report.row("Larger models" + (" (tiny)" if setup.tiny else ""), model=size, **row)
                mfu = "" if row["MFU"] is None else f", MFU {row['MFU']:.1%}"
                lines.append(f"{size}, {case.name}: {row['tokens_per_s']:.0f} tokens/s{mfu}")
                report.summary("; ".join(lines))
            free(setup)


def _train_row(setup: Setup, case: Case, shape: str, *, with_entropy: bool) -> dict[str, Any]:
    engine = engine_of(setup, case, BEST, with_entropy=with_entropy, shape=shape)
    found = measure(setup, case, BEST, engine, shape=shape)
    return {"rows": case.name, "setting": BEST.name} | found.row


def mixture(setup: Setup, report: Report) -> None:
    """Measure four layers of a mixture of 128 experts over packed rows, and look which operations
    compute the experts."""
    case = sft_cases(tiny=setup.tiny)[1]
    case = Case(case.name, case.groups, case.budget, True, case.layout)
    with operators(setup):
        engine = engine_of(setup, case, BEST, with_entropy=False, shape=MIXTURE)
        found = measure(setup, case, BEST, engine, shape=MIXTURE)
        report.row("Mixture of experts", model=MIXTURE, rows=case.name, **found.row)
        names = _operations(setup, engine, case)
    report.add(operations=names.most_common(30))
    grouped = sum(count for name, count in names.items() if "grouped_mm" in name)
    if not grouped:
        report.problem("no grouped_mm computed the experts")
    memory = found.row["peak_GB"]
    report.summary(
        f"{found.tokens_per_s:.0f} tokens/s; {grouped} x grouped_mm in a step"
        + ("" if memory is None else f"; peak {memory:.1f} GB")
    )
    free(setup)


def _operations(setup: Setup, engine: Any, case: Case) -> Counter[str]:
    """Count the operations of a forward and backward pass over the first row."""
    batch = make_batch(case.groups[:1], vocabulary_of(setup))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        engine.forward_backward(batch, nll)
        engine.optim_step()
    return Counter({event.key: event.count for event in profiled.key_averages()})


# ---- copies --------------------------------------------------------------------------------------


def copies(setup: Setup, report: Report) -> None:
    """Measure copies of 1.2 GB of bf16 weights to the host and to another process, and their
    checks."""
    shape = (2, 8, 8) if setup.tiny else (40, 4096, 3712)
    flat = torch.randn(shape, device=setup.device).to(torch.bfloat16)
    weights = {f"layer.{i}": matrix for i, matrix in enumerate(flat)}
    pinned = torch.empty_like(flat, device="cpu", pin_memory=setup.device == "cuda")
    runs: dict[str, Callable[[], Any]] = {
        "to new pageable memory (.cpu())": flat.cpu,
        "to pinned memory": lambda: pinned.copy_(flat),
        "to new memory, through pinned buffers (to_host)": lambda: to_host(flat, copy=True),
        "fingerprint": lambda: fingerprints(weights),
        "checksum": lambda: word_sums(flat.view(torch.uint8).reshape(-1)),
    }
    rates = []
    for name, run in runs.items():
        with report.case(name):
            seconds = median(_seconds(setup, run) for _ in range(3))
            rates.append(_rate(report, name, flat.nbytes, seconds))
            report.summary("; ".join(rates))
    if setup.device == "cuda":
        with report.case("to another process (cudaIpc)"):
            rates.append(_rate(report, "to another process (cudaIpc)", flat.nbytes, _ipc(flat)))
            report.summary("; ".join(rates))
    free(setup)


def _rate(report: Report, name: str, num_bytes: int, seconds: float) -> str:
    rate = num_bytes / seconds / 1e9
    report.row("Copies", copy=name, GB=num_bytes / 1e9, seconds=seconds, GB_per_s=rate)
    return f"{name} {rate:.3g} GB/s"


def _seconds(setup: Setup, run: Callable[[], Any]) -> float:
    synchronize(setup)
    begun = time.perf_counter()
    run()
    synchronize(setup)
    return time.perf_counter() - begun


def _ipc(tensor: Tensor) -> float:
    """Return the seconds in which another process copies the tensor by its handle."""
    context: Any = importlib.import_module("torch.multiprocessing").get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_receive, args=(there, back), daemon=True)
    process.start()
    try:
        there.put(tensor)
        seconds = float(back.get())
        there.put(None)  # the handle's owner outlives its use
        process.join(10)
    finally:
        process.kill()
    return seconds


def _receive(there: Any, back: Any) -> None:
    tensor = there.get()
    own = torch.empty_like(tensor)
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        own.copy_(tensor)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    del tensor
    back.put(median(taken))
    there.get()


# ---- sampling, tests -----------------------------------------------------------------------------


def rollout(setup: Setup, report: Report) -> None:
    """Measure new tokens per second of the local engine with CUDA graphs, last with compiled
    layers, which stay in the model."""
    plain, compiled = LocalEngine(), LocalEngine(compile="layers")
    sampling(setup, report, [(1, plain), (8, plain), (8, compiled), (1, compiled)])


def tests(setup: Setup, report: Report) -> None:
    """Run the tests of :data:`NEW_TESTS`."""
    run_tests(report, [f"tests/gpu/{name}" for name in NEW_TESTS])


# ---- TRL -----------------------------------------------------------------------------------------


def trl(setup: Setup, report: Report) -> None:
    """Compare a GRPO and a DPO step with TRL's, on random weights of the shape of SmolLM2-135M."""
    absent = [name for name in ("trl", "datasets") if find_spec(name) is None]
    if absent:
        report.add(absent=absent)
        report.summary(f"not run: no {' and '.join(absent)} (gpu_wheels.py --with-trl)")
        return
    cache = setup.work / "bench-cache"
    _random_smollm2(cache / "smollm2-135m", tiny=setup.tiny)
    env = os.environ | {"BURNISH_BENCH_CACHE": str(cache)}
    dtype = "fp32" if setup.tiny else "bf16"
    lines = []
    for script in ("grpo_vs_trl", "dpo_vs_trl"):
        with report.case(script):
            words = [f"--device={setup.device}", f"--dtype={dtype}", "--steps=2", "--threads=4"]
            command = [sys.executable, str(HERE / f"{script}.py"), *words]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError((done.stdout + done.stderr)[-3000:])
            walls = dict(re.findall(r"^ +(\S.*?) +user-CPU.*?wall +([\d.]+) s", done.stdout, re.M))
            for name, seconds in walls.items():
                report.row("TRL", script=script, dtype=dtype, by=name, wall_s=float(seconds))
            rivals = [float(s) for name, s in walls.items() if name.startswith("trl")]
            ours = [float(s) for name, s in walls.items() if not name.startswith("trl")]
            lines.append(f"{script}: {min(ours) / min(rivals):.3f} of TRL's wall time")
            report.summary("; ".join(lines))


def _random_smollm2(folder: Path, *, tiny: bool) -> None:
    """Write a model folder with random weights and a tokenizer of characters."""
    if (folder / "tokenizer.json").is_file():
        return
    sizes = (64, 128, 2) if tiny else (576, 1536, 30)
    hidden, inner, layers = sizes
    tokenizer = scratch_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer) if tiny else 49_152,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=4 if tiny else 9,
            num_key_value_heads=2 if tiny else 3,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
