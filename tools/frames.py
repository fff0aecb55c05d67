"""Count the frames of this package between the command line and ``backward()``:

    python tools/frames.py sft recipes/tiny_1_sft.yaml
    PYTHONPATH=OTHER_CHECKOUT python tools/frames.py ...   # of another checkout

Runs the first training pass of the recipe in a temporary folder and prints the frames, outermost
first.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

import burnish
from burnish.cli import main as command_line


class _Reached(BaseException):
    """Raised in place of the first backward pass; no handler of a run catches it."""

    def __init__(self) -> None:
        super().__init__()
        package = str(Path(burnish.__file__).parent)
        stack = [f for f in traceback.extract_stack() if f.filename.startswith(package)]
        self.frames = [f"{Path(f.filename).relative_to(package)}: {f.name}" for f in stack]


_backward = torch.Tensor.backward


def _reached(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
    reached = _Reached()
    if any(frame.startswith("train/") for frame in reached.frames):
        raise reached
    _backward(tensor, *args, **options)  # the memory plan traces a pass


def main() -> None:
    """Run the command line until the first backward pass."""
    torch.Tensor.backward = _reached  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["burnish", *sys.argv[1:], f"run_dir={folder}/run"]
        try:
            command_line()
        except _Reached as reached:
            print(*reached.frames, f"{len(reached.frames)} frames", sep="\n")


if __name__ == "__main__":
    main()
