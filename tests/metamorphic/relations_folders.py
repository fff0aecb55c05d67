"""Relations of folders that somebody else may have written: run folders and model folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from metamorphic.base import CLOSERS, Broken, Draw, Refused, relation
from safetensors.torch import load_file

import burnish
from burnish.checkpoint.export import export
from burnish.config import load_config
from burnish.config.model import ModelConfig
from burnish.errors import BurnishError
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.observe.progress import silenced
from burnish.plan.command import measured_rates
from burnish.plan.hardware import parse_cluster

LIMIT_S = 60
"""Seconds after which a command hangs. The slowest takes half a second."""


@lru_cache(maxsize=1)
def _written() -> Path:
    """Return a folder with a run of two RL steps, recorded, and its exported model."""
    folder = Path(tempfile.mkdtemp(prefix="metamorphic-"))
    CLOSERS.append(_forget)
    prompts, rewards = folder / "prompts.jsonl", folder / "rewards.py"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i % 7}="}) + "\n" for i in range(20)))
    rewards.write_text(
        "def even(responses):\n    return [sum(c in '02468' for c in r) / 7 for r in responses]\n"
    )
    tree = {
        "job": "rl",
        "run_dir": str(folder / "run"),
        "max_steps": 2,
        "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 16, "num_layers": 1}},
        "data": {"sources": [str(prompts)], "prompt_max_len": 8},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 4},
        "train": {"train_batch_size": 2, "lr": 5e-3},
        "rewards": [{"kind": "function", "name": "even", "function": f"{rewards}:even"}],
        "checkpoint": {"every_n_steps": 1},
        "observe": {"record_rollouts": True},
    }
    with silenced():
        burnish.run(load_config(tree))
    export(folder / "run", folder / "model")
    return folder


def _forget() -> None:
    """Remove the folder."""
    if _written.cache_info().currsize:
        shutil.rmtree(_written(), ignore_errors=True)
    _written.cache_clear()


# ---- commands ------------------------------------------------------------------------------------


def _weights(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").glob("step_*"))
    files = sorted(newest.glob("*/**/*.safetensors"))
    return {f"{f.relative_to(newest)}/{n}": t for f in files for n, t in load_file(f).items()}


def _resume(folder: Path) -> dict[str, Any]:
    run = folder / "run"
    config = load_config(run / "config.yaml", [f"run_dir={run}", "max_steps=3"])
    burnish.run(config, resume=run)
    return _weights(run)


def _replay(folder: Path) -> dict[str, Any]:
    config = load_config(folder / "run/config.yaml", [f"run_dir={folder}/again"])
    burnish.run(config, replay=folder / "run")
    return _weights(folder / "again")


def _report(folder: Path) -> dict[str, Any]:
    burnish.build_report(folder / "run")
    return {}  # the page names what it leaves out


def _rates(folder: Path) -> dict[str, Any]:
    factors = measured_rates(folder / "run", parse_cluster("1xA100-80GB")).factors
    return {str(key): torch.tensor(factor) for key, factor in factors.items()}


def _export(folder: Path) -> dict[str, Any]:
    """Export one checkpoint. (Of a run folder, the newest good one.)"""
    export(folder / "run/checkpoints/step_000002", folder / "out")
    return load_file(folder / "out/model.safetensors")


def _model(folder: Path) -> dict[str, Any]:
    config = ModelConfig(path=str(folder / "model"))
    ids = load_tokenizer(config)("1+1=")["input_ids"]
    return {"ids": torch.tensor(ids), **load_causal_lm(config).state_dict()}


COMMANDS: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "resume": (_resume, "run"),
    "replay": (_replay, "run"),
    "report": (_report, "run"),
    "rates": (_rates, "run"),
    "export": (_export, "run/checkpoints/step_000002"),
    "model": (_model, "model"),
}
"""Command -> (its results, the folder that is damaged)."""


@lru_cache(maxsize=len(COMMANDS))
def _undamaged(command: str) -> dict[str, Any]:
    with _copy() as folder, silenced():
        return COMMANDS[command][0](folder)


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="metamorphic-") as folder:
        for name in ("run", "model"):
            shutil.copytree(_written() / name, Path(folder) / name)
        yield Path(folder)


# ---- damages -------------------------------------------------------------------------------------


def _flip(path: Path, rng: Random) -> None:
    data = bytearray(path.read_bytes() or b"x")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _link(path: Path, rng: Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice(["/dev/zero", "/nowhere", path.name]))


def _folder(path: Path, rng: Random) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path, rng: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _value(path: Path, rng: Random) -> None:
    """Replace one value anywhere in JSON."""
    tree = json.loads(path.read_bytes())
    places, nodes = [], [tree]
    for node in nodes:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        nodes += [node[key] for key in keys if isinstance(node[key], dict | list)]
    node, key = rng.choice(places)
    node[key] = rng.choice([None, -1, "x", [], {}, 10**400, 1e308, True, [[1]], "\x1b[2J"])
    path.write_text(json.dumps(tree))


NEWER = (b'"format": 1', b'"format": 99')
STRUCTURAL: dict[str, Callable[[Path, Random], Any]] = {
    "truncated": lambda path, rng: path.write_bytes(
        path.read_bytes()[: rng.randrange(path.stat().st_size or 1)]
    ),
    "noise": lambda path, rng: path.write_bytes(b"\xff" + rng.randbytes(200)),
    "nested": lambda path, rng: path.write_bytes(b"[" * 100_000),
    "pipe": _pipe,
    "folder": _folder,
    "link": _link,
    "huge": lambda path, rng: os.truncate(path, 1 << 38),
}
"""Damages that no reader can mistake for another valid content."""
OTHERS: dict[str, Callable[[Path, Random], Any]] = {
    "missing": lambda path, rng: path.unlink(),
    "empty": lambda path, rng: path.write_bytes(b""),
    "flipped": _flip,
    "another value": _value,
    "newer format": lambda path, rng: path.write_bytes(path.read_bytes().replace(*NEWER)),
    "other JSON": lambda path, rng: path.write_text(rng.choice(["null", "5", "[]", "{}", '"x"'])),
}
"""Damages that only checksums can tell from another valid content."""


def _damages(path: Path, command: str) -> dict[str, Callable[[Path, Random], Any]]:
    """Return what may happen to a file, by what protects it."""
    if path.name in ("metrics.jsonl", "config.yaml") and command != "report":
        return {k: v for k, v in STRUCTURAL.items() if k != "truncated"}  # fewer lines are valid
    if {"checkpoints", "rollouts"} & set(path.parts) or command == "report":
        return STRUCTURAL | {
            name: damage
            for name, damage in OTHERS.items()
            if name != "another value" or path.suffix == ".json"
        }
    return STRUCTURAL


@relation
def damaged_folder(draw: Draw) -> None:
    """A folder with one damaged file gives the same results as without the damage, or an error that
    names the file. Exact: the same bits."""
    name = draw.one(command=list(COMMANDS))
    command, root = COMMANDS[name]
    expected = _undamaged(name)
    with _copy() as folder:
        path = draw.rng.choice(sorted(p for p in (folder / root).rglob("*") if p.is_file()))
        draw.note(file=str(path.relative_to(folder)))
        damages = _damages(path, name)
        damages[draw.one(damage=sorted(damages))](path, draw.rng)
        try:
            with _ending(), silenced():
                results = command(folder)
        except BurnishError as error:
            if path.name not in str(error):
                raise Broken(f"the error does not name {path.name}: {error}") from error
            raise Refused(str(error)) from error
    if results.keys() != expected.keys():
        raise Broken(f"results of other names: {sorted(results.keys() ^ expected.keys())[:5]}")
    for key, value in expected.items():
        if not torch.equal(value, results[key]):
            raise Broken(f"{key} differs")


@contextmanager
def _ending() -> Iterator[None]:
    """Raise Broken if the block takes more than LIMIT_S."""

    def end(*_: Any) -> None:
        raise Broken(f"it takes more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
