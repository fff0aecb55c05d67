"""Recording decode steps, with CUDA's calls replaced: their device and mode, and the memory that a
replay reads."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burnish.models.attention import DecodePlan
from burnish.rollout.base import Sampling
from burnish.rollout.local.decode_graphs import DecodeBlock, DecodeGraphs, RowState
from burnish.rollout.local.sampling import draw_groups


def test_steps_are_recorded_on_the_models_device_with_memory_that_stays_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logits and the draw are recorded once for two blocks. The rows' state is read outside of
    the capture's own memory, so it is never freed."""
    calls: list[tuple[str, Any]] = []
    states: list[weakref.ref[torch.Tensor]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    def recorded(graph: Any, *, pool: Any, capture_error_mode: str) -> Any:
        calls.append((f"graph in {pool}", capture_error_mode))
        return nullcontext()

    def noted(name: str, result: Any) -> Any:
        def call(given: Any) -> Any:
            calls.append((name, given))
            return result

        return call

    graph = SimpleNamespace(pool=lambda: "pool", replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", noted("device", nullcontext()))
    monkeypatch.setattr(torch.cuda, "Stream", noted("stream", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    device = torch.device("cpu")
    cache: Any = SimpleNamespace(capacity=64, num_slots=4)

    def body(tokens: torch.Tensor, positions: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        assert positions.tolist() == [[63], [63]], "written before a row gets there"
        assert tokens._base is not None
        states.append(weakref.ref(tokens._base))
        return torch.zeros(*tokens.shape, 2)

    graphs = DecodeGraphs(body, lambda x: x, cache, device)
    rows = [RowState(token=5, position=3, last=40, stops=(1,))] * 2
    block = DecodeBlock(rows, torch.zeros(8, 2), draw_groups([Sampling(9)] * 2, device))
    for _ in range(2):
        results = graphs.run(block)
        assert len(results) == 8 and len(results[0].tokens) == 2
    assert len(states) == 3 and all(ref() is not None for ref in states), "a replay reads freed"
    assert calls == [
        ("device", device),
        ("stream", device),
        ("graph in None", "thread_local"),
        ("stream", device),
        ("graph in pool", "thread_local"),
        ("device", device),
    ]
