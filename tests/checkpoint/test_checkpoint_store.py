"""The store: retention, the newest checkpoint, and the warnings about damaged checkpoints."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil

import pytest
import torch

from burnish.checkpoint import (
    CheckpointError,
    CheckpointStore,
    load_state,
    read_manifest,
    save_state,
    verify,
)


def writes(content: str):
    def write(folder):
        (folder / "policy").mkdir()
        (folder / "policy" / "weights.bin").write_text(content * 100)
        (folder / "trainer.json").write_text(json.dumps({"content": content}))

    return write


def content_of(path) -> str:
    assert verify(path) == []
    return json.loads((path / "trainer.json").read_text())["content"]


def names(store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep_last=2, best_mode="max")


def test_a_saved_checkpoint_is_found_again_with_its_state(store):
    path = store.save(10, lambda f: save_state(f, "trainer", {"x": torch.ones(2)}), metric=0.5)
    assert path.name == "step_000010"
    assert store.latest() == path
    assert torch.equal(load_state(path, "trainer")["x"], torch.ones(2))
    manifest = read_manifest(path)
    assert (manifest.step, manifest.extra) == (10, {"metric": 0.5})
    assert names(store) == ["step_000010"]


def test_an_empty_store_has_no_checkpoints_and_creates_no_folder(store):
    assert (store.all(), store.latest()) == ([], None)
    assert not store.folder.exists()


def test_the_last_two_and_the_best_are_kept_on_disk(store):
    """Metrics .1 .9 .3 .4 .2 at steps 1 to 5: 4 and 5 are the last two, 2 is best."""
    for step, metric in enumerate([0.1, 0.9, 0.3, 0.4, 0.2], 1):
        store.save(step, writes(str(step)), metric=metric)
    assert names(store) == ["step_000002", "step_000004", "step_000005"]
    assert store.latest().name == "step_000005"


def test_steps_are_ordered_as_numbers_beyond_six_digits(store):
    store.save(999_999, writes("a"))
    store.save(1_000_000, writes("b"))
    assert [p.name for p in store.all()] == ["step_999999", "step_1000000"]
    assert content_of(store.latest()) == "b"


@pytest.mark.parametrize("metric", [None, math.nan, math.inf])
def test_a_step_without_a_finite_metric_is_not_kept_as_the_best(store, metric):
    """The last two steps are kept, and step 1 is neither of them."""
    for step in (1, 2, 3):
        store.save(step, writes(str(step)), metric=metric)
    assert names(store) == ["step_000002", "step_000003"]


def test_a_new_store_on_the_same_folder_keeps_the_best(store):
    """Metrics 1 and 2 at steps 1 and 2: the smallest is at step 1, and 3 is the last."""
    store.save(1, writes("a"), metric=1.0)
    store.save(2, writes("b"), metric=2.0)
    fresh = CheckpointStore(store.folder, keep_last=1, best_mode="min")
    fresh.save(3, writes("c"))
    assert names(fresh) == ["step_000001", "step_000003"]


def truncate(path):
    file = path / "policy" / "weights.bin"
    file.write_bytes(file.read_bytes()[:-1])
    return file


def flip(path):
    file = path / "policy" / "weights.bin"
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)
    return file


def lose_file(path):
    (path / "trainer.json").unlink()
    return path / "trainer.json"


def lose_manifest(path):
    (path / "manifest.json").unlink()
    return path / "manifest.json"


@pytest.mark.parametrize("damage", [truncate, flip, lose_file, lose_manifest])
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(store, caplog, damage):
    good = store.save(1, writes("a"), metric=0.1)
    bad = store.save(2, writes("b"), metric=0.9)
    damaged_file = damage(bad)
    with caplog.at_level(logging.WARNING, logger="burnish"):
        assert store.latest() == good
    (record,) = caplog.records
    assert f"{bad} is not usable" in record.getMessage()
    assert str(damaged_file) in record.getMessage()
    assert f"Using {good} instead" in record.getMessage()


def test_every_newer_bad_one_is_named(store, caplog):
    store.save(1, writes("a"), metric=1.0)
    store.save(2, writes("b"))
    store.save(3, writes("c"))
    flip(store.folder / "step_000002")
    lose_manifest(store.folder / "step_000003")
    assert store.latest().name == "step_000001"
    assert ["step_000003" in r.getMessage() for r in caplog.records] == [True, False]
    assert all("step_000001 instead" in r.getMessage() for r in caplog.records)


def test_without_a_good_checkpoint_latest_warns_and_returns_none(store, caplog):
    lose_manifest(store.save(1, writes("a")))
    assert store.latest() is None
    assert "no good checkpoint" in caplog.text


def test_a_good_checkpoint_gives_no_warning(store, caplog):
    store.save(1, writes("a"), metric=1.0)
    store.latest()
    assert caplog.records == []


def test_bad_checkpoints_are_deleted_once_a_newer_good_one_exists(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, best_mode="max")
    store.save(1, writes("a"))
    (tmp_path / "step_000002").mkdir()  # never finished
    (tmp_path / "step_000009").mkdir()
    store.save(5, writes("e"))
    assert names(store) == ["step_000005", "step_000009"]


def test_saving_a_step_again_replaces_it(store):
    store.save(1, writes("old"), metric=1.0)
    store.save(1, writes("new"), metric=0.0)
    assert content_of(store.latest()) == "new"
    assert read_manifest(store.latest()).extra == {"metric": 0.0}
    assert names(store) == ["step_000001"]


def test_a_failed_second_save_of_a_step_leaves_the_first(store, monkeypatch):
    store.save(1, writes("old"))
    rename = os.rename

    def failing(source, target):
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.save(1, writes("new"))
    assert names(store) == ["step_000001"]
    assert content_of(store.latest()) == "old"


def test_a_replaced_checkpoint_without_successor_is_used_and_restored(store):
    """Between the two renames of a replacement: the old one aside, the new one not there."""
    store.save(1, writes("old"))
    os.rename(store.folder / "step_000001", store.folder / ".replaced-step_000001")
    assert content_of(store.latest()) == "old"
    store.save(2, writes("next"))
    assert names(store) == ["step_000001", "step_000002"]


def test_the_next_save_removes_leftovers_of_dead_processes_only(store, dead_pid):
    store.save(1, writes("a"))
    live = f".tmp-step_000002-{os.getppid()}"
    for leftover in (
        f".tmp-step_000002-{dead_pid}", f".tmp-step_000003-{os.getpid()}", live,
        ".trash-step_000000-0123abcd",
    ):  # fmt: skip
        (store.folder / leftover).mkdir()
        (store.folder / leftover / "part").write_text("half")
    shutil.copytree(store.folder / "step_000001", store.folder / ".replaced-step_000001")
    assert [p.name for p in store.all()] == ["step_000001"]
    store.save(4, writes("d"))
    assert names(store) == [live, "step_000001", "step_000004"]


def test_other_files_in_the_folder_are_kept(store):
    store.folder.mkdir()
    (store.folder / "step_notes").mkdir()
    (store.folder / "step_000007").write_text("a file")
    (store.folder / "README").write_text("mine")
    store.save(8, writes("a"))
    assert names(store) == ["README", "step_000007", "step_000008", "step_notes"]
    assert store.all() == [store.folder / "step_000008"]


def test_a_failed_deletion_is_a_warning_and_the_save_succeeds(store, monkeypatch, caplog):
    for step in (1, 2):
        store.save(step, writes("a"))
    rename = os.rename

    def failing(source, target):
        if ".trash-" in str(target):
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    assert store.save(3, writes("b")).name == "step_000003"
    assert "step_000001 could not be deleted" in caplog.text


def test_an_interrupted_write_is_removed_and_not_published(store):
    def interrupted(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(1, interrupted)
    assert names(store) == []


@pytest.mark.parametrize(("keep_last", "step"), [(0, 1), (1, -1)])
def test_invalid_arguments_are_refused(tmp_path, keep_last, step):
    with pytest.raises(ValueError, match=r"keep_last=0|step=-1"):
        CheckpointStore(tmp_path, keep_last=keep_last, best_mode="max").save(step, writes("a"))
