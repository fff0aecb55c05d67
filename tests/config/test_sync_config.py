"""The sync node: what can be set together, what one process cannot do, and what auto means."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.config import ConfigError, load_config
from burnish.config.sync import DiskSync, InprocSync, LinkSync, resolve_kind

Recipes = dict[str, dict[str, Any]]


@pytest.mark.parametrize("sync", ["inproc", "auto", {}, {"kind": "auto"}, {"kind": "inproc"}])
def test_a_recipe_of_one_process_may_name_its_sync(sync: Any, recipes: Recipes) -> None:
    assert load_config(recipes["rl"] | {"sync": sync})


@pytest.mark.parametrize(
    ("sync", "told"),
    [
        ("collective", "sync.kind=collective hands weights from process to process"),
        ({"kind": "ipc"}, "sync.kind=ipc hands weights from process to process"),
        ("object_store", "sync.kind=object_store hands weights from process to process"),
        ({"kind": "disk", "folder": "x"}, "sync.kind=disk hands weights from process to process"),
        ({"bucket_bytes": 4096}, "sync sets how weights are sent"),
        ({"verify": False}, "sync sets how weights are sent"),
        ("disk", "folder"),
        ({"kind": "collective", "folder": "x"}, "folder"),
        ({"keep": 3}, "keep"),
        ({"kind": "inproc", "timeout_s": 5}, "timeout_s"),
        ({"bucket_bytes": 1000}, "bucket_bytes"),
        ({"bucket_bytes": 4097}, "bucket_bytes"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"kind": "pigeon"}, "pigeon"),
    ],
)
def test_what_cannot_be_honoured_is_refused(sync: Any, told: str, recipes: Recipes) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipes["rl"] | {"sync": sync})
    assert told in str(error.value)


@pytest.mark.parametrize(
    "sync",
    [
        "auto",
        "object_store",
        "collective",
        "ipc",
        {"kind": "disk", "folder": "x"},
        {"verify": False},
    ],
)
def test_on_ray_every_way_between_processes_may_be_named(sync: Any, recipes: Recipes) -> None:
    assert load_config(recipes["rl"] | {"sync": sync, "cluster": {"runtime": "ray"}})


def test_on_ray_there_is_no_way_inside_one_process(recipes: Recipes) -> None:
    with pytest.raises(ConfigError, match=r"sync\.kind=inproc .* are in several"):
        load_config(recipes["rl"] | {"sync": "inproc", "cluster": {"runtime": "ray"}})


def test_only_rl_has_a_sync(recipes: Recipes) -> None:
    with pytest.raises(ConfigError, match="sync"):
        load_config(recipes["sft"] | {"sync": {}})


@pytest.mark.parametrize(
    ("kind", "process", "memory", "resolved"),
    [
        ("auto", True, True, "inproc"),
        ("auto", False, True, "ipc"),
        ("auto", False, False, "collective"),
        ("collective", False, True, "collective"),
        ("disk", False, False, "disk"),
    ],
)
def test_auto_takes_the_nearest_way(kind: Any, process: bool, memory: bool, resolved: str) -> None:
    config = DiskSync(kind=kind, folder="x") if kind == "disk" else LinkSync(kind=kind)
    assert resolve_kind(config, same_process=process, same_memory=memory) == resolved
    assert resolve_kind(InprocSync(kind="inproc"), same_process=True, same_memory=True) == "inproc"


def test_auto_takes_the_object_store_where_there_is_one() -> None:
    places = {"same_process": False, "same_memory": True, "has_store": True}
    assert resolve_kind(LinkSync(), **places) == "object_store"
    assert resolve_kind(LinkSync(kind="ipc"), **places) == "ipc"
