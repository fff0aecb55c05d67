"""Trackers get every step in order. One that fails or hangs neither stops nor slows training."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from burnish.config import load_config
from burnish.observe.errors import TrackerError
from burnish.observe.make_trackers import check_trackers
from burnish.observe.metrics import MetricsLog, read_metrics
from burnish.observe.samples import write_samples
from burnish.observe.tensorboard import TensorBoardTracker
from burnish.observe.tracker import SampleRate, Samples, TrackerLimits, TrackerQueue, Trackers
from burnish.types import Group, Prompt, Sample

LIMITS = TrackerLimits(close_timeout_s=30.0)
AT_ONCE = TrackerLimits(close_timeout_s=0.05, max_queued_steps=4)


class Recorder:
    """Remembers its calls."""

    name = "recorder"

    def __init__(self) -> None:
        self.recorded: int | None = None
        """Last step that an earlier process has recorded. None: all."""
        self.calls: list[tuple[Any, ...]] = []
        self.tables: dict[int, dict[str, list[str]]] = {}

    def start(self) -> None:
        self.calls.append(("start",))

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        self.calls.append(("log", step, dict(metrics)))
        if samples:
            found = samples.items()
            self.tables[step] = {k: [row["response"] for row in rows] for k, rows in found}

    def rewind(self, step: int) -> int:
        self.calls.append(("rewind", step))
        return self.recorded if self.recorded is not None else step

    def close(self, *, failed: bool) -> None:
        self.calls.append(("close", failed))

    @property
    def steps(self) -> list[int]:
        return [call[1] for call in self.calls if call[0] == "log"]


class Hanging(Recorder):
    """Hangs in one method until it is let go."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.entered, self.let_go = method, threading.Event(), threading.Event()

    def _hang(self, method: str) -> None:
        if method == self.method:
            self.entered.set()
            self.let_go.wait()

    def start(self) -> None:
        self._hang("start")
        super().start()

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        self._hang("log")
        super().log(step, metrics, samples)

    def close(self, *, failed: bool) -> None:
        self._hang("close")
        super().close(failed=failed)


class Failing(Recorder):
    """Raises in some calls."""

    def __init__(self, fails: Callable[[str, int], bool]) -> None:
        super().__init__()
        self.fails = fails

    def start(self) -> None:
        if self.fails("start", 0):
            raise ConnectionError("no route to http://me:secret@tracker")

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        if self.fails("log", step):
            raise SystemExit(f"step {step}")
        super().log(step, metrics, samples)

    def close(self, *, failed: bool) -> None:
        if self.fails("close", 0):
            raise OSError("the disk is full")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_tracker_receives_all_logged_metrics_in_order(
    tmp_path: Path,
) -> None:
    tracker = Recorder()
    log = MetricsLog(tmp_path, Trackers([TrackerQueue(tracker, tmp_path, LIMITS)]))
    log.rewind(-1)
    log.log(0, {"eval/pass@1": math.nan})
    log.start_trackers()
    log.log(1, {"train/loss": 0.5})
    log.close(ended_by=RuntimeError)
    log.close()
    names = [call[:2] for call in tracker.calls]
    assert names == [("start",), ("rewind", -1), ("log", 0), ("log", 1), ("close", True)]
    assert tracker.calls[3][2] == {"train/loss": 0.5, "observe/recorder_dropped": 0.0}
    assert math.isnan(tracker.calls[2][2]["eval/pass@1"])
    assert read_metrics(tmp_path)[1]["observe/recorder_dropped"] == 0.0


@pytest.mark.parametrize("method", ["start", "log"])
def test_a_tracker_that_hangs_loses_only_its_own_steps(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """9 steps. If ``log`` hangs, step 1 is in it, 2 to 5 are queued, and 6 to 9 find the queue
    full: 3 before step 9 is written. If ``start`` hangs, 1 to 4 are queued, so that is 4. At the
    end all 9 are lost."""
    tracker = Hanging(method)
    log = MetricsLog(tmp_path, Trackers([TrackerQueue(tracker, tmp_path, AT_ONCE)]))
    log.start_trackers()
    log.log(1, {"train/loss": 1.0})
    assert tracker.entered.wait(30)
    for step in range(2, 10):
        log.log(step, {"train/loss": float(step)})
    log.close()
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert lines[-1]["observe/recorder_dropped"] == (3 if method == "log" else 4)
    first, last = warnings(caplog)
    assert "4 steps are waiting for it, so new ones are dropped. Training continues" in first
    assert "number of steps that did not reach it: 9" in last
    (thread,) = [t for t in threading.enumerate() if t.name == "burnish-tracker-recorder"]
    tracker.let_go.set()
    thread.join(30)
    expected = [1] if method == "log" else []
    assert tracker.steps == expected, "nothing is delivered after the run has ended"


def test_a_tracker_that_hangs_in_close_is_abandoned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Hanging("close")
    trackers = Trackers([TrackerQueue(tracker, tmp_path, AT_ONCE)])
    trackers.start()
    trackers.log(1, {})
    trackers.close()
    tracker.let_go.set()
    (said,) = warnings(caplog)
    assert "did not close within 0.05 s" in said and tracker.steps == [1]


def test_a_second_interrupt_does_not_wait_for_trackers(tmp_path: Path) -> None:
    tracker = Hanging("log")
    queue = TrackerQueue(tracker, tmp_path, LIMITS)
    trackers = Trackers([queue])
    trackers.start()
    trackers.log(1, {})
    assert tracker.entered.wait(30)
    trackers.close(ended_by=KeyboardInterrupt)
    assert queue.dropped == 1
    tracker.let_go.set()


def test_steps_that_a_tracker_fails_on_are_counted_and_the_others_arrive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Failing(lambda method, step: method == "close" or step % 2 == 1)
    queue = TrackerQueue(tracker, tmp_path, LIMITS)
    trackers = Trackers([queue])
    trackers.start()
    for step in range(1, 7):
        trackers.log(step, {})
    trackers.close()
    assert tracker.steps == [2, 4, 6] and queue.dropped == 3
    first, last = warnings(caplog)
    assert "a step failed: SystemExit: step 1. Training continues" in first
    assert "did not reach it: 3 (metrics.jsonl has them)" in last


def test_a_tracker_that_cannot_start_is_a_warning_without_passwords(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Failing(lambda method, step: method == "start")
    trackers = Trackers([TrackerQueue(tracker, tmp_path, LIMITS)])
    trackers.start()
    trackers.log(1, {})
    trackers.rewind(0, list)
    trackers.log(1, {})
    trackers.close()
    assert tracker.calls == []
    first, last = warnings(caplog)
    assert "could not start: ConnectionError: no route to http://***@tracker" in first
    assert "steps that did not reach it" in last


def test_a_run_that_never_started_its_trackers_reports_no_lost_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Recorder()
    trackers = Trackers([TrackerQueue(tracker, tmp_path, LIMITS)])
    trackers.rewind(3, list)
    trackers.close(ended_by=RuntimeError)
    assert tracker.calls == [] and warnings(caplog) == []


def test_a_rewind_replaces_the_queued_steps_that_come_again(tmp_path: Path) -> None:
    tracker = Recorder()
    trackers = Trackers([TrackerQueue(tracker, tmp_path, LIMITS)])
    for step in (1, 2, 3):
        trackers.log(step, {})
    trackers.rewind(1, list)
    trackers.log(2, {})
    trackers.start()
    trackers.close()
    calls = [call[:2] for call in tracker.calls]
    assert calls == [("start",), ("log", 1), ("rewind", 1), ("log", 2), ("close", False)]


def test_steps_that_an_earlier_process_did_not_deliver_are_sent_on_resume(tmp_path: Path) -> None:
    """Of steps 1 to 5 the tracker has 1, and the run goes back to the checkpoint of 4. It fails on
    step 2."""
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.log(step, {"train/loss": math.nan if step == 3 else float(step)})
    log.close()
    tracker = Failing(lambda _method, step: step == 2)
    tracker.recorded = 1
    queue = TrackerQueue(tracker, tmp_path, LIMITS)
    log = MetricsLog(tmp_path, Trackers([queue]))
    log.rewind(4)
    log.start_trackers()
    log.log(5, {"train/loss": 50.0})
    log.close()
    losses = {call[1]: call[2]["train/loss"] for call in tracker.calls if call[0] == "log"}
    assert tracker.steps == [3, 4, 5] and queue.dropped == 1
    assert math.isnan(losses[3]) and (losses[4], losses[5]) == (4.0, 50.0)


def _group(step: int) -> Group:
    prompt = Prompt(id=f"p{step}", text="1+1=", token_ids=(1,), label="2")
    samples = [
        Sample(
            prompt_id=prompt.id,
            group_id=0,
            sample_id=f"{step}/{n}",
            prompt_ids=(1,),
            response_ids=(2,),
            text=f"{step}.{n}",
            finish_reason="stop",
            sampler_logprobs=(0.0,),
            action_mask=(True,),
            versions=(0,),
        )
        for n in range(3)
    ]
    return Group(group_id=0, prompt=prompt, samples=tuple(samples))


def test_samples_come_from_the_run_folder_at_a_bounded_rate(tmp_path: Path) -> None:
    """Tables of at most 2 rows, 3 steps apart for each split: training 1, 4, 7, held-out 2, 6."""
    tracker = Recorder()
    rate = SampleRate(rows=2, every_n_steps=3)
    trackers = Trackers([TrackerQueue(tracker, tmp_path, TrackerLimits(30.0, rate))])
    for step in range(1, 8):
        write_samples(tmp_path, step, [_group(step)], None, limit=8)
        if step % 2 == 0:
            write_samples(tmp_path, step, [_group(step)], None, limit=8, split="eval")
        trackers.log(step, {})
    trackers.start()
    trackers.close()
    shown = {
        split: [s for s, t in tracker.tables.items() if split in t] for split in ("train", "eval")
    }
    assert shown == {"train": [1, 4, 7], "eval": [2, 6]}
    assert tracker.tables[4] == {"train": ["4.0", "4.1"]}


def test_tensorboard_receives_the_same_metrics_and_drops_rewound_steps(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    queue = TrackerQueue(TensorBoardTracker(tmp_path), tmp_path, LIMITS)
    log = MetricsLog(tmp_path, Trackers([queue]))
    log.start_trackers()
    for step in (1, 2, 3):
        log.log(step, {"train/loss": float(step)})
    log.rewind(1)
    log.log(2, {"train/loss": 20.0})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]


def test_no_name_or_number_costs_the_other_metrics_of_its_step(tmp_path: Path) -> None:
    """Names of rewards come from recipes, files and servers."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = [
        "",
        "\ud800x",
        "a\x00\x1b[2J\nb",
        "/a//b/../",
        "reward/x" * 999,
        "$x {}",
        "_step",
        "é.",
    ]
    numbers = [math.nan, math.inf, -math.inf, 1e308, 1e-320, 0.5, -0.0, 10**30]
    queue = TrackerQueue(TensorBoardTracker(tmp_path), tmp_path, LIMITS)
    log = MetricsLog(tmp_path, Trackers([queue]))
    log.start_trackers()
    metrics = dict(zip(names, numbers, strict=True))
    log.log(1, metrics)
    log.close()
    assert queue.dropped == 0
    (first,) = read_metrics(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) >= {*names, "\\ud800x"} - {"\ud800x"}
    assert set(first) >= {*names, "\\ud800x"} - {"\ud800x"}


def test_a_missing_tensorboard_is_named_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the working directory has a folder of that name, which Python takes for a package."""
    (tmp_path / "tensorboard").mkdir()
    folder = importlib.machinery.PathFinder.find_spec("tensorboard", [str(tmp_path)])
    assert folder is not None and folder.origin is None
    tree = {
        "job": "sft",
        "model": {"scratch": {}},
        "data": {"sources": ["rows.jsonl"]},
        "train": {"train_batch_size": 4},
        "observe": {"tensorboard": True},
    }
    for spec in (None, folder):
        monkeypatch.setattr(
            "burnish.observe.make_trackers.find_spec", lambda _name, spec=spec: spec
        )
        with pytest.raises(TrackerError, match=r"pip install 'burnish\[tensorboard\]'"):
            check_trackers(load_config(tree))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrackerError, match=r"importing it failed .*burnish\[tensorboard\]"):
        TensorBoardTracker(tmp_path)
