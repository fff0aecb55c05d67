"""Settings of a process that computes on a GPU."""

from __future__ import annotations

import torch


def set_up_gpu(device: torch.device) -> None:
    """Make ``device`` the process's own and set how torch computes there. On a CPU: nothing.

    cuDNN's attention is off: it builds an execution plan for every new combination of batch size
    and lengths (reported: 23 to 37 ms of host time each, forward and backward apart), packed rows
    have other lengths in almost every micro-batch, and the plans are kept for the whole process.
    Recent torch prefers it on Hopper and Blackwell.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Products of half operands add up in fp32, partial sums too.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
