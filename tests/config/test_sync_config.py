"""The sync node: what can be set together, what one process cannot do, and what auto means."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.config import load_config
from burnish.config.sync import DiskSync, InprocSync, LinkSync, SyncConfig

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
    ("sync", "store"),
    [
        (LinkSync(), "object_store"),
        (LinkSync(kind="object_store"), "object_store"),
        (DiskSync(kind="disk", folder="x"), "disk"),
        (LinkSync(kind="collective"), None),
        (LinkSync(kind="ipc"), None),
        (InprocSync(kind="inproc"), None),
    ],
)
def test_a_transfer_names_the_store_that_workers_of_ray_read(
    sync: SyncConfig, store: str | None
) -> None:
    assert sync.ray_store == store
