"""docs/engine-tests.md has the result of every property of the contract suite for every engine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "contract_table.py"
_SPEC = importlib.util.spec_from_file_location("contract_table", TOOL)
assert _SPEC is not None and _SPEC.loader is not None
tool: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["contract_table"] = tool  # its dataclass looks its module up
_SPEC.loader.exec_module(tool)


@pytest.mark.slow
def test_the_table_lists_the_engines_and_properties_of_the_suite() -> None:
    done = subprocess.run(
        [fork_server.interpreter(), str(TOOL), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_nothing_in_the_table_failed() -> None:
    text = tool.between((ROOT / "docs" / "engine-tests.md").read_text(encoding="utf-8"))
    assert "FAILED" not in text and "| pass |" in text


def test_the_worst_of_several_cases_is_written_and_read_back() -> None:
    seen = {
        ("train", "torch", "it steps"): ["pass", "FAILED"],
        ("train", "torch", "it saves"): ["pass", "refused"],
        ("train", "other, 2 ranks", "it steps"): ["pass"],
        ("train", "other, 2 ranks", "it saves"): [],
        ("rollout", "local", "it samples"): ["not run"],
    }
    text = tool.table(tool.Results(seen, {"torch, refused": "why"}))
    assert "| torch | FAILED | refused |" in text
    assert "| other, 2 ranks | pass | not run |" in text
    assert "| local | not run |" in text and "- torch, refused: why" in text
    page = f"{tool.BEGIN}\n{text}\n{tool.END}"
    worst = ["FAILED", "refused", "pass", "not run", "not run"]
    assert tool.listed(page) == dict(zip(seen, worst, strict=True))


def test_results_of_cases_that_did_not_run_are_kept() -> None:
    seen = {("train", "torch", "it saves"): ["refused"], ("train", "other", "it saves"): ["pass"]}
    page = f"{tool.BEGIN}\n{tool.table(tool.Results(seen, {'torch, refused': 'why'}))}\n{tool.END}"
    again = {("train", "torch", "it saves"): [], ("train", "other", "it saves"): ["FAILED"]}
    found = tool.Results(again | {("train", "new", "it saves"): []})
    tool.keep_results(found, page)
    assert found.seen == {
        ("train", "torch", "it saves"): ["refused"],
        ("train", "other", "it saves"): ["FAILED"],
        ("train", "new", "it saves"): [],
    }
    assert found.reasons == {"torch, refused": "why"}
