"""``burnish plan --probe`` runs stages in new processes and stops before one that cannot fit."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fork_server
import psutil
import pytest
from typer.testing import CliRunner

from burnish import cli
from burnish.config import load_config
from burnish.plan import probe_command, probe_worker
from burnish.plan.hardware import this_machine
from burnish.plan.probe_command import probe_recipe
from burnish.plan.probe_stages import planned, probe_stages
from burnish.plan.shapes import PlanError

TREE: dict[str, Any] = {
    "job": "rl",
    "max_steps": 1,
    "model": {"scratch": {"hidden_size": 64, "num_layers": 4, "max_position_embeddings": 256}},
    "data": {"sources": ["none.jsonl"], "prompt_max_len": 32},
    "rewards": [{"kind": "function", "function": "none.py:score"}],
    "rollout": {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "generate_max_len": 32,
        "engine": {"kind": "local", "max_batch_size": 16},
    },
    "train": {"train_batch_size": 16, "micro_train_batch_size": 4},
}
SFT = {
    "job": "sft",
    "model": TREE["model"],
    "data": {"sources": ["none.jsonl"], "max_len": 64},
    "train": {"train_batch_size": 4, "micro_train_batch_size": 2},
}


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of probes."""
    monkeypatch.setattr(sys, "executable", fork_server.interpreter())


def test_stages_grow_from_short_rows_and_one_row_to_the_recipe() -> None:
    stages = probe_stages(load_config(TREE), this_machine())
    sizes = [
        (r.config.rollout.generate_max_len, r.config.train.micro_train_batch_size)  # type: ignore
        for r in stages
    ]
    assert sizes == [(8, 1), (16, 1), (32, 1), (32, 2), (32, 4)]
    peaks = [planned(r, this_machine())["forward/backward"].tensors for r in stages]
    assert peaks == sorted(peaks)


def test_a_probe_does_not_repeat_the_warnings_of_the_recipe(
    caplog: pytest.LogCaptureFixture, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its stages nor in its processes."""
    config = load_config(SFT, ["train.lr=0.5"])
    assert "lr=0.5" in caplog.text
    caplog.clear()
    stage = probe_stages(config, this_machine())[-1]
    task = {"config": stage.config.model_dump(mode="json"), "job": "sft", "engine_alone": False}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(task) + "\n"))
    monkeypatch.setattr(probe_worker, "_end_with_parent", lambda: None)
    monkeypatch.setattr(probe_worker, "probe", lambda config, _: {"lr": config.train.lr})
    monkeypatch.setattr(os, "_exit", lambda code: None)
    probe_worker.main()
    assert json.loads(capsys.readouterr().out) == {"lr": 0.5}
    assert not caplog.records


def test_stages_of_episodes_grow_from_short_conversations() -> None:
    episodes = {"environment": "none.py:Game", "max_tokens": 128}
    config = load_config(TREE, [f"rollout.episodes={json.dumps(episodes)}"])
    lengths = [
        r.config.resolve().role("policy").lengths for r in probe_stages(config, this_machine())
    ]
    assert [(found.prompt, found.rest) for found in lengths[:3]] == [(8, 24), (16, 48), (32, 96)]


def test_only_the_last_stage_measures_vllm_in_a_process_of_its_own() -> None:
    """Its weights and its cache, without the trainer; not with several processes."""
    config = load_config(TREE, ["rollout.engine={kind: vllm, max_num_seqs: 16}"])
    stages = probe_stages(config, this_machine())
    assert [stage.separate_engine for stage in stages] == [False] * 4 + [True]
    plans = planned(stages[-1], this_machine())
    found = plans["rollout"]
    assert found.alone and not any(p.alone for name, p in plans.items() if name != "rollout")
    assert 0 < found.tensors < plans["step"].tensors
    parts = load_config(TREE, ["rollout.engine={kind: vllm, tensor_parallel_size: 2}"])
    assert "rollout" not in planned(probe_stages(parts, this_machine())[-1], this_machine())


def test_a_checkpoint_larger_than_the_disk_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = probe_stages(load_config(SFT), this_machine())[-1]
    plans, said = planned(stage, this_machine()), list[str]()
    free = shutil.disk_usage("/")._replace(free=int(plans["checkpoint"].disk))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert set(probe_command._savable(plans, said.append)) == set(plans) - {"checkpoint"}
    assert "checkpoint is not measured: it writes" in said[0] and "set TMPDIR" in said[0]


def test_stages_with_several_ranks_come_last_and_are_limited_by_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    on_ray = ["cluster.runtime=ray", "cluster.policy_ranks=8", "train.micro_train_batch_size=2"]
    stages = probe_stages(load_config(TREE, on_ray), this_machine())
    assert [r.ranks for r in stages] == [1, 1, 1, 1, 2, 4]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_stage_is_within_10_percent_of_its_plan(capsys: Any, tmp_path: Path) -> None:
    """Live tensors are counted, as the plan counts them; a tenth is the planner's own limit."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(TREE))
    done = CliRunner().invoke(cli.app, ["plan", str(recipe), "--probe"])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    ratios = {
        phase: [float(row[3]) for row in rows if row[:1] == [phase]]
        for phase in ("rollout", "forward/backward", "step")
    }
    assert {len(found) for found in ratios.values()} == {5}
    for phase, found in ratios.items():
        assert all(0.9 < ratio < 1.1 for ratio in found), (phase, found)
    assert "correction factors (measured / planned, last completed stage): rollout" in done.output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_ranks_are_two_processes(sharding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    two = ["cluster.runtime=ray", "cluster.policy_ranks=2", f"train.engine.sharding={sharding}"]
    stages = probe_stages(load_config(SFT, two), this_machine())
    assert [r.ranks for r in stages] == [1, 1, 1, 1, 2]
    plans = planned(stages[-1], this_machine())
    found = probe_command._run(stages[-1], plans, on_gpu=False)
    assert isinstance(found, dict), found
    assert found["forward/backward"]["host"] > 50e6  # a Python process with torch
    assert (found["step"]["tensors"] is None) == (sharding == "full")


def test_probe_stops_before_a_stage_that_would_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stage is measured at 1.02 times its plan; the limit is between the plan of the third
    stage and that plan times 1.02."""
    config = load_config(TREE)
    stages = probe_stages(config, this_machine())
    tried: list[str] = []

    def measured(stage: Any, plans: Any, *, on_gpu: bool) -> dict[str, Any]:
        tried.append(stage.name)
        values = {"reserved": None, "host": 1.0, "seconds": 0.1}
        return {p: {"tensors": 1.02 * plan.tensors, **values} for p, plan in plans.items()}

    def need(index: int, factor: float) -> float:
        plans = planned(stages[index], this_machine()).values()
        return max(p.overhead + factor * p.tensors for p in plans)

    limit = (need(2, 1.0) + need(2, 1.02)) / 2 / probe_command.ROOM
    assert need(1, 1.02) < probe_command.ROOM * limit
    monkeypatch.setattr(probe_command, "_run", measured)
    monkeypatch.setattr(probe_command, "_free", lambda _: limit)
    said: list[str] = []
    result = probe_recipe(config, said.append)
    assert not result.completed and tried == [r.name for r in stages[:2]]
    assert result.factors["step"] == pytest.approx(1.02)
    assert any("skipped" in line for line in said)


def test_out_of_memory_in_a_rank_ends_the_probe_with_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = 'print(\'{"out_of_memory": "CUDA out of memory"}\')'
    monkeypatch.setattr(
        probe_command,
        "_start",
        lambda task: subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ),
    )
    said: list[str] = []
    assert not probe_recipe(load_config(SFT), said.append).completed
    assert any("out of memory: CUDA out of memory" in line for line in said)


def test_a_job_without_training_is_rejected() -> None:
    tree = {
        "job": "evaluate",
        "model": TREE["model"],
        "rewards": TREE["rewards"],
        "eval": {"data": TREE["data"], "generate_max_len": 8},
    }
    with pytest.raises(PlanError, match="the job evaluate trains no model"):
        probe_stages(load_config(tree), this_machine())


TEACHER = {"scratch": {"hidden_size": 96, "num_layers": 2, "max_position_embeddings": 256}}
PPO = [
    "algorithm.advantage=gae",
    "algorithm.kl.init_kl_coef=0.1",
    "train.train_batch_size=8",
    "train.micro_train_batch_size=4",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tree", "overrides", "expected"),
    [
        pytest.param(
            TREE,
            PPO,
            {
                "rollout",
                "log-probs",
                "forward/backward",
                "step",
                "log-probs (reference)",
                "log-probs (critic)",
                "forward/backward (critic)",
                "step (critic)",
                "checkpoint",
                "checkpoint (critic)",
            },
            id="ppo",
        ),
        pytest.param(
            {**SFT, "job": "rm"},
            [],
            {"forward/backward (reward)", "step (reward)", "checkpoint (reward)"},
            id="rm",
        ),
        pytest.param(
            {**SFT, "job": "preference"},
            [],
            {"forward/backward", "step", "checkpoint", "log-probs (reference)"},
            id="preference",
        ),
        pytest.param(
            {**SFT, "job": "distill", "teacher": {"model": TEACHER}},
            ["loss=jsd"],
            {"forward/backward", "step", "checkpoint", "log-probs (teacher)"},
            id="distill",
        ),
    ],
)
def test_every_role_and_phase_is_measured(
    tree: dict[str, Any], overrides: list[str], expected: set[str]
) -> None:
    """Within a tenth of the plan, the planner's own limit."""
    stage = probe_stages(load_config(tree, overrides), this_machine())[-1]
    plans = planned(stage, this_machine())
    assert set(plans) == expected
    found = probe_command._run(stage, plans, on_gpu=False)
    assert isinstance(found, dict), found
    saves = {phase for phase in plans if phase.startswith("checkpoint")}
    assert {phase for phase in plans if found[phase]["tensors"] is None} == saves
    ratios = {phase: found[phase]["tensors"] / plans[phase].tensors for phase in expected - saves}
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), ratios


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_of_4_bits_are_measured_as_such() -> None:
    """In a pass they are most of the memory. (The plan of a step is an upper bound.)"""
    tree = SFT | {"model": {"scratch": {"hidden_size": 256, "num_layers": 4}}}
    config = load_config(tree, ["model.lora.quantization=nf4"])
    stage = probe_stages(config, this_machine())[-1]
    plans = planned(stage, this_machine())
    found = probe_command._run(stage, plans, on_gpu=False)
    assert isinstance(found, dict), found
    ratio = found["forward/backward"]["tensors"] / plans["forward/backward"].tensors
    assert 0.9 < ratio < 1.1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_probe_leaves_no_process(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(TREE))
    python = os.environ[fork_server.PYTHON]  # a fork's processes are no children of its command
    command_line = [python, "-m", "burnish", "plan", str(recipe), "--probe"]
    parent = subprocess.Popen(command_line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    while not children and parent.poll() is None:
        children = psutil.Process(parent.pid).children()
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    _, left = psutil.wait_procs(children, timeout=60)
    assert children and not left
