"""Steps of benchmarks/gpu_session.py that need no model: imports, the machine, its tests."""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_report import TAIL_CHARS, Report, Setup

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "huggingface-hub", "peft", "accelerate"),
    *("safetensors", "pyarrow", "numpy", "pydantic", "rich", "typer", "httpx", "xxhash"),
    *("ray", "deepspeed", "vllm", "datasets"),
)
OPTIONAL = (
    *("ray", "deepspeed", "vllm", "datasets", "math_verify", "gguf", "starlette"),
    *("uvicorn", "reasoning_gym", "tensorboard", "wandb", "trl", "verifiers", "mcp", "mcp_types"),
    "httpx2",
)
"""Modules that a bare machine lacks. Only parts of Burnish that need them may fail to import."""
NOT_IMPORTED = ("burnish.__main__",)


def installed(name: str) -> str | None:
    """Return the version of a distribution, None if it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ---- imports -------------------------------------------------------------------------------------


def imports(setup: Setup, report: Report) -> None:
    """Import every module of Burnish. A missing optional package is no problem, all else is."""
    versions = {name: installed(name) for name in PACKAGES}
    report.add(python=platform.python_version(), versions=versions)
    import torch

    import burnish

    report.add(about=about(setup, torch))
    begun, imported, absent = time.perf_counter(), 0, dict[str, str]()
    for found in pkgutil.walk_packages(burnish.__path__, "burnish."):
        if found.name in NOT_IMPORTED:
            continue
        with report.case(f"import {found.name}"):
            missing = import_module(found.name)
            imported += missing is None
            if missing is not None:
                absent[found.name] = missing
    done = subprocess.run(
        [sys.executable, "-m", "burnish", "--version"], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        report.problem(f"python -m burnish --version: {done.stderr[-TAIL_CHARS:]}")
    report.add(imported=imported, absent=absent, command=done.stdout.strip())
    without = ", ".join(f"{name} ({package})" for name, package in absent.items())
    report.summary(
        f"{imported} modules in {time.perf_counter() - begun:.0f} s"
        + (f"; not without their packages: {without}" if absent else "")
    )


def import_module(name: str) -> str | None:
    """Import a module. Return the optional package whose absence prevents it, or None."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL:
            raise
        return package
    return None


def about(setup: Setup, torch: Any) -> dict[str, str]:
    """Return the head of the report: device, date, versions, commit."""
    names = ("torch", "triton", "transformers", "peft")
    versions = ", ".join(f"{n} {v}" for n in names if (v := installed(n)))
    device = "CPU, tiny shapes" if setup.tiny else torch.cuda.get_device_name(0)
    return {
        "Device": device,
        "Date": time.strftime("%Y-%m-%d", time.gmtime()),
        "Versions": f"Python {platform.python_version()}, {versions}",
        "Commit": commit(),
    }


def commit() -> str:
    """Return the commit of this checkout, empty if it is no git checkout."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# ---- environment ---------------------------------------------------------------------------------


def environment(setup: Setup, report: Report) -> None:
    """Describe the machine, and measure its rates."""
    import torch

    from burnish.doctor.facts import gather_facts

    facts = asdict(gather_facts())
    facts.pop("versions")
    report.add(facts=facts, cudnn=torch.backends.cudnn.version(), cuda=torch.version.cuda)
    if not setup.tiny:
        found = torch.cuda.get_device_properties(0)
        report.add(device=str(found), free_and_total=torch.cuda.mem_get_info())
        with report.case("nvidia-smi"):
            report.add(nvidia_smi=nvidia_smi())
    rates(setup, report)


def nvidia_smi() -> str:
    """Return driver, clocks and power of the devices."""
    fields = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def rates(setup: Setup, report: Report) -> None:
    """Measure matrix products, memory and the link to the host; compare with the data sheet."""
    import torch

    from burnish.doctor.calibrate import ON_GPU, Sizes, copy_rate, gpu_of, matmul_flops, read_rate
    from burnish.plan.hardware import load_tables

    device = torch.device(setup.device)
    sizes = Sizes(64, 64, 1 << 20) if setup.tiny else ON_GPU
    gpu = None
    if not setup.tiny:
        memory = torch.cuda.get_device_properties(0).total_memory
        gpu = gpu_of(load_tables(), torch.cuda.get_device_name(0), memory)
        if gpu is None:
            report.problem("burnish/plan/hardware.yaml has no entry for this GPU: no MFU")
    half, full = torch.bfloat16, torch.float32
    cases: dict[str, tuple[Callable[[], float], float, str]] = {
        "bf16, TFLOP/s": (lambda: matmul_flops(sizes, device, half), 1e12, "bf16_tflops"),
        "fp32, TFLOP/s": (lambda: matmul_flops(sizes, device, full), 1e12, "fp32_tflops"),
        "memory, GB/s read": (lambda: read_rate(sizes, device, half), 1e9, "memory_gbs"),
    }
    if not setup.tiny:
        from_host = (lambda: copy_rate(sizes, device), 1e9, "pcie_gbs")
        cases["from pinned host memory, GB/s"] = from_host
    measured = []
    for name, (measure, unit, sheet) in cases.items():
        with report.case(name):
            reached = measure() / unit
            peak = None if gpu is None else vars(gpu)[sheet]
            share = None if peak is None else reached / peak
            report.row("Rates", rate=name, measured=reached, data_sheet=peak, share=share)
            measured.append(f"{name}: {reached:.4g}")
    report.summary("; ".join(measured))


# ---- tests/gpu -----------------------------------------------------------------------------------


class Outcomes:
    """A pytest plugin that reports the outcome of each test at once."""

    def __init__(self, report: Report) -> None:
        self.report, self.ends = report, dict[str, str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest after each phase of a test."""
        name = report.nodeid.removeprefix("tests/gpu/")
        if report.when == "call" or report.outcome != "passed":
            self.ends[name] = report.outcome
            if report.outcome == "skipped":
                self.ends[name] = f"skipped: {str(report.longrepr)[-200:]}"
        if report.outcome == "failed":
            self.report.problem(f"{name}: {str(report.longrepr)[-TAIL_CHARS:]}")
        self.report.add(outcomes=self.ends)

    def pytest_collectreport(self, report: Any) -> None:
        """Called by pytest after it read a file."""
        if report.outcome == "failed":
            self.report.problem(f"{report.nodeid}: {str(report.longrepr)[-TAIL_CHARS:]}")

    def counts(self) -> dict[str, int]:
        """Count the tests by outcome."""
        kinds = [end.partition(":")[0] for end in self.ends.values()]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def tests(setup: Setup, report: Report) -> None:
    """Run ``tests/gpu``."""
    run_tests(report, ["tests/gpu"])


def run_tests(report: Report, paths: Sequence[str]) -> None:
    """Run tests in this process. Without a GPU all of tests/gpu are collected and skipped."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the machine's own are not those of our set
    import pytest

    os.chdir(ROOT)
    outcomes = Outcomes(report)
    words = [*paths, "-m", "gpu", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    code = pytest.main(words, plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        report.problem(f"pytest exited with {code!r}")
    counts = outcomes.counts()
    report.add(counts=counts)
    report.summary(", ".join(f"{count} {kind}" for kind, count in counts.items()))
