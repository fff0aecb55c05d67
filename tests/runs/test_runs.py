"""Run folders as objects and tables: states of running, ended and killed runs, data frames, and the
commands that list and compare runs."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import burnish
from burnish import cli
from burnish.config.base import LOCK_FILE
from burnish.driver.errors import Interrupted, StoppedError
from burnish.file_lock import lock_file
from burnish.observe.ending import END_FILE, recorded_end, state_of
from burnish.observe.metrics import MetricsLog
from burnish.runs.compare import metric_rows, recipe_difference, short_names
from burnish.runs.errors import RunFolderError
from burnish.runs.folder import find_runs, load_run
from burnish.runs.tables import runs_table, sparkline

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run("a/b", lr=1e-3, reward=[0.1, 0.2])``: a folder with a recipe and metrics."""

    def make(name: str, *, lr: float = 1e-3, reward: Any = (0.25, 0.5), **recipe: Any) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        tree = {"job": "rl", "run_dir": str(folder), "train": {"lr": lr}, **recipe}
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
        lines = [
            {"step": i, "time": 1e9 + i, "reward/mean": value} for i, value in enumerate(reward)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make


def _hold(path: Path, ready: Any) -> None:
    lock_file(path)
    ready.set()
    time.sleep(60)


def test_a_run_runs_while_a_process_has_its_folder_and_dies_with_it(make_run: MakeRun) -> None:
    folder = make_run("a")
    assert state_of(folder).kind == "ended"
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(folder / LOCK_FILE, ready))
    process.start()
    assert ready.wait(30)
    state = state_of(folder)
    assert state.kind == "running" and f"process {process.pid} " in state.reason
    os.kill(int(process.pid or 0), signal.SIGKILL)
    process.join()
    assert state_of(folder).kind == "died"


def test_a_run_of_another_host_is_silent_without_new_lines(make_run: MakeRun) -> None:
    """Its lock cannot be seen in a copy of its folder."""
    folder = make_run("a")
    since = "since 2026-01-01T00:00:00+00:00"
    (folder / LOCK_FILE).write_text(f"process 7 on host not-{socket.gethostname()} {since}\n")
    assert state_of(folder).kind == "running"
    long_ago = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    assert state_of(folder).kind == "silent"


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (None, "finished", ""),
        (Interrupted(Path("x"), signal.SIGTERM), "stopped", "stopped by SIGTERM"),
        (StoppedError("no signal\nmore", {}), "stopped", "no signal"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
        (RunFolderError("a folder is wrong"), "failed", "a folder is wrong"),
        (ValueError("bad"), "failed", "ValueError: bad"),
    ],
)
def test_the_end_of_a_run_is_recorded(
    error: BaseException | None, kind: str, reason: str, make_run: MakeRun
) -> None:
    folder = make_run("a")
    try:
        with recorded_end(folder):
            assert not (folder / END_FILE).exists()
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    state = state_of(folder)
    assert state.kind == kind and state.reason.startswith(reason) and "\n" not in state.reason


def test_a_refused_resume_keeps_the_record_of_the_end(make_run: MakeRun) -> None:
    folder = make_run("a")
    with recorded_end(folder):
        pass
    for is_written, kind in ((False, "finished"), (True, "failed")):
        with pytest.raises(RunFolderError), recorded_end(folder):
            if is_written:
                (folder / "metrics.jsonl").write_text('{"step": 2, "time": 1}\n')
                os.utime(folder / "metrics.jsonl", (5, 5))
            raise RunFolderError("refused")
        assert state_of(folder).kind == kind


def test_a_real_run_has_its_state_metrics_and_samples(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    tree = {
        "job": "rl",
        "run_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "model": {"scratch": {"hidden_size": 16, "num_layers": 1}},
        "data": {"sources": [str(tmp_path / "rows.jsonl")]},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "generate_max_len": 2},
        "train": {"train_batch_size": 2},
    }
    burnish.run(burnish.load_config(tree), rewards=lambda response: float(len(response)))
    run = burnish.load_run(tmp_path / "run")
    assert (run.state.kind, run.job, run.step) == ("finished", "rl", 2)
    frame = run.metrics
    assert frame.index.tolist() == [1, 2] and frame["reward/mean"].notna().all()
    samples = run.samples(step=2, split="train")
    assert len(samples) == 2 and set(samples["step"]) == {2}
    assert [*samples["reward_parts"][0].values()] == [samples["reward"][0]]
    assert "finished" in run._repr_html_() and "reward" in repr(run.headline)


def test_metrics_of_one_step_are_one_row(make_run: MakeRun) -> None:
    folder = make_run("a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "time": 1000000002, "eval/pass@1": 0.5}\n{"step": 2, "ti')
    frame = load_run(folder).metrics
    assert frame.loc[1].to_dict() == {"time": 1e9 + 2, "reward/mean": 0.5, "eval/pass@1": 0.5}
    assert len(frame) == 2
    (folder / "metrics.jsonl").write_text("")
    assert load_run(folder).metrics.empty and load_run(folder).headline is None


def test_recipes_differ_in_the_keys_that_differ(make_run: MakeRun) -> None:
    runs = [load_run(make_run("a")), load_run(make_run("b", lr=2e-3, seed=1, reward=[1.0]))]
    assert recipe_difference(runs) == {"train.lr": ("0.001", "0.002"), "seed": ("(not set)", "1")}
    (row,) = metric_rows(runs)
    assert row.metric == "reward/mean" and row.values == ((0.5, 0.25, 0.5), (1.0, 1.0, 1.0))
    assert metric_rows(runs, ["eval/*"]) == []
    texts = [load_run(make_run(f"{n}/x", tag=value)) for n, value in enumerate([None, "null"])]
    assert recipe_difference(texts) == {"tag": ("null", "'null'")}
    assert short_names(texts) == ["0/x", "1/x"] and short_names(runs) == ["a", "b"]


def test_secrets_that_differ_are_named_but_not_shown(make_run: MakeRun) -> None:
    runs = [
        load_run(make_run(name, observe={"wandb": {"api_key": f"hunter-{name}"}})) for name in "ab"
    ]
    assert recipe_difference(runs) == {"observe.wandb.api_key": ("***", "***")}
    assert "hunter" not in str(runs[0].recipe) + runs[0].recipe_text


@pytest.mark.parametrize("end", ["NaN", "1e300", "-1", '"x"', "[]"])
def test_a_damaged_end_is_none(make_run: MakeRun, end: str) -> None:
    folder = make_run("a")
    (folder / END_FILE).write_text(f'{{"kind": "finished", "reason": "", "time": {end}}}')
    assert state_of(folder).kind == "ended"


def test_without_locks_the_process_is_looked_for(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, host = make_run("a"), socket.gethostname()

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    for process, kind in ((os.getpid(), "running"), (2**22 + 1, "died"), (9_999_999_999, "died")):
        text = f"process {process} on host {host} since 2026-01-01T00:00:00+00:00\n"
        (folder / LOCK_FILE).write_text(text)
        assert state_of(folder).kind == kind


def test_runs_are_found_below_a_folder_but_not_in_runs(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("deep/b")
    (folder / "export").mkdir()
    (folder / "export/metrics.jsonl").write_text("")
    (tmp_path / "runs/config.yaml").write_text("x: 1")  # of something else
    make_run("samples/c")
    make_run("a")
    (tmp_path / "runs/link").symlink_to(folder)
    found = find_runs(tmp_path / "runs")
    assert [run.folder.name for run in found] == ["a", "b", "c"]


def test_a_course_of_any_size_has_bars() -> None:
    assert sparkline([-1e308, 1e308, 1e308]) == "▁██" and sparkline([5e-324, 0.0]) in ("█▁", "▄▄")


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, arguments)
    return done.exit_code, done.output


def test_the_commands_list_and_compare_runs(make_run: MakeRun, tmp_path: Path) -> None:
    one = make_run("a", reward=[0.25, 0.5, 0.75])
    other = make_run("b\x1b[2J", lr=2e-3)
    code, text = command("runs", str(tmp_path / "runs"))
    assert code == 0 and "0.250 → 0.750" in text and "\x1b[2J" not in text
    code, text = command("compare", str(one), str(other))
    assert code == 0 and "train.lr" in text and "0.002" in text and "0.75" in text


def test_what_is_no_run_is_said_and_a_damaged_run_leaves_the_others(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("a")
    (make_run("b") / "metrics.jsonl").write_text('oops\n{"step": 1, "time": 1}\n')
    (make_run("c") / "config.yaml").write_text("a: [")
    code, text = command("runs", str(tmp_path / "runs"))
    assert code == 0 and "unreadable" in text and "0.500" in text
    assert "b: 1 line of metrics.jsonl is damaged and left out" in text
    for arguments, said in (
        (("runs", str(tmp_path / "nothing")), "is no folder"),
        (("compare", str(tmp_path / "runs/a")), "two or more"),
        (("compare", str(tmp_path), str(tmp_path / "runs/a")), "contains runs, such as a"),
        (("compare", *[str(tmp_path / "runs/a")] * 2, "--metric", "x*"), "no run has a metric"),
    ):
        code, text = command(*arguments)
        assert code == 2 and said in text, arguments


def test_metrics_are_plotted_with_those_of_other_runs(tmp_path):
    pytest.importorskip("matplotlib")
    for name, slope in (("a", 1.0), ("b", 2.0)):
        log = MetricsLog(tmp_path / name)
        for step in range(3):
            log.log(step, {"reward/mean": slope * step, "reward/exact": 0.5, "train/loss": -slope})
        log.close()
    a, b = load_run(tmp_path / "a"), load_run(tmp_path / "b")
    figure = a.plot("reward/*", others=[b])
    lines = {panel.get_title(): panel.get_lines() for panel in figure.axes}
    assert set(lines) == {"reward/mean", "reward/exact"}
    assert [list(line.get_ydata()) for line in lines["reward/mean"]] == [[0, 1, 2], [0, 2, 4]]
    assert [panel.get_title() for panel in a.plot().axes] == ["reward/mean"]
    with pytest.raises(RunFolderError, match="no run has a metric that matches nothing"):
        a.plot("nothing")


@pytest.mark.parametrize("width", [40, 79, 80, 119, 240])
def test_a_table_of_runs_has_complete_numbers_at_every_width(tmp_path, width):
    log = MetricsLog(tmp_path / "a" / "a_run_with_a_long_name")
    for step in range(3):
        log.log(step, {"reward/mean": 0.25 * step})
    log.close()
    screen = Console(width=width, file=io.StringIO(), legacy_windows=False)
    screen.print(runs_table(find_runs(tmp_path), tmp_path, width=width))
    text = screen.file.getvalue()
    assert "0.500" in text and "ended" in text and ("changed" in text) == (width >= 80)
