"""Save the process state that vLLM changes, and restore it. Nothing here imports vllm."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch


def new_folder() -> Path:
    """A temporary folder for the config and for sockets, with a short path: a socket's has at most
    107 characters."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="burnish-vllm-", dir=usual if len(usual) < 40 else "/tmp"))


@contextmanager
def process_kept() -> Iterator[None]:
    """Inside, seeding Python, numpy and torch has no effect on what follows, and the process's
    right to set its number of threads cannot be taken."""
    python, numbers = random.getstate(), np.random.get_state()
    set_threads = torch.set_num_threads
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_num_threads = set_threads


def remove_traces(name: str | None) -> None:
    """Remove what vLLM on CPU leaves under ``name``: its workers' shared memory, and the file by
    which they met. (Not the folder of that file: a store that outlives its engine opens the file
    once more when it is collected, and where the folder is gone it tries for 300 s.)"""
    if not name:
        return
    for segment in Path("/dev/shm").glob(f"{name}-*"):
        segment.unlink(missing_ok=True)
    (Path(tempfile.gettempdir()) / name).unlink(missing_ok=True)


@contextmanager
def keeping_default_group(*, keep: bool) -> Iterator[None]:
    """Inside, the process's default group is not ended (vLLM ends it even where a trainer made
    it)."""
    end = torch.distributed.destroy_process_group

    def end_others(group: Any = None) -> None:
        if group is not None and group is not torch.distributed.group.WORLD:
            end(group)

    if keep:
        torch.distributed.destroy_process_group = end_others
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = end
