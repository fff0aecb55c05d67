"""Partial results of a job that writes rows (generate, score): one file per step, written
atomically, and the output assembled from them.

    run_dir/<job>.json                input prompts and their digest; totals once finished
    run_dir/parts/part_000012.jsonl   the rows of step 12, after a header line (``ShardInfo``)

A part is written under a temporary name and renamed, so a killed run leaves it complete or absent.
The completed steps are the parts from 1 to the last before the first missing one. Every part
records its number of prompts, its number of rows, and the counts of everything dropped. The sums
over the parts therefore account for every prompt.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from burnish.data.prompts.generation import OWN_COLUMNS
from burnish.data_files.writing import ColumnError, json_line, read_lines, write_parquet
from burnish.driver.errors import RunError
from burnish.observe.files import create_new, replacing, write_text
from burnish.small_files import read_small

log = logging.getLogger("burnish")

SHARDS_DIR = "parts"


@dataclass(frozen=True)
class ShardInfo:
    """Header line of a part."""

    step: int
    prompts: int
    rows: int
    sha256: str
    """Digest of the lines after the header."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped prompts or responses, by the names in ``data.selection.DROPS``."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Quantities that add up over parts: ``samples``, ``tokens``, ``truncated``, ``reward``,
    ``scored``, ``kept_reward``, ``margin``."""


class OutputShards:
    """The parts of one run. Only one process may write at a time."""

    def __init__(self, run_dir: Path, *, job: str = "generate") -> None:
        self.run_dir, self.folder, self.job = run_dir, run_dir / SHARDS_DIR, job
        self.state_file = run_dir / f"{job}.json"
        self.done: list[ShardInfo] = []
        """Headers of the completed steps 1, 2, ..."""

    # ---- identity of the run -----------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return the state that :meth:`write_state` wrote; None before that. Raises RunError if the
        file is not a JSON object."""
        path = self.state_file
        if not path.is_file():
            return None
        try:
            state = json.loads(read_small(path))
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is corrupt: not JSON ({error}); start a new run") from error
        if not isinstance(state, dict):
            raise RunError(f"{path} is corrupt: not a JSON object; start a new run")
        return state

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace the state. Raises RunError if the file cannot be written."""
        with self._disk_errors(self.state_file):
            write_text(self.state_file, json.dumps(state, indent=1) + "\n")

    # ---- parts -------------------------------------------------------------------------------

    def find(self, prompts_of: Callable[[int], int]) -> None:
        """Fill ``done`` with the existing parts, up to the first that is missing or incomplete.
        Later parts are deleted. ``prompts_of``: returns the number of prompts of a step."""
        self.done = []
        while (info := self._read(len(self.done) + 1, prompts_of)) is not None:
            self.done.append(info)
        for path in self.folder.glob("*part_*.jsonl*"):
            if path not in {self.path(info.step) for info in self.done}:
                path.unlink()

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"part_{step:06d}.jsonl"

    def add(self, info: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the next part. ``info``: the fields of ShardInfo that are not computed from the
        rows. Raises RunError if the file cannot be written."""
        lines = [json_line(row) for row in rows]
        body = b"".join(lines)
        step = len(self.done) + 1
        part = ShardInfo(
            step=step, rows=len(lines), sha256=hashlib.sha256(body).hexdigest(), **info
        )
        path = self.path(step)
        with self._disk_errors(path), replacing(path) as scratch:
            scratch.write_bytes(json_line(asdict(part)) + body)
        self.done.append(part)

    def rows(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a part."""
        return read_lines(self._body(step))

    def totals(self) -> dict[str, float]:
        """Return the sums over all parts: prompts, rows, dropped items, and ``sums``."""
        totals: dict[str, float] = {"prompts": 0, "rows": 0}
        for info in self.done:
            more = {"prompts": info.prompts, "rows": info.rows, **info.dropped, **info.sums}
            totals |= {name: totals.get(name, 0) + value for name, value in more.items()}
        return totals

    def remove(self) -> None:
        """Delete all parts, whose rows are in the output by then."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _body(self, step: int) -> bytes:
        return self.path(step).read_bytes().partition(b"\n")[2]

    def _read(self, step: int, prompts_of: Callable[[int], int]) -> ShardInfo | None:
        """Return the header of a part. Return None if the part is missing, incomplete, or of
        another step."""
        path = self.path(step)
        if not path.is_file():
            return None
        head, _, body = path.read_bytes().partition(b"\n")
        try:
            info = ShardInfo(**json.loads(head))
            complete = hashlib.sha256(body).hexdigest() == info.sha256
            complete &= all(
                isinstance(number, int | float)
                for number in (info.rows, *info.dropped.values(), *info.sums.values())
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            complete, info = False, None
        if info is None or not complete or (info.step, info.prompts) != (step, prompts_of(step)):
            log.warning("%s is incomplete; this step and later ones are run again", path)
            return None
        return info

    # ---- the output --------------------------------------------------------------------------

    def publish(self, output: Path) -> None:
        """Write all rows to ``output``, atomically.

        An existing file is never overwritten. It is accepted only if its content is identical (a
        run that was killed right after writing it). Raises RunError if the content differs, or if
        the file cannot be written.
        """
        scratch = output.with_name(f".{output.name}.of-{self.run_dir.resolve().name}")
        with self._disk_errors(output):
            try:
                create_new(scratch)
                self._assemble(scratch, kind=output.suffix.lower())
                if not output.exists():
                    with scratch.open("rb") as file:
                        os.fsync(file.fileno())
                    scratch.rename(output)
                elif not filecmp.cmp(scratch, output, shallow=False):
                    raise RunError(
                        f"the output {output} was created by another process during this run, and "
                        "its content differs. All completed steps are kept. Move it away, or "
                        "choose another path, and resume with: "
                        f"burnish {self.job} --resume {self.run_dir} output=OTHER"
                    )
            finally:
                scratch.unlink(missing_ok=True)

    def _assemble(self, path: Path, *, kind: str) -> None:
        steps = [info.step for info in self.done]
        if kind == ".jsonl":
            with path.open("wb") as file:
                for step in steps:
                    file.write(self._body(step))
            return
        readers = [lambda step=step: self.rows(step) for step in steps]
        try:
            write_parquet(readers, path, as_they_are=OWN_COLUMNS - {"label"})
        except ColumnError as error:
            raise RunError(
                f"the rows cannot be written as Parquet: {error}. All completed steps are kept. "
                f"Resume with: burnish {self.job} --resume {self.run_dir} output=OTHER.jsonl"
            ) from error

    @contextmanager
    def _disk_errors(self, path: Path) -> Iterator[None]:
        """Convert an OSError to a RunError that explains how to resume. The completed steps are
        kept."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{path} could not be written ({error}). Completed steps are kept. Correct the "
                f"cause and resume with: burnish {self.job} --resume {self.run_dir}"
            ) from error
