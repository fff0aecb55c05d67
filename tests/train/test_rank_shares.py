"""A rank that receives only its rows computes what it computes from the entire batch, bit for bit,
with every engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("share_ranks.py")
_SPEC = importlib.util.spec_from_file_location("share_ranks", SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
share_ranks: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["share_ranks"] = share_ranks
_SPEC.loader.exec_module(share_ranks)
RANKS = 4
BYTES_PER_TOKEN = 8 + 1 + 4
"""Token, mask, advantage."""


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, run_together: Callable[..., list[int]]
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shares")
    arguments = [[str(folder), str(rank), str(RANKS)] for rank in range(RANKS)]
    run_together(SCRIPT, arguments, folder, timeout_s=400)
    texts = [(folder / f"rank{rank}.json").read_text(encoding="utf-8") for rank in range(RANKS)]
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("engine", share_ranks.ENGINES)
def test_a_rank_receives_only_its_rows_and_computes_the_same_bits(
    engine: str, found: list[dict[str, Any]]
) -> None:
    """Each row is in one share; ranks of a model-parallel group have the same share. A share has 13
    bytes per token; 16 per row and 8 more for offsets, prompt lengths and groups (8 each), and 16
    per row for the samples of episodes."""
    reports = [own[engine] for own in found]
    per_share = 2 if "parallel" in engine else 1
    assert [own["share"] for own in reports] == [rank // per_share for rank in range(RANKS)]
    assert all(own["same weights"] and own["moved"] for own in reports)
    for name, batch in share_ranks.batches().items():
        lengths = batch.lengths.tolist()
        shares = {own["share"]: own[name]["rows"] for own in reports}
        assert sorted(row for rows in shares.values() for row in rows) == list(range(len(lengths)))
        for own in reports:
            case = own[name]
            assert case["same logprobs"] and case["same stats"] and case["nonzero"], name
            assert case["unwritten"], name
            assert case["rows"] == shares[own["share"]]
            per_row = 24 + (16 if name == "episodes" else 0)
            tokens = sum(lengths[row] for row in case["rows"])
            expected = BYTES_PER_TOKEN * tokens + per_row * len(case["rows"]) + 8
            assert case["bytes"] == expected, name
