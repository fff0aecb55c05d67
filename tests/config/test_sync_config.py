"""The sync node: what can be set together, what one process cannot do, and what auto means."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.config import load_config
from burnish.config.sync import DiskSync, InprocSync, LinkSync, resolve_kind

Recipes = dict[str, dict[str, Any]]


@pytest.mark.parametrize("sync", ["inproc", "auto", {}, {"kind": "auto"}, {"kind": "inproc"}])
def test_an_inline_recipe_may_set_inproc_sync(sync: Any, recipes: Recipes) -> None:
    assert load_config(recipes["rl"] | {"sync": sync})


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
