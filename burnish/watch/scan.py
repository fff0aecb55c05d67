"""Search over the samples of all steps of a run, a file at a time, newest step first."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from burnish.data_files.arrow_files import READ_ERRORS
from burnish.observe.samples import sample_files, split_of
from burnish.watch.step_rows import finite, shortened

MAX_HITS = 200
_READERS = min(8, os.cpu_count() or 1)
_EVERY_S = 0.25
"""Seconds between two reports of progress."""
_AROUND = 80
_TEXTS = ("prompt", "response", "label", "episode")
_SHOWN = ("sample_id", "step", "split", "prompt_id", "reward", "advantage", "response_tokens")


def search(
    folder: Path, text: str, *, how: Literal["text", "prompt"], max_hits: int = MAX_HITS
) -> Iterator[dict[str, Any]]:
    """Yield ``{"hits": [...], "done": files read, "files": number of files}`` several times a
    second, newest step first; the last one has ``"end"``: "complete", or "limit" after
    ``max_hits``.

    ``how`` "text": samples with a text that contains ``text``, without regard to case. "prompt":
    samples with exactly this prompt. Files that cannot be read are listed in ``"unreadable"``.
    """
    files = sample_files(folder)[::-1]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="scan") as readers:
        yield from _search(readers, files, text, how, max_hits)


def _search(
    readers: ThreadPoolExecutor,
    files: Sequence[tuple[int, Path]],
    text: str,
    how: str,
    max_hits: int,
) -> Iterator[dict[str, Any]]:
    hits: list[dict[str, Any]] = []
    unreadable: list[str] = []
    count, last = 0, time.monotonic()
    ahead: deque[Future[list[dict[str, Any]]]] = deque()
    waiting = iter(files)
    for done, (_, path) in enumerate(files, start=1):
        for step, other in islice(waiting, 2 * _READERS - len(ahead)):
            ahead.append(readers.submit(_hits, other, step, text, how))
        try:
            hits += ahead.popleft().result()
        except READ_ERRORS:
            unreadable.append(path.name)
        hits = hits[: max_hits - count]
        if count + len(hits) >= max_hits or time.monotonic() - last > _EVERY_S:
            count += len(hits)
            yield {"hits": hits, "done": done, "files": len(files), "unreadable": unreadable}
            hits, unreadable, last = [], [], time.monotonic()
        if count >= max_hits:
            for rest in ahead:
                rest.cancel()
            yield {"hits": [], "done": done, "files": len(files), "end": "limit"}
            return
    done = len(files)
    yield {"hits": hits, "done": done, "files": done, "unreadable": unreadable, "end": "complete"}


def _hits(path: Path, step: int, text: str, how: str) -> list[dict[str, Any]]:
    """Return the hits in a file."""
    names = pq.read_schema(path).names
    searched = [name for name in _TEXTS if name in names] if how == "text" else ["prompt"]
    table = pq.read_table(path, columns=searched, use_threads=False)
    masks = [_matches(table[name], text, how) for name in searched if name in table.column_names]
    if not masks:
        return []
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.or_(mask, other)
    if not pc.any(mask).as_py():
        return []
    shown = [name for name in (*_SHOWN, *searched) if name in names]
    rows = pq.read_table(path, columns=shown).filter(mask).to_pylist()
    return [_hit(row, step, split_of(path), text, searched) for row in rows]


def _matches(column: pa.ChunkedArray, text: str, how: str) -> pa.ChunkedArray:
    column = column.cast(pa.string())
    found = (
        pc.equal(column, text)
        if how == "prompt"
        else pc.match_substring(column, text, ignore_case=True)
    )
    return pc.fill_null(found, False)


def _hit(
    row: dict[str, Any], step: int, split: str, text: str, searched: list[str]
) -> dict[str, Any]:
    texts = [str(row[name]) for name in searched if row.get(name) is not None]
    found = next(((t, at) for t in texts if (at := t.casefold().find(text.casefold())) >= 0), None)
    excerpt, at = found or (texts[0] if texts else "", 0)
    begin = max(0, at - _AROUND)
    return {
        "sample": row.get("sample_id"),
        "step": step,
        "split": split,
        "reward": finite(row.get("reward")),
        "advantage": finite(row.get("advantage")),
        "tokens": row.get("response_tokens"),
        "excerpt": excerpt[begin : at + len(text) + _AROUND],
        "response": shortened(str(row.get("response") or "")),
    }
