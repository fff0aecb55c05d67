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

    ``environment``: None means that of the process. Variables of torchrun (``RANK``,
    ``WORLD_SIZE``) have priority over those of a SLURM step. Raises LaunchError if a variable is
    missing or has an impossible value.
    """
    values = os.environ if environment is None else environment
    if "RANK" in values and "WORLD_SIZE" in values:
        return _from_torchrun(values)
    # A batch script and salloc's shell have SLURM_NTASKS too; only a step has its own count.
    if "SLURM_PROCID" in values and "SLURM_STEP_NUM_TASKS" in values:
        return _from_slurm(values)
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


def _from_torchrun(values: Mapping[str, str]) -> LaunchedRank | None:
    size = _number(values, "WORLD_SIZE", least=1)
    if size == 1:
        return None
    elastic, hugging_face = "TORCHELASTIC_RUN_ID" in values, "ACCELERATE_MIXED_PRECISION" in values
    name = "accelerate" if hugging_face else "torchrun" if elastic else "the launcher"
    found = LaunchedRank(
        rank=_number(values, "RANK"),
        size=size,
        local_rank=_number(values, "LOCAL_RANK"),
        local_size=_number(values, "LOCAL_WORLD_SIZE", least=1, default=size),
        address=_text(values, "MASTER_ADDR"),
        port=_number(values, "MASTER_PORT"),
        launcher=f"{name} (WORLD_SIZE)",
    )
    if found.rank >= size:
        raise LaunchError(f"RANK={found.rank} is not below WORLD_SIZE={size}; check the launcher")
    return found


def _from_slurm(values: Mapping[str, str]) -> LaunchedRank | None:
    size = _number(values, "SLURM_STEP_NUM_TASKS", least=1)
    if size == 1:
        return None
    nodes = values.get("SLURM_STEP_NODELIST") or _text(values, "SLURM_JOB_NODELIST")
    job = _number(values, "SLURM_JOB_ID", default=0)
    step = _number(values, "SLURM_STEP_ID", default=0)
    tasks = re.match(r"\d+", values.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return LaunchedRank(
        rank=_number(values, "SLURM_PROCID"),
        size=size,
        local_rank=_number(values, "SLURM_LOCALID"),
        local_size=int(tasks[0]) if tasks else size,
        address=values.get("MASTER_ADDR") or first_host(nodes),
        port=_number(values, "MASTER_PORT", default=20_000 + (job * 7 + step) % 20_000),
        launcher="srun (SLURM_STEP_NUM_TASKS)",
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
    found = values.get(name)
    if not found:
        raise LaunchError(
            f"the environment variable {name} is not set, but others describe the ranks of a "
            "launcher; start with torchrun, accelerate launch or srun, or unset RANK and WORLD_SIZE"
        )
    return found


def _number(
    values: Mapping[str, str], name: str, *, least: int = 0, default: int | None = None
) -> int:
    if default is not None and name not in values:
        return default
    text = _text(values, name)
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(
            f"the environment variable {name}={text!r} is not a number of at least {least}; start "
            "with torchrun, accelerate launch or srun, or unset RANK and WORLD_SIZE"
        )
    return int(text)


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
