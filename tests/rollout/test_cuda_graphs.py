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
from burnish.rollout.local.model import DecodeGraphs


def test_steps_are_recorded_on_the_models_device_with_memory_that_stays_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, Any]] = []
    slots: list[weakref.ref[torch.Tensor]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    def recorded(graph: Any, *, pool: Any, capture_error_mode: str) -> Any:
        calls.append(("graph", capture_error_mode))
        return nullcontext()

    def noted(name: str, result: Any) -> Any:
        return lambda given: calls.append((name, given)) or result

    graph = SimpleNamespace(pool=lambda: "pool", replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", noted("device", nullcontext()))
    monkeypatch.setattr(torch.cuda, "Stream", noted("stream", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    device = torch.device("cpu")
    cache: Any = SimpleNamespace(capacity=64)

    def body(tokens: torch.Tensor, positions: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        slots.append(weakref.ref(plan.slots))
        return torch.zeros(*tokens.shape, 2)

    graphs = DecodeGraphs(body, lambda x: x, cache, device)
    assert graphs.step(torch.tensor([5, 6]), torch.tensor([3, 4]), 5).shape == (2, 2)
    graphs.step(torch.tensor([5, 6]), torch.tensor([4, 5]), 6)
    assert all(ref() is not None for ref in slots), "a replay reads freed memory"
    assert calls == [("device", device), ("stream", device), ("graph", "thread_local")]
