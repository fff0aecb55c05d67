"""Jobs on the ranks of a launcher give the numbers of one process. Two processes over loopback."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import burnish

pytestmark = pytest.mark.slow

FP32 = 1e-5  # fp32 sums in another order, over four Adam steps


def recipes(folder: Path, name: str) -> list[dict[str, Any]]:
    """Recipes of short runs on the rows in ``folder``, with run folders that contain ``name``."""
    data = {"sources": [str(folder / "rows.jsonl")]}
    common = {
        "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
        "data": data,
        "eval_data": data,
        "train": {"train_batch_size": 4, "lr": 1e-2},
    }
    jobs = ["sft", "rm", "preference"]
    found = [{"job": job, "run_dir": str(folder / f"{job} {name}"), **common} for job in jobs]
    sharded = {**common["train"], "engine": {"sharding": "full"}}
    return [*found, {**found[0], "run_dir": str(folder / f"full {name}"), "train": sharded}]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    wanted = ("train/loss", "train/grad_norm", "eval/loss")
    return [{n: line[n] for n in wanted if n in line} for line in found]


def test_jobs_on_two_ranks_match_one_process(
    tmp_path: Path, run_together: Callable[..., list[int]]
) -> None:
    rows = [
        {"prompt": f"{i}=", "response": str(i), "chosen": str(i), "rejected": "+"}
        for i in range(16)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    arguments = [[str(tmp_path), str(rank), str(port)] for rank in range(2)]
    run_together(Path(__file__), arguments, tmp_path, timeout_s=150)
    assert "step" not in (tmp_path / "rank1.log").read_text(), "only rank 0 reports"
    for recipe, other in zip(recipes(tmp_path, "one"), recipes(tmp_path, "two"), strict=True):
        one, two = burnish.run(burnish.load_config(recipe)).run_dir, Path(other["run_dir"])
        assert len(lines(one)) == len(lines(two)) == 5
        for first, second in zip(lines(one), lines(two), strict=True):
            assert first == pytest.approx(second, abs=FP32)
        if "full" in other["run_dir"]:
            continue  # its weights are in the files of two ranks
        role = "reward" if recipe["job"] == "rm" else "policy"
        path = f"checkpoints/step_000004/{role}/master.safetensors"
        weights = load_file(two / path)
        for name, tensor in load_file(one / path).items():
            torch.testing.assert_close(weights[name], tensor, atol=FP32, rtol=0)


def main(folder: Path, rank: str, port: str) -> None:
    import os

    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
    for number, recipe in enumerate(recipes(folder, "two")):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(int(port) + number)}
        burnish.run(burnish.load_config(recipe))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
