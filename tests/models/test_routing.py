"""The experts that a recorded pass names are those that compute its tokens, in every mixture."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.models.load import ModelError
from burnish.models.routing import RoutingRecorder
from burnish.models.shrink import build, shrink

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from families import config_of, names

IDS = torch.arange(5, 21)[None]
TOP_K_OF_LOGITS = ("llama4", "jetmoe")
"""Families whose experts receive no indices; their routers choose the largest logits."""

WITHOUT_MIXTURE_LAYERS = ("doge", "nemotron_h")
"""Rows whose config counts experts but whose layers are all dense."""


def mixtures() -> list[str]:
    """Return the rows of the family table that are mixtures, by their config fields."""
    found = []
    for name in names():
        try:
            fields = shrink(config_of(name)).to_dict()
        except Exception:
            continue
        flat = fields | (fields.get("ffn_config") or {})
        counts = [v for k, v in flat.items() if "experts" in k and isinstance(v, int)]
        if max(counts, default=0) > 2 and name not in WITHOUT_MIXTURE_LAYERS:
            found.append(name)
    return found


def computed_by(module: nn.Module, inputs: tuple[Any, ...], experts: int) -> Tensor:
    """Return [M, E] bool: tokens whose output is NaN if all weights of an expert are NaN."""
    stacked = [p for p in module.parameters() if p.ndim == 3]
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


def by_weights(model: PreTrainedModel, experts: int) -> list[Tensor]:
    """Return [M, E] of every experts module of a pass over IDS, in the order of the calls."""
    calls: list[tuple[nn.Module, tuple[Any, ...]]] = []
    handles = [
        m.register_forward_pre_hook(lambda m, args: calls.append((m, args)))
        for m in model.modules()
        if type(m).__name__.endswith("Experts")
        and len(inspect.signature(type(m).forward).parameters) == 4
    ]
    model.get_decoder()(input_ids=IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    return [computed_by(*call, experts) for call in calls]


def as_mask(chosen: Tensor, experts: int) -> Tensor:
    """Return [M, E] bool of ids [M, k]. Ids from ``experts`` on compute nothing."""
    mask = torch.zeros(chosen.shape[0], max(experts, int(chosen.max()) + 1), dtype=torch.bool)
    return mask.scatter(1, chosen.long(), True)[:, :experts]


@pytest.mark.slow
@torch.no_grad()
def test_every_mixture_counts_the_experts_that_compute_its_tokens() -> None:
    checked, wrong = [], []
    for name in mixtures():
        model = build(shrink(config_of(name)))
        recorder = RoutingRecorder(model.get_decoder())
        with recorder.recording():
            model.get_decoder()(input_ids=IDS, use_cache=False)
        routing = recorder.routing()
        assert routing.chosen.shape[1] == routing.logits.shape[1] == IDS.numel(), name
        checked.append(name)
        if name.startswith(TOP_K_OF_LOGITS):
            continue
        wanted = by_weights(model, routing.logits.shape[-1])
        masks = [as_mask(ids, wanted[0].shape[1]) for ids in routing.chosen]
        # layers without a trained choice are recorded last, so compare sets of layers
        same = all(any(torch.equal(mask, one) for one in wanted) for mask in masks)
        if len(masks) != len(wanted) or not same:
            wrong.append(name)
    assert not wrong
    assert len(checked) > 50 and {"deepseek_v4", "hy_v3", "gpt_oss", "dbrx"} <= set(checked)


def test_jetmoe_has_one_entry_for_each_router() -> None:
    """Two layers with a router of attention and one of the MLP each."""
    model = build(shrink(config_of("jetmoe")))
    recorder = RoutingRecorder(model.get_decoder())
    with recorder.recording():
        model.get_decoder()(input_ids=IDS, use_cache=False)
    assert recorder.routing().logits.shape[0] == 4


def test_passes_outside_of_recording_are_not_recorded() -> None:
    model = build(shrink(config_of("mixtral")))
    recorder = RoutingRecorder(model.get_decoder())
    with recorder.recording():
        model.get_decoder()(input_ids=IDS, use_cache=False)
    model.get_decoder()(input_ids=IDS[:, :3], use_cache=False)
    assert recorder.routing().chosen.shape[:2] == (2, IDS.numel())


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match=r"moe_aux_loss_coef.* none"):
        RoutingRecorder(build(shrink(config_of("qwen3"))).get_decoder())
