"""The step ``trace`` of benchmarks/gpu_session.py: where the time of one training pass goes.

The pass (a micro-batch of 8 rows with one shared prompt, about 16k tokens, and the optimizer step)
is profiled twice: without Python stacks for the shares and ``OUT/trace.json.gz``, which
chrome://tracing and ui.perfetto.dev open; and with stacks to name what the host did while the
device was idle. Stacks slow the host down, so gaps of the second pass are longer than they would
be.

Of a gap between two kernels the host is the cause up to the launch of the second; what was launched
before the gap began waited for something else (another stream, a copy).
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_compare import BEST
from gpu_model import free, make_batch, make_engine, nll, synchronize, vocabulary_of
from gpu_report import Report, Setup
from gpu_speed import rl_cases
from torch.profiler import ProfilerActivity, profile

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
SYNCS = ("Synchronize", "aten::item", "aten::_local_scalar_dense", "aten::nonzero", "Memcpy DtoH")
TOP = 15
STEPS_BEFORE = 2


@dataclass(frozen=True)
class Span:
    """One event of a trace, in microseconds."""

    name: str
    kind: str
    start: float
    end: float
    link: int | None = None
    """Correlation of a launch and what it launched."""


@dataclass(frozen=True)
class Gap:
    """The device did nothing from ``start`` to ``end``; the kernel ``after`` ended it."""

    start: float
    end: float
    after: Span

    @property
    def length(self) -> float:
        """Microseconds."""
        return self.end - self.start


def read_trace(path: Path) -> list[Span]:
    """Return the complete events of a Chrome trace, sorted by start."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spans = [
        Span(
            str(e["name"]),
            str(e.get("cat", "")),
            float(e["ts"]),
            float(e["ts"]) + float(e.get("dur", 0)),
            (e.get("args") or {}).get("correlation"),
        )
        for e in events
        if e.get("ph") == "X"
    ]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def gaps_of(spans: Iterable[Span]) -> list[Gap]:
    """Return the gaps between kernels and copies on the device, all streams together, in order.

    >>> kernel = lambda name, start, end: Span(name, "kernel", start, end)
    >>> busy = [kernel("a", 0, 4), kernel("b", 2, 3), kernel("c", 10, 12), kernel("d", 12, 13)]
    >>> [(gap.start, gap.end, gap.after.name) for gap in gaps_of(busy)]
    [(4, 10, 'c')]
    """
    found, until = [], None
    for span in spans:
        if span.kind not in ON_DEVICE:
            continue
        if until is not None and span.start > until:
            found.append(Gap(until, span.start, span))
        until = span.end if until is None else max(until, span.end)
    return found


class Overlaps:
    """An index of spans by interval."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.starts = np.array([span.start for span in spans])
        self.ends = np.array([span.end for span in spans])

    def within(self, start: float, end: float) -> list[Span]:
        """Return the spans that overlap [start, end], in order."""
        found = np.flatnonzero((self.starts < end) & (self.ends > start))
        return [self.spans[i] for i in found.tolist()]


class Host:
    """The host's side of a trace."""

    def __init__(self, spans: Sequence[Span], root: Path | None = None) -> None:
        self.launched = {
            s.link: s.start for s in spans if s.kind in LAUNCHES and s.link is not None
        }
        self.operations = Overlaps([s for s in spans if s.kind == "cpu_op"])
        here = "" if root is None else f"{root}/"
        python = [s for s in spans if s.kind == "python_function"]
        self.functions = Overlaps(
            [
                Span(s.name.replace(here, ""), s.kind, s.start, s.end)
                for s in python
                if "burnish/" in s.name and ".py(" in s.name
            ]
        )

    def cause(self, gap: Gap) -> tuple[float, str, str]:
        """Return (microseconds of the gap until the launch, Burnish's function, operation)."""
        link = gap.after.link
        launch = gap.end if link is None else self.launched.get(link, gap.end)
        until = min(max(launch, gap.start), gap.end)
        if until <= gap.start:
            return 0.0, "", ""
        return (
            until - gap.start,
            longest(self.functions.within(gap.start, until), gap.start, until),
            longest(self.operations.within(gap.start, until), gap.start, until),
        )


def longest(spans: Sequence[Span], start: float, end: float) -> str:
    """Return the name of the innermost span that covers most of [start, end]. ``spans`` are sorted
    by start.

    >>> spans = [Span("outer", "", 0, 100), Span("first", "", 1, 20), Span("second", "", 21, 80)]
    >>> longest(spans, 15, 60), longest(spans, 2, 3), longest(spans, 90, 95)
    ('second', 'first', 'outer')
    """
    best, name = 0.0, ""
    for span in spans:
        shared = min(span.end, end) - max(span.start, start)
        # an inner span wins over the ones around it if it takes at least half of the gap
        if shared > 0 and (shared >= best or shared >= 0.5 * (end - start)):
            best, name = shared, span.name
    return name


def shares(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the device's milliseconds from the first to the last kernel, its idle share, and the
    time of each kernel."""
    device = [s for s in spans if s.kind in ON_DEVICE]
    if not device:
        return {}
    duration = max(s.end for s in device) - device[0].start
    idle = sum(gap.length for gap in gaps_of(device))
    by_name: Counter[str] = Counter()
    for span in device:
        by_name[span.name] += span.end - span.start  # type: ignore[assignment]
    total = sum(by_name.values())
    counts = Counter(s.name for s in device)
    return {
        "ms": duration / 1e3,
        "idle_share": idle / duration,
        "kernels": len(device),
        "top": [
            {"kernel": n[:90], "calls": counts[n], "ms": us / 1e3, "share": us / total}
            for n, us in by_name.most_common(TOP)
        ],
        "syncs": {n: sum(n in s.name for s in spans) for n in SYNCS},
    }


def trace(setup: Setup, report: Report) -> None:
    """Profile a training pass and report kernels, idle share and gaps."""
    case = rl_cases(tiny=setup.tiny)[0]
    engine = make_engine(
        setup,
        with_entropy=True,
        layout=case.layout,
        max_tokens_per_micro_batch=case.budget,  # all rows in one pass
        **({} if setup.tiny else BEST.keys),
    )
    batch = make_batch(case.groups[:1], vocabulary_of(setup))

    def step() -> None:
        engine.forward_backward(batch, nll)
        engine.optim_step()
        synchronize(setup)

    for _ in range(STEPS_BEFORE):
        step()
    kept = setup.out / "trace.json.gz"
    spans = profiled(setup, step, setup.work / "trace.json", stacks=False)
    with open(setup.work / "trace.json", "rb") as plain, gzip.open(kept, "wb") as packed:
        shutil.copyfileobj(plain, packed)
    found = shares(spans)
    if not found:
        operations = Counter(s.name for s in spans if s.kind == "cpu_op")
        report.add(operations=operations.most_common(TOP))
        if setup.device == "cuda":
            report.problem("the profiler recorded no kernel: CUPTI is missing or not permitted")
        report.summary(f"no kernels on a device; {operations.total()} operations")
        return
    for row in found["top"]:
        report.row("Kernels of a training pass", **row)
    layers = engine.body.config.get_text_config().num_hidden_layers
    report.add(**found, setting=BEST.name, kernels_per_layer=found["kernels"] / layers)
    name_gaps(setup, report, profiled(setup, step, setup.work / "stacks.json", stacks=True))
    syncs = ", ".join(f"{count} x {name}" for name, count in found["syncs"].items() if count)
    report.summary(
        f"{found['ms']:.0f} ms, device idle {found['idle_share']:.1%}, {found['kernels']} kernels, "
        f"{found['kernels'] / layers:.0f} per layer; host waits: {syncs or 'none'}"
    )
    free(setup)


def profiled(setup: Setup, run: Callable[[], None], path: Path, *, stacks: bool) -> list[Span]:
    """Return the trace of one run."""
    activities = [ProfilerActivity.CPU]
    if setup.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, with_stack=stacks) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


def name_gaps(setup: Setup, report: Report, spans: Sequence[Span]) -> None:
    """Report the longest gaps, and the functions with the most idle time."""
    host, gaps = Host(spans, Path(__file__).resolve().parents[1]), gaps_of(spans)
    by_function: Counter[str] = Counter()
    longest_first = sorted(gaps, key=lambda gap: -gap.length)
    for number, gap in enumerate(longest_first[:300]):
        host_us, function, operation = host.cause(gap)
        by_function[function or "(not the host)"] += gap.length  # type: ignore[assignment]
        if number < TOP:
            row = {"us": gap.length, "of_them_host": host_us, "function": function}
            report.row("Longest gaps", **row, operation=operation, then=gap.after.name[:60])
    for name, us in by_function.most_common(TOP):
        report.row("Idle time by function (300 longest gaps)", function=name, ms=us / 1e3)
