"""A mistake for the relation of folders."""

from __future__ import annotations

import pytest

import burnish.checkpoint.save as save
import burnish.driver.records as rollout_records

Patch = pytest.MonkeyPatch


def checksums_are_not_compared(patch: Patch) -> None:
    """Checkpoints and recordings are read without a look at their checksums."""
    for module in (save, rollout_records):
        patch.setattr(module, "verify", lambda *_, **__: [])


PLANTED = {"damaged_folder": (checksums_are_not_compared, tuple(range(60)))}
