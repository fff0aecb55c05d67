"""Ranks that a launcher started, from its environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config import ConfigError, load_config
from burnish.config.launch import LaunchError, first_host, launched_rank, resume_command

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SFT: dict[str, Any] = {
    "job": "sft",
    "model": {"scratch": {"alphabet": "01"}},
    "data": {"sources": ["rows.jsonl"]},
    "train": {"train_batch_size": 4},
}


def test_torchrun_and_srun_describe_the_same_rank() -> None:
    slurm = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu[07-08],login1",
    }
    torchrun, srun = launched_rank(TORCHRUN), launched_rank(slurm)
    assert torchrun is not None and srun is not None
    assert (torchrun.rank, torchrun.size) == (srun.rank, srun.size) == (1, 2)
    assert (torchrun.address, torchrun.port, srun.address) == ("127.0.0.1", 29500, "gpu07")
    assert [first_host(text) for text in ("n1", "a[3,5]-ib,b2")] == ["n1", "a3-ib"]


@pytest.mark.parametrize(
    "environment",
    [{}, {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}],
    ids=["no launcher", "one rank", "a batch script"],
)
def test_a_single_process_is_no_rank(environment: dict[str, str]) -> None:
    assert launched_rank(environment) is None


@pytest.mark.parametrize("wrong", [{"RANK": "2"}, {"RANK": "x"}, {"MASTER_ADDR": ""}])
def test_inconsistent_variables_are_an_error(wrong: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=next(iter(wrong))):
        launched_rank({**TORCHRUN, **wrong})


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    config = load_config(SFT)
    assert (config.cluster.runtime, config.cluster.policy_ranks) == ("spmd", 2)
    with pytest.raises(ConfigError, match=r"offload_between_phases=.* with runtime=spmd"):
        load_config({**SFT, "cluster": {"offload_between_phases": ["policy"]}})
    for key, value in (("runtime", "ray"), ("policy_ranks", 3)):
        with pytest.raises(ConfigError, match=rf"cluster.{key}={value} contradicts the 2 ranks"):
            load_config({**SFT, "train": {"train_batch_size": 6}, "cluster": {key: value}})
    saved = {**SFT, "cluster": {"runtime": "ray", "policy_ranks": 4, "reference_ranks": 1}}
    assert load_config(saved, resumed=True).cluster == config.cluster


def test_the_command_of_a_resume_has_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume_command("sft", Path("runs/x")) == "burnish sft --resume runs/x"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for variable, program in (
        ("TORCHELASTIC_RUN_ID", "torchrun OPTIONS"),
        ("ACCELERATE_MIXED_PRECISION", "accelerate launch OPTIONS"),
    ):
        monkeypatch.setenv(variable, "no")
        command = resume_command("sft", Path("runs/x"))
        assert command == f"{program} -m burnish sft --resume runs/x"
