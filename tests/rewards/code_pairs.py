"""Right and wrong code with tests, in the styles of common data sets: python3 is the oracle."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

END = """
import unittest
for name, value in list(globals().items()):
    if isinstance(value, type) and issubclass(value, unittest.TestCase):
        unittest.main(argv=['tests'])
"""


@dataclass(frozen=True)
class Pair:
    """Code that passes its tests, and code that does not."""

    name: str
    right: str
    wrong: str
    tests: str


def read_pairs() -> list[Pair]:
    """Return the pairs of ``code_pairs.txt``."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    pairs = []
    for part in text.split("=== ")[1:]:
        name, _, rest = part.partition("\n")
        right, wrong, tests = rest.replace("--- tests\n", "--- wrong\n").split("--- wrong\n")
        pairs.append(Pair(name, right, wrong, tests))
    return pairs


def passes_in_python(code: str, tests: str) -> bool:
    """Return whether Python itself runs the code and then the tests without an error."""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", f"{code}\n{tests}\n{END}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return ran.returncode == 0
