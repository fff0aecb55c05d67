"""Two runs and one run folder: one of them writes, whenever and however the other starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.checkpoint import CheckpointError
from burnish.config import JobConfig, load_config
from burnish.driver.errors import RunError
from burnish.driver.run_dir import locked_outputs
from burnish.observe.errors import RemovedError
from burnish.observe.metrics import read_metrics

Recipe = Callable[..., JobConfig]
Measured = Callable[[Path], list[dict[str, Any]]]

ORPHANS = """
import json, multiprocessing, os, subprocess, sys, time
from pathlib import Path

calls = []

def share_of_digits(response):
    "In call 40, start children of three kinds that outlive this process, which then ends at once."
    folder = Path(__file__).parent
    calls.append(1)
    if len(calls) == 40 and not (folder / "pids").exists():
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        served = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
        forked.start()
        served.start()
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        executed = subprocess.Popen(sleep, close_fds=False)
        (folder / "pids").write_text(json.dumps([forked.pid, served.pid, executed.pid]))
        os.kill(os.getpid(), 9)
    return sum(c.isdigit() for c in response) / 4
"""


def _digits(response: str) -> float:
    return sum(c.isdigit() for c in response) / 4


def _job(job: str, recipe: Recipe) -> JobConfig:
    """A run with a reward of the caller that is called in several steps (evaluate: in one)."""
    tree = recipe("grpo", "max_steps=3").model_dump(mode="json", exclude_unset=True)
    data = tree["data"] | {"sources": tree["data"]["sources"]}
    common = {"job": job, "run_dir": tree["run_dir"], "model": tree["model"]}
    common |= {"rewards": [{"kind": "function"}]}
    if job == "rl":
        return load_config(tree | common)
    if job == "generate":
        return load_config(common | {"data": data, "rollout": tree["rollout"]})
    if job == "score":
        return load_config(common | {"data": data, "batch_size": 4})
    return load_config(common | {"eval": {"data": data, "generate_max_len": 4}})


@pytest.mark.parametrize("job", ["rl", "generate", "score", "evaluate"])
def test_a_start_or_resume_in_the_folder_of_a_running_run_is_refused_and_changes_nothing(
    job: str, recipe: Recipe, measured: Measured, tmp_path: Path
) -> None:
    config = _job(job, recipe)
    alone = config.model_copy(update={"run_dir": str(tmp_path / "alone")})
    burnish.run(alone, rewards=_digits)
    run_dir, link = Path(config.run_dir), tmp_path / "link"
    refusals: list[str] = []
    link.symlink_to(run_dir)

    def refused(folder: Path, *, resumed: bool) -> None:
        second = config.model_copy(update={"run_dir": str(folder)})
        with pytest.raises(RunError) as caught:
            burnish.run(second, rewards=_digits, resume=folder if resumed else None)
        refusals.append(str(caught.value))

    def score(response: str) -> float:
        if not refusals:  # the metrics are empty
            refused(run_dir, resumed=False)
        elif len(refusals) == 1 and job != "evaluate" and read_metrics(run_dir):
            refused(link, resumed=True)
        return _digits(response)

    burnish.run(config, rewards=score)
    assert len(refusals) == 1 + (job != "evaluate")
    for text in refusals:
        assert f"process {os.getpid()} on host {socket.gethostname()}" in text
    assert measured(run_dir) == measured(Path(alone.run_dir))
    assert {path.name for path in run_dir.iterdir()} == {
        path.name for path in Path(alone.run_dir).iterdir()
    }


def _with_output(job: str, recipe: Recipe, folder: Path) -> tuple[JobConfig, str, Path]:
    """A run whose output is outside of its folder; the key that names it; the output."""
    tree = _job(job, recipe).model_dump(mode="json", exclude_unset=True)
    if job == "rl":
        output = folder / "out" / "model"
        tree["checkpoint"] = {"export_at_end": str(output)}
        return load_config(tree), "checkpoint.export_at_end", output
    output = folder / "out" / "rows.jsonl"
    return load_config(tree | {"output": str(output)}), "output", output


@pytest.mark.parametrize("job", ["rl", "generate", "score"])
def test_the_output_of_a_running_run_is_refused_to_a_run_in_another_folder(
    job: str, recipe: Recipe, tmp_path: Path
) -> None:
    config, key, output = _with_output(job, recipe, tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    second, _, _ = _with_output(job, recipe, tmp_path / "link")
    second = second.model_copy(update={"run_dir": str(tmp_path / "second")})
    refusals: list[str] = []
    calls: list[str] = []

    def score(response: str) -> float:
        if not refusals:
            with pytest.raises(RunError) as caught:
                burnish.run(second, rewards=lambda response: calls.append(response) or 0.0)
            refusals.append(str(caught.value))
        return _digits(response)

    burnish.run(config, rewards=score)
    assert calls == []
    (text,) = refusals
    assert text.startswith(f"{key}: ")
    assert f"process {os.getpid()} on host {socket.gethostname()}" in text
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    with pytest.raises(RunError, match="exists"):  # not written again
        burnish.run(second, rewards=_digits)


def test_an_export_beside_a_run_that_will_write_the_folder_is_refused(
    recipe: Recipe, tmp_path: Path
) -> None:
    finished = recipe("grpo", "max_steps=1", name="finished")
    burnish.run(finished)
    config, _, output = _with_output("rl", recipe, tmp_path)
    refusals: list[str] = []

    def score(response: str) -> float:
        if not refusals:
            with pytest.raises(CheckpointError) as caught:
                burnish.export(Path(finished.run_dir), output)
            refusals.append(str(caught.value))
        return _digits(response)

    burnish.run(config, rewards=score)
    assert str(output) in refusals[0] and f"process {os.getpid()} on host" in refusals[0]
    with pytest.raises(CheckpointError, match="not empty"):
        burnish.export(Path(finished.run_dir), output)


def test_a_transfer_folder_has_one_trainer(recipe: Recipe, tmp_path: Path) -> None:
    """On Ray, workers of one run would load the weights of the other."""
    sync, run_dir = {"kind": "disk", "folder": str(tmp_path / "weights")}, tmp_path / "run"
    tree = recipe("grpo").model_dump(mode="json", exclude_unset=True)
    config = load_config(tree | {"sync": sync, "cluster": {"runtime": "ray"}})
    with locked_outputs(config.output_locks(run_dir)):
        with pytest.raises(RunError, match=r"^sync\.folder: "):
            with locked_outputs(config.output_locks(tmp_path / "other")):
                pass
    assert list((tmp_path).glob("**/*.lock")) == []


@pytest.mark.parametrize("job", ["rl", "generate"])
def test_a_run_whose_folder_was_removed_ends_and_leaves_the_next_run_there_alone(
    job: str, recipe: Recipe, measured: Measured, tmp_path: Path
) -> None:
    config = _job(job, recipe)
    alone = config.model_copy(update={"run_dir": str(tmp_path / "alone")})
    burnish.run(alone, rewards=_digits)
    run_dir = Path(config.run_dir)
    removed = False

    def score(response: str) -> float:
        nonlocal removed
        if not removed and (run_dir / "metrics.jsonl").exists() and read_metrics(run_dir):
            removed = True
            shutil.rmtree(run_dir)
            burnish.run(config, rewards=_digits)
        return _digits(response) / 2

    with pytest.raises(RemovedError):
        burnish.run(config, rewards=score)
    assert measured(run_dir) == measured(Path(alone.run_dir))
    names = [{path.name for path in folder.rglob("*")} for folder in (run_dir, tmp_path / "alone")]
    assert names[0] == names[1]


def _run_at_once(config: JobConfig, barrier: Any, folders: Any) -> None:
    """Run ``config`` when the other process does, in the same second."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(0))
    time.strftime = lambda *_: stamp  # type: ignore[assignment]
    barrier.wait(60)
    folders.put((config.seed, str(burnish.run(config).run_dir)))


def test_two_evaluations_of_the_same_second_have_a_folder_each(
    recipe: Recipe, children: Any, tmp_path: Path
) -> None:
    tree = _job("evaluate", recipe).model_dump(mode="json", exclude_unset=True)
    tree |= {"run_dir": str(tmp_path / "runs" / "{job}-{time}")}
    tree |= {
        "rewards": [{"kind": "function", "function": f"{tmp_path}/my_reward.py:share_of_digits"}]
    }
    barrier, folders = children.context.Barrier(2), children.context.Queue()
    processes = [
        children.context.Process(
            target=_run_at_once, args=(load_config(tree | {"seed": seed}), barrier, folders)
        )
        for seed in (1, 2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    by_seed = dict(folders.get(timeout=10) for _ in processes)
    assert sorted(by_seed) == [1, 2] and len(set(by_seed.values())) == 2
    for seed, folder in by_seed.items():
        assert load_config(Path(folder) / "config.yaml").seed == seed
        assert len(read_metrics(Path(folder))) == 1


def test_a_run_resumes_at_once_after_kill_9_though_children_of_the_killed_process_live(
    recipe: Recipe, children: Any, measured: Measured, tmp_path: Path
) -> None:
    whole, killed = recipe("grpo", "max_steps=4", name="whole"), recipe("grpo", "max_steps=4")
    children.run(whole)
    (tmp_path / "my_reward.py").write_text(ORPHANS)
    process = children.start(killed)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    pids = json.loads((tmp_path / "pids").read_text())
    try:
        children.run(killed, resume=Path(killed.run_dir))
        for pid in pids:
            os.kill(pid, 0)  # raises if the child has ended: nothing was tried
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert measured(Path(killed.run_dir)) == measured(Path(whole.run_dir))
