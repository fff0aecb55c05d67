"""Run folders, written with the writers of runs, and a server of their page."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.observe.metrics import MetricsLog
from burnish.observe.resumes import record_resume
from burnish.serve.guard import listener, make_server
from burnish.serve.running import address_of
from burnish.watch.app import WatchApp
from burnish.watch.library import Library

PLAIN = ("What is 2 + 2?", "It is 4.")
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    "\u202eevil\x1b[31mred",
    "</script><svg onload=window.hacked=1>" + "a" * 1_000_000 + "\x00\ud800 {{7*7}} ${7*7}",
)
RECIPE = """job: rl
run_dir: {folder}
max_steps: 100
model:
  path: models/<b>small</b>
train:
  lr: {lr}
"""


def write_run(
    folder: Path, *, num_steps: int, texts: tuple[str, str] = PLAIN, lr: float = 1e-5
) -> Path:
    """Write a run of ``num_steps`` steps with two groups of two samples in each."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(RECIPE.format(folder=folder, lr=lr))
    (folder / "run.log").write_text("2026-01-01 00:00:00,000 WARNING a <b>bold</b> warning\n")
    (folder / "end.json").write_text('{"kind": "finished", "reason": "", "time": 1790000000.0}\n')
    log = MetricsLog(folder)
    for step in range(1, num_steps + 1):
        log_step(log, step, lr=lr)
        write_samples_of(folder, step, texts)
    log.close()
    spans = [
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 1, "args": {"name": "MainThread"}},
        *(
            {"ph": "X", "pid": 7, "tid": 1, "name": name, "ts": 1e6 * (2 * i + j), "dur": 0.9e6}
            for i in range(num_steps)
            for j, name in enumerate(("rollout", "train"))
        ),
    ]
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": spans, "otherData": {}}))
    line = {"role": "all", "phase": "train", "ranks": [0], "planned": None, "allocated": None}
    line |= {"reserved": None, "host_planned": 2e9, "host": 1e9}
    (folder / "memory.json").write_text(json.dumps({"lines": [line]}))
    record_resume(folder, num_steps // 2, {"train.lr": "was 0.1, now <b>0.2</b>"})
    return folder


def log_step(log: MetricsLog, step: int, *, lr: float = 1e-5) -> None:
    """Log the metrics of a step."""
    log.log(
        step,
        {
            "reward/mean": 1 - math.exp(-step / 20),
            "train/loss": 1 / step,
            "train/lr": lr,
            "rollout/tokens": 100.0,
            "time/rollout_s": 1.0,
            "time/train_s": 0.5,
            "time/step_s": 1.6,
            "memory/peak_rss_bytes": 1e9 + step,
        },
    )


def write_samples_of(folder: Path, step: int, texts: tuple[str, str] = PLAIN) -> None:
    """Write two groups of two samples; of the first, with its tokens."""
    prompt, response = (text.encode("utf-8", "replace").decode() for text in texts)
    rows = []
    for i in range(4):
        is_first = i == 0
        rows.append(
            {
                "step": step,
                "split": "train",
                "prompt_id": f"train:{i // 2}@{step}",
                "group_id": 2 * step + i // 2,
                "sample_id": f"train:{i // 2}@{step}/{i % 2}",
                "prompt": f"{prompt} ({i // 2})",
                "response": f"{response} (step {step}, sample {i})",
                "reward": float(i % 2),
                "reward_parts": json.dumps({"exact": float(i % 2), "length": 0.25}),
                "advantage": i % 2 - 0.5,
                "finish_reason": "length" if i == 3 else "stop",
                "response_tokens": 10 + i,
                "label": "4",
                "version": step,
                "episode": None,
                "tokens": ["2", "+", "<b>", "\n"] if is_first else None,
                "token_ids": [5, 6, 7, 8] if is_first else None,
                "action_mask": [False, False, True, True] if is_first else None,
                "sampler_logprobs": [None, None, -0.5, -2.0] if is_first else None,
                "trainer_logprobs": [None, None, -0.25, math.nan] if is_first else None,
                "entropies": [None, None, 0.1, 2.0] if is_first else None,
                "token_advantages": [None, None, -0.5, -0.5] if is_first else None,
                "versions": [None, None, step, step] if is_first else None,
                "tokens_omitted": 3 if is_first else None,
            }
        )
    (folder / "samples").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "samples" / f"step_{step:06d}.parquet")


@contextlib.contextmanager
def serving(root: Path, *, token: str | None = None) -> Iterator[str]:
    """Serve the page of ``root`` in a thread; yield its address."""
    app = WatchApp(Library(root), token=token, names=(), refresh_s=0.1)
    listening = listener("127.0.0.1", 0, token=token)
    server = make_server(app.asgi, app.guard, shutdown_s=1)
    app.is_closing = lambda: server.should_exit
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield address_of(listening)
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


def open_view(page: Any, served: str, address: str = "") -> None:
    """Load a view of the page, and wait until it is drawn."""
    page.goto("about:blank")  # (a new fragment alone would not load the page again)
    page.goto(f"{served}/{address}")
    page.wait_for_selector("[data-ready]")


def events_of(text: str) -> list[tuple[str, object]]:
    """Return the server-sent events in a text."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found
