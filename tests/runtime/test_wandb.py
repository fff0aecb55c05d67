"""Weights & Biases with the real package, which writes offline: no test uses the network."""

from __future__ import annotations

import json
import math
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import fork_server
import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

import burnish
from burnish.config import JobConfig
from burnish.config.observe import WandbConfig
from burnish.observe.errors import TrackerError
from burnish.observe.metrics import read_metrics
from burnish.observe.tracker import TrackerLimits, TrackerQueue, Trackers
from burnish.observe.wandb import MAX_TEXT_CHARS, WandbTracker, wandb_mode
from burnish.preflight.inputs import check_inputs

OFFLINE = ("observe.wandb.mode=offline", "observe.wandb.project=sums")
KEY = "0123456789abcdef0123456789abcdef01234567"

Make = Callable[..., JobConfig]
Reward = Callable[[str], float]


@dataclass
class Part:
    """What one process wrote: the content of one ``.wandb`` file."""

    run_id: str = ""
    resumes: bool = False
    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)


def parts_of(run_dir: Path) -> list[Part]:
    """The parts of a run, oldest first, once the service process of wandb has written them."""
    wandb.teardown()
    files = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    return [read_part(path) for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)]


def read_part(path: Path) -> Part:
    part = Part()
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            part.run, part.run_id, part.resumes = record.run, record.run.run_id, record.run.resume
        if kind == "config":
            for item in record.config.update:
                part.config[item.key] = json.loads(item.value_json)
        if kind == "history":
            part.steps.append(
                {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return part


def records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB after a header of 7 bytes, and
    pieces of (checksum, length, type) and content; types 1: whole, 2: first, 3: middle, 4: last."""
    position, pieces = 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


@pytest.fixture(autouse=True)
def without_service() -> Iterator[None]:
    """The service process of wandb ends with the test."""
    yield
    wandb.teardown()


def recorded(part: Part) -> list[int]:
    return [step["_step"] for step in part.steps]


def test_a_resumed_run_continues_the_same_run_and_no_step_is_there_twice(
    rl: Make,
    reward: Reward,
    evaluation: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a kill: steps 1 to 3 are recorded, and the newest checkpoint is that of step 2."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    words = (*OFFLINE, *evaluation, "checkpoint.every_n_steps=2", "observe.wandb.tags=[a, b]")
    run_dir = burnish.run(rl("max_steps=3", *words), rewards=reward).run_dir
    shutil.rmtree(run_dir / "checkpoints" / "step_000003")
    burnish.run(rl("max_steps=5", *words), rewards=reward, resume=run_dir)

    first, second = parts_of(run_dir)
    assert recorded(first) == [0, 1, 2, 3] and recorded(second) == [4, 5]
    assert first.run_id == second.run_id == json.loads((run_dir / "wandb.json").read_text())["id"]
    assert second.resumes
    assert (first.run.project, first.run.display_name) == ("sums", "run")
    assert (list(first.run.tags), first.run.job_type) == (["a", "b"], "rl")
    assert (first.config["max_steps"], second.config["max_steps"]) == (3, 5)
    assert second.config["rollout"]["n_samples_per_prompt"] == 4
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    for line, step in zip(lines, first.steps + second.steps, strict=True):
        same = {n for n in line if not n.startswith(("time", "memory/")) and n != "step"}
        for name in {n for n in same if not n.endswith("tokens_per_s")}:
            assert step[name] == line[name], name
    assert (
        first.steps[0]["samples/eval/nrows"] == 16 and first.steps[1]["samples/train/nrows"] == 16
    )
    assert "samples/train/nrows" not in first.steps[2], "ten steps between two tables"
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    log = (run_dir / "run.log").read_text()
    assert "steps up to 3 are recorded already, and are not sent again" in log
    assert f"wandb sync {run_dir / 'wandb'}" in log


def test_every_kind_of_job_is_recorded(
    supervised: Make, generate: Make, reward: Reward, sums: str, tmp_path: Path
) -> None:
    trained = burnish.run(supervised("sft", *OFFLINE)).run_dir
    made = burnish.run(generate(*OFFLINE, "num_prompts=8", name="made"), rewards=reward).run_dir
    tree = {
        "job": "evaluate",
        "run_dir": str(tmp_path / "measured"),
        "model": {"scratch": {"alphabet": "0123456789+="}},
        "eval": {"data": {"sources": [sums]}, "generate_max_len": 4},
    }
    measured = burnish.run(burnish.load_config(tree, OFFLINE), rewards=reward).run_dir
    for run_dir, steps in ((trained, range(1, 9)), (made, [1, 2]), (measured, [0])):
        (part,) = parts_of(run_dir)
        assert recorded(part) == list(steps)
        assert [line["step"] for line in read_metrics(run_dir)] == list(steps)
    assert parts_of(made)[0].steps[0]["samples/generate/nrows"] == 16
    assert parts_of(measured)[0].steps[0]["samples/eval/nrows"] == 16


def test_numbers_that_are_not_finite_and_long_texts_are_recorded(tmp_path: Path) -> None:
    tracker = WandbTracker(WandbConfig(mode="offline"), tmp_path, {"job": "rl"})
    tracker.start()
    numbers = {"a/b/c": math.nan, "a/b": math.inf, "a": -math.inf, "train/pass@1": 1e300}
    numbers |= {
        "a\x00\x1b[2J\nb": 1.5,
        "/a//b/../": 2.5,
        "a.b.": 3.5,
        "$x {}": 4.5,
        "x" * 5000: 5.5,
    }
    row = {
        "split": "train",
        "prompt": "é" * (MAX_TEXT_CHARS + 5),
        "reward": None,
        "label": "\x00|{}",
    }
    tracker.log(3, numbers, {"train": [row, row | {"reward": 1.0, "prompt": ""}]})
    tracker.close(failed=True)
    (part,) = parts_of(tmp_path)
    (step,) = part.steps
    assert {name: str(step[name]) for name in numbers} == {k: str(v) for k, v in numbers.items()}
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples/train*.json")
    table = json.loads(file.read_text(encoding="utf-8"))
    assert table["columns"] == ["prompt", "reward", "label"]
    assert table["data"][0] == ["é" * MAX_TEXT_CHARS + " [5 more characters]", None, "\x00|{}"]
    assert part.run.project == "burnish"


def test_a_server_that_does_not_answer_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and never replies
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        tracker = WandbTracker(WandbConfig(mode="online", timeout_s=1), tmp_path, {"job": "rl"})
        tracker.start()
        tracker.log(1, {"train/loss": 0.5}, {})
        tracker.close(failed=False)
    assert "the server could not be reached" in caplog.text and KEY not in caplog.text
    assert [recorded(part) for part in parts_of(tmp_path)][-1] == [1]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_resumed_run_sends_nothing_that_the_server_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has steps up to 5, also if the state in the run folder says 3."""
    saved = {"id": "abc", "project": "burnish", "entity": None, "step": 3}
    (tmp_path / "wandb.json").write_text(json.dumps(saved))
    run = MagicMock(resumed=True, starting_step=6, offline=False, url="https://wandb.ai/x")
    tracker = WandbTracker(WandbConfig(mode="offline"), tmp_path, {})
    monkeypatch.setattr(wandb, "init", lambda **given: run if given["id"] == "abc" else None)
    tracker.start()
    assert tracker.rewind(2) == 5
    for step in range(3, 8):
        tracker.log(step, {"train/loss": 0.5}, {})
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [6, 7]
    assert json.loads((tmp_path / "wandb.json").read_text())["step"] == 7


def test_an_upload_that_does_not_end_in_time_names_the_command_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MagicMock(resumed=False, offline=False, url="", dir=str(tmp_path / "part" / "files"))
    run.finish.side_effect = TimeoutError
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker = WandbTracker(WandbConfig(mode="offline", timeout_s=2), tmp_path, {})
    tracker.start()
    with pytest.raises(
        TrackerError, match=rf"within 2 s; .* sync --include-online {tmp_path / 'part'}$"
    ):
        tracker.close(failed=False)


def test_another_project_is_another_run(tmp_path: Path) -> None:
    def state(**more: str) -> tuple[str, int]:
        tracker = WandbTracker(WandbConfig(mode="offline", **more), tmp_path, {})  # type: ignore[arg-type]
        return tracker._state.id, tracker._state.step

    saved = {"id": "abc", "project": "burnish", "entity": None, "step": 7}
    (tmp_path / "wandb.json").write_text(json.dumps(saved))
    assert state() == ("abc", 7)
    for other in ({"project": "p"}, {"entity": "e"}):
        run_id, step = state(**other)
        assert run_id != "abc" and step == -1
    for damaged in ("{", "[" * 100_000, *({**saved, key: [1]} for key in ("id", "step"))):
        text = damaged if isinstance(damaged, str) else json.dumps(damaged)
        (tmp_path / "wandb.json").write_text(text)
        with pytest.raises(TrackerError, match=r"wandb\.json cannot be read .*remove it"):
            state()


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "none"))


@pytest.mark.usefixtures("no_credentials")
def test_an_online_run_without_usable_credentials_is_refused_before_anything_loads(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = supervised("sft", "observe.wandb.mode=online")
    with pytest.raises(TrackerError, match=r"no API key.*WANDB_API_KEY.*mode=offline"):
        check_inputs(config)
    monkeypatch.setenv("WANDB_API_KEY", "too-short-to-be-a-key")
    with pytest.raises(TrackerError, match="WANDB_API_KEY invalid") as caught:
        check_inputs(config)
    assert "too-short" not in str(caught.value)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    check_inputs(config)


def test_a_missing_or_old_package_is_refused_before_anything_loads(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = supervised("sft", *OFFLINE)
    monkeypatch.setattr(metadata, "version", lambda name: "0.28.2")
    with pytest.raises(TrackerError, match=r"wandb 0\.28\.2 .*0\.31 or newer.*burnish\[wandb\]"):
        check_inputs(config)

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(TrackerError, match=r"not installed; pip install 'burnish\[wandb\]'"):
        check_inputs(config)
    check_inputs(supervised("sft"))


@pytest.mark.parametrize(
    ("variable", "given", "mode"),
    [
        (None, None, "online"),
        ("dryrun", None, "offline"),
        ("offline", None, "offline"),
        ("disabled", None, "disabled"),
        ("disabled", "offline", "offline"),
    ],
)
def test_the_mode_is_that_of_the_recipe_or_of_the_environment(
    variable: str | None, given: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_mode(WandbConfig(mode=given)) == mode
    monkeypatch.setenv("WANDB_MODE", "onlien")
    if given is None:
        with pytest.raises(
            TrackerError, match=r"WANDB_MODE=onlien: .*online, offline and disabled"
        ):
            wandb_mode(WandbConfig())


class Hanging:
    """A tracker that never returns from a step."""

    name = "hanging"

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def start(self) -> None: ...

    def log(self, *_: object) -> None:
        self.let_go.wait()

    def rewind(self, step: int) -> int:
        return step

    def close(self, *, failed: bool) -> None: ...


def test_training_goes_on_to_its_end_with_a_tracker_that_hangs(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 steps: one in the tracker, two queued, so the last line knows of 4 or 5 that were
    dropped."""
    tracker, limits = Hanging(), TrackerLimits(close_timeout_s=0.05, max_queued_steps=2)
    monkeypatch.setattr(
        "burnish.driver.base.open_trackers",
        lambda _config, run_dir: Trackers([TrackerQueue(tracker, run_dir, limits)]),
    )
    run_dir = burnish.run(supervised("sft")).run_dir
    tracker.let_go.set()
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["observe/hanging_dropped"] in (4, 5)
    log = (run_dir / "run.log").read_text()
    assert log.count("WARNING observe.hanging") == 2
    assert "number of steps that did not reach it: 8" in log


@pytest.mark.slow
def test_only_the_controller_of_a_ray_run_is_recorded(supervised: Make) -> None:
    words = ("cluster.runtime=ray", "cluster.policy_ranks=2", "max_epochs=1")
    run_dir = burnish.run(supervised("sft", *OFFLINE, *words)).run_dir
    (part,) = parts_of(run_dir)
    assert recorded(part) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_without_trackers_imports_none(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1=", "response": "1"}\n' * 4)
    code = f"""
import sys, burnish
tree = dict(job="sft", run_dir={str(tmp_path / "run")!r}, model=dict(scratch=dict(hidden_size=32)),
            data=dict(sources=[{str(rows)!r}]), train=dict(train_batch_size=4))
burnish.run(burnish.load_config(tree))
print([name for name in ("wandb", "tensorboard") if name in sys.modules])
"""
    command = [fork_server.interpreter(), "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
