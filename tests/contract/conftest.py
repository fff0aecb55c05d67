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

from burnish.models.flash_reference import on_cpu

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
LAUNCHED = {
    f"test_{name}"
    for name in (
        "weights_after_five_steps_equal_those_of_torch_on_one_rank",
        "logprobs_are_aligned_with_the_tokens_and_zero_elsewhere",
        "values_are_at_action_tokens_or_at_last_tokens",
        "an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale",
        "weights_have_the_names_and_shapes_of_transformers",
        "a_restored_engine_continues_bit_for_bit",
        "a_run_continues_on_one_torch_rank_and_back",
        "the_checkpoint_of_another_role_is_refused",
    )
}
"""Properties of launched ranks. The rest concerns their engines, which other rows test."""
NOT_LAUNCHED = "this property concerns the engine, not its runtime"


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


@pytest.fixture(scope="module")
def operators() -> Iterator[None]:
    """FlashAttention by plain matmuls, in this process."""
    with on_cpu():
        yield


@pytest.fixture
def make(request: pytest.FixtureRequest, kind: Any, started: dict[str, Any]) -> Make:
    """``make(Wanted(...))`` is an engine; the one before it is gone then."""
    if kind.attention == "flash":
        request.getfixturevalue("operators")
    if kind.place == "launched" and request.node.originalname not in LAUNCHED:
        pytest.skip(NOT_LAUNCHED)
    if kind.ranks == 1:
        request.getfixturevalue("group_of_one")
    if kind.place == "ray":
        request.getfixturevalue("ray_cluster")
    name = f"{kind.place} {kind.ranks}"
    if name not in started:
        sized = {"processes": pools.Processes, "launched": pools.Launched}.get(kind.place)
        single = pools.OnRay if kind.place == "ray" else pools.Here
        started[name] = single() if sized is None else sized(kind.ranks)
    return lambda wanted: started[name].make(kind, wanted)


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
