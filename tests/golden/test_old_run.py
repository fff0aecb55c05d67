"""A run that an earlier version of this package wrote resumes and gives the numbers that the
earlier version gave.

``old_run.tar.gz`` holds the folder of a PPO run of four steps that was interrupted after step 2
(commit 9a3dba2: critic, adaptive KL penalty in the reward, moving average, two epochs per rollout;
checkpoint format 0.1), its prompts, and the metrics of steps 3 and 4 of the same run when that
commit resumed it.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

import burnish
from burnish.config import load_config
from burnish.observe.metrics import read_metrics

ARCHIVE = Path(__file__).with_name("old_run.tar.gz")


def small_digits(response: str) -> float:
    """Share of six positions that hold a digit below 5."""
    return sum(c in "01234" for c in response) / 6


def test_a_run_of_an_earlier_version_resumes_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # its config.yaml has relative paths
    with tarfile.open(ARCHIVE) as archive:
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4
        archive.extractall(**options)
    expected = json.loads(Path("expected.json").read_text(encoding="utf-8"))
    config = load_config(Path("run/config.yaml"))
    burnish.run(config, rewards=small_digits, resume=Path("run"))
    lines = read_metrics(Path("run"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, old in zip(lines[2:], expected, strict=True):
        found = {name: line.get(name) for name in old}
        # another CPU or torch differs in the last bits of fp32; differences that are near zero
        # (gaps between two kernels) are of that size themselves
        assert found == pytest.approx(old, rel=1e-3, abs=1e-5)
