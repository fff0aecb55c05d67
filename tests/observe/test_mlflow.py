"""The MLflow tracker with a stand-in for MLflow's client, which records the calls."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config import ConfigError, load_config
from burnish.config.observe import MlflowConfig
from burnish.observe.errors import TrackerError
from burnish.observe.make_trackers import check_trackers
from burnish.observe.mlflow import MlflowTracker

RECIPE: dict[str, Any] = {
    "job": "sft",
    "model": {"scratch": {}},
    "data": {"sources": ["rows.jsonl"]},
    "train": {"train_batch_size": 4},
}


class Client:
    """A store of runs in memory with the methods of ``MlflowClient`` that the tracker calls."""

    def __init__(self, *, tracking_uri: str | None) -> None:
        self.calls: list[tuple[Any, ...]] = [("uri", tracking_uri)]

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"number of {name}"

    def create_run(self, number: str, *, run_name: str) -> Any:
        self.calls.append(("create", number, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def update_run(self, run_id: str, *, status: str) -> None:
        self.calls.append(("update", run_id, status))

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self.calls.append(("text", run_id, text, file))

    def log_batch(self, run_id: str, *, metrics: list[tuple[Any, ...]]) -> None:
        self.calls.append(("batch", run_id, [(n, v, step) for n, v, _, step in metrics]))

    def set_terminated(self, run_id: str, *, status: str) -> None:
        self.calls.append(("end", run_id, status))


def test_a_run_is_created_resumed_and_each_step_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Client] = []

    def client(**options: Any) -> Client:
        made.append(Client(**options))
        return made[-1]

    entities = SimpleNamespace(Metric=lambda *values: values)
    module = SimpleNamespace(MlflowClient=client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "")  # restored after the test
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    for begin in (0, 2):
        tracker = MlflowTracker(MlflowConfig(), tmp_path / "run", "job: sft")
        (tmp_path / "run").mkdir(exist_ok=True)
        tracker.start()
        if begin:
            assert tracker.rewind(9) == 2 and tracker.rewind(1) == 1
        for step in (1, 2) if not begin else (2, 3):
            tracker.log(step, {"eval/pass@1": 0.5}, {})
        tracker.close(failed=bool(begin))
    limits = (os.environ[f"MLFLOW_HTTP_REQUEST_{name}"] for name in ("TIMEOUT", "MAX_RETRIES"))
    assert tuple(limits) == ("5", "2"), "a dead server is reported before the run ends"
    first, second = (client.calls for client in made)
    assert first == [
        ("uri", None),
        ("create", "number of burnish", "run"),
        ("text", "abc", "job: sft", "config.yaml"),
        ("batch", "abc", [("eval/pass_1", 0.5, 1)]),
        ("batch", "abc", [("eval/pass_1", 0.5, 2)]),
        ("end", "abc", "FINISHED"),
    ]
    assert second[1:] == [
        ("update", "abc", "RUNNING"),
        ("batch", "abc", [("eval/pass_1", 0.5, 3)]),
        ("end", "abc", "FAILED"),
    ]


def test_names_that_mlflow_refuses_do_not_lose_the_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow 3.17 refuses the request of a step if a name is no relative path, has other characters
    or more than 250."""
    client = Client(tracking_uri=None)
    entities = SimpleNamespace(Metric=lambda *values: values)
    module = SimpleNamespace(MlflowClient=lambda **_: client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    odd = ["eval/pass@1", "eval/pass_1", "eval/pass:1", "../x", "/a", "a//b", "a/", ".", "", "ü "]
    names = ["loss", *odd, "x" * 251, "x" * 250 + "y"]
    tracker = MlflowTracker(MlflowConfig(), tmp_path, "job: sft")
    tracker.start()
    tracker.log(1, dict.fromkeys(names, 0.5), {})
    (sent,) = [[name for name, *_ in call[2]] for call in client.calls if call[0] == "batch"]
    assert len(set(sent)) == len(names) and {"loss", "eval/pass_1"} <= set(sent)
    for name in sent:
        assert re.fullmatch(r"[\w\-. /]{1,250}", name)
        assert posixpath.normpath(name) == name and not name.startswith((".", "/"))


@pytest.mark.parametrize(
    "state",
    [
        "no json",
        "[" * 100_000,
        "[]",
        '{"run_id": 5}',
        '{"run_id": "a", "x": 1}',
        '{"run_id": "gone"}',
    ],
)
def test_a_state_that_cannot_be_continued_names_its_file(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(Client):
        def update_run(self, run_id: str, *, status: str) -> None:
            raise RuntimeError("not found")

    module = SimpleNamespace(MlflowClient=Gone, MlflowException=RuntimeError)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    (tmp_path / "mlflow.json").write_text(state)
    with pytest.raises(TrackerError, match=r"mlflow\.json .* start a new run"):
        MlflowTracker(MlflowConfig(), tmp_path, "job: sft").start()


def test_a_missing_package_and_a_password_in_the_uri_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(TrackerError, match=r"pip install 'burnish\[mlflow\]'"):
        check_trackers(load_config(RECIPE, ["observe.mlflow={}"]))
    with pytest.raises(ConfigError, match="set MLFLOW_TRACKING_USERNAME"):
        load_config(RECIPE, ["observe.mlflow.tracking_uri=https://me:secret@host:5000"])
    load_config(RECIPE, ["observe.mlflow.tracking_uri=https://host:5000"])
