"""Results of benchmarks/gpu_session.py: results.json, written step by step, and results.md.

The process of a step writes each finding at once (:class:`Report`), so a step that is killed keeps
what it had. The session adds how the step ended (:class:`Results`).
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import markdown_table

FORMAT = 1
TAIL_CHARS = 4000
ENDED = ("done", "failed", "timeout", "killed", "gave up")
"""States of steps that a later call does not run again. (The others: ``running``, when the session
itself was killed, and ``cut``, when its call was over.)"""


@dataclass(frozen=True)
class Setup:
    """Arguments of a step."""

    out: Path
    """Folder of results, small."""
    work: Path
    """Folder of what may be large and is not kept: models, run folders."""
    tiny: bool
    """Tiny shapes on the CPU, to test the steps."""

    @property
    def device(self) -> str:
        """The device that is measured."""
        return "cpu" if self.tiny else "cuda"


def write_json(path: Path, tree: Any) -> None:
    """Write ``tree`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(tree, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def tail(error: BaseException) -> str:
    """Return the end of a traceback."""
    return "".join(traceback.format_exception(error))[-TAIL_CHARS:]


class Report:
    """Findings of one step. Each method writes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {"values": {}, "tables": {}, "problems": []}
        self._write()

    def add(self, **values: Any) -> None:
        """Store named values."""
        self.values["values"].update(values)
        self._write()

    def summary(self, text: str) -> None:
        """Set the step's line in the table of all steps."""
        self.values["summary"] = text
        self._write()

    def row(self, table: str, **cells: Any) -> None:
        """Add a row to a table of the report. The cells' names are the table's columns."""
        self.values["tables"].setdefault(table, []).append(cells)
        self._write()

    def problem(self, text: str) -> None:
        """Store a problem. The step continues; the session's exit code will be 1."""
        self.values["problems"].append(text)
        self._write()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Turn an exception of one of several cases into a problem, so that the next case runs."""
        try:
            yield
        except Exception as error:
            self.problem(f"{name}: {tail(error)}")

    def _write(self) -> None:
        write_json(self.path, self.values)


class Results:
    """``results.json``: every step's state and findings. Written after each change."""

    def __init__(self, path: Path, *, tiny: bool, preset: str = "full") -> None:
        """Continue the file if there is one. Raises SystemExit if it is not of this session."""
        self.path = path
        self.tree: dict[str, Any] = {"format": FORMAT, "tiny": tiny, "preset": preset}
        self.tree |= {"calls": [], "steps": {}}
        if not path.is_file():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            own = found["format"] == FORMAT and isinstance(found["steps"], dict)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} cannot be read ({error!r}); use another --out") from None
        ours, theirs = (
            f"--tiny={tree['tiny']}, --preset={tree.get('preset', 'full')}, format {tree['format']}"
            for tree in (self.tree, found)
        )
        if not own or theirs != ours:
            raise SystemExit(
                f"{path} is from another kind of session ({theirs}; this one has {ours}), whose "
                "results cannot be combined; use another --out"
            )
        self.tree = found

    def step(self, name: str) -> dict[str, Any]:
        """Return the record of a step, empty if it has not begun."""
        return dict(self.tree["steps"].get(name, {}))

    def ended(self, name: str, redo: bool) -> bool:
        """Return whether a step need not run."""
        return self.step(name).get("state") in ENDED and not redo

    def set(self, name: str, **fields: Any) -> None:
        """Replace the record of a step."""
        self.tree["steps"][name] = fields
        self.write()

    def write(self) -> None:
        """Write the file atomically."""
        write_json(self.path, self.tree)


def result_cell(step: dict[str, Any]) -> str:
    """Return one line with the state and the findings of a step."""
    state, found = step.get("state"), step.get("found") or {}
    if state is None:
        return "not run"
    parts = [str(found["summary"])] if "summary" in found else []
    if problems := found.get("problems"):
        first = problems[0].strip().splitlines()
        parts.append(f"{len(problems)} problems, the first: {first[0][:60]} {first[-1][:120]}")
    if state != "done":
        last = (step.get("error") or "").strip().splitlines()
        parts.insert(0, f"**{state}**" + (f" ({last[-1][:160]})" if last else ""))
    return "; ".join(parts).replace("|", "\\|") or "done"


def markdown(steps: Sequence[tuple[str, str]], tree: dict[str, Any]) -> str:
    """Return the report: device and versions, one row per step (``steps``: name, what it measures),
    then every table of every step."""
    about = tree.get("about") or {}
    head = [f"{name}: {value}" for name, value in about.items() if value]
    rows = []
    for name, what in steps:
        step = tree["steps"].get(name, {})
        seconds = f"{step['seconds']:.0f}" if step.get("seconds") is not None else "not run"
        rows.append((f"`{name}`", what, result_cell(step), seconds))
    lines = [". ".join([*head, ""]).strip()] if head else []
    lines += ["", *markdown_table(("step", "what is measured", "result", "seconds"), rows)]
    for name, _ in steps:
        found = tree["steps"].get(name, {}).get("found") or {}
        for title, cells in found.get("tables", {}).items():
            lines += ["", f"**{title}**", "", *_table(cells)]
    return "\n".join(lines).strip() + "\n"


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    heads = list(dict.fromkeys(name for row in rows for name in row))
    texts = ([cell(row.get(head)) for head in heads] for row in rows)
    yield from markdown_table([head.replace("_", " ") for head in heads], texts)


def cell(value: Any) -> str:
    """Return a value as a cell of a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
