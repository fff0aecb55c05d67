"""Checkpoints that are whole or not there: checksummed, renamed into place, free of pickle.

Read in this order: save.py (the store of a run), manifest.py (what makes a folder good),
retention.py (what is kept), state.py (nested state as JSON and safetensors).
"""

from burnish.checkpoint.errors import CheckpointError
from burnish.checkpoint.manifest import Manifest, read_manifest, verify, write_manifest
from burnish.checkpoint.retention import Entry, best_step, to_delete
from burnish.checkpoint.save import CheckpointStore, PendingCheckpoint
from burnish.checkpoint.state import capture_rng, load_state, restore_rng, save_state

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "Entry",
    "Manifest",
    "PendingCheckpoint",
    "best_step",
    "capture_rng",
    "load_state",
    "read_manifest",
    "restore_rng",
    "save_state",
    "to_delete",
    "verify",
    "write_manifest",
]
