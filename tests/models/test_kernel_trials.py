"""Trials of kernels that do not end: named, limited, and never mistaken for kernels that fail."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from compiling import compiles  # noqa: F401
from transformers import LlamaConfig

from burnish.models import attention_kernel, compiled_layers, flash_merge, fused_head, gpu
from burnish.models.attention_kernel import try_flash, try_newer
from burnish.models.deterministic import check_deterministic
from burnish.models.flash import FlashSwitch
from burnish.models.flash_merge import fused_merge, merge_by_torch
from burnish.models.fused_head import BY_TORCH, choose_head
from burnish.models.gpu import KernelHangsError, limited_trial
from burnish.models.logit_scaling import UNSCALED

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


def test_a_trial_that_compiles_is_named_later(
    monkeypatch: pytest.MonkeyPatch, warnings: Records
) -> None:
    monkeypatch.setattr(gpu, "TRIAL_NAMED_S", 0.01)
    with limited_trial("layers", "use off", CPU, compiling_s=0.02):
        assert warnings.first.wait(60)
    assert "for 0.03 s" in warnings.messages[0]


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


@contextmanager
def hangs(trial: str, way_out: str, device: torch.device, **options: float) -> Iterator[None]:
    """A trial whose kernels do not end."""
    yield
    raise KernelHangsError(f"{trial}; {way_out}")


def test_log_probs_by_pytorch_do_not_replace_kernels_that_block_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_head, "limited_trial", hangs)
    monkeypatch.setattr(fused_head, "device_problem", lambda kernels: None)
    monkeypatch.setattr(fused_head, "triton_kernels", lambda: BY_TORCH)
    with pytest.raises(KernelHangsError, match="log-probs; uninstall triton"):
        choose_head(CPU, torch.float32, 7, UNSCALED)


def test_a_wide_product_that_does_not_end_is_no_missing_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_head, "limited_trial", hangs)
    monkeypatch.setattr(fused_head, "accumulate_wide", lambda *tensors: None)
    with pytest.raises(KernelHangsError, match="uninstall triton"):
        fused_head.accumulates(CPU, torch.bfloat16)


def test_a_merge_by_pytorch_does_not_replace_a_kernel_that_blocks_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do torch's kernels replace a newer FlashAttention in whose pass it happens."""
    monkeypatch.setattr(flash_merge, "limited_trial", hangs)
    monkeypatch.setattr(flash_merge, "triton_merge", lambda: merge_by_torch)
    monkeypatch.setattr("burnish.models.flash.select", lambda name: None)
    switch = FlashSwitch(may_fall_back=True, newer="FA3")
    with pytest.raises(KernelHangsError, match=r"merges; .* train.attention=sdpa"):
        switch.run(
            lambda: fused_merge(CPU, torch.float32, 3, 24), (torch.ones(1), *[torch.ones(1)] * 2)
        )
    assert switch.newer == "FA3" and not switch.fallbacks


@pytest.mark.parametrize("key", ["compile", "deterministic"])
def test_passes_of_a_small_copy_are_limited(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "limited_trial", hangs)
    monkeypatch.setattr("burnish.models.deterministic.limited_trial", hangs)
    monkeypatch.setattr(compiled_layers.CompiledLayers, "backend", "aot_eager")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 40, "rms_norm_eps": 3e-6}
    config = LlamaConfig(num_hidden_layers=1, intermediate_size=48, **sizes)
    with pytest.raises(KernelHangsError, match=f"train.{key}="):
        if key == "compile":
            compiled_layers.device_problem(config, CPU, "fp32")
        else:
            check_deterministic(config, CPU)
