"""Memory is measured in bytes, on both kinds of system."""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from burnish.observe import memory


def test_held_memory_grows_by_what_is_allocated_and_the_peak_keeps_it() -> None:
    before = memory.current_rss_bytes()
    with mmap.mmap(-1, 64 << 20) as block:  # (malloc may reuse memory that other tests have freed)
        block.write(b"x" * (64 << 20))
        held = memory.current_rss_bytes()
    # The 64 MiB are written, so all are resident; half leaves room for pages given back.
    assert held - before > 32 << 20
    # The kernel may count a few pages per thread late; 1 MiB covers them.
    assert memory.peak_rss_bytes() >= held - (1 << 20)


@pytest.mark.parametrize(("platform", "factor"), [("linux", 1024), ("darwin", 1)])
def test_ru_maxrss_is_kibibytes_on_linux_and_bytes_on_macos(
    platform: str, factor: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)  # no /proc
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=5000))
    assert memory.peak_rss_bytes() == 5000 * factor


def test_without_an_initialised_gpu_there_are_no_gpu_metrics() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("this process uses a GPU")
    assert memory.cuda_memory() == {}
    assert set(memory.memory_metrics()) == {"memory/rss_bytes", "memory/peak_rss_bytes"}
