"""metrics.jsonl is strictly valid JSON, survives a kill, and goes back to a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from burnish.observe.metrics import MetricsLog, read_metrics


def _strict(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def _steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir)]


def test_every_line_is_strict_json_even_if_a_metric_is_nan(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(1, {"train/loss": math.nan, "train/kl": math.inf, "train/lr": 1e-6})
    log.log(2, {"train/loss": 0.5})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=_strict) for line in lines)
    assert first["train/loss"] is None and first["train/kl"] is None
    assert first["train/lr"] == 1e-6
    assert (first["step"], second["step"]) == (1, 2)
    assert 0 < first["time"] <= second["time"]


def test_a_line_is_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(1, {"train/loss": 0.5})
    assert _steps(tmp_path) == [1]
    log.close()


def test_null_reads_back_as_nan_and_the_rest_unchanged(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(3, {"a/b": math.nan, "a/c": 0.1})
    log.close()
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["a/b"]) and line["a/c"] == 0.1


def test_rewind_drops_later_steps_and_an_incomplete_last_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.log(step, {"train/loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as f:
        f.write(b'{"step": 2, "time": 1.0, "train/lo\xc3')  # killed inside a line and a character
    resumed = MetricsLog(tmp_path)
    resumed.rewind(3)
    resumed.log(4, {"train/loss": 40.0})
    resumed.close()
    assert [(x["step"], x["train/loss"]) for x in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]


def test_a_line_after_an_incomplete_one_is_separate_even_without_rewind(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n{"step": 2, "ti')
    log = MetricsLog(tmp_path)
    log.log(2, {})
    log.close()
    assert _steps(tmp_path) == [1, 2]


def test_reading_skips_an_incomplete_last_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n{"step": 2, "ti')
    assert _steps(tmp_path) == [1]


def test_a_broken_line_in_the_middle_is_named_when_read_and_dropped_by_rewind(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0}\n\x00\x00\n{"step": 3, "time": 1.0}\n')
    with pytest.raises(ValueError, match="line 2 is not a metrics line"):
        read_metrics(tmp_path)
    log = MetricsLog(tmp_path)
    log.rewind(9)
    log.close()
    assert _steps(tmp_path) == [1, 3]


def test_a_metric_that_would_overwrite_the_step_is_refused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match="'step' is reserved for the log line itself"):
        log.log(1, {"step": 2.0})
    log.close()
    assert read_metrics(tmp_path) == []


def test_a_folder_without_the_file_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
