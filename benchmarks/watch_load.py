"""Measure ``burnish watch`` on 200 runs, one of 10,000 steps with 1,024 samples each (about 10 GB):
``python benchmarks/watch_load.py FOLDER``. It generates the runs (about 10 minutes), unless FOLDER
has them, and needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import Page
from watch_page import opened

from burnish.observe.samples import SCHEMA

LARGE = "large"
METRICS = 60
RARE, IN_OLDEST = "xylograph quartz", "benzylic heliotrope"


def generate(root: Path, *, num_runs: int, num_steps: int, num_samples: int) -> None:
    """Write the runs."""
    rng = np.random.default_rng(0)
    for i in range(num_runs - 1):
        write_metrics(root / f"run_{i:03d}", 500, rng)
    write_metrics(root / LARGE, num_steps, rng)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(20_000)])
    folder = root / LARGE / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    bases = [samples(words, rng, num_samples) for _ in range(20)]
    for step in range(1, num_steps + 1):
        base = bases[step % len(bases)]
        texts = base["response"]
        if step == 1:
            texts = pa.array([f"{IN_OLDEST} {text}" for text in texts.to_pylist()])
        columns = {
            "step": pa.array(np.full(num_samples, step)),
            "sample_id": pa.array([f"train:{i // 8}@{step}/{i % 8}" for i in range(num_samples)]),
            "reward": pa.array(rng.integers(0, 2, num_samples).astype(float)),
            "advantage": pa.array(rng.normal(size=num_samples)),
            "response": texts,
        }
        table = pa.table([columns.get(name, base[name]) for name in SCHEMA.names], schema=SCHEMA)
        pq.write_table(table, folder / f"step_{step:06d}.parquet", compression="zstd")


def samples(words: np.ndarray, rng: np.random.Generator, count: int) -> pa.Table:
    """Return rows with random words: about 1 kB each when compressed."""

    def texts(length: int) -> list[str]:
        return [" ".join(words[rng.integers(0, len(words), length)]) for _ in range(count)]

    rows = {
        "step": [0] * count,
        "split": ["train"] * count,
        "prompt_id": [f"train:{i // 8}" for i in range(count)],
        "group_id": [i // 8 for i in range(count)],
        "sample_id": [""] * count,
        "prompt": [text for text in texts(20)[: count // 8] for _ in range(8)],
        "response": texts(262),
        "reward": [0.0] * count,
        "reward_parts": ['{"exact": 1.0, "format": 0.5}'] * count,
        "advantage": [0.0] * count,
        "finish_reason": ["stop", "length"] * (count // 2),
        "response_tokens": rng.integers(100, 2000, count).tolist(),
        "label": [str(i % 100) for i in range(count)],
        "version": [0] * count,
        "episode": [None] * count,
    }
    empty = [None] * count
    return pa.table({name: rows.get(name, empty) for name in SCHEMA.names}, schema=SCHEMA)


def write_metrics(run: Path, num_steps: int, rng: np.random.Generator) -> None:
    """Write the metrics and the recipe of a finished run."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(f"job: rl\nmax_steps: {num_steps}\nmodel: {{path: m}}\n")
    (run / "end.json").write_text('{"kind": "finished", "reason": "", "time": 1790000000}')
    names = ["reward/mean", "train/loss", *(f"group{i % 8}/metric_{i}" for i in range(METRICS - 2))]
    values = rng.normal(size=(num_steps, METRICS)).round(6)
    with open(run / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step, row in enumerate(values.tolist(), start=1):
            line = {"step": step, "time": 1.79e9 + step, **dict(zip(names, row, strict=True))}
            file.write(json.dumps(line) + "\n")


def peak_mb(pid: int) -> float:
    """Return the largest resident memory of a process so far, in MB (1e6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def measure(page: Page, address: str) -> Iterator[tuple[str, float]]:
    """Yield (what, seconds), as a user waits for it."""

    def timed(action: Callable[[], object], selector: str) -> float:
        started = time.monotonic()
        action()
        page.wait_for_selector(selector, timeout=120_000)
        return time.monotonic() - started

    def open_view(view: str) -> Callable[[], object]:
        return lambda: (page.goto("about:blank"), page.goto(f"{address}/{view}"))

    yield "runs: first rows", timed(open_view(""), "tbody tr")
    started = time.monotonic()
    page.wait_for_selector("tbody tr:nth-child(200)", timeout=120_000)
    yield "runs: all 200 rows, after that", time.monotonic() - started
    yield "runs: again", timed(open_view(""), "tbody tr:nth-child(200)")
    large = f"run={LARGE}"
    yield "run: curves of 10,000 steps", timed(open_view(f"#/run?{large}"), ".u-over")
    yield "run: list of its steps", timed(open_view(f"#/run?{large}&tab=steps"), ".numbers a")
    yield "step: first rows", timed(open_view(f"#/step?{large}&step=5000"), ".group")
    for query in ("reward>0.5 tokens<500", "ab"):
        yield f"step: filter {query!r}", filtered(page, query)
    for what, text in (("usual", "ab"), ("in the oldest step only", IN_OLDEST), ("nowhere", RARE)):
        view = f"#/search?{large}&text={text.replace(' ', '+')}"
        if what != "nowhere":
            yield f"search: first hit of a text that is {what}", timed(open_view(view), ".hit")
        yield (
            f"search: progress of a text that is {what}",
            timed(open_view(view), "text=/files$|^the newest/"),
        )
        if what == "nowhere":
            yield "search: its end, after that", timed(lambda: None, "[data-done]")


def filtered(page: Page, query: str) -> float:
    """Return the seconds from typing to the rows."""
    before = page.locator(".controls .count").inner_text()
    started = time.monotonic()
    page.get_by_label("Filter").fill(query)
    page.wait_for_selector(f".controls .count:not(:text-is('{before}'))")
    return time.monotonic() - started


def main() -> None:
    """Generate the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1024)
    options = parser.parse_args()
    if not options.folder.exists():
        started = time.monotonic()
        generate(
            options.folder,
            num_runs=options.runs,
            num_steps=options.steps,
            num_samples=options.samples,
        )
        print(f"generated in {time.monotonic() - started:.0f} s")
    size = sum(path.stat().st_size for path in (options.folder / LARGE / "samples").iterdir())
    print(f"{options.runs} runs; samples of one: {size / 1e9:.1f} GB; {os.cpu_count()} cores\n")
    with opened(options.folder) as chromium:
        print("| what | s | server, MB |\n| --- | --- | --- |")
        for what, seconds in measure(chromium.page, chromium.address):
            print(f"| {what} | {seconds:.2f} | {peak_mb(chromium.pid):.0f} |", flush=True)


if __name__ == "__main__":
    main()
