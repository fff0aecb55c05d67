"""What takes processes of its own on CUDA: weights by NCCL and through cudaIpc handles, state in
pinned host memory. Needs one or two devices (``make test-gpu``)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("gpu_ranks.py")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed"
)


def run(folder: Path, *commands: list[str]) -> None:
    """The script as processes that run at a time, each to a good end."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cuda"}
    logs = [folder / f"{i}.log" for i in range(len(commands))]
    processes = []
    try:
        for log, command in zip(logs, commands, strict=True):
            with log.open("w") as out:
                line = [sys.executable, str(SCRIPT), *command]
                processes.append(
                    subprocess.Popen(line, env=env, stdout=out, stderr=subprocess.STDOUT)
                )
        codes = [process.wait(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * len(codes), "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        pytest.param("collective", ("cuda:0", "cuda:1"), marks=TWO, id="NCCL"),
        pytest.param("ipc", ("cuda:0", "cuda:0"), id="cudaIpc"),
    ],
)
def test_weights_come_as_they_were_sent_and_a_changed_bit_is_found(
    kind: str, devices: tuple[str, str], tmp_path: Path
) -> None:
    commands = [["sync", str(tmp_path), kind, str(r), d] for r, d in enumerate(devices)]
    run(tmp_path, *commands)
    for dtype in ("fp32", "bf16"):
        reports = [json.loads((tmp_path / f"rank{r}.json").read_text())[dtype] for r in range(2)]
        assert [report["versions"] for report in reports] == [[0, 1, 2]] * 2
        assert all("bucket 2 of version 2 is damaged" in report["error"] for report in reports)
        pushed = []
        for push in range(3):
            sent, came = (
                load_file(tmp_path / f"{dtype}-{push}-{end}.safetensors")
                for end in ("sent", "came")
            )
            assert sent.keys() == came.keys()
            assert all(torch.equal(sent[name], came[name]) for name in sent)
            pushed.append(sent["model.norm.weight"])
        assert not torch.equal(pushed[0], pushed[1]), "training changed them"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("zero-2", marks=DEEPSPEED),
        pytest.param("zero-3", marks=DEEPSPEED),
        "fsdp",
    ],
)
def test_offloaded_state_is_pinned_and_trains_as_state_on_the_device(
    engine: str, tmp_path: Path
) -> None:
    run(tmp_path, ["offload", str(tmp_path), engine, "cuda:0"])
    found = json.loads((tmp_path / "found.json").read_text())
    plain = load_file(tmp_path / "plain.safetensors")
    numel = sum(weight.numel() for weight in plain.values())
    assert found["pinned"] >= 4 * numel, "fp32 masters at least"
    offloaded = load_file(tmp_path / "offloaded.safetensors")
    assert offloaded.keys() == plain.keys()
    for name, weight in plain.items():
        # steps of up to 1e-3, from gradients whose fp32 sums have another order
        torch.testing.assert_close(offloaded[name], weight, atol=1e-5, rtol=0)
