"""Engines of the contract suite, started once for each file.

Every test of the suite is one property; ``engine_name`` says of which engine. What is known to be
refused is in ``REFUSED``: then the refusal is what is tested. ``tools/contract_table.py`` writes
all results into docs/engine-tests.md.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

NAME = "tests.contract.pools"
if NAME not in sys.modules:  # under the name by which other processes find it
    _SPEC = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name("pools.py"))
    assert _SPEC is not None and _SPEC.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules[NAME])
pools: Any = sys.modules[NAME]

Make = Callable[[Any], Any]
NO_FP16 = "zero_stage=0 with precision.dtype=fp16"
REFUSED = {
    ("ZeRO-0, 1 rank", name): NO_FP16
    for name in (
        "test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale",
        "test_the_loss_scale_follows_the_scaler_of_burnish",
    )
}


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What engines run in, by place; started when the first one needs it."""
    found: dict[str, Any] = {}
    yield found
    for pool in found.values():
        pool.close()


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


SLOW = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(600)])
    for name, kind in pools.KINDS.items()
    if kind.ranks > 1 or "ZeRO" in name
]
FAST = [name for name, kind in pools.KINDS.items() if kind.ranks == 1 and "ZeRO" not in name]


@pytest.fixture(scope="module", params=[*FAST, *SLOW])
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind(engine_name: str) -> Any:
    return pools.KINDS[engine_name]


@pytest.fixture
def make(request: pytest.FixtureRequest, kind: Any, started: dict[str, Any]) -> Make:
    """``make(Wanted(...))`` is an engine; the one before it is gone then."""
    if kind.ranks == 1:
        request.getfixturevalue("group_of_one")
    if kind.place == "ray":
        request.getfixturevalue("ray_cluster")
    if kind.place not in started:
        place = {"here": pools.Here, "processes": pools.Processes, "ray": pools.OnRay}[kind.place]
        started[kind.place] = place()
    return lambda wanted: started[kind.place].make(kind, wanted)


@pytest.fixture
def refused(
    request: pytest.FixtureRequest, engine_name: str, record_property: Callable[..., None]
) -> Callable[[Make, Any], bool]:
    """``refused(make, wanted)``: whether this engine refuses what the test is about, with the
    reason that was expected of it."""

    def check(make: Make, wanted: Any) -> bool:
        function = request.node.originalname
        reason = REFUSED.get((engine_name, function))
        if reason is None:
            return False
        with pytest.raises(Exception, match=reason):
            make(wanted)
        record_property("refused", reason)
        return True

    return check
