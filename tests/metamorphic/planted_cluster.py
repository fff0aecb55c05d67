"""Mistakes for the relations of transfers, secrets and files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from metamorphic import relations_cluster

import burnish.data.files as files
import burnish.secret as secret
import burnish.sync.buckets as buckets
from burnish.sync.channel import Channel

Patch = pytest.MonkeyPatch


def integers_are_converted(patch: Patch) -> None:
    """All weights get the dtype of the rollout engine."""
    own = buckets.wanted_dtype

    def wanted(tensor: Any, dtype: Any) -> torch.dtype:
        return own(tensor, dtype) if dtype is None else dtype

    patch.setattr(buckets, "wanted_dtype", wanted)


def nobody_looks_for_the_dead(patch: Patch) -> None:
    """A waiting process does not look for the end of its connection."""
    patch.setattr(Channel, "check_not_ended", lambda self: None)
    patch.setattr(relations_cluster, "PATIENCE_S", 3.0)
    patch.setattr(relations_cluster, "GLOO_S", 3.0)


def arguments_are_public(patch: Patch) -> None:
    """Arguments of a command are no secrets."""
    patch.setattr(secret, "_argument", lambda value, previous, found: value)


def pipes_are_files(patch: Patch) -> None:
    """Whatever has the suffix of a data file is opened."""
    patch.setattr(files, "_reader_of", lambda path: files._READERS[".jsonl"])


PLANTED = {
    "weights_arrive": (integers_are_converted, tuple(range(24))),
    "death_ends_the_wait": (nobody_looks_for_the_dead, tuple(range(4))),
    "secrets_stay_in_the_recipe": (arguments_are_public, tuple(range(12))),
    "files_are_refused_alike": (pipes_are_files, tuple(range(40))),
}
