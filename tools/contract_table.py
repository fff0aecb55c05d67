"""Write the table of docs/engine-tests.md: the engines that pass each property of the contract
suite.

``python tools/contract_table.py`` runs ``tests/contract`` (some minutes) and writes the results
between the markers. ``--check`` only collects the suite and checks that the table lists the same
engines and properties (exit code 1 if not). Run it on a machine with vLLM: properties that could
not be run are written as "not run". Other arguments are those of pytest: with ``-k launched`` only
engines with that word in their name run, and the results of the others are kept."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BEGIN, END = "<!-- contract table -->", "<!-- end of contract table -->"
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "engine-tests.md"
SUITE = "tests/contract"
WORST = ("FAILED", "refused", "not run", "pass")
"""Order of outcomes. A property with several cases gets the first of these that one of its cases
has."""


@dataclass
class Results:
    """A pytest plugin with the results of a run of the suite."""

    seen: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    """(suite, engine, property) -> outcome of every case, in the order of collection."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Reason of a refusal or of a missing run, by outcome and engine."""
    _keys: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        """Collect every property of every engine. Tests without an engine, such as those of the
        registry, are not properties."""
        for item in items:
            if "engine_name" not in item.fixturenames:
                continue
            suite = "rollout" if "rollout" in item.path.name else "train"
            sentence = item.originalname.removeprefix("test_").replace("_", " ")
            key = (suite, str(item.callspec.params["engine_name"]), sentence)
            self._keys[item.nodeid] = key
            self.seen.setdefault(key, [])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record one phase of one case."""
        properties: dict[str, Any] = dict(report.user_properties)
        key = self._keys.get(report.nodeid)
        if key is None:
            return
        if report.failed:
            self.seen[key].append("FAILED")
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._note("not run", key, report.longrepr[2].removeprefix("Skipped: "))
        elif report.when == "call" and "refused" in properties:
            self._note("refused", key, f"`{properties['refused']}`")
        elif report.when == "call":
            self.seen[key].append("pass")

    def _note(self, outcome: str, key: tuple[str, str, str], reason: str) -> None:
        self.seen[key].append(outcome)
        self.reasons[f"{key[1]}, {outcome}"] = reason


def run(*options: str) -> Results:
    """Run the suite with pytest's ``options``."""
    found = Results()
    pytest.main([str(ROOT / SUITE), "-q", "-p", "no:cacheprovider", *options], plugins=[found])
    return found


def table(found: Results) -> str:
    """Return Markdown: a list of properties and a table of engines for each suite."""
    lines: list[str] = []
    for suite in ("train", "rollout"):
        keys = [key for key in found.seen if key[0] == suite]
        engines, properties = _unique(k[1] for k in keys), _unique(k[2] for k in keys)
        lines += [f"Properties of a {suite} engine:", ""]
        lines += [f"{i}. {text}" for i, text in enumerate(properties, 1)]
        numbers = [str(i) for i in range(1, len(properties) + 1)]
        lines += ["", _row([f"{suite} engine", *numbers]), _row(["---"] * (1 + len(properties)))]
        for engine in engines:
            cells = [_outcome(found.seen[suite, engine, text]) for text in properties]
            lines.append(_row([engine, *cells]))
        lines.append("")
    lines += [f"- {where}: {why}" for where, why in sorted(found.reasons.items())]
    return "\n".join(lines).strip()


def listed(page: str) -> dict[tuple[str, str, str], str]:
    """Return (suite, engine, property) -> outcome of every entry in the page's table."""
    found: dict[tuple[str, str, str], str] = {}
    suite, properties = "", list[str]()
    for line in between(page).splitlines():
        if match := re.match(r"Properties of a (\w+) engine:", line):
            suite, properties = match[1], []
        elif match := re.match(r"\d+\. (.+)", line):
            properties.append(match[1])
        elif line.startswith("| ") and not line.startswith((f"| {suite} engine", "| ---")):
            engine, *outcomes = line.strip("| ").split(" | ")
            found |= {(suite, engine, p): o for p, o in zip(properties, outcomes, strict=True)}
    return found


def keep_results(found: Results, page: str) -> None:
    """Add the results in the page's table, with their reasons, of cases that did not run."""
    before = listed(page)
    kept = [key for key, cases in found.seen.items() if not cases and key in before]
    found.seen |= {key: [before[key]] for key in kept}
    notes = {f"{engine}, {before[suite, engine, text]}" for suite, engine, text in kept}
    for line in between(page).splitlines():
        where, _, why = line.removeprefix("- ").partition(": ")
        if line.startswith("- ") and where in notes:
            found.reasons.setdefault(where, why)


def between(page: str) -> str:
    """Return the text between the markers. Raises ValueError if they are missing."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"{PAGE} has no {BEGIN} ... {END}")
    return page.split(BEGIN)[1].split(END)[0]


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _outcome(cases: list[str]) -> str:
    return next((word for word in WORST if word in cases), "not run")


def main(arguments: list[str]) -> int:
    """Write the table, or check it."""
    if "--check" in arguments:
        have, want = (
            set(listed(PAGE.read_text(encoding="utf-8"))),
            set(run("--collect-only", "-qq").seen),
        )
        for key in sorted(have ^ want):
            print("not in the suite" if key in have else "not in the table", *key, sep=": ")
        return int(have != want)
    found = run(*arguments)
    page = PAGE.read_text(encoding="utf-8")
    keep_results(found, page)
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}", encoding="utf-8")
    return int(any("FAILED" in cases for cases in found.seen.values()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
