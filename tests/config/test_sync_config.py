"""The sync node: what can be set together, what one process cannot do, and what auto means."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.config import ConfigError, load_config
from burnish.config.sync import DiskSync, InprocSync, LinkSync, resolve_kind

Recipes = dict[str, dict[str, Any]]


@pytest.mark.parametrize("sync", ["inproc", "auto", {}, {"kind": "auto"}, {"kind": "inproc"}])
def test_an_inline_recipe_may_set_inproc_sync(sync: Any, recipes: Recipes) -> None:
    assert load_config(recipes["rl"] | {"sync": sync})


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ("collective", "sync.kind=collective transfers weights between processes"),
        ({"kind": "ipc"}, "sync.kind=ipc transfers weights between processes"),
        ("object_store", "sync.kind=object_store transfers weights between processes"),
        ({"kind": "disk", "folder": "x"}, "sync.kind=disk transfers weights between processes"),
        ({"bucket_bytes": 4096}, "sync has no effect"),
        ({"verify": False}, "sync has no effect"),
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
def test_impossible_sync_settings_are_rejected(sync: Any, message: str, recipes: Recipes) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipes["rl"] | {"sync": sync})
    assert message in str(error.value)


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
def test_every_sync_between_processes_is_valid_on_ray(sync: Any, recipes: Recipes) -> None:
    assert load_config(recipes["rl"] | {"sync": sync, "cluster": {"runtime": "ray"}})


def test_inproc_sync_is_rejected_on_ray(recipes: Recipes) -> None:
    with pytest.raises(ConfigError, match=r"sync\.kind=inproc .* are in different processes"):
        load_config(recipes["rl"] | {"sync": "inproc", "cluster": {"runtime": "ray"}})


def test_only_rl_has_sync(recipes: Recipes) -> None:
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
def test_auto_selects_the_fastest_link(
    kind: Any, process: bool, memory: bool, resolved: str
) -> None:
    config = DiskSync(kind=kind, folder="x") if kind == "disk" else LinkSync(kind=kind)
    assert resolve_kind(config, same_process=process, same_memory=memory) == resolved
    assert resolve_kind(InprocSync(kind="inproc"), same_process=True, same_memory=True) == "inproc"


def test_auto_selects_the_object_store_on_ray() -> None:
    places = {"same_process": False, "same_memory": True, "has_store": True}
    assert resolve_kind(LinkSync(), **places) == "object_store"
    assert resolve_kind(LinkSync(kind="ipc"), **places) == "ipc"
