"""FlashAttention 3 (Hopper) and 4 (Blackwell), whose kernels replace those of torch's operators.

torch registers the kernels of an installed package in place of those of the operators that
``flash.py`` calls. The registration is of the process: it also replaces the FlashAttention kernel
of scaled-dot-product attention, which then refuses dropout. A process may hold models with
different kernels, and other code that computes attention. Therefore a train engine registers the
kernels that its model was tried with within its passes only (:func:`select`; 0.05 ms).
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import metadata
from typing import Literal

import torch
from torch.nn import attention as torch_attention

from burnish.models.sdpa import Kernels

Newer = Literal["FA3", "FA4"]
"""Name of an implementation in torch's registry."""
TITLES: dict[Newer, str] = {"FA3": "FlashAttention 3", "FA4": "FlashAttention 4"}
PACKAGES: dict[Newer, str] = {"FA3": "flash-attn-3", "FA4": "flash-attn-4"}
_BY_MAJOR: dict[int, Newer] = {9: "FA3", 10: "FA4"}


class _Selected:
    """The implementation that this module has registered."""

    name: Newer | None = None


def newer_for(kernels: Kernels | None) -> Newer | None:
    """Return the implementation that is made for a GPU, or None."""
    if kernels is None or kernels.hip:
        return None
    return _BY_MAJOR.get(kernels.capability[0])


@cache
def is_installed(name: Newer) -> bool:
    """Return whether the package of an implementation is installed. Imports nothing."""
    try:
        metadata.distribution(PACKAGES[name])
    except metadata.PackageNotFoundError:
        return False
    return True


def registered() -> str | None:
    """Return the implementation in place of torch's own kernels, or None."""
    current = vars(torch_attention).get("current_flash_attention_impl")  # torch 2.11 and later
    return None if current is None else current()


def select(name: Newer | None) -> None:
    """Register the kernels of an implementation, or torch's own (None), unless they are.

    An implementation that other code has registered stays. Raises whatever the package raises if it
    cannot be imported, or torch if it cannot register it.
    """
    if _Selected.name == name:
        return
    if _Selected.name is not None:
        torch_attention.restore_flash_attention_impl(_raise_warn=False)
        _Selected.name = None
    if name is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # overriding
            torch_attention.activate_flash_attention_impl(name)
        _Selected.name = name


def activation_problem(name: Newer) -> str | None:
    """Register an implementation. Return why it cannot be, or None if it is."""
    title = TITLES[name]
    if "activate_flash_attention_impl" not in vars(torch_attention):
        return f"torch {torch.__version__} cannot use {title}"
    other = registered()
    if other is not None and _Selected.name is None:
        return f"this program has activated {other} in place of torch's own kernels"
    try:
        select(name)
    except ImportError as error:
        return f"{title} is not installed ({error})"
    except Exception as error:  # whatever the package or its registration raises
        return f"{title} raised {type(error).__name__}: {error}"
    return None if registered() == name else f"torch did not activate {title}"
