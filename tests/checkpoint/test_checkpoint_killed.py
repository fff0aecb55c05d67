"""SIGKILL at every file operation of a save, and at random moments: a good one is always found."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time

import pytest

from burnish.checkpoint import CheckpointStore, verify

CONTENTS = {"old": b"old" * 1000, "new": b"new" * 1000}
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Audit events that Python raises just before it changes a file or folder."""


def writes(name: str):
    def write(folder):
        for i in range(3):
            (folder / f"part{i}").write_bytes(CONTENTS[name])

    return write


def content_of(path) -> str:
    """Which of the two contents every file of a good checkpoint has."""
    assert verify(path) == []
    (content,) = {(path / f"part{i}").read_bytes() for i in range(3)}
    return next(name for name, value in CONTENTS.items() if value == content)


def die_before_operation(n: int) -> None:
    """From now on, SIGKILL this process just before its n-th file operation."""
    left = n

    def hook(event, _args):
        nonlocal left
        if event in OPERATIONS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.fixture(autouse=True)
def no_flush(monkeypatch):
    """A killed process loses no data that it has passed to the system: flushes would only cost
    time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def killed_at_every_operation(tmp_path, run_in_child, *, step: int):
    """Save ``step`` over steps 1 and 2, dying before operation 1, 2, ... until a save gets through.

    Yields the store after each death and at last after the save that finished.
    """
    template = CheckpointStore(tmp_path / "template", keep_last=2, best_mode="max")
    template.save(1, writes("old"))
    template.save(2, writes("old"))
    n, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        n += 1
        folder = tmp_path / str(n)
        shutil.copytree(template.folder, folder)
        store = CheckpointStore(folder, keep_last=1, best_mode="max")

        def work(n=n, store=store):
            die_before_operation(n)
            store.save(step, writes("new"))

        code = run_in_child(work)
        yield store
    assert code == 0
    assert n > 15  # 3 parts, their hashes, the manifest, the flushes, the renames: all were hit


def check_next_save(store) -> None:
    """The next save works and removes leftovers."""
    store.save(9, writes("new"))
    assert [path.name for path in store.folder.iterdir()] == ["step_000009"]


def test_a_kill_before_any_operation_of_a_save_leaves_the_newest_complete_checkpoint(
    tmp_path, run_in_child
):
    seen = set()
    for store in killed_at_every_operation(tmp_path, run_in_child, step=3):
        latest = store.latest()
        seen.add((latest.name, content_of(latest)))
        check_next_save(store)
    assert seen == {("step_000002", "old"), ("step_000003", "new")}


def test_a_kill_before_any_operation_of_a_replacement_leaves_the_old_or_the_new_one(
    tmp_path, run_in_child
):
    seen = set()
    for store in killed_at_every_operation(tmp_path, run_in_child, step=2):
        latest = store.latest()
        seen.add((latest.name, content_of(latest)))
        check_next_save(store)
    # .replaced: died between the two renames
    assert seen == {
        ("step_000002", "old"),
        (".replaced-step_000002", "old"),
        ("step_000002", "new"),
    }


def test_the_step_never_decreases_over_random_kills(tmp_path):
    rng = random.Random(0)
    store = CheckpointStore(tmp_path, keep_last=2, best_mode="max")
    store.save(0, writes("new"))

    def slow_write(folder):
        for i in range(3):
            with open(folder / f"part{i}", "wb", buffering=0) as file:
                for start in range(0, 3000, 500):
                    file.write(CONTENTS["new"][start : start + 500])
                    time.sleep(0.0005)

    reached = 0
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            step = reached
            while True:
                step += 1
                store.save(step, slow_write)
        time.sleep(rng.uniform(0.005, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        latest = store.latest()
        assert content_of(latest) == "new"
        step = int(latest.name.removeprefix("step_"))
        assert step >= reached
        reached = step
    assert reached > 0  # the children did get somewhere
