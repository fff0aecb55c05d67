"""Detection of ranks that a launcher started: torchrun, accelerate or srun. Imports nothing heavy.

A launcher starts one process per rank and describes it in environment variables. Every rank then
runs the same command, so the number of data-parallel ranks comes from the launcher instead of the
recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.errors import BurnishError

_RANK_KEYS = (
    "runtime",
    "ray_address",
    "layout",
    "policy_ranks",
    "reference_ranks",
    "teacher_ranks",
    "critic_ranks",
    "rollout_workers",
    "gpus_per_worker",
)
"""Keys of ``cluster`` that a launcher replaces in the saved recipe of a run that is resumed."""


_DESCRIBING = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
)
"""Variables that errors about a launcher list, if they are set."""
_MPI = {"OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}
"""Number of processes that mpirun started (Open MPI; MPICH and Intel MPI) -> rank."""
_START = (
    "Start all ranks with torchrun, accelerate launch or srun, which set all of RANK, WORLD_SIZE, "
    "LOCAL_RANK, MASTER_ADDR and MASTER_PORT (LOCAL_RANK=0 if a node has one rank); to run a "
    "single process, unset those that are set"
)


class LaunchError(BurnishError, RuntimeError):
    """A launcher's environment variables are incomplete or inconsistent."""


@dataclass(frozen=True)
class LaunchedRank:
    """This process among the ranks that a launcher started."""

    rank: int
    size: int
    local_rank: int
    """Number of this rank among those of its node, which selects its GPU."""
    local_size: int
    """Number of ranks on this node."""
    address: str
    """Address of rank 0 (torchrun: of its rendezvous)."""
    port: int
    launcher: str
    """Launcher and the variable that contains the number of ranks, for messages."""

    def environment(self) -> dict[str, str]:
        """Return the variables by which torch and DeepSpeed find the other ranks."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def launched_rank(environment: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Return this process's rank; None if no launcher started it, or started only this process.

    ``environment``: None means that of the process. An empty variable counts as unset. Variables of
    torchrun (``RANK``, ``WORLD_SIZE``) have priority over those of a SLURM step, which may complete
    them. Raises LaunchError if the variables are inconsistent, because each process would then run
    the entire job and write the same run folder.
    """
    variables = os.environ if environment is None else environment
    values = {name: value for name, value in variables.items() if value}
    # A batch script and salloc's shell have SLURM_NTASKS too; only a step has its own count. A Ray
    # that a step started passes the variables of the step to its workers and jobs, which are no
    # tasks.
    tasks = 0
    if "SLURM_STEP_NUM_TASKS" in values and "RAY_RAYLET_PID" not in values:
        tasks = _number(values, "SLURM_STEP_NUM_TASKS", least=1)
    if "RANK" in values and "WORLD_SIZE" in values:
        return _from_torchrun(values, tasks)
    if tasks > 1:
        return _from_slurm(values, tasks)
    _check_single(values)
    return None


def resume_command(job: str, run_dir: Path) -> str:
    """Return the command that resumes a run of this process, for messages. ``OPTIONS``: those of
    the launcher, which this process does not know."""
    rank = launched_rank()
    if rank is None:
        return f"burnish {job} --resume {run_dir}"
    known = {
        "torchrun": "torchrun OPTIONS",
        "accelerate": "accelerate launch OPTIONS",
        "srun": "srun OPTIONS python",
    }
    program = known.get(rank.launcher.partition(" ")[0], "LAUNCHER OPTIONS python")
    return f"{program} -m burnish {job} --resume {run_dir}"


def _from_torchrun(values: Mapping[str, str], tasks: int) -> LaunchedRank | None:
    size, rank = _number(values, "WORLD_SIZE", least=1), _number(values, "RANK")
    if rank >= size:
        raise _inconsistent(values, f"RANK={rank} is not below WORLD_SIZE={size}", _START)
    if size < tasks:
        raise _inconsistent(
            values,
            f"WORLD_SIZE={size} is less than SLURM_STEP_NUM_TASKS={tasks}, so several of the "
            "tasks that srun started would run the same job",
            "Unset RANK and WORLD_SIZE (srun alone describes the ranks), give torchrun --nnodes "
            "and --rdzv-endpoint, or start independent jobs with srun --ntasks 1",
        )
    if size == 1:
        return None
    if tasks == size and values.get("SLURM_PROCID") == str(rank):
        values = {**_from_slurm(values, tasks).environment(), **values}
    elastic, hugging_face = "TORCHELASTIC_RUN_ID" in values, "ACCELERATE_MIXED_PRECISION" in values
    name = "accelerate" if hugging_face else "torchrun" if elastic else "the launcher"
    launched = LaunchedRank(
        rank=rank,
        size=size,
        local_rank=_number(values, "LOCAL_RANK"),
        local_size=_number(values, "LOCAL_WORLD_SIZE", least=1, default=size),
        address=_text(values, "MASTER_ADDR"),
        port=_port(values),
        launcher=f"{name} (WORLD_SIZE)",
    )
    if launched.local_rank >= launched.local_size or launched.local_size > size:
        raise _inconsistent(
            values,
            f"LOCAL_RANK={launched.local_rank}, LOCAL_WORLD_SIZE={launched.local_size} and "
            f"WORLD_SIZE={size} must increase",
            _START,
        )
    return launched


def _from_slurm(values: Mapping[str, str], tasks: int) -> LaunchedRank:
    rank = _number(values, "SLURM_PROCID")
    if rank >= tasks:
        raise _inconsistent(
            values, f"SLURM_PROCID={rank} is not below SLURM_STEP_NUM_TASKS={tasks}", _START
        )
    for name, value in (("RANK", rank), ("WORLD_SIZE", tasks)):
        if _number(values, name, default=value) != value:
            raise _inconsistent(
                values,
                f"{name}={values[name]}, but the SLURM step has {value}",
                f"Unset {name} (srun describes the ranks), or set RANK, WORLD_SIZE, LOCAL_RANK, "
                "MASTER_ADDR and MASTER_PORT for every process",
            )
    nodes = values.get("SLURM_STEP_NODELIST") or _text(values, "SLURM_JOB_NODELIST")
    job = _number(values, "SLURM_JOB_ID", default=0)
    step = _number(values, "SLURM_STEP_ID", default=0)
    on_node = re.match(r"\d+", values.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return LaunchedRank(
        rank=rank,
        size=tasks,
        local_rank=_number(values, "SLURM_LOCALID"),
        local_size=int(on_node[0]) if on_node else tasks,
        address=values.get("MASTER_ADDR") or first_host(nodes),
        port=_port(values, default=20_000 + (job * 7 + step) % 20_000),
        launcher="srun (SLURM_STEP_NUM_TASKS)",
    )


def _check_single(values: Mapping[str, str]) -> None:
    """Raise LaunchError if some variables say that this process is one of several ranks."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in values and (name == "RANK" or values[name] != "1"):
            raise _inconsistent(values, f"{name}={values[name]}, but {other} is not set", _START)
    for name, alone in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("SLURM_PROCID", 0)):
        if _number(values, name, default=alone) != alone:
            count = "SLURM_STEP_NUM_TASKS is" if "SLURM" in name else "RANK and WORLD_SIZE are"
            if name == "SLURM_PROCID" and "RAY_RAYLET_PID" in values:
                continue  # of the step that started Ray
            raise _inconsistent(values, f"{name}={values[name]}, but {count} not set", _START)
    for name, rank in _MPI.items():
        size = _number(values, name, least=1, default=1)
        if size > 1:
            raise _inconsistent(
                values,
                f"mpirun started {size} processes ({name}), each of which would run the job",
                f"Start with torchrun, or set RANK=${rank}, WORLD_SIZE=${name}, LOCAL_RANK, "
                "MASTER_ADDR and MASTER_PORT in each process",
            )


def _inconsistent(values: Mapping[str, str], problem: str, fix: str) -> LaunchError:
    """Return the error, with all variables that describe ranks."""
    listed = ", ".join(f"{name}={values[name]}" for name in _DESCRIBING if name in values)
    return LaunchError(
        f"the environment variables of a launcher are inconsistent: {problem} (set are {listed}). "
        f"{fix}"
    )


def first_host(node_list: str) -> str:
    """Return the first host of SLURM's node list.

    >>> [first_host(text) for text in ("n1", "gpu[07-12,20],login1", "a[3,5]-ib,b2")]
    ['n1', 'gpu07', 'a3-ib']
    """
    name = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", node_list)
    if name is None or not name[0]:
        raise LaunchError(f"SLURM's node list {node_list!r} names no host; set MASTER_ADDR")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name[0])


def _text(values: Mapping[str, str], name: str) -> str:
    text = values.get(name)
    if not text:
        raise _inconsistent(values, f"{name} is not set", _START)
    return text


def _number(
    values: Mapping[str, str], name: str, *, least: int = 0, default: int | None = None
) -> int:
    if default is not None and name not in values:
        return default
    text = _text(values, name)
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        problem = f"{name}={text!r} is not a number of at least {least}"
        raise _inconsistent(values, problem, _START)
    return int(text)


def _port(values: Mapping[str, str], default: int | None = None) -> int:
    port = _number(values, "MASTER_PORT", least=1, default=default)
    if port > 65_535:
        raise _inconsistent(values, f"MASTER_PORT={port} is not a port (1 to 65535)", _START)
    return port


def use_launched_ranks(tree: dict[str, Any], rank: LaunchedRank, *, resumed: bool) -> Iterator[str]:
    """Set ``cluster.runtime`` and ``cluster.policy_ranks`` of a recipe to what a launcher started.
    Yield an error for each key that contradicts it.

    ``resumed``: the recipe is the saved one of a run. Its ranks are replaced instead.
    """
    cluster = tree.setdefault("cluster", {})
    if not isinstance(cluster, dict):
        return  # reported by validation
    if resumed:
        for key in _RANK_KEYS:
            cluster.pop(key, None)
    runtime = cluster.setdefault("runtime", "spmd")
    if runtime != "spmd":
        yield (
            f"cluster.runtime={runtime} contradicts the {rank.size} ranks that {rank.launcher} "
            "started, each of which would run the entire job; remove cluster.runtime, or start "
            "one process without the launcher"
        )
    ranks = cluster.setdefault("policy_ranks", rank.size)
    if ranks != rank.size:
        yield (
            f"cluster.policy_ranks={ranks} contradicts the {rank.size} ranks that "
            f"{rank.launcher} started; remove cluster.policy_ranks, or start {ranks} ranks"
        )
