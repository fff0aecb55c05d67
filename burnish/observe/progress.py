"""Progress display of a run: a live bar on a terminal, otherwise one plain line per step.

Every line also goes to the logger ``burnish``, and :func:`setup_logging` writes that logger to
``run.log``. Warnings of any ``burnish.*`` logger reach the terminal as well.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from logging.handlers import BufferingHandler
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from burnish.messages import visible
from burnish.secret import without_texts

LOG_FILE = "run.log"
LOGGER = "burnish"

_log = logging.getLogger(LOGGER)

_SHOWN = (
    ("reward/mean", "reward"),
    ("eval/pass@1", "pass@1"),
    ("eval/loss", "eval loss"),
    ("episodes/turns", "turns"),
    ("train/mismatch_abs", "gap"),  # mean |trainer's - sampler's log-probability| of a token
)
_LEGEND = {
    "reward/mean": "reward: mean of all sampled responses, also of groups that are filtered",
    "train/mismatch_abs": (
        "gap: mean difference between the trainer's and the sampler's log-prob of a token"
    ),
}
"""Explanations of numbers in the lines of steps."""
_FAILED = ("episodes/env_error", "episodes/infra_error", "episodes/timeout")
_SKIPPED = ("train/skipped_steps", "critic/skipped_steps")
_SPEEDS = ("rollout/tokens_per_s", "train/tokens_per_s")
_NOT_PHASES = frozenset({"time/step_s", "time/total_s"})


class ProgressDisplay:
    """Progress display of one run, active from construction to :meth:`close`."""

    def __init__(self, total_steps: int, *, every: int = 1, console: Console | None = None) -> None:
        """Start the display. It is updated every ``every`` steps and after the last one.

        With ``console`` None it prints to stdout.
        """
        self._total = total_steps
        self._every = every
        self._console = console or Console()
        self._started = time.monotonic()
        self._num_seen = 0
        self._explained = False
        self._live: RichProgress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._live = RichProgress(
                TextColumn("[bold]step[/bold]"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[shown]}", markup=False),
                console=self._console,
            )
            self._task = self._live.add_task("", total=total_steps, shown="starting")
            self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report that step number ``step`` (1 is the first) is done, with its metrics. Explain the
        numbers before the first line."""
        self._num_seen += 1
        per_step = (time.monotonic() - self._started) / self._num_seen
        left = self._total - step
        if left > 0 and step % self._every:
            return
        if not self._explained and (legend := [_LEGEND[n] for n in _LEGEND if n in metrics]):
            self._explained = True
            self.message("; ".join(legend))
        shown = describe_step(metrics, eta_s=per_step * left if left > 0 else None)
        line = " · ".join([f"step {step}/{self._total}", *shown])
        _log.info(line)
        if self._live is not None:
            self._live.update(self._task, completed=step, shown=" · ".join(shown))
        else:
            _print(line, self._console)

    def message(self, text: str) -> None:
        """Print one line of text, above the bar on a terminal."""
        tell(text, self._console)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. Cells are plain text; square brackets are not interpreted as markup."""
        table = Table(title=Text(title, style="bold"), box=box.SIMPLE_HEAD, title_justify="left")
        for column in columns:
            table.add_column(Text(column))
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        self._console.print(table)
        plain = Console(file=io.StringIO(), width=120, color_system=None)
        with plain.capture() as capture:
            plain.print(table)
        _log.info(
            "\n" + "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())
        )

    def close(self) -> None:
        """Stop the bar and leave its last state on the terminal. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def tell(text: str, console: Console | None = None) -> None:
    """Log ``text`` and print it to ``console``, or to stdout if that is None."""
    _log.info(text)
    _print(text, console or Console())


def _print(text: str, console: Console) -> None:
    console.print(visible(text), markup=False, highlight=False, soft_wrap=True, emoji=False)


def describe_step(metrics: Mapping[str, float], *, eta_s: float | None) -> list[str]:
    """Return the most important numbers of a step as short texts; missing metrics are omitted.

    >>> describe_step({"reward/mean": 0.3124, "time/rollout_s": 4.1, "time/train_s": 5.9}, eta_s=80)
    ['reward 0.312', 'rollout 41% train 59%', 'ETA 1m20s']
    """
    shown = [f"{word} {_short(metrics[name])}" for name, word in _SHOWN if name in metrics]
    if "reward/mean" not in metrics and "train/loss" in metrics:
        shown.insert(0, f"loss {_short(metrics['train/loss'])}")
    if "train/loss_scale" in metrics:
        scale = metrics["train/loss_scale"]
        mantissa, exponent = math.frexp(scale)  # powers of two have the mantissa 0.5
        shown.append(f"scale 2^{exponent - 1}" if mantissa == 0.5 else f"scale {_short(scale)}")
    if "generate/prompts_total" in metrics:
        done, total = metrics["generate/prompts_done"], metrics["generate/prompts_total"]
        shown.insert(0, f"{done:,.0f}/{total:,.0f} prompts")
    skipped = sum(metrics[name] for name in _SKIPPED if metrics.get(name, 0) > 0)
    if skipped:
        shown.append(f"{skipped:,.0f} skipped")
    failed = sum(metrics.get(name, 0) for name in _FAILED)
    if failed:
        shown.append(f"{failed:,.0f} failed episodes")
    speed = next((metrics[name] for name in _SPEEDS if name in metrics), None)
    if speed is not None and math.isfinite(speed):
        shown.append(f"{speed:,.0f} tok/s")
    split = _time_split(metrics)
    if split:
        shown.append(split)
    if eta_s is not None:
        shown.append(f"ETA {format_duration(eta_s)}")
    return shown


def format_duration(seconds: float) -> str:
    """Format seconds in the two largest units.

    >>> [format_duration(s) for s in (0.42, 7, 80, 3725, 200_000)]
    ['0.4s', '7s', '1m20s', '1h02m', '2d07h']
    """
    if seconds < 1:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{minutes}m{s:02d}s" if minutes else f"{s}s"


def time_phases(metrics: Mapping[str, float], lane: str = "") -> dict[str, float]:
    """Return phase name -> seconds of a lane: of the trainer from the ``time/<phase>_s`` metrics,
    without ``step`` and ``total``, or of another from ``time/<lane>/<phase>_s``.

    >>> line = {"time/step_s": 3.0, "time/wait_s": 1.0, "time/sampler/rollout_s": 2.5}
    >>> time_phases(line), time_phases(line, "sampler")
    ({'wait': 1.0}, {'rollout': 2.5})
    """
    start = f"time/{lane}/" if lane else "time/"
    return {
        name.removeprefix(start).removesuffix("_s"): seconds
        for name, seconds in metrics.items()
        if name.startswith(start) and name.endswith("_s") and name not in _NOT_PHASES
        if "/" not in name.removeprefix(start)
    }


def time_lanes(metrics: Mapping[str, float]) -> list[str]:
    """Return the lanes of a step, the trainer's ("") first."""
    parts = [name.split("/") for name in metrics if name.startswith("time/")]
    return ["", *sorted({lane for _, lane, *rest in parts if rest})]


class _WithoutSecrets(logging.Formatter):
    """Formats a record, traceback included, without some texts and without control characters."""

    def __init__(self, form: str, hidden: Collection[str]) -> None:
        super().__init__(form)
        self._hidden = hidden

    def format(self, record: logging.LogRecord) -> str:
        return visible(without_texts(super().format(record), self._hidden))


def setup_logging(run_dir: Path, *, hidden: Collection[str] = ()) -> None:
    """Append the logger ``burnish`` to ``run_dir/run.log``, and print its warnings to stderr.
    ``hidden``: texts that the file must not contain, replaced by ``***``.

    Another call switches to its run folder. :func:`close_logging` undoes it.
    """
    close_logging()
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    to_file = _RunLogHandler(run_dir / LOG_FILE, encoding="utf-8", errors="replace")
    to_file.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)-7s %(message)s", hidden))
    for earlier in [handler for handler in _log.handlers if isinstance(handler, _EarlyHandler)]:
        for record in earlier.buffer:
            to_file.handle(record)
        _log.removeHandler(earlier)
    _log.addHandler(to_file)
    _log.addHandler(_StderrHandler(logging.WARNING))
    _log.setLevel(logging.INFO)


@contextmanager
def keeping_early_records() -> Iterator[None]:
    """Print warnings to stderr, and keep all records until :func:`setup_logging` writes them to
    ``run.log``: the checks of a launch precede the log."""
    level = _log.level
    records = _EarlyHandler()
    _log.addHandler(records)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(records)
        _log.setLevel(level)


def close_logging() -> None:
    """Close ``run.log`` and restore the logger. No effect if :func:`setup_logging` was not
    called."""
    for handler in list(_log.handlers):
        if isinstance(handler, _RunLogHandler | _StderrHandler):
            _log.removeHandler(handler)
            handler.close()
            _log.setLevel(logging.NOTSET)


@contextmanager
def silenced() -> Iterator[None]:
    """Discard standard output, and log warnings only to run.log, in this process. Errors are still
    printed."""
    discarded = logging.NullHandler()  # otherwise logging prints warnings without a handler
    _log.addHandler(discarded)
    before, _StderrHandler.discards = _StderrHandler.discards, True
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        _StderrHandler.discards = before
        _log.removeHandler(discarded)


_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SHOWN_REPEATS = frozenset(10**n for n in range(1, 10))
"""Numbers of times at which a repeated warning is printed again."""
_MAX_COUNTED = 1000
"""Different warnings whose repetitions are counted."""

FILE_ONLY = {"file_only": True}
"""``extra`` of log records that are already printed on the terminal."""


class _RunLogHandler(logging.FileHandler):
    """The handler of run.log, with its own class to distinguish it from a user's handlers."""


class _StderrHandler(logging.Handler):
    """Prints to the current sys.stderr, which a live bar replaces to keep lines above itself."""

    discards = False
    """True on ranks that print only errors (:func:`silenced`)."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if self.discards or "file_only" in vars(record):
            return
        try:
            text = visible(self.format(record))
            template = _NUMBER.sub("0", text)  # repetitions may contain other numbers
            if len(self._counts) < _MAX_COUNTED:
                self._counts[template] += 1
            count = self._counts[template]
            if count > 1 and count not in _SHOWN_REPEATS:
                return
            repeated = f" ({count} times; {LOG_FILE} has all)" if count > 1 else ""
            print(text + repeated, file=sys.stderr)
        except Exception:  # as logging requires of handlers: a log line never stops the program
            self.handleError(record)


class _EarlyHandler(BufferingHandler):
    """Keeps the records before run.log is open, and prints their warnings."""

    def __init__(self) -> None:
        super().__init__(capacity=0)
        self._terminal = _StderrHandler(logging.WARNING)

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        if record.levelno >= self._terminal.level:
            self._terminal.handle(record)
        return False


def _time_split(metrics: Mapping[str, float]) -> str:
    phases = {name: s for name, s in time_phases(metrics).items() if s > 0}
    total = sum(phases.values())
    largest = sorted(phases.items(), key=lambda item: -item[1])[:3]
    in_order = [(name, s) for name, s in phases.items() if (name, s) in largest and s >= total / 20]
    return " ".join(f"{name} {s / total:.0%}" for name, s in in_order)


def _short(value: float) -> str:
    """Format with three significant digits: 0.312, 12.3, 1e-05, 1e+38. From a thousand to a
    billion, round to an integer."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
