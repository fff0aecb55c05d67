"""Save the process state that vLLM changes, and restore it; release its GPU memory for other
processes. Nothing here imports vllm."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish import shm

_DISABLE = "TORCHDYNAMO_DISABLE"


def new_folder() -> Path:
    """Create a temporary folder for the config and for sockets; its name identifies this process.

    Folders of killed processes are removed first. The path is short, because the path of a socket
    is limited to 107 characters, of which vLLM's own name takes 37.
    """
    usual = tempfile.gettempdir()
    parent = Path(usual if len(usual) <= 25 else "/tmp")
    shm.sweep("vllm", parent)
    return Path(tempfile.mkdtemp(prefix=shm.prefix("vllm"), dir=parent))


@contextmanager
def process_kept() -> Iterator[None]:
    """Restore the random state of Python, numpy and torch, and ``torch.set_num_threads``, after the
    ``with`` block."""
    python, numbers = random.getstate(), np.random.get_state()
    set_threads = torch.set_num_threads
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_num_threads = set_threads


@contextmanager
def uncompiled_on_cpu() -> Iterator[None]:
    """Without a GPU, leave the functions of modules that are imported in the ``with`` block as they
    are: vLLM decorates some with ``torch.compile``, and the first log-probs would take 24 s. A
    trainer in this process may compile its layers before and after."""
    before = os.environ.get(_DISABLE)
    if not torch.cuda.is_available():
        os.environ[_DISABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_DISABLE, None)
        if before is not None:
            os.environ[_DISABLE] = before


def remove_traces(name: str | None) -> None:
    """Remove what vLLM on CPU leaves behind under ``name``: its workers' shared memory and
    rendezvous file.

    The folder of that file is kept: a store that outlives its engine reopens the file when it is
    garbage-collected, and retries for 300 s if the folder is missing.
    """
    if not name:
        return
    for segment in Path("/dev/shm").glob(f"{name}-*"):
        segment.unlink(missing_ok=True)
    (Path(tempfile.gettempdir()) / name).unlink(missing_ok=True)


@contextmanager
def keeping_default_group(*, keep: bool) -> Iterator[None]:
    """Prevent the destruction of the default process group inside the ``with`` block, if ``keep``.

    vLLM destroys it even if a trainer created it.
    """
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


class Sleep:
    """Releases and reallocates parts of the memory of ``llm``, vLLM's LLMEngine."""

    def __init__(self, llm: Any, *, on_cpu: bool) -> None:
        """Manage ``llm``. With ``on_cpu`` nothing is released, because vLLM has no sleep there."""
        self._llm, self._on_cpu = llm, on_cpu
        self._asleep: set[str] = set()

    def begin(self, *, drop_weights: bool) -> bool:
        """Free the cache, and move the weights to host memory or drop them.

        Returns whether this changed anything.
        """
        if self._on_cpu or self._asleep:
            return False
        self._llm.sleep(2 if drop_weights else 1)
        self._asleep = {"weights", "kv_cache"}
        return True

    def wake(self, *tags: str) -> None:
        """Reallocate the memory of ``tags`` ("weights", "kv_cache") if it was freed."""
        if tags_asleep := sorted(self._asleep.intersection(tags)):
            self._llm.wake_up(tags_asleep)
            self._asleep -= set(tags_asleep)
