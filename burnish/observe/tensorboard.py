"""TensorBoard as a tracker: event files under ``tensorboard/`` in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrackerError(
                "observe.tensorboard=true needs the package tensorboard, and importing it failed "
                f"({error}); install it with: pip install 'burnish[tensorboard]', or leave "
                "observe.tensorboard out (metrics.jsonl is always written)"
            ) from error
        self._open = SummaryWriter
        self._folder = str(run_dir / TENSORBOARD_DIR)
        self._writer: SummaryWriter | None = None

    def start(self) -> None:
        self._writer = self._open(self._folder)

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        assert self._writer is not None
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
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
