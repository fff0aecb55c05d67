"""The experts that a recorded pass names are those that compute its tokens, in every mixture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from burnish.models.load import ModelError
from burnish.models.routing import RoutingRecorder
from burnish.models.shrink import build, shrink

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from families import config_of, names
from family_experts import TOP_K_OF_LOGITS, record, wrong_layers

IDS = torch.arange(5, 21)[None]

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


@pytest.mark.slow
def test_every_mixture_counts_the_experts_that_compute_its_tokens() -> None:
    checked, wrong = [], []
    for name in mixtures():
        model = build(shrink(config_of(name)))
        routing = record(model, IDS)
        assert routing.chosen.shape[1] == routing.logits.shape[1] == IDS.numel(), name
        checked.append(name)
        if not name.startswith(TOP_K_OF_LOGITS) and wrong_layers(model, IDS, routing):
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
