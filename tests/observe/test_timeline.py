"""Spans add up, nest and stay bounded; the timing proxy only records times.

Time is replaced by a clock that the test moves, so every expected number is exact up to the
rounding of binary floats (hence approx, at its default relative 1e-6).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from burnish.observe import timeline as timeline_module
from burnish.observe.timeline import SAMPLER, Drained, Span, Timeline, timed


class Clock:
    """perf_counter that advances only on request."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeline_module.time, "perf_counter", clock)
    return clock


class Engine:
    """Substitute for a rollout engine: a lazy method, an eager one, state."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.version = 3
        self.closed = False

    def generate(self, count: int) -> Iterator[int]:
        try:
            for i in range(count):
                self.clock.pass_(2.0)
                yield i
        finally:
            self.closed = True

    def poll(self) -> None:
        self.clock.pass_(1.0)

    def load(self, seconds: float) -> str:
        self.clock.pass_(seconds)
        return "loaded"

    def fail(self) -> None:
        self.clock.pass_(1.0)
        raise RuntimeError("broken engine")


def test_collect_gives_the_seconds_since_the_last_collect_and_totals_give_all(clock: Clock) -> None:
    line = Timeline()
    with line.span("train"):
        clock.pass_(3.0)
    assert line.collect() == pytest.approx({"train": 3.0})
    with line.span("train"):
        clock.pass_(4.0)
    assert line.collect() == pytest.approx({"train": 4.0})
    assert line.collect() == {}
    assert line.totals == pytest.approx({"train": 7.0})


def test_only_the_outermost_span_counts_so_the_sum_is_never_above_the_clock(clock: Clock) -> None:
    line = Timeline()
    with line.span("step"):
        clock.pass_(1.0)
        with line.span("sync"):
            clock.pass_(2.0)
    assert line.collect() == pytest.approx({"step": 3.0})


def test_a_span_that_raises_is_counted_and_closed(clock: Clock) -> None:
    line = Timeline()
    with pytest.raises(KeyError), line.span("a"):
        clock.pass_(1.0)
        raise KeyError
    with line.span("b"):
        clock.pass_(1.0)
    assert line.collect() == pytest.approx({"a": 1.0, "b": 1.0})


def test_a_timed_iterator_counts_the_time_inside_next_and_none_of_the_consumers(
    clock: Clock,
) -> None:
    """Three items at 2 s each, 10 s of the consumer after each: 6 s, not 36."""
    line = Timeline()
    engine = timed(Engine(clock), line, {"generate": "rollout"})
    for _ in engine.generate(3):
        with line.span("reward"):
            clock.pass_(10.0)
    assert line.collect() == pytest.approx({"rollout": 6.0, "reward": 30.0})


def test_adjacent_items_are_one_span_in_the_trace(clock: Clock, tmp_path: Path) -> None:
    line = Timeline()
    engine = timed(Engine(clock), line, {"generate": "rollout"})
    list(engine.generate(50))
    line.save(tmp_path / "timeline.json")
    spans = _spans(tmp_path / "timeline.json")
    # One for the call, which returns at once, and one for the 50 items together.
    assert [(s["name"], s["dur"]) for s in spans] == [("rollout", 0.0), ("rollout", 100e6)]


def test_closing_a_timed_iterator_early_closes_the_inner_iterator(clock: Clock) -> None:
    line = Timeline()
    bare = Engine(clock)
    items = timed(bare, line, {"generate": "rollout"}).generate(10)
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert bare.closed
    assert line.collect() == pytest.approx({"rollout": 2.0})


def test_polls_in_a_row_are_one_span_of_the_trace(clock: Clock, tmp_path: Path) -> None:
    line = Timeline()
    engine = timed(Engine(clock), line, {"poll": "rollout", "load": "sync"})
    for _ in range(3):
        engine.poll()
    engine.load(2.0)
    engine.poll()
    clock.pass_(5.0)
    engine.poll()
    assert line.collect() == pytest.approx({"rollout": 5.0, "sync": 2.0})
    line.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [(e["name"], e["dur"] / 1e6) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert spans == [("rollout", 3.0), ("sync", 2.0), ("rollout", 1.0), ("rollout", 1.0)]


def test_the_proxy_forwards_reads_writes_results_errors_and_isinstance(clock: Clock) -> None:
    line = Timeline()
    bare = Engine(clock)
    engine = timed(bare, line, {"load": "sync", "fail": "fail"})
    assert engine.load(5.0) == "loaded"
    with pytest.raises(RuntimeError, match="broken engine"):
        engine.fail()
    assert line.collect() == pytest.approx({"sync": 5.0, "fail": 1.0})
    engine.version = 4
    assert bare.version == 4 and engine.version == 4
    assert isinstance(engine, Engine)
    with pytest.raises(AttributeError, match="nothing"):
        engine.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_missing_method_is_refused_when_the_engine_is_built(clock: Clock) -> None:
    with pytest.raises(ValueError, match=r"cannot time Engine\.genrate"):
        timed(Engine(clock), Timeline(), {"genrate": "rollout"})


def test_the_trace_is_bounded_with_a_note_and_the_sums_are_exact(
    clock: Clock, tmp_path: Path
) -> None:
    line = Timeline(max_events=10)
    for _ in range(25):
        with line.span("train"):
            clock.pass_(1.0)
    line.save(tmp_path / "timeline.json")
    trace = json.loads((tmp_path / "timeline.json").read_text())
    spans = _spans(tmp_path / "timeline.json")
    assert [s["ts"] for s in spans] == [i * 1e6 for i in range(15, 25)]
    assert trace["otherData"]["recorded_spans"] == 25
    assert "15 old spans are omitted" in trace["otherData"]["note"]
    assert line.totals == pytest.approx({"train": 25.0})


def test_spans_of_a_worker_are_in_the_trace_at_their_time_and_not_in_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker starts 100 s after the run, and its own clock counts from elsewhere."""
    clocks = [Clock(), Clock()]
    lines = []
    for late, clock in zip((0.0, 100.0), clocks, strict=True):
        clock.pass_(50 * late)
        monkeypatch.setattr(timeline_module.time, "perf_counter", clock)
        monkeypatch.setattr(timeline_module.time, "time", lambda late=late: 1e9 + late)
        lines.append(Timeline(max_events=3))
    run, worker = lines
    for _ in range(5):
        with worker.span("rollout", join_s=0.05):
            clocks[1].pass_(2.0)
        clocks[1].pass_(0.04)
    with worker.span("sync"):
        clocks[1].pass_(1.0)
    run.add("rollout 0", worker.drain())
    assert worker.drain() == Drained([])
    with worker.span("rollout", join_s=0.05):
        clocks[1].pass_(1.0)
    run.add("rollout 0", worker.drain())
    assert run.totals == {}
    run.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in _spans(tmp_path / "trace.json")]
    assert spans == [
        ("rollout", pytest.approx(100.0), pytest.approx(10.16)),
        ("sync", pytest.approx(110.2), pytest.approx(1.0)),
        ("rollout", pytest.approx(111.2), pytest.approx(1.0)),
    ]
    assert [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"] == ["rollout 0"]
    run.add("rollout 0", Drained([Span("a", 0.0, 1.0)]))
    run.save(tmp_path / "trace.json")
    assert "1 old spans" in json.loads((tmp_path / "trace.json").read_text())["otherData"]["note"]


def test_spans_that_a_worker_omitted_are_counted(tmp_path: Path) -> None:
    """Of 5, then 1, then 4 spans it keeps 3, 1 and 3: 2 + 0 + 1 are omitted."""
    run, worker = Timeline(), Timeline(max_events=3)
    for count in (5, 1, 4):
        for _ in range(count):
            with worker.span("rollout"):
                pass
        run.add("rollout 0", worker.drain())
    run.save(tmp_path / "trace.json")
    other = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert (other["recorded_spans"], other["left_out_spans"]) == (10, 3)
    assert "3 old spans" in other["note"] and len(_spans(tmp_path / "trace.json")) == 7


def test_spans_of_another_thread_do_not_nest_into_this_ones(clock: Clock) -> None:
    line = Timeline()

    def work() -> None:
        with line.span("other"):
            pass

    with line.span("main"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert set(line.collect()) == {"main", "other"}


def _spans(path: Path) -> list[dict[str, float]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]


def test_two_threads_at_once_have_sums_of_their_own_and_joined_polls(
    clock: Clock, tmp_path: Path
) -> None:
    """The trainer trains for 2 s. Meanwhile the engine's thread polls for 1 s, a span of the
    trainer ends, and the thread polls again: 2 s of sampling in one event of the trace."""
    line, engine = Timeline(), Engine(clock)
    sampler = timed(engine, line, {"poll": f"{SAMPLER}/rollout"})
    with ThreadPoolExecutor(1) as thread, line.span("train"):
        thread.submit(sampler.poll).result()
        with line.span("inner"):
            pass
        thread.submit(sampler.poll).result()
    assert line.collect() == pytest.approx({"train": 2.0, "sampler/rollout": 2.0})
    line.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {e["name"]: (e["dur"], e["tid"]) for e in trace if e["ph"] == "X"}
    assert len([e for e in trace if e["ph"] == "X"]) == 3
    assert spans["sampler/rollout"][0] == pytest.approx(2e6)
    assert spans["sampler/rollout"][1] != spans["train"][1]


def test_a_working_run_writes_its_trace_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Clock()
    monkeypatch.setattr(timeline_module.time, "monotonic", now)
    line, path = Timeline(), tmp_path / "timeline.json"
    written = []
    for _ in range(200):
        now.pass_(1.0)
        line.save_at_times(path)
        if path.exists():
            written.append(now.now)
            path.unlink()
    assert len(written) == 6
    slow = line.save

    def takes_a_second(to: Path) -> None:
        slow(to)
        now.pass_(1.0)

    monkeypatch.setattr(line, "save", takes_a_second)
    now.pass_(100.0)
    before = now.now
    while path.unlink(missing_ok=True) or now.now - before < 1200:
        line.save_at_times(path)
        written += [now.now] * path.exists()
        now.pass_(1.0)
    assert len(written) - 6 == 3  # at most a five-hundredth of the time
