"""A folder of runs as their writers leave it, and a server of their page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import chromium
from watched_runs import HOSTILE, serving, write_run

from burnish.observe.metrics import MetricsLog


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """Two sound runs, a hostile one, and one of every kind that is damaged."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "first", num_steps=60)
    write_run(root / "group" / "second", num_steps=30, lr=1e-4)
    write_run(root / "hostile", num_steps=3, texts=HOSTILE)
    damaged = write_run(root / "damaged", num_steps=3)
    (damaged / "samples" / "step_000002.parquet").write_bytes(b"PAR1 cut")
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "time": 17')  # a last line that is being written
    (root / "bare").mkdir()
    MetricsLog(root / "bare").close()
    (root / "no_run").mkdir()
    (root / "no_run" / "notes.txt").write_text("nothing")
    return root


@pytest.fixture(scope="session")
def served(runs: Path) -> Iterator[str]:
    with serving(runs) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser):
    """A page whose errors and warnings fail the test."""
    problems = []
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()

    def note(message):
        # (Chromium logs every reply with an error status, which the views show as text.)
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            problems.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    yield page
    context.close()
    assert problems == []
