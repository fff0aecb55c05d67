"""The samples that stand in the report, as JSON that is safe inside a script element."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from burnish.observe.samples import read_sample_file, sample_files

MAX_ROWS = 3000
MAX_CHARS = 6000  # of one prompt or response
MAX_TOTAL_CHARS = 24_000_000  # of all texts, so that the page opens


@dataclass(frozen=True)
class EmbeddedSamples:
    """What the page's script reads (report.js) and the sentence above the table."""

    json: str
    """``{"prompts": [text], "rows": [{...}]}`` with every ``<`` escaped; rows name their prompt by
    number.
    """
    num_rows: int
    note: str
    """Which samples are left out and where they are; "" where all are shown whole."""


def embed_samples(run_dir: Path, *, max_rows: int = MAX_ROWS) -> EmbeddedSamples | None:
    """The run's samples for the page; None where there are none.

    Past ``max_rows`` the newest and the oldest steps are kept, alternately, as whole files; long
    texts are cut in the middle.
    """
    files = sample_files(run_dir)
    total = sum(pq.read_metadata(path).num_rows for _, path in files)
    if not total:
        return None
    prompts: dict[str, int] = {}
    kept: list[dict[str, Any]] = []
    num_chars = num_cut = 0
    for path in _outside_in([path for _, path in files]):
        rows = read_sample_file(path)
        if kept and len(kept) + len(rows) > max_rows:
            break
        for row in rows[:max_rows]:
            entry, was_cut = _entry(row, prompts)
            num_cut += was_cut
            num_chars += len(entry["response"])
            kept.append(entry)
        if num_chars + sum(map(len, prompts)) > MAX_TOTAL_CHARS:
            break
    kept.sort(key=lambda entry: entry["step"])
    data = json.dumps(
        {"prompts": list(prompts), "rows": kept}, allow_nan=False, separators=(",", ":")
    )
    # "<" occurs only inside strings, where \u003c is the same: no text can end the script element.
    return EmbeddedSamples(
        data.replace("<", "\\u003c"), len(kept), _note(len(kept), total, num_cut)
    )


def _entry(row: dict[str, Any], prompts: dict[str, int]) -> tuple[dict[str, Any], bool]:
    prompt, response = _cut(row["prompt"] or ""), _cut(row["response"] or "")
    entry = {
        "step": row["step"],
        "split": row["split"],
        "prompt": prompts.setdefault(prompt, len(prompts)),
        "response": response,
        "label": None if row["label"] is None else _cut(row["label"]),
        "reward": row["reward"],
        "parts": json.loads(row["reward_parts"] or "{}"),
        "advantage": row["advantage"],
        "finish": row["finish_reason"],
        "tokens": row["response_tokens"],
        "id": row["sample_id"],
        "group": row["group_id"],
    }
    return entry, prompt != (row["prompt"] or "") or response != (row["response"] or "")


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _outside_in(paths: list[Path]) -> list[Path]:
    """Newest, oldest, second newest, second oldest, ..."""
    newest, oldest = list(reversed(paths)), paths
    both = [path for pair in zip(newest, oldest, strict=True) for path in pair]
    return both[: len(paths)]


def _note(kept: int, total: int, num_cut: int) -> str:
    notes = []
    if kept < total:
        notes.append(f"{kept:,} of {total:,} samples, from the newest and the oldest steps")
    if num_cut:
        notes.append(f"{num_cut:,} long texts are cut in the middle")
    return "; ".join([*notes, "everything is in samples/*.parquet"]) if notes else ""
