"""benchmarks/precision.py from its command line, on models made from scratch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import fork_server
import pytest

ROOT = Path(__file__).parents[2]
LEARN = ("learn", "--tiny", "--seeds", "0", "--dtypes", "fp32", "bf16", "--threads", "1")

pytestmark = pytest.mark.slow


def benchmark(*args: str) -> str:
    """What ``python benchmarks/precision.py ARGS`` prints."""
    done = subprocess.run(
        [fork_server.interpreter(), str(ROOT / "benchmarks" / "precision.py"), *args],
        capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def tables(text: str) -> list[list[list[str]]]:
    """The markdown tables of a text as [table][row][cell], the head first; every row is as long as
    its head."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("| "):
            found += [[]] * (not inside)
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[-1] = [*found[-1], cells] if set(cells) != {"---"} else found[-1]
        inside = line.startswith("| ")
    for table in found:
        assert {len(row) for row in table} == {len(table[0])}
    return found


def column(table: list[list[str]], name: str) -> list[str]:
    return [row[table[0].index(name)] for row in table[1:]]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, what was printed) of two tiny runs."""
    out = tmp_path_factory.mktemp("precision")
    return out, benchmark(*LEARN, "--device", "cpu", "--out", str(out))


def test_learn_prints_a_row_per_format_and_keeps_every_step(learned: tuple[Path, str]) -> None:
    out, printed = learned
    (table,) = tables(printed)
    assert column(table, "trainer / sampler") == ["fp32 / fp32", "bf16 / bf16"]
    assert column(table, "seeds") == ["1", "1"]
    for cell in column(table, "log-prob gap, mean (nats)"):
        assert 0 <= float(cell) < 0.1
    summary = json.loads((out / "summary.json").read_text())
    assert [(r["kind"], r["seed"]) for r in summary["runs"]] == [("fp32", 0), ("bf16", 0)]
    for run in summary["runs"]:
        assert [line["step"] for line in run["steps"]] == [0, 1, 2]
        rewards = [line["reward/mean"] for line in run["steps"][1:]]
        assert run["results"]["reward"] == pytest.approx(sum(rewards) / 2)
        assert run["results"]["accuracy"] == run["steps"][-1]["eval/pass@1"]


def test_learn_repeats_no_complete_run_and_rejects_other_settings(
    learned: tuple[Path, str],
) -> None:
    out, printed = learned
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/seed-0/metrics.jsonl")}
    again = benchmark(*LEARN, "--device", "cpu", "--out", str(out))
    assert tables(again) == tables(printed)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    with pytest.raises(AssertionError, match="steps was 2, and is now 7"):
        benchmark(*LEARN, "--device", "cpu", "--out", str(out), "--steps", "7")


def test_figures_are_the_same_files_when_they_are_made_again(
    learned: tuple[Path, str], tmp_path: Path
) -> None:
    contents = []
    for name in ("first", "second"):
        benchmark("figures", "--results", str(learned[0]), "--to", str(tmp_path / name))
        files = sorted((tmp_path / name).iterdir())
        contents.append({file.name: file.read_bytes() for file in files})
    assert list(contents[0]) == [
        "precision_gap.svg",
        "precision_learning.svg",
        "precision_loss_scale.svg",
    ]
    assert contents[0] == contents[1]
    assert all(b"<svg" in data and b"<dc:date>" not in data for data in contents[0].values())


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(numbers, what was printed) of a tiny ``cost`` in three formats."""
    file = tmp_path_factory.mktemp("cost") / "cost.json"
    printed = benchmark(
        "cost", "--tiny", "--micro", "2", "--rounds", "1", "--threads", "1", "--device", "cpu",
        "--json", str(file),
    )  # fmt: skip
    return json.loads(file.read_text()), printed


def test_cost_counts_the_model_state_to_the_byte(cost: tuple[dict[str, Any], str]) -> None:
    """Per parameter, weight + master + gradient + two moments. fp32: 4 + 0 + 4 + 8 = 16 (its
    weights are the masters). fp16 and bf16, gradients summed in fp32: 2 + 4 + 4 + 8 = 18. AdamW
    also counts its steps, 4 bytes for each of 2 layers x 9 + embedding + last norm = 20 tensors."""
    expected = {"fp32": (4, 0, 4, 8), "bf16": (2, 4, 4, 8), "fp16": (2, 4, 4, 8)}
    for case in cost[0]["cases"]:
        parts = list(case["state_bytes"].values())
        parts[3] -= 4 * 20
        assert tuple(part / case["parameters"] for part in parts) == expected[case["dtype"]]


def test_cost_measures_about_half_the_activations_in_half_precision(
    cost: tuple[dict[str, Any], str],
) -> None:
    """Not exactly half: norms and log-probs keep fp32 values, and token ids are int64."""
    held = {case["dtype"]: case["activation_bytes"] for case in cost[0]["cases"]}
    for dtype in ("bf16", "fp16"):
        assert 0.5 <= held[dtype] / held["fp32"] < 0.7


def test_cost_prints_steps_state_products_and_claims(cost: tuple[dict[str, Any], str]) -> None:
    steps, state, products, claims = tables(cost[1])
    assert column(steps, "format") == column(state, "format") == ["fp32", "bf16", "fp16"]
    assert all(float(cell) > 0 for cell in column(steps, "tokens/s"))
    assert len(products) == 2 and products[0][-1].startswith("fp16 by torch")
    assert column(claims, "compared") == ["bf16 / fp32"] * 3 + ["fp16 / fp32"] * 3
    assert {cell.split(";")[0].split(",")[0] for cell in column(claims, "holds?")} <= {
        "yes",
        "no",
        "in part",
    }


def test_gap_is_smallest_in_fp32_and_smaller_in_fp16_than_in_bf16(tmp_path: Path) -> None:
    """Of 24, 8 and 11 bits of significand the errors are about 6e-8, 4e-3 and 5e-4 relative: they
    are three and one decimal places apart, and the order is no luck of the tokens."""
    file = tmp_path / "gap.json"
    matrix, errors = reversed(tables(benchmark(*_gap(file))))
    assert column(errors, "format") == ["fp32", "bf16", "fp16"]
    assert len(matrix) == 4
    found = {f["dtype"]: f for f in json.loads(file.read_text())["formats"]}
    for error in ("trainer_mean", "sampler_mean"):
        assert found["fp32"][error] < found["fp16"][error] < found["bf16"][error]
    assert 0 < found["fp32"]["trainer_max"] < 1e-5


def _gap(file: Path) -> list[str]:
    return ["gap", "--tiny", "--threads", "1", "--device", "cpu", "--json", str(file)]
