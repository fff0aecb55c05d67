"""Jobs on the ranks of a launcher give the numbers of one process, and a failed rank ends all of
them. Two and four processes over loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

import burnish
from burnish.config.cluster import ClusterConfig
from burnish.config.launch import LaunchedRank, LaunchError
from burnish.runtime.spmd import runtime as spmd
from burnish.runtime.spmd.monitor import RankLostError, RankMonitor
from burnish.runtime.spmd.runtime import Ranks, SpmdTrainEngine
from burnish.train.base import StepStats
from burnish.train.fsdp import sharded_state

pytestmark = pytest.mark.slow

FP32 = 1e-5  # fp32 sums in another order, over four Adam steps


def recipes(folder: Path, name: str) -> list[dict[str, Any]]:
    """Recipes of short runs on the rows in ``folder``, with run folders that contain ``name``."""
    data = {"sources": [str(folder / "rows.jsonl")]}
    common = {
        "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
        "data": data,
        "eval": {"data": data},
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


def write_rows(folder: Path) -> None:
    rows = [
        {"prompt": f"{i}=", "response": str(i), "chosen": str(i), "rejected": "+"}
        for i in range(16)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def launches(folder: Path, size: int, task: str) -> list[list[str]]:
    """Return the arguments of :func:`main` for each of ``size`` ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return [[str(folder), task, str(rank), str(size), str(port)] for rank in range(size)]


def test_jobs_on_two_ranks_match_one_process(
    tmp_path: Path, run_together: Callable[..., list[int]]
) -> None:
    write_rows(tmp_path)
    run_together(Path(__file__), launches(tmp_path, 2, "jobs"), tmp_path, timeout_s=150)
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


def test_killed_ranks_end_all_and_the_run_can_be_resumed(
    tmp_path: Path, run_together: Callable[..., list[int]]
) -> None:
    """Rank 1 of two shards is killed in its third step, after two checkpoints; and, resumed, in the
    third checkpoint, after it has written its part. The run that is resumed again has the weights
    of an undisturbed one, bit for bit."""
    write_rows(tmp_path)
    for task in ("kill", "kill in a save"):
        ranks = launches(tmp_path, 2, task)
        codes = run_together(Path(__file__), ranks, tmp_path, timeout_s=100, end_well=False)
        assert codes[0] == 1 and codes[1] != 0
        log = (tmp_path / "rank0.log").read_text()
        assert re.search(r"rank 1 \(.*\) (ended without a message|failed: sent no heartbeat)", log)
        checkpoints = tmp_path / "full faulty/checkpoints"
        complete = sorted(path.name for path in checkpoints.glob("step*"))
        assert complete == ["step_000001", "step_000002"]
    assert "checkpointing.py" in log, "rank 0 waited for rank 1 in the save"
    assert not any(checkpoints.glob(".tmp*")), "rank 0 removes the incomplete checkpoint"
    run_together(Path(__file__), launches(tmp_path, 2, "resume"), tmp_path, timeout_s=100)
    for part in range(2):
        path = f"checkpoints/step_000004/policy/master-{part + 1:05}-of-00002.safetensors"
        resumed, undisturbed = (
            load_file(tmp_path / f"full {n}" / path) for n in ("faulty", "whole")
        )
        assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)


def test_ranks_with_different_inputs_end_before_anything_is_written(
    tmp_path: Path, run_together: Callable[..., list[int]]
) -> None:
    """Rank 1 has another learning rate, and the same rows in another folder, which is no
    difference."""
    write_rows(tmp_path)
    (tmp_path / "copy").mkdir()
    write_rows(tmp_path / "copy")
    ranks = launches(tmp_path, 2, "differ")
    codes = run_together(Path(__file__), ranks, tmp_path, timeout_s=100, end_well=False)
    assert codes == [1, 1], "a traceback: the command line makes it 2"
    expected = (
        f"LaunchError: the ranks have different inputs, so they would train different models (rank "
        f"0 is on host {socket.gethostname()}):\n"
        f"  - rank 1 (host {socket.gethostname()}): train.lr is 0.02, but 0.01 on rank 0\n"
        "Start all ranks with the same recipe and the same overrides.\n"
    )
    for rank in range(2):
        assert (tmp_path / f"rank{rank}.log").read_text().endswith(expected)
    assert not (tmp_path / "sft differ").exists()


def test_a_rank_killed_before_the_group_is_formed_ends_all(
    tmp_path: Path, run_together: Callable[..., list[int]]
) -> None:
    write_rows(tmp_path)
    ranks = launches(tmp_path, 2, "kill early")
    codes = run_together(Path(__file__), ranks, tmp_path, timeout_s=100, end_well=False)
    assert codes == [1, -signal.SIGKILL]
    log = (tmp_path / "rank0.log").read_text()
    assert re.search(r"rank 1 \(.*\) failed: sent no heartbeat for 3 s: killed", log), log


def test_an_error_of_one_rank_ends_four_with_its_cause(
    tmp_path: Path, run_together: Callable[..., list[int]]
) -> None:
    write_rows(tmp_path)
    ranks = launches(tmp_path, 4, "raise")
    codes = run_together(Path(__file__), ranks, tmp_path, timeout_s=100, end_well=False)
    assert codes == [1, 1, 1, 1]
    for rank in range(3):
        log = (tmp_path / f"rank{rank}.log").read_text()
        assert re.search(r"rank 3 \(.*\) failed: ValueError: injected", log), log


class Unshared(dict[Any, Any]):
    """Stores that are not used again: one waiting thread would block the others of its rank."""

    def __contains__(self, key: object) -> bool:
        return False


def start_threads(ranks: list[int], size: int, *, start_timeout_s: float) -> list[str]:
    """Connect ``ranks`` of ``size`` in threads of this process. Return their errors."""
    port = int(launches(Path(), 1, "")[0][-1])
    config = ClusterConfig(runtime="spmd", policy_ranks=size, start_timeout_s=start_timeout_s)

    def connect(rank: int) -> str:
        try:
            Ranks(LaunchedRank(rank, size, rank, size, "127.0.0.1", port, "x"), config).close()
        except LaunchError as error:
            return str(error)
        return "connected"

    numbers = patch.object(spmd, "_CONNECTIONS", repeat(0))  # of a process's only run
    stores = patch.object(spmd, "_STORES", Unshared())
    with patch.dict(os.environ), numbers, stores, ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(connect, ranks))


def test_ranks_that_do_not_connect_are_named_on_all_others() -> None:
    first, other = start_threads([0, 2], 3, start_timeout_s=1)
    assert first == other
    assert re.match(
        r"rank 1 of 3 did not connect to 127.0.0.1:\d+ within 1 s .*rank 2 \(host", first
    )


def test_two_processes_of_the_same_rank_are_refused() -> None:
    found = start_threads([0, 1, 1], 3, start_timeout_s=60)
    assert len(set(found)) == 1
    assert re.match(r"two processes have RANK=1: rank 1 \(host .*\) and rank 1 \(host", found[0])


def test_the_other_ranks_wait_for_a_long_block_of_rank_0() -> None:
    """As long as it takes, also if it fails; and not for a rank 0 whose store has ended."""
    store, order = HashStore(), list[str]()
    first, other = (RankMonitor(store, rank=rank, size=2, timeout_s=60) for rank in range(2))

    def wait() -> None:
        with other.long_block_of_first("check"):
            order.append("other")

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(ValueError, match="bad row"), first.long_block_of_first("check"):
        thread.join(0.5)
        order.append("first")
        raise ValueError("bad row")
    thread.join(30)
    assert order == ["first", "other"]
    first.close()
    other.close()
    other._store = EndedStore()
    with pytest.raises(RankLostError, match="rank 0 ended during check"):
        wait()


class EndedStore(HashStore):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_in_third_step(fault: str) -> None:
    """Replace the optimizer step of this process by one that fails when it is called again after
    two steps."""
    step, calls = SpmdTrainEngine.optim_step, count(1)

    def failing(engine: SpmdTrainEngine) -> StepStats:
        if next(calls) == 3:
            if fault == "kill":
                die()
            raise ValueError("injected")
        return step(engine)

    SpmdTrainEngine.optim_step = failing  # type: ignore[method-assign]


def die_in_save() -> None:
    """Kill this process after it has written its part of a checkpoint, before the other ranks
    know."""
    write = sharded_state.write_shards

    def dying(*arguments: Any) -> None:
        write(*arguments)
        die()

    sharded_state.write_shards = dying


def main(folder: Path, task: str, rank: int, size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size)}  # vLLM sets it
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if task == "jobs":
        for recipe in recipes(folder, "two"):
            burnish.run(burnish.load_config(recipe))
        return
    if task == "differ":
        recipe = recipes(folder, task)[0]
        rows = str((folder / "copy" if rank else folder) / "rows.jsonl")
        others = [f"train.lr={0.01 * (1 + rank)}", f"data.sources.0.path={rows}"]
        burnish.run(burnish.load_config(recipe, others))
    if task == "kill early":
        if rank == 1:
            spmd.inputs_of = die  # type: ignore[assignment]
        recipe = recipes(folder, task)[0]
        burnish.run(burnish.load_config(recipe, ["cluster.heartbeat_timeout_s=3"]))
    each = ["checkpoint.every_n_steps=1", "checkpoint.keep_last=4"]
    if task == "raise":
        if rank == size - 1:
            fail_in_third_step(task)
        burnish.run(burnish.load_config(recipes(folder, "faulty")[0], each))
    faulty = burnish.load_config(recipes(folder, "faulty")[3], each)
    if task == "kill":
        burnish.run(burnish.load_config(recipes(folder, "whole")[3], each))
        if rank == 1:
            fail_in_third_step(task)
        burnish.run(faulty)
    if task == "kill in a save" and rank == 1:
        die_in_save()
    burnish.run(faulty, resume=faulty.run_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))
