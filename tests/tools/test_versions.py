"""docs/versions.md is what the recorded self-tests say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.train.deepspeed.engine import OLDEST

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "versions.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_record_is_of_a_machine_on_which_every_self_test_passed() -> None:
    records = sorted((ROOT / "docs" / "versions").glob("*.json"))
    assert records
    for path in records:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["outcomes"] and all(o["passed"] for o in record["outcomes"]), path.name


def test_the_lock_holds_what_the_constraints_pin() -> None:
    """Every version of constraints/cpu.txt is in the lock, and no CUDA package is. (Triton is: it
    runs kernels on a CPU.)"""

    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
        pairs = [line.rstrip(" \\").split("==") for line in lines if re.match(r"\w", line)]
        return {name.lower().replace("_", "-"): version for name, version in pairs}

    lock, wanted = pins("cpu.lock.txt"), pins("cpu.txt")
    missing = {n: v for n, v in wanted.items() if n in lock and lock[n] != v}
    assert not missing and len(lock) > len(wanted)
    assert not [name for name in lock if name.startswith(("nvidia-", "cuda-"))]
    assert wanted["deepspeed"] == str(OLDEST)


@pytest.mark.parametrize("name", ["cpu", "vllm-cpu", "cuda", "build"])
def test_every_locked_package_has_hashes(name: str) -> None:
    """pip compares hashes only if every package has one."""
    text = (ROOT / "constraints" / f"{name}.lock.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^\w.*$(?:\n    .*$)*", text, flags=re.MULTILINE)
    assert entries
    form = re.compile(r"[\w.-]+==[\w.]+( \\\n    --hash=sha256:[0-9a-f]{64})+")
    assert not [entry for entry in entries if not form.fullmatch(entry)]
