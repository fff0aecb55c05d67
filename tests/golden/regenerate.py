"""Write the golden numbers anew: ``python tests/golden/regenerate.py``, from the repository root.

Do it only for a change that is meant to change results, say so in the CHANGELOG (mark NUMERICS),
and look at the difference that this prints.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from golden_run import GOLDEN, differences, run_golden


def main() -> None:
    """Run, print how far the new numbers are from the old ones, and replace the file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = run_golden(Path(folder))
    if GOLDEN.is_file():
        changed = differences(found, json.loads(GOLDEN.read_text(encoding="utf-8")))
        print("largest change at any step:", changed)
    rounded = [{name: round(value, 7) for name, value in line.items()} for line in found]
    lines = ",\n".join(f" {json.dumps(line)}" for line in rounded)
    GOLDEN.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"wrote {GOLDEN}")


if __name__ == "__main__":
    main()
