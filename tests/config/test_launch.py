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


SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu07",
}
SINGLE: dict[str, dict[str, str]] = {
    "no launcher": {},
    "torchrun with one rank": {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    "the number of ranks alone": {"WORLD_SIZE": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
    "accelerate launch with one process": {
        "ACCELERATE_USE_CPU": "True",
        "ACCELERATE_MIXED_PRECISION": "no",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    },
    "a batch script": {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},
    "an interactive shell of one task": {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "1",
    },
    "DeepSpeed's own variable": {"LOCAL_RANK": "0"},
    "empty variables": {"RANK": "", "WORLD_SIZE": ""},
    "mpirun with one process": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    "a job of a Ray that srun started": {**SRUN, "RAY_RAYLET_PID": "7"},
    "the same in a step without a count": {"SLURM_PROCID": "3", "RAY_RAYLET_PID": "7"},
}


@pytest.mark.parametrize("environment", SINGLE.values(), ids=list(SINGLE))
def test_a_single_process_is_no_rank(environment: dict[str, str]) -> None:
    assert launched_rank(environment) is None


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TORCHRUN.items() if name not in names}


INCONSISTENT: list[tuple[dict[str, str], str]] = [
    (without("WORLD_SIZE"), "RANK=1, LOCAL_RANK=1"),
    ({"RANK": "0"}, "RANK=0, but WORLD_SIZE"),
    (without("RANK"), "WORLD_SIZE=2, but RANK is not set"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
    (without("RANK", "WORLD_SIZE"), "LOCAL_RANK=1, but RANK"),
    ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2, but RANK"),
    (without("LOCAL_RANK"), "LOCAL_RANK=0"),
    (without("MASTER_ADDR"), "MASTER_ADDR is not set"),
    (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    (without("MASTER_PORT"), "MASTER_PORT is not set"),
    (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
    (TORCHRUN | {"RANK": "2"}, "below WORLD_SIZE=2"),
    (TORCHRUN | {"WORLD_SIZE": "1"}, "below WORLD_SIZE=1"),
    (TORCHRUN | {"RANK": "x"}, "RANK='x'"),
    (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
    (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a number"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2 and WORLD_SIZE=2"),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=1, LOCAL_WORLD_SIZE=4 and WORLD_SIZE=2"),
    (SRUN | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but"),
    (SRUN | {"RANK": "0"}, "RANK=0, but the"),
    (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "than SLURM_STEP_NUM_TASKS=2"),
    (SRUN | {"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
    (SRUN | {"SLURM_PROCID": "2"}, "SLURM_PROCID=2"),
    (SRUN | {"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
    (SRUN | {"SLURM_STEP_NUM_TASKS": ""}, "SLURM_PROCID=1, but SLURM_STEP_NUM_TASKS"),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, r"RANK=\$PMI_RANK, WORLD_SIZE=\$PMI_SIZE"),
]


@pytest.mark.parametrize(("environment", "message"), INCONSISTENT)
def test_inconsistent_variables_are_an_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launched_rank(environment)


def test_variables_of_a_slurm_step_complete_those_of_torch() -> None:
    """A script that exports WORLD_SIZE, and a wrapper that also sets RANK, in every task."""
    alone = launched_rank(SRUN)
    assert alone is not None
    assert launched_rank({**SRUN, "WORLD_SIZE": "2"}) == alone
    wrapped = launched_rank({**SRUN, "WORLD_SIZE": "2", "RANK": "1"})
    assert wrapped is not None and wrapped.environment() == alone.environment()
    # torchrun in each of two tasks: four ranks, described by torchrun
    nested = launched_rank({**SRUN, **TORCHRUN, "RANK": "3", "WORLD_SIZE": "4"})
    assert nested is not None and (nested.rank, nested.size) == (3, 4)


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
