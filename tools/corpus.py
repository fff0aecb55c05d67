"""Record the behavior of a checkout and compare another one with it: the proof that a change of the
structure changed nothing else.

    python tools/corpus.py record build/before                # about 25 minutes with the tests
    python tools/corpus.py compare build/before               # later, in the changed checkout
    python tools/corpus.py compare build/before --parts plans runs     # 4 minutes

A run of the tests for another reason can record the recipes on the way:

    export BURNISH_CORPUS_CALLS=build/calls PYTHONPATH=tools PYTEST_ADDOPTS="-p corpus"
    make test && python tools/corpus.py compare build/before --parts configs --calls build/calls

A corpus is a folder with one JSON file per part. Each part maps a case to its result:

``configs``: every recipe that a test of the suite loads -> the resolved YAML, or the sorted lines
of the error. ``plans``: each shipped recipe and each variant of ``corpus.yaml`` on each cluster ->
the output of ``burnish plan --json``. ``runs``: each base recipe of ``dead_keys.yaml`` -> its
metrics, and digests of all files (weights, samples, checkpoints). What differs between two runs of
the same checkout (times, memory) is left out. The folder ``resumable`` has runs without their last
checkpoint: recording and comparing resume copies of them.

Reading order: main, record, differences."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import dead_keys
import yaml
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.config import ConfigError, JobConfig, dump_yaml, load_config
from burnish.config.load import changed_config

ROOT = Path(__file__).resolve().parents[1]
CASES = Path(__file__).with_suffix(".yaml")
_CALLS = "BURNISH_CORPUS_CALLS"
"""Environment variable with the folder for the calls of load_config. Set in the test processes."""
SAVING = ("checkpoint.every_n_steps=1", "checkpoint.keep_last=10")

Part = dict[str, Any]
"""Case -> result."""


def main(argv: Sequence[str]) -> int:
    """Record a corpus, or compare the checkout with one. Return the exit code: 1 if a case that
    both have has another result."""
    options = _parser().parse_args(argv)
    logging.getLogger("burnish").addHandler(logging.NullHandler())  # warnings of recipes
    folder: Path = options.folder
    if options.action == "record":
        for name in options.parts:
            write_part(folder, name, PARTS[name](folder, None))
        return 0
    count = 0
    for name in options.parts:
        before = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        if name == "configs" and options.calls is not None:
            after = read_calls(options.calls)
        else:
            after = PARTS[name](folder, before)
        if name == "configs":
            before = {case: reread(outcome) for case, outcome in before.items()}
        common = sorted(before.keys() & after.keys())
        lines = [line for case in common for line in differences(before[case], after[case], case)]
        print(
            f"{name}: {len(common)} cases compared, {len(before) - len(common)} missing,", end=" "
        )
        print(f"{len(after) - len(common)} new, {len(lines)} differences", flush=True)
        print(*lines[: options.lines], sep="\n")
        count += len(lines)
    return 1 if count else 0


def write_part(folder: Path, name: str, part: Part) -> None:
    """Write one part of a corpus as JSON with sorted keys."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(part, indent=0, sort_keys=True, ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(f"{name}: {len(part)} cases", flush=True)


def differences(before: Any, after: Any, place: str) -> Iterator[str]:
    """Yield one line for each leaf that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{place}: {key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{place}.{number}")
    elif before != after:
        yield f"{place}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]} ... ({len(text)} characters)"


# --- configs: the recipes that tests load


def configs(_folder: Path, _before: Part | None) -> Part:
    """Run the tests and return the recipes that they load. A failed test is no difference."""
    with tempfile.TemporaryDirectory(prefix="corpus-calls-") as calls:
        environment = {
            **os.environ,
            _CALLS: calls,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")]),
        }
        words = ["-q", "-p", "corpus", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
        words += ["-m", "not gpu and not slow and not clients", "--no-header"]
        command = [sys.executable, "-m", "pytest", *words, "--tb=no", "tests"]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        print(result.stdout.strip().rpartition("\n")[2], flush=True)
        return read_calls(Path(calls))


def read_calls(folder: Path) -> Part:
    """Return the recipes and results that test processes recorded in ``folder``."""
    part: Part = {}
    for file in sorted(folder.iterdir()):
        for line in file.read_text(encoding="utf-8").splitlines():
            case, outcome = json.loads(line)
            part[case] = outcome
    return part


def record_calls(load_config: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Return ``load_config`` with a record of each call: a line [case, result] in a file of the
    process."""

    @wraps(load_config)
    def recording(recipe: Any, overrides: Sequence[str] = (), **options: Any) -> Any:
        source = recipe
        if isinstance(recipe, (str, Path)) and Path(recipe).is_file():
            source = Path(recipe).read_bytes().decode("utf-8", "replace")
        case = _portable([source, list(overrides), options])
        try:
            config = load_config(recipe, overrides, **options)
            outcome: Any = _portable(dump_yaml(config))
        except ConfigError as error:
            outcome = sorted(_portable(list(error.problems or [str(error)])))
            raise
        else:
            return config
        finally:
            digest = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]
            with (folder / str(os.getpid())).open("a", encoding="utf-8") as file:
                file.write(json.dumps([f"{digest} {json.dumps(case)[:200]}", outcome]) + "\n")

    return recording


def reread(outcome: Any) -> Any:
    """Return a recorded recipe in the present form of its keys, which loading it gives."""
    if not isinstance(outcome, str):
        return outcome
    with contextlib.suppress(ConfigError):  # it names files that are gone
        return _portable(dump_yaml(load_config(yaml.safe_load(outcome))))
    return outcome


def _portable(value: Any) -> Any:
    """Return a JSON value without paths of this checkout and of temporary folders."""
    text = json.dumps(value, default=str, ensure_ascii=True)
    temporary = re.escape(tempfile.gettempdir())
    text = re.sub(rf"{temporary}/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?", "TMP/", text)
    text = re.sub(rf"{temporary}/[^/\s\"'\\]+", "TMP", text)
    return json.loads(text.replace(str(ROOT), "ROOT"))


def _install(folder: Path) -> None:
    """Replace load_config in all modules by the recording one."""
    original = load_config  # the loop also replaces this module's global
    recording = record_calls(original, folder)
    for module in list(sys.modules.values()):
        if getattr(module, "load_config", None) is original:
            module.load_config = recording  # type: ignore[attr-defined]


if _CALLS in os.environ:  # a plugin of pytest
    _install(Path(os.environ[_CALLS]).resolve())


# --- plans


def plans(_folder: Path, _before: Part | None) -> Part:
    """Return the plans of the shipped recipes and of the variants on each cluster."""
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    recipes = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
    commands: list[tuple[str, list[str], str]] = []
    commands += [(name, [], cluster) for name in recipes for cluster in cases["clusters"]]
    for name, variants in cases["variants"].items():
        commands += [(name, words, c) for words in variants for c in cases["clusters"][:2]]
    part: Part = {}
    previous = Path.cwd()
    os.chdir(ROOT)
    try:
        for name, overrides, cluster in commands:
            words = ["plan", f"recipes/{name}", *overrides, "--cluster", cluster, "--json"]
            result = CliRunner().invoke(app, words)
            key = " ".join([name, *overrides, "on", cluster])
            try:
                part[key] = json.loads(result.stdout)
            except json.JSONDecodeError:
                part[key] = sorted(_portable(result.output.splitlines()))
    finally:
        os.chdir(previous)
    return part


# --- runs


def runs(folder: Path, before: Part | None) -> Part:
    """Return the results of the base recipes, and of resuming each from the checkpoint before its
    last one.

    Recording (``before`` is None) leaves the folders that are resumed in ``folder``/resumable, and
    runs each recipe twice to find the results that vary."""
    part: Part = {}
    for case, call in _calls(folder.resolve(), recording=before is None):
        results = call()
        if "error" in results:
            raise SystemExit(f"the recipe {case} does not run: {results['error']}")
        if before is None:
            again = call()
            varies = sorted(key for key in results if results[key] != again.get(key))
        else:
            varies = before[case]["varies"] if case in before else []
        constant = {key: value for key, value in results.items() if key not in varies}
        part[case] = {"results": constant, "varies": varies}
    return part


def _calls(
    folder: Path, *, recording: bool
) -> Iterator[tuple[str, Callable[[], dead_keys.Outcome]]]:
    """Yield each case and the call that runs it, in a folder with the data of the recipes."""
    cases = yaml.safe_load(dead_keys.CASES.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch, contextlib.chdir(scratch):
        dead_keys.write_data(cases["data"])
        for name, base in cases["bases"].items():
            config = load_config({**base["recipe"], "job": name.split("/")[0]})
            if "checkpoint" not in type(config).model_fields:
                yield name, partial(dead_keys.outcome, config)
                continue
            config = changed_config(config, SAVING)
            yield name, partial(dead_keys.outcome, config)
            run = folder / "resumable" / name.replace("/", "-")
            if recording:
                interrupt(config, run)
            yield f"{name}, resumed", partial(resumed, run)


def resumed(run: Path) -> dead_keys.Outcome:
    """Resume a copy of ``run`` with its own recipe and return the results."""
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        copy = Path(scratch) / "run"
        shutil.copytree(run, copy, symlinks=True)
        config = load_config(copy / "config.yaml", [f"run_dir={copy}"], resumed=True)
        return dead_keys.outcome(config, resume=copy)


def interrupt(config: JobConfig, run: Path) -> None:
    """Run a recipe in the folder ``run`` and remove its last checkpoint, as if it had been killed
    before."""
    shutil.rmtree(run, ignore_errors=True)
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        burnish.run(config.model_copy(update={"run_dir": str(run)}))
    *_, last = sorted((run / "checkpoints").glob("step_*"))
    shutil.rmtree(last)


PARTS: Mapping[str, Callable[[Path, Part | None], Part]] = {
    "configs": configs,
    "plans": plans,
    "runs": runs,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path, help="folder of the corpus")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--calls", type=Path, help="recorded calls of a run of the tests")
    parser.add_argument("--lines", type=int, default=40, help="differences to print per part")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
