"""Runs of ``burnish sft`` that log to Trackio, compared with Trackio's database.

Trackio's packages are in a virtual environment of their own, because it excludes the locked pillow.
Their folder comes first on the path of the runs."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from client_venvs import interpreter

from burnish.observe.metrics import read_metrics

pytestmark = [pytest.mark.clients, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RECIPE = f"""
job: sft
model: {{scratch: {{alphabet: "0123456789>", hidden_size: 8, num_layers: 1, num_heads: 2,
  num_kv_heads: 2, max_position_embeddings: 16}}}}
data: {{sources: [{ROOT}/recipes/data/sort_demos.jsonl], max_len: 16}}
train: {{train_batch_size: 4}}
max_steps: 3
checkpoint: {{every_n_steps: 1}}
observe: {{trackio: {{project: sums}}}}
"""
WATCH_SOCKETS = """
import os, sys
def record(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
        with open(os.environ["SOCKETS"], "a") as file:
            print(event, arguments, file=file)
sys.addaudithook(record)
"""


class Home:
    """A folder with a recipe, runs and Trackio's database."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_dir = path / "runs" / "first"
        python = interpreter("trackio")
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        packages = subprocess.check_output([python, "-c", code], text=True).strip()
        (path / "audit").mkdir()
        (path / "audit" / "sitecustomize.py").write_text(WATCH_SOCKETS)
        (path / "recipe.yaml").write_text(RECIPE + f"run_dir: {self.run_dir}\n")
        left_out = ("TRACKIO_", "HF_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)} | {
            "PYTHONPATH": os.pathsep.join([str(path / "audit"), packages, str(ROOT)]),
            "HF_TOKEN": "hf_not_a_token",  # Trackio's client would ask the hub whose it is
            "TRACKIO_DIR": str(path / "trackio"),
            "SOCKETS": str(path / "sockets.txt"),
        }

    def burnish(self, *words: str, **environment: str) -> str:
        """The output of a run. It ends with the pipe, which a process left behind would hold."""
        return self.python("-m", "burnish", "sft", *words, **environment)

    def python(self, *words: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            env=self.environment | environment,
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def query(self, text: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(self.path / "trackio" / "sums.db") as database:
            return database.execute(text).fetchall()

    def steps(self) -> list[tuple[int, dict[str, Any]]]:
        rows = self.query("SELECT step, metrics FROM metrics ORDER BY step, id")
        return [(step, json.loads(text)) for step, text in rows]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def logged(run_dir: Path) -> list[tuple[int, dict[str, Any]]]:
    return [
        (int(row["step"]), {k: v for k, v in row.items() if k not in ("step", "time")})
        for row in read_metrics(run_dir)
    ]


def test_a_resumed_run_has_each_step_of_the_log_once_and_uses_no_network(home: Home) -> None:
    output = home.burnish("recipe.yaml")
    assert "trackio show --project sums" in output
    assert output.count("Trackio") == 1 and "* " not in output, "no line of Trackio's own"
    assert home.steps() == logged(home.run_dir)
    home.query("DELETE FROM metrics WHERE step > 1")  # as if the process had been killed
    home.burnish("--resume", str(home.run_dir), "max_steps=5")
    assert home.steps() == logged(home.run_dir) and len(home.steps()) >= 5
    assert len(set(home.query("SELECT run_id, run_name FROM metrics"))) == 1
    (config,) = home.query("SELECT config FROM configs")
    assert json.loads(config[0])["train"]["train_batch_size"] == 4
    assert home.query("SELECT * FROM alerts") == []
    assert not (home.path / "sockets.txt").exists(), (home.path / "sockets.txt").read_text()


def test_a_database_that_cannot_be_written_costs_only_its_steps(home: Home) -> None:
    (home.path / "trackio").write_text("a file")
    output = home.burnish("recipe.yaml")
    assert "observe.trackio: " in output and "number of steps that did not reach it" in output
    assert [step for step, _ in logged(home.run_dir)][-1] == 3


def test_steps_on_a_network_file_system_are_imported_by_trackio(home: Home) -> None:
    home.burnish("recipe.yaml", TRACKIO_STORAGE_MODE="jsonl")
    assert not (home.path / "trackio" / "sums.db").exists()
    code = "from trackio import fragments; fragments.import_inbox_dir()"
    home.python("-c", code)
    assert home.steps() == logged(home.run_dir)


VALUES = """
import math
from pathlib import Path
from burnish.config.observe import TrackioConfig
from burnish.observe.trackio import TrackioTracker
Path("run").mkdir()
for project in ("sums", "others", "sums"):
    tracker = TrackioTracker(TrackioConfig(project=project), Path("run"), {"job": "sft"})
    tracker.start()
    tracker.log(1, {"nan": math.nan, "inf": math.inf, "step": 7.0, "\\ud800": 1.0, "__x": 2.0}, {})
    tracker.close(failed=project == "sums")
"""


def test_values_names_and_the_alert_of_a_failed_run(home: Home) -> None:
    """Another project is another run; the third tracker does not find the first one's."""
    home.python("-c", VALUES)
    (_, values), _ = home.steps()
    expected = {"nan": "NaN", "inf": "Infinity", "__step": 7.0, "?": 1.0, "____x": 2.0}
    assert values == expected, "as Trackio stores them"
    assert home.query("SELECT level, step FROM alerts")[0] == ("error", 1)
    code = "from trackio.sqlite_storage import SQLiteStorage as S; print(S.get_logs('sums', 'run'))"
    assert "'nan': nan, 'inf': inf" in home.python("-c", code)


def test_another_machine_and_reserved_names_are_refused(home: Home) -> None:
    for words, environment, said in (
        ((), {"TRACKIO_SPACE_ID": "me/runs"}, "TRACKIO_SPACE_ID is set"),
        (("observe.trackio.project=registry-a",), {}, "are reserved"),
    ):
        command = [sys.executable, "-m", "burnish", "sft", "recipe.yaml", "--dry-run", *words]
        done = subprocess.run(
            command,
            env=home.environment | environment,
            cwd=home.path,
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0 and said in done.stderr + done.stdout
        assert "Traceback" not in done.stderr
