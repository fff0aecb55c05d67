"""Trials of kernels that do not end: named, limited, and never mistaken for kernels that fail."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from burnish.models import attention_kernel, gpu
from burnish.models.attention_kernel import try_flash, try_newer
from burnish.models.gpu import KernelHangsError, limited_trial

CPU = torch.device("cpu")


class Records(logging.Handler):
    """Messages, and an event at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.first = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.first.set()


@pytest.fixture
def warnings() -> Iterator[Records]:
    records = Records()
    logging.getLogger("burnish").addHandler(records)
    yield records
    logging.getLogger("burnish").removeHandler(records)


def test_kernels_that_do_not_end_are_an_error_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "TRIAL_LIMIT_S", 0.1)
    never = threading.Event()
    try:
        with (
            pytest.raises(KernelHangsError, match=r"a call on cpu did not end.*; uninstall x"),
            limited_trial("a call", "uninstall x", CPU, synchronize=never.wait),
        ):
            pass
    finally:
        never.set()


def test_a_trial_that_takes_long_is_named_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, warnings: Records
) -> None:
    """(As a package that compiles its kernels at the first call.)"""
    monkeypatch.setattr(gpu, "TRIAL_NAMED_S", 0.01)
    with limited_trial("a small call", "uninstall x", CPU):
        assert warnings.first.wait(60)
    assert len(warnings.messages) == 1
    assert "waiting for a small call on cpu" in warnings.messages[0]
    assert warnings.messages[0].endswith("uninstall x")


def test_a_short_trial_waits_for_its_kernels_and_is_not_named(warnings: Records) -> None:
    ended = threading.Event()
    before = threading.active_count()
    with limited_trial("a small call", "uninstall x", CPU, synchronize=ended.set):
        assert not ended.is_set()
    assert ended.is_set()
    assert warnings.messages == []
    assert threading.active_count() <= before + 1  # the canceled timer may be ending


@pytest.mark.parametrize(
    ("newer", "way_out"),
    [(False, "set train.attention=sdpa"), (True, "uninstall flash-attn-3, or set train")],
)
def test_auto_does_not_fall_back_from_kernels_that_block_the_gpu(
    newer: bool, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []

    @contextmanager
    def hanging(what: str, way_out: str, device: torch.device) -> Iterator[None]:
        named.append(way_out)
        raise KernelHangsError(what)
        yield

    monkeypatch.setattr(attention_kernel, "limited_trial", hanging)
    try_newer.cache_clear()
    try_flash.cache_clear()
    with pytest.raises(KernelHangsError):
        if newer:
            try_newer("FA3", CPU, "fp32", 16, 2, window=False)
        else:
            try_flash(CPU, "fp32", 16)
    assert named[0].startswith(way_out)
