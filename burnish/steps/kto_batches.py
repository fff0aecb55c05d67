"""Batches that a KTO run passes through its reference model: those of its steps, and the mismatched
rows of each, from which the KL is estimated.

The order of the data depends only on the seed and on the position in the stream. The rows of all
later steps are therefore known before the first one, and their log-probs can be computed in
advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.checkpoint.save import CheckpointStore
from burnish.checkpoint.state import load_state
from burnish.data.batches import BatchStream
from burnish.data.preferences.unpaired import mismatched_pairs
from burnish.types import Batch


@dataclass(frozen=True)
class KtoBatches:
    """The batches of the remaining steps of a run. Each iteration reads the data again."""

    open_stream: Callable[[], BatchStream]
    """Return a new stream of single responses of the training data, at its beginning."""
    batch_size_at: Callable[[int], int]
    """Return the number of rows of an optimizer step; the first step is 1."""
    total_steps: int
    max_len: int
    """Length limit of the training data."""
    held_out: Sequence[tuple[Batch, int]] = ()
    """Batches that are also measured, each with the length limit of its data."""
    checkpoint: Path | None = None
    """Checkpoint from which the run continues. None: from the first step."""

    def __iter__(self) -> Iterator[Batch]:
        for batch, max_len in self.held_out:
            yield batch
            yield mismatched_pairs(batch, max_len=max_len)
        stream, done = self.open_stream(), 0
        if self.checkpoint is not None:
            stream.load_state_dict(load_state(self.checkpoint, "data"))
            done = load_state(self.checkpoint, "session")["step"]
        for step in range(done + 1, self.total_steps + 1):
            batch = stream.next(self.batch_size_at(step))
            yield batch
            yield mismatched_pairs(batch, max_len=self.max_len)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint from which the run in ``run_dir`` would continue; None if there is
    none."""
    store = CheckpointStore(run_dir / "checkpoints", keep_last=1, best_mode="max")
    return store.latest(resumable=True)
