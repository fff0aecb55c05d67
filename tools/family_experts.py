"""Compare the experts that a mixture is counted to use with those that compute its tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.models.routing import Routing, RoutingRecorder

TOP_K_OF_LOGITS = ("llama4", "jetmoe")
"""Families whose experts receive no indices; their routers choose the largest logits."""


@torch.no_grad()
def record(model: PreTrainedModel, ids: Tensor) -> Routing:
    """Return the routing of a pass over ``ids`` [1, T]. Raises ModelError if ``model`` is no
    mixture."""
    body: Any = model.get_decoder()
    recorder = RoutingRecorder(body)
    with recorder.recording():
        body(input_ids=ids, use_cache=False)
    return recorder.routing()


@torch.no_grad()
def wrong_layers(model: PreTrainedModel, ids: Tensor, routing: Routing) -> list[int]:
    """Return the layers of ``routing`` whose tokens are computed by other experts.

    The tokens of an expert are those whose output is NaN if all its weights are NaN. Layers without
    a trained choice are recorded last, so each layer is compared with all of the model.
    """
    wanted = _by_weights(model, ids, routing.logits.shape[-1])
    masks = [_as_mask(chosen, wanted[0].shape[1]) for chosen in routing.chosen]
    if len(masks) != len(wanted):
        return list(range(len(masks)))
    same = [any(torch.equal(mask, one) for one in wanted) for mask in masks]
    return [layer for layer, is_same in enumerate(same) if not is_same]


def _by_weights(model: PreTrainedModel, ids: Tensor, experts: int) -> list[Tensor]:
    """Return [M, E] of every experts module of a pass, in the order of the calls."""
    calls: list[tuple[nn.Module, tuple[Any, ...]]] = []
    handles = [
        m.register_forward_pre_hook(lambda m, args: calls.append((m, args)))
        for m in model.modules()
        if type(m).__name__.endswith("Experts")
        and len(inspect.signature(type(m).forward).parameters) == 4
    ]
    body: Any = model.get_decoder()
    body(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return [_computed_by(*call, experts) for call in calls]


def _computed_by(module: nn.Module, inputs: tuple[Any, ...], experts: int) -> Tensor:
    """Return [M, E] bool: tokens whose output is NaN if all weights of an expert are NaN."""
    stacked: list[Tensor] = [p for p in module.parameters() if p.ndim == 3]
    if not stacked:  # DBRX: one matrix with the rows of all experts
        stacked = [p.view(experts, -1, p.shape[-1]) for p in module.parameters()]
    rows = []
    for e in range(min(len(p) for p in stacked)):
        kept = [p[e].clone() for p in stacked]
        for p in stacked:
            p[e] = torch.nan
        rows.append(module(*inputs).flatten(0, -2).isnan().any(-1))
        for p, before in zip(stacked, kept, strict=True):
            p[e] = before
    return torch.stack(rows, 1)


def _as_mask(chosen: Tensor, experts: int) -> Tensor:
    """Return [M, E] bool of ids [M, k]. Ids from ``experts`` on compute nothing."""
    mask = torch.zeros(chosen.shape[0], max(experts, int(chosen.max()) + 1), dtype=torch.bool)
    return mask.scatter(1, chosen.long(), True)[:, :experts]
