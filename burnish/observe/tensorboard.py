"""TensorBoard as a tracker: event files under ``tensorboard/`` in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.observe.errors import TrackerError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from burnish.observe.tracker import Samples

TENSORBOARD_DIR = "tensorboard"


class TensorBoardTracker:
    """Writes metrics as scalars. Samples are ignored."""

    name = "tensorboard"

    def __init__(self, run_dir: Path) -> None:
        """Import the package; no file is written yet. Raises TrackerError if the import fails."""
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrackerError(
                "observe.tensorboard=true needs the package tensorboard, and importing it failed "
                f"({error}); install it with: pip install 'burnish[tensorboard]', or leave "
                "observe.tensorboard out (metrics.jsonl is always written)"
            ) from error
        self._open, self._summary, self._value = SummaryWriter, Summary, Summary.Value
        self._folder = str(run_dir / TENSORBOARD_DIR)
        self._writer: SummaryWriter | None = None

    def start(self) -> None:
        self._writer = self._open(self._folder)

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        assert self._writer is not None
        # One event for all values: add_scalar makes one each, at up to 8 times the CPU time.
        values = [self._value(tag=name, simple_value=value) for name, value in metrics.items()]
        events: Any = self._writer.file_writer
        events.add_summary(self._summary(value=values), step)
        self._writer.flush()

    def rewind(self, step: int) -> int:
        """Start a new event file that hides steps after ``step`` in earlier files."""
        assert self._writer is not None
        self._writer.close()
        self._writer = self._open(self._folder, purge_step=step + 1)
        return step

    def close(self, *, failed: bool) -> None:
        assert self._writer is not None
        self._writer.close()
