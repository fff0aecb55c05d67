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

from burnish.data_files.arrow_files import READ_ERRORS, record_batches
from burnish.observe.samples import sample_files, split_of
from burnish.watch.step_rows import finite, shortened
from burnish.watch.texts import TextMatch

MAX_HITS = 200
_READERS = min(8, os.cpu_count() or 1)
_EVERY_S = 0.25
"""Seconds between two reports of progress."""
_AROUND = 80
_TEXTS = ("prompt", "response", "label", "episode")
_SHOWN = ("sample_id", "reward", "advantage", "response_tokens")


def search(
    folder: Path, text: str, *, how: Literal["text", "prompt"], max_hits: int = MAX_HITS
) -> Iterator[dict[str, Any]]:
    """Yield ``{"hits": [...], "done": files read, "files": number of files}`` several times a
    second, newest step first; the last one has ``"end"``: "complete", or "limit" after
    ``max_hits``.

    ``how`` "text": samples with a text (:func:`texts_of`) that contains ``text``, in upper or lower
    case. "prompt":
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
    match, split = TextMatch(text), split_of(path)
    hits = []
    for batch in record_batches(path, columns=[*_SHOWN, *_TEXTS]):
        mask = _candidates(batch, match, how)
        for row in batch.filter(mask).to_pylist() if pc.any(mask).as_py() else ():
            found = (row["prompt"], 0) if how == "prompt" else match.first(row)
            if found is not None:
                hits.append(_hit(row, step, split, *found, length=len(text)))
    return hits


def _candidates(batch: pa.RecordBatch, match: TextMatch, how: str) -> pa.BooleanArray:
    """Return which rows may have the text. Those without it are left to :class:`TextMatch`."""
    names = [name for name in _TEXTS if name in batch.schema.names]
    if how == "prompt":
        return pc.fill_null(pc.equal(batch["prompt"], match.text), False)
    mask = pa.repeat(False, len(batch))
    for name in names:
        column, wanted = batch[name].cast(pa.string()), match.text
        if name == "episode":
            part = match.in_json()
            if part is None:
                mask = pc.or_(mask, pc.is_valid(column))
                continue
            wanted = part
        found = pc.match_substring(column, wanted, ignore_case=True)
        mask = pc.or_(mask, pc.fill_null(found, False))
    return mask


def _hit(
    row: dict[str, Any], step: int, split: str, text: str, place: int, *, length: int
) -> dict[str, Any]:
    begin = max(0, place - _AROUND)
    return {
        "sample": row.get("sample_id"),
        "step": step,
        "split": split,
        "reward": finite(row.get("reward")),
        "advantage": finite(row.get("advantage")),
        "tokens": row.get("response_tokens"),
        "excerpt": text[begin : place + length + _AROUND],
        "response": shortened(str(row.get("response") or "")),
    }
