"""torch settings of a process that computes on a GPU, and limits of trials of its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread, Timer

import torch

from burnish.models.paths import ModelError

log = logging.getLogger("burnish")

TRIAL_NAMED_S = 20.0
"""Seconds after which a trial is named."""
TRIAL_LIMIT_S = 60.0
"""Seconds that the kernels of a trial may take once all are launched."""


class KernelHangsError(ModelError):
    """Kernels of a trial do not end. They block their GPU until the process ends."""


def set_up_gpu(device: torch.device) -> None:
    """Make ``device`` (without an index: the current GPU) the process's current GPU and configure
    torch for it. No effect on a CPU.

    cuDNN attention is disabled, although recent torch prefers it on Hopper and Blackwell. It builds
    an execution plan for every new combination of batch size and lengths (forward and backward: 92
    to 145 ms on an H200). Packed rows have new lengths in almost
    every micro-batch, and the plans are kept for the lifetime of the process.
    """
    if device.type != "cuda":
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Half-precision matmuls accumulate in fp32, including their partial sums.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextmanager
def limited_trial(
    trial: str,
    way_out: str,
    device: torch.device,
    *,
    synchronize: Callable[[], object] | None = None,
    compiling_s: float = 0.0,
) -> Iterator[None]:
    """Launch a trial of kernels in the block, then wait for them. A trial that takes long is named
    once in a warning, also while a package compiles its kernels in the block. The block must not
    read results: it would wait without a limit.

    ``trial`` is tried, and ``way_out`` switches it off, for messages. ``synchronize`` waits for the
    kernels. None: for those of a GPU. ``compiling_s``: seconds that are usual for the block.
    Raises KernelHangsError if they do not end.
    """
    place, named_s = f"{trial} on {device}", TRIAL_NAMED_S + compiling_s
    text = f"waiting for {place} for {named_s:g} s; if it never ends, {way_out}"
    named = Timer(named_s, log.warning, [text])
    named.daemon = True
    named.start()
    try:
        yield
        if synchronize is None and device.type == "cuda":
            synchronize = torch.cuda.current_stream(device).synchronize
        if synchronize is None:
            return
        waiter = Thread(target=synchronize, name="kernel trial", daemon=True)
        waiter.start()
        waiter.join(TRIAL_LIMIT_S)
        if waiter.is_alive():
            raise KernelHangsError(
                f"{place} did not end within {TRIAL_LIMIT_S:g} s, and blocks the GPU until this "
                f"process ends; {way_out}"
            )
    finally:
        named.cancel()
