"""What vLLM takes from the process that it runs in, and how it is given back. Nothing here imports
vllm."""

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
    """A temporary folder whose path is short: sockets are made in it, and a socket's path has at
    most 107 characters."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="burnish-vllm-", dir=usual if len(usual) < 40 else "/tmp"))


@contextmanager
def process_kept(folder: Path) -> Iterator[None]:
    """Inside, seeding Python, numpy and torch has no effect on what follows, the process's right to
    set its number of threads cannot be taken, and temporary files go to ``folder``."""
    python, numbers = random.getstate(), np.random.get_state()
    set_threads, temporary = torch.set_num_threads, tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_num_threads, tempfile.tempdir = set_threads, temporary


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
