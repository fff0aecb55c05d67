"""What takes processes of its own on CUDA: weights by NCCL and through cudaIpc handles, state in
pinned host memory. Needs one or two devices (``make test-gpu``)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
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
RunTogether = Callable[..., list[int]]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        pytest.param("collective", ("cuda:0", "cuda:1"), marks=TWO, id="NCCL"),
        pytest.param("ipc", ("cuda:0", "cuda:0"), id="cudaIpc"),
    ],
)
def test_weights_come_as_they_were_sent_and_a_changed_bit_is_found(
    kind: str, devices: tuple[str, str], tmp_path: Path, run_together: RunTogether
) -> None:
    commands = [["sync", str(tmp_path), kind, str(r), d] for r, d in enumerate(devices)]
    run_together(SCRIPT, commands, tmp_path, timeout_s=500, DS_ACCELERATOR="cuda")
    for dtype in ("fp32", "bf16"):
        reports = [json.loads((tmp_path / f"rank{r}.json").read_text())[dtype] for r in range(2)]
        assert [report["versions"] for report in reports] == [[0, 1, 2]] * 2
        assert all("bucket 2 of version 2 is corrupted" in report["error"] for report in reports)
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
    engine: str, tmp_path: Path, run_together: RunTogether
) -> None:
    command = ["offload", str(tmp_path), engine, "cuda:0"]
    run_together(SCRIPT, [command], tmp_path, timeout_s=500, DS_ACCELERATOR="cuda")
    found = json.loads((tmp_path / "found.json").read_text())
    plain = load_file(tmp_path / "plain.safetensors")
    numel = sum(weight.numel() for weight in plain.values())
    assert found["pinned"] >= 4 * numel, "fp32 masters at least"
    offloaded = load_file(tmp_path / "offloaded.safetensors")
    assert offloaded.keys() == plain.keys()
    for name, weight in plain.items():
        # steps of up to 1e-3, from gradients whose fp32 sums have another order
        torch.testing.assert_close(offloaded[name], weight, atol=1e-5, rtol=0)
