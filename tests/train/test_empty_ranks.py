"""Every engine trains through steps in which a rank has no rows, with every loss: two processes
over loopback, started once."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from burnish.distributed.process_group import SINGLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("empty_ranks.py")
_SPEC = importlib.util.spec_from_file_location("empty_ranks", SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
script: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["empty_ranks"] = script  # its dataclasses look their module up
_SPEC.loader.exec_module(script)

# Gradients differ by some 1e-9 (sums in another order); Adam with eps 1e-6 and lr 1e-3 moves an
# entry as small as that by 1e-9 / 1e-6 x 1e-3 = 1e-6 more or less. Four steps.
WEIGHTS = 5e-6
OUTPUTS = 5e-6  # log-probs of size 4 of these weights

Reports = tuple[list[dict[str, Tensor]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, run_together: Callable[..., Any]) -> Reports:
    """Reports of both ranks. A deadlock ends after the group's limit of 60 s."""
    folder = tmp_path_factory.mktemp("empty")
    run_together(SCRIPT, [[str(folder), str(rank)] for rank in range(2)], folder, timeout_s=500)
    tensors = [load_file(folder / f"rank{rank}.safetensors") for rank in range(2)]
    texts = [(folder / f"rank{rank}.json").read_text(encoding="utf-8") for rank in range(2)]
    return tensors, [json.loads(text) for text in texts]


@cache
def alone(case: Any) -> Any:
    """Results of one rank, which are the same for all engines."""
    return script.run_case(case, SINGLE)


@pytest.mark.parametrize("loss", script.LOSSES)
def test_steps_without_rows_on_a_rank_are_those_of_one_rank(loss: str, reports: Reports) -> None:
    """Steps over one unit (rank 1 has no rows), all rows, one unit, all rows. Weights, outputs,
    metrics and norms are those of the torch engine on one rank."""
    tensors, said = reports
    cases = [case for case in script.CASES if case.loss == loss]
    assert len(cases) >= len(script.ALL) + 1
    for case in cases:
        expected, reported = alone(replace(case, engine="replicas"))
        for rank in range(2):
            for name, tensor in expected.items():
                error = float((tensors[rank][f"{case.key}|{name}"] - tensor).abs().max())
                bound = WEIGHTS if name.startswith("weight") else OUTPUTS
                assert error <= bound, f"{case.key}: {name} is off by {error:.2e} on rank {rank}"
            for ours, theirs in zip(said[rank][case.key], reported, strict=True):
                # sums of about 40 terms of size 1 in another order
                assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-5), case.key


def test_every_case_moves_the_weights(reports: Reports) -> None:
    for case in script.CASES:
        start = dict(script.make_engine(case, SINGLE).weights())
        name = "model.layers.1.mlp.down_proj.weight"
        moved = (reports[0][0][f"{case.key}|weight {name}"] - start[name]).abs().max()
        if case.model == "lora":  # B starts at 0, and its first step does not reach all layers
            name = "model.layers.1.self_attn.q_proj.weight"
            moved = (reports[0][0][f"{case.key}|weight {name}"] - start[name]).abs().max()
        assert float(moved) > 1e-5, case.key
        assert bool(torch.isfinite(moved)), case.key


def test_a_timed_out_rank_reports_its_wait_and_collective(reports: Reports) -> None:
    """Rank 0 sums statistics over the ranks, and rank 1 does not come."""
    first, second = (said["in vain"] for said in reports[1])
    assert first == second
    collective = "torch.distributed.all_gather_object"
    assert first == f"timed out after 0.5 s waiting for the other ranks in {collective}"
