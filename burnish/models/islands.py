"""Parameters that stay in fp32 when a model computes in half precision.

transformers keeps some weights of some families in fp32: routers, decays, mixing weights of hyper
connections (``_keep_in_fp32_modules`` in fp16, ``_keep_in_fp32_modules_strict`` also in bf16, and
parameters that a module creates in fp32). Rounding them changes the model by as much as computing
it in half precision. Loading, training, sampling and exporting all ask :func:`fp32_names`.

Iterators over a model's weights yield these parameters as :class:`torch.nn.Buffer`, like buffers,
so that code that casts weights skips them (``buffers.wanted_dtype``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.models.buffers import plain_name
from burnish.models.paths import ModelError
from burnish.models.support import plain_torch

_FOUND: WeakKeyDictionary[nn.Module, dict[torch.dtype, frozenset[str]]] = WeakKeyDictionary()


def fp32_names(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Return the names, without adapters, of the parameters that stay in fp32 when ``model``
    computes in ``dtype``: those that transformers loads in fp32."""
    if dtype == torch.float32:
        return frozenset()
    known = _FOUND.setdefault(model, {})
    if dtype not in known:
        known[dtype] = frozenset(_names(model, dtype))
    return known[dtype]


def _names(model: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    networks = ((n, m) for n, m in model.named_modules() if isinstance(m, PreTrainedModel))
    prefix, network = next(networks, ("", None))
    if network is None:
        return
    kind: Any = type(network)
    with plain_torch(), torch.device("meta"):
        shell: Any = kind._from_config(
            copy.deepcopy(network.config), dtype=dtype, attn_implementation="eager"
        )
    patterns = [re.compile(key.replace("*", ".*")) for key in network._get_dtype_plan(dtype)]
    for name, parameter in shell.named_parameters():
        planned = any(pattern.search(f"model.{name}") for pattern in patterns)
        if planned or parameter.dtype == torch.float32:
            yield f"{prefix}.{name}" if prefix else name


@torch.no_grad()
def cast_parameters(model: nn.Module, dtype: torch.dtype, *, only_frozen: bool = False) -> None:
    """Cast the floating-point parameters of ``model`` to ``dtype``, and those that stay in fp32 to
    fp32. ``only_frozen``: leave parameters that require a gradient as they are."""
    wide = fp32_names(model, dtype)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or (only_frozen and parameter.requires_grad):
            continue
        is_wide = plain_name(name) in wide
        parameter.data = parameter.data.to(torch.float32 if is_wide else dtype)


def with_islands(
    weights: Iterable[tuple[str, Tensor]], wide: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights``, those named in ``wide`` as buffers, which keep their dtype."""
    for name, tensor in weights:
        yield name, nn.Buffer(tensor.detach()) if name in wide else tensor


def require_one_dtype(model: nn.Module, dtype: torch.dtype, setting: str) -> None:
    """Raise ModelError if ``model`` has parameters that stay in fp32, for engines that store or
    gather all weights of a layer in one dtype. ``setting`` selects the engine."""
    if wide := sorted(fp32_names(model, dtype)):
        half = "fp16" if dtype == torch.float16 else "bf16"
        raise ModelError(
            f"{setting} with precision.dtype={half}: {type(model).__name__} keeps {len(wide)} "
            f"weights in fp32 (e.g. {wide[0]}), but this engine has all weights of a layer in one "
            "dtype; use precision.dtype=fp32, or train.engine.kind=torch without sharding"
        )
