"""Memory peaks by phase compared with the plan, and the report of a run out of memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import burnish
from burnish import cli
from burnish.checkpoint import CheckpointStore
from burnish.config import JobConfig
from burnish.jobs import rl as rl_job
from burnish.observe import timeline
from burnish.observe.metrics import read_metrics
from burnish.plan.oom import RunOutOfMemoryError, suggestions
from burnish.plan.plan_vs_actual import MeasuredPeak, plan_vs_actual, plan_vs_actual_text
from burnish.runtime.ray import runtime as ray_runtime
from burnish.runtime.ray import worker_group
from burnish.watch.lanes import lanes_of

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
FULL = "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``full_at(call)``: that call of the policy's loss runs out of memory."""
    plain = rl_job.policy_objective

    def install(call: int, error: type[Exception] = RuntimeError, text: str = FULL) -> None:
        def made(*args: Any, **kwargs: Any) -> Any:
            loss, calls = plain(*args, **kwargs), [0]

            def failing(outputs: Any, batch: Any) -> Any:
                calls[0] += 1
                if calls[0] == call:
                    raise error(text)
                return loss(outputs, batch)

            return failing

        monkeypatch.setattr(rl_job, "policy_objective", made)

    return install


def test_every_phase_of_a_step_has_its_peak_and_its_plan(
    rl: MakeConfig, reward: Reward, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rl("algorithm.kl.init_kl_coef=0.01", "checkpoint.every_n_steps=1")
    monkeypatch.setattr(timeline, "_SAVE_EVERY_S", 0.0)
    written_at: list[float] = []

    def watching(response: str) -> float:
        if (Path(config.run_dir) / "memory.json").exists():
            written_at.append(time.monotonic())
        return reward(response)

    result = burnish.run(config, rewards=watching)
    assert written_at, "a working run writes its memory, too"
    lines = read_metrics(result.run_dir)
    for phase in ("rollout", "reference", "train", "optim", "sync"):
        name = f"memory/{phase}/host_peak_bytes"
        assert all(name in line for line in lines[-2:]), name
        # A Python process with torch is far above 50 MB, and this machine has less than 16 TB.
        assert 50e6 < lines[-1][name] < 16e12
    assert "memory/load/host_peak_bytes" in lines[0]
    assert "memory/checkpoint/host_peak_bytes" in lines[1]  # the checkpoint of step 1
    assert not any("rank" in name for name in lines[-1])
    table = (result.run_dir / "memory.txt").read_text()
    row = next(line for line in table.splitlines() if line.split()[1:2] == ["train"])
    assert row.split()[0] == "all" and float(row.split()[2]) > 0
    page = (result.run_dir / "report.html").read_text()
    assert '<section id="memory">' in page and "<td>checkpoint</td>" in page


def test_only_the_phase_with_a_larger_allocation_has_a_higher_peak(
    rl: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward takes 200 MB and gives them back: its phase has them, the update has not."""

    def hungry(response: str) -> float:
        torch.ones(50_000_000)  # fp32
        return float(len(response))

    result = burnish.run(rl("max_steps=3"), rewards=hungry)
    last = read_metrics(result.run_dir)[-1]
    more = last["memory/reward/host_peak_bytes"] - last["memory/train/host_peak_bytes"]
    # Pages that the process gave back or took meanwhile: less than half of it.
    assert more > 100e6
    assert last["memory/peak_rss_bytes"] >= last["memory/reward/host_peak_bytes"]


def test_out_of_memory_report_has_the_phase_and_suggestions_and_the_run_can_resume(
    rl: MakeConfig, reward: Reward, full_at: Callable[..., None], tmp_path: Path
) -> None:
    config = rl("max_steps=3", "checkpoint.every_n_steps=1", "train.micro_train_batch_size=8")
    full_at(5)  # two micro-batches a step: the third step
    with pytest.raises(RunOutOfMemoryError) as raised:
        burnish.run(config, rewards=reward)
    run_dir = tmp_path / "run"
    text = (run_dir / "oom.txt").read_text()
    assert text.strip() in str(raised.value)
    assert text.startswith("out of memory in forward/backward of the policy")
    assert "you tried to allocate 64 bytes" in text
    assert "host planned" in text and "rollout" in text
    order = ["on_oom=retry_smaller", "micro_train_batch_size=4", "gradient_checkpointing=true"]
    places = [text.index(words) for words in [*order, "generate_max_len=2"]]
    assert places == sorted(places)
    assert "same planned memory" in text.split("on_oom=retry_smaller")[1].split("\n")[1]
    newest = CheckpointStore(run_dir / "checkpoints", keep_last=1, best_mode="max").latest()
    assert newest is not None and str(newest) in text and f"--resume {run_dir}" in text
    assert "Memory" in (run_dir / "report.html").read_text()
    full_at(10**9)
    again = burnish.run(config, rewards=reward, resume=run_dir)
    assert [line["step"] for line in read_metrics(again.run_dir)] == [1, 2, 3]
    assert not (run_dir / "oom.txt").exists()


def test_the_command_reports_out_of_memory_without_a_traceback(
    rl: MakeConfig, full_at: Callable[..., None], tmp_path: Path
) -> None:
    full_at(1, torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB")
    recipe = tmp_path / "recipe.yaml"
    config = rl()
    (tmp_path / "scores.py").write_text("def score(response):\n    return float(len(response))\n")
    tree = json.loads(config.model_dump_json())
    tree["rewards"] = [{"kind": "function", "function": f"{tmp_path / 'scores.py'}:score"}]
    recipe.write_text(json.dumps(tree))
    done = CliRunner().invoke(cli.app, ["rl", str(recipe)])
    assert done.exit_code == 2, done.output
    assert "error: out of memory in forward/backward" in done.output
    assert "Traceback" not in done.output
    assert "No checkpoint was written yet" in done.output


def test_oom_retries_are_counted_in_the_metrics(
    rl: MakeConfig, reward: Reward, full_at: Callable[..., None]
) -> None:
    plain = burnish.run(rl(), rewards=reward)
    full_at(2)
    retried = burnish.run(
        rl("train.on_oom=retry_smaller", "run_dir={}".format(plain.run_dir.with_name("again"))),
        rewards=reward,
    )
    counts = [line["train/oom_retries"] for line in read_metrics(retried.run_dir)]
    assert counts == [0, 1]
    assert "train/oom_retries" not in plain.metrics
    # fp32 sums in another order.
    assert retried.metrics["train/grad_norm"] == pytest.approx(
        plain.metrics["train/grad_norm"], rel=1e-5
    )


def test_other_errors_are_not_treated_as_out_of_memory(
    rl: MakeConfig, reward: Reward, full_at: Callable[..., None]
) -> None:
    full_at(1, RuntimeError, "shapes do not match")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        burnish.run(rl(), rewards=reward)


def test_in_a_rollout_fewer_concurrent_samples_are_suggested_first(rl: MakeConfig) -> None:
    first = next(suggestions(rl(), "rollout"))
    assert first.overrides[0].startswith("rollout.engine.max_batch_size=")


def test_the_maximum_over_ranks_is_shown_and_every_rank_is_saved() -> None:
    ranks = [
        MeasuredPeak("policy", 0, "train", 3e9, 10e9, 12e9),
        MeasuredPeak("policy", 1, "train", 2e9, 11e9, 11.5e9),
    ]
    line = plan_vs_actual(None, ranks)[0]
    assert (line.host, line.allocated, line.reserved) == (3e9, 11e9, 12e9)
    assert line.ranks == (10e9, 11e9)
    assert "11.00" in plan_vs_actual_text([line])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_ray_every_worker_reports_and_out_of_memory_names_its_rank(
    ray_cluster: Any,
    rl: MakeConfig,
    reward: Reward,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    on_ray = ["cluster.runtime=ray", "cluster.policy_ranks=2", "cluster.rollout_workers=2"]
    result = burnish.run(rl(*on_ray), rewards=reward)
    last = read_metrics(result.run_dir)[-1]
    for phase in ("rollout", "rollout_sync", "train", "optim", "sync"):
        assert last[f"memory/{phase}/host_peak_bytes"] > 50e6, phase
        assert last[f"memory/{phase}/peak_rank"] in (0, 1)
    assert last["memory/controller/host_peak_bytes"] > 50e6
    kept = json.loads((result.run_dir / "memory.json").read_text())["lines"]
    ranks = {(line["role"], line["phase"]): len(line["ranks"]) for line in kept}
    assert ranks["policy", "train"] == 2 and ranks["rollout", "rollout"] == 2
    assert ranks["policy", "checkpoint"] == 2 and ranks["controller", "controller"] == 1
    planned = {(line["role"], line["phase"]): line["host_planned"] for line in kept}
    assert planned["policy", "train"] and planned["rollout", "rollout"]
    lanes = lanes_of(result.run_dir)
    assert lanes is not None
    spans = {
        lane["name"]: [
            (start, start + length)
            for start, length, phase in lane["spans"]
            if lanes["phases"][phase] in ("train", "rollout")
        ]
        for lane in lanes["lanes"]
    }
    for name, role in [("policy", "train"), ("rollout", "rollout")]:
        for rank in (0, 1):
            work = spans[f"{name} {rank}"]
            assert work, "each worker has spans of its own"
            for start, end in work:  # inside of a call of the controller, on one machine's clock
                assert any(a - 0.1 <= start and end <= b + 0.1 for a, b in spans[role])

    plain = rl_job.policy_objective

    def made(*args: Any, **kwargs: Any) -> Any:
        loss = plain(*args, **kwargs)

        def failing(outputs: Any, batch: Any) -> Any:
            from torch import distributed

            if distributed.get_rank() == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return loss(outputs, batch)

        return failing

    monkeypatch.setattr(rl_job, "policy_objective", made)
    for module, limit in ((worker_group, "_OTHER_RANKS_S"), (ray_runtime, "_USAGE_TIMEOUT_S")):
        monkeypatch.setattr(module, limit, 1.0)  # rank 0 waits for rank 1
    with pytest.raises(RunOutOfMemoryError) as raised:
        burnish.run(rl(*on_ray, f"run_dir={tmp_path / 'full'}"), rewards=reward)
    assert "in rank 1 of the policy" in str(raised.value)
    assert "train.engine.sharding=full" in str(raised.value)
