"""Find keys of recipes that do nothing: ``make keys ARGS="--job rl --key 'train.*'"``.

Each base recipe of ``dead_keys.yaml`` runs for a few steps on a tiny model. Then every key of its
resolved config gets another value, and the run is repeated. Equal weights, metrics, samples and
files mean that the key has no effect. Such a key is a defect unless a rule refuses it, a warning
names it, or ``dead_keys.yaml`` has the reason. Exit code 1 if there is an unexplained key, or a
reason for a key that has an effect.

Reading order: main, examine, alternatives, outcome."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import yaml

import burnish
from burnish.config import ConfigError, JobConfig, load_config
from burnish.config.base import Node
from burnish.config.load import changed_config
from burnish.config.schema import nodes_in
from burnish.errors import BurnishError

CASES = Path(__file__).with_suffix(".yaml")
_TIMES = ("time/", "memory/", "_per_s", "tokens_per_s", "seconds", "total_s", "rss", "idle")
"""Parts of the names of metrics that no two runs share."""
_NOT_COMPARED = (
    *("config.yaml", "run.log", "report.html", "plan.txt", "timeline.json", "manifest.json"),
    *("*.tmp", "oom.txt", "*.html", "memory*", "date.txt", ".lock", "code_digests.json"),
)
"""Files that contain the recipe, times or memory."""

Outcome = dict[str, Any]
"""What a run produced: file -> digest or content. The key ``error`` is the class of its error."""


@dataclass
class Verdict:
    """The result for one key of a base recipe."""

    base: str
    path: str
    word: Literal["effect", "dead", "refused", "noticed", "untried"]
    tried: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Examine the keys and print those without an effect. Return the exit code."""
    options = _parser().parse_args(argv)
    logging.getLogger("burnish").addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    verdicts: list[Verdict] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dead-keys-") as folder:
        os.chdir(folder)
        write_data(cases["data"])
        for name, base in cases["bases"].items():
            if options.job in (None, name.split("/")[0]) and fnmatchcase(name, options.base):
                verdicts += examine(name, base, cases["values"], options.key)
    print(f"{len(verdicts)} keys, {time.monotonic() - begin:.0f} s:", end=" ")
    print(", ".join(f"{n} {word}" for word, n in Counter(v.word for v in verdicts).items()))
    problems = list(contradictions(verdicts, cases["without_effect"]))
    print(*problems, sep="\n")
    return 1 if problems else 0


def contradictions(verdicts: Sequence[Verdict], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the dead keys without a reason, and the reasons for keys that have an effect. A reason
    belongs to ``path`` or to ``base:path``; both may contain ``*``."""
    for verdict in verdicts:
        pattern = next((p for p in reasons if _matches(p, verdict)), None)
        if verdict.word == "dead" and pattern is None:
            yield f"no effect, no reason: {verdict.base}: {verdict.path}"
    for pattern in reasons:
        words = {v.word for v in verdicts if _matches(pattern, v)}
        if words and "dead" not in words and "effect" in words:
            yield f"has an effect, remove its reason: {pattern}"


def _matches(pattern: str, verdict: Verdict) -> bool:
    base, _, path = pattern.rpartition(":")
    return fnmatchcase(verdict.path, path) and fnmatchcase(verdict.base, base or "*")


def examine(
    name: str, base: Mapping[str, Any], values: Mapping[str, Sequence[Any]], pattern: str = "*"
) -> Iterator[Verdict]:
    """Yield the verdict of each key of a base recipe whose path matches ``pattern``. Print the keys
    without an effect."""
    config = load_config({**base["recipe"], "job": name.split("/")[0]})
    first, second = outcome(config), outcome(config)
    if "error" in first:
        raise SystemExit(f"the base recipe {name} does not run: {first['error']}")
    noise = {key for key in first if first[key] != second.get(key)}
    patterns = base.get("keys", ["*"])
    for path, owner, key, value in leaves(config):
        if not fnmatchcase(path, pattern) or not any(fnmatchcase(path, p) for p in patterns):
            continue
        verdict = Verdict(name, path, "untried")
        others = next((v for p, v in values.items() if fnmatchcase(path, p)), None)
        if others is None:
            others = list(alternatives(type(owner).model_fields[key].annotation, value))
        for other in others:
            override = f"{path}={json.dumps(other)}"
            try:
                changed = changed_config(config, [override])
            except ConfigError:
                verdict.word = "refused" if verdict.word == "untried" else verdict.word
                continue
            if changed == config:
                continue
            verdict.tried.append(json.dumps(other))
            result = outcome(changed)
            names = (first.keys() | result.keys()) - noise
            if any(first.get(key) != result.get(key) for key in names):
                verdict.word = "effect"
                break
            warned = set(changed.warnings()) - set(config.warnings())
            verdict.word = "noticed" if any(key in text for text in warned) else "dead"
        if verdict.word == "dead":
            print(f"{name}: {path} = {' | '.join(verdict.tried)}", flush=True)
        yield verdict


def leaves(node: Node, prefix: str = "") -> Iterator[tuple[str, Node, str, Any]]:
    """Yield (dotted path, its node, key, value) for every key at and below a node."""
    for key, value in node:
        path = f"{prefix}{key}"
        yield path, node, key, value
        items = value if isinstance(value, tuple) else (value,)
        for number, item in enumerate(items):
            if isinstance(item, Node):
                place = f"{path}.{number}." if isinstance(value, tuple) else f"{path}."
                yield from leaves(item, place)


def alternatives(annotation: Any, value: Any) -> Iterator[Any]:
    """Yield other values of a key, the most different first."""
    kinds = _types_in(annotation)
    if isinstance(value, bool) or (value is None and bool in kinds):
        yield not value
    elif isinstance(value, int) or (value is None and int in kinds):
        yield from (n for n in (2 * (value or 1) + 1, (value or 0) + 1, 1, 2, 4) if n != value)
    elif isinstance(value, float) or (value is None and float in kinds):
        number = value or 0.0
        yield from (x for x in (number / 2 + 0.25, number + 1, 0.5, 0.01) if x != number)
    for kind in kinds:
        if get_origin(kind) is Literal:
            yield from (choice for choice in get_args(kind) if choice != value)
    if value is None and nodes_in(annotation):
        yield {}


def _types_in(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal or not get_args(annotation):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _types_in(part)]


# --- what a run produces


def outcome(config: JobConfig, resume: Path | None = None) -> Outcome:
    """Run a recipe in a new folder, or resume a run, and return what it produced."""
    with tempfile.TemporaryDirectory(dir=".", prefix="run-") as folder:
        run_dir = Path(folder) / "run"
        if config.run_dir.startswith("runs/"):  # the default
            config = config.model_copy(update={"run_dir": str(run_dir)})
        try:
            with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
                run_dir = burnish.run(config, resume=resume).run_dir
        except BurnishError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return dict(_produced(run_dir))


def _produced(run_dir: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(run_dir.rglob("*")):
        name = str(path.relative_to(run_dir))
        if path.is_dir() or any(fnmatchcase(path.name, p) for p in _NOT_COMPARED):
            continue
        if path.name == "metrics.jsonl":
            for line in path.read_text().splitlines():
                yield from _numbers(json.loads(line))
        else:
            yield name, hashlib.sha256(path.read_bytes()).hexdigest()


def _numbers(line: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in line.items():
        if name != "time" and not any(part in name for part in _TIMES):
            same = "nan" if isinstance(value, float) and math.isnan(value) else value
            yield f"step {line['step']}: {name}", same


def write_data(files: Mapping[str, Sequence[Any]]) -> None:
    """Write the data files of the base recipes into the working directory."""
    for name, rows in files.items():
        text = rows if isinstance(rows, str) else "".join(json.dumps(r) + "\n" for r in rows)
        Path(name).write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make keys", description=__doc__)
    parser.add_argument("--job", help="only the base recipes of this job")
    parser.add_argument("--base", default="*", help="only the base recipes with this name")
    parser.add_argument("--key", default="*", help="only keys with this path")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
