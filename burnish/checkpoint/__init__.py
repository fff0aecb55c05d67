"""Atomic checkpoints with checksums and without pickle.

Read in this order: save.py (the checkpoint store of a run), manifest.py (checksums of a folder),
retention.py (which checkpoints to keep), state.py (nested state as JSON and safetensors).
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
