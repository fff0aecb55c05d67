"""Two ranks compute the same results as one: two processes over loopback, started once, and their
reports."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.types import Stats

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("two_ranks.py")
RunTogether = Callable[..., list[int]]
_SPEC = importlib.util.spec_from_file_location("two_ranks", SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
two_ranks: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["two_ranks"] = two_ranks  # its dataclasses look their module up
_SPEC.loader.exec_module(two_ranks)

FP32 = 1e-6  # fp32 sums over some hundred tokens in another order


@dataclass(frozen=True)
class Reports:
    """Reports of the two ranks."""

    found: tuple[dict[str, Any], dict[str, Any]]
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]]

    def same(self, name: str) -> dict[str, Any]:
        """A report that is equal on both ranks."""
        first, second = (found[name] for found in self.found)
        assert first == second
        return dict(first)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, run_together: RunTogether) -> Reports:
    folder = tmp_path_factory.mktemp("ranks")
    arguments = [[str(folder), str(rank)] for rank in range(2)]
    run_together(SCRIPT, arguments, folder, timeout_s=150)
    texts = [(folder / f"rank{rank}.json").read_text(encoding="utf-8") for rank in range(2)]
    return Reports(
        (json.loads(texts[0]), json.loads(texts[1])),
        (load_file(folder / "rank0.safetensors"), load_file(folder / "rank1.safetensors")),
    )


@pytest.mark.parametrize("layout", two_ranks.accumulation.LAYOUTS)
@pytest.mark.parametrize("loss", two_ranks.NAMES)
def test_a_step_over_two_ranks_has_the_gradient_of_one(
    loss: str, layout: str, reports: Reports
) -> None:
    """For every split, ragged rows, and with rows for one rank only; also log-probs, values and
    stats."""
    for case in two_ranks.CASES:
        if (case.loss, case.layout) != (loss, layout):
            continue
        expected, stats = two_ranks.run_case(case, SINGLE)
        names = {name.partition("|")[2] for name in reports.tensors[0] if case.key in name}
        assert names == expected.keys(), "the same parameters have a gradient"
        assert max(float(expected[n].abs().max()) for n in names - {"outputs"}) > 1e-3
        for name, tensor in expected.items():
            first, second = (found[f"{case.key}|{name}"] for found in reports.tensors)
            assert torch.equal(first, second), "both ranks have the same bits"
            # log-probs of size 4: a few ulps; gradients relative to 1 where they are larger
            bound = 3e-6 if name == "outputs" else FP32 * max(1.0, float(tensor.abs().max()))
            error = float((first - tensor).abs().max())
            assert error <= bound, f"{case.key}: {name} is off by {error:.2e}"
        for found in reports.found:
            # sums of about 40 terms of size 1 in another order
            assert found["cases"][case.key] == pytest.approx(stats, abs=2e-5), case.key


@pytest.mark.parametrize("precision", two_ranks.PRECISIONS)
def test_an_overflow_on_one_rank_skips_the_step_on_both(precision: str, reports: Reports) -> None:
    """Both ranks agree: no weight changes, the count increases, and a dynamic scale is halved
    immediately (hysteresis 1): 1024, 1024, then 512."""
    first, second = (found["overflow"][precision] for found in reports.found)
    assert first == second
    before, clean, skipped, after = first["hashes"]
    assert before != clean and clean == skipped and skipped != after
    assert first["skipped"] == [False, True, False]
    assert first["skipped_total"] == [0, 1, 1]
    assert first["version"] == 2
    scales = [1024.0, 1024.0, 512.0, 512.0] if precision.startswith("fp16") else [1.0] * 4
    assert first["scales"] == scales


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_both(reports: Reports) -> None:
    assert reports.same("bad_loss") == {"skipped": True, "overflow": False, "unmoved": True}


def test_a_run_that_must_stop_stops_on_both_ranks_with_one_message(reports: Reports) -> None:
    """Rank 1 alone finds the bad loss; rank 0 reports it too."""
    message = reports.same("stop")["message"]
    assert "2 consecutive steps of the policy were skipped" in message
    assert "First bad tensor: loss" in message


def test_all_ranks_save_and_all_learn_the_outcome(reports: Reports) -> None:
    """Rank 0 writes. If it cannot (a file blocks the path), or if only a weight of rank 1 is not
    finite, both ranks raise."""
    first, second = (found["save"] for found in reports.found)
    for own in (first, second):
        assert own["there"], "written when save returns"
        assert own["version"] == 1 and own["written"] == ["file", "policy"]
        assert "are not finite, e.g. model.embed_tokens.weight" in own["messages"][1]
    assert first["messages"][0] == "FileExistsError" and second["messages"][0] == "OSError"


def test_ranks_with_different_loads_plan_as_many_passes_and_finish(reports: Reports) -> None:
    """A row of 63 tokens against 20 of 3 under a budget of 12: 60 tokens are 5 passes of 4 rows on
    rank 1, and rank 0, with its one row, plans 5 as well, of which 4 are empty. Two steps."""
    first, second = (found["uneven"] for found in reports.found)
    assert first["planned"] == second["planned"] == [5, 5]
    assert first["empty"] == [4, 0]
    assert (first["computed"], second["computed"]) == (2, 10), "replicas leave out what is empty"
    assert first["rows"] == second["rows"] == [21, 21]
    assert first["hash"] == second["hash"]


def test_sums_over_ranks_are_the_same_on_both_for_every_shape_and_bucket(
    reports: Reports,
) -> None:
    """1 on rank 0 and 2 on rank 1 make 3."""
    matrix = [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]  # [[0, 1, 2], [3, 4, 5]] transposed, times 3
    expected = [[3.0] * 3, [[3.0] * 2] * 2, [3.0] * 40, matrix, 3.0, [3.0] * 10, []]
    assert reports.same("exchange")["sums"] == expected


def test_any_and_gather_combine_values_of_both_ranks(reports: Reports) -> None:
    found = reports.same("exchange")
    assert found["any"] == [False, True, True]
    assert found["any_across"] == [False, True, True]
    assert found["gathered"] == ["rank 0", "rank 1"]


def test_stats_are_summed_over_ranks(reports: Reports) -> None:
    """frac (3 + 6) / (10 + 10) = 0.45; most max(1, 2); n 1 + 2. A rank without values adds 0."""
    found = reports.same("exchange")
    assert found["stats"] == {"frac": 0.45, "frac_den": 20, "most": 2.0, "n": 3.0}
    assert found["empty"] == {"frac": 0.3, "most": 1.0, "n": 1.0}


def test_stats_with_other_names_on_another_rank_are_refused_on_both(reports: Reports) -> None:
    message = reports.same("exchange")["message"]
    assert "only rank 0 has sum only 0, only rank 1 has sum only 1" in message


def test_a_single_rank_needs_no_communication() -> None:
    tensors, stats = [torch.ones(2)], Stats(sums={"n": torch.tensor(1.0)})
    alone = RankGroup()
    alone.all_reduce_(tensors)
    assert tensors[0].tolist() == [1, 1] and alone.sum_stats(stats) is stats
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.any(torch.tensor(True)) and not alone.any(False)
    assert alone.any_across([True, False]) == [True, False]
    assert alone.gather("x") == ["x"]
