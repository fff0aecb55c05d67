"""Comparison of the inputs of launched ranks: versions, recipe, data files, model files.

A launcher starts the same command on every node, but each node may have another installation,
another recipe file or other data. The ranks would then train different models without an error, or
wait for each other. :func:`inputs_of` describes the inputs of one rank as plain values, and
:func:`different_inputs` compares those of all ranks. ``runtime.py`` exchanges them.

Paths of files that exist are not compared, but the files are: nodes may have their copies on
different disks."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from burnish.config import JobConfig
from burnish.config.changes import different_values, flat
from burnish.config.model import ModelConfig
from burnish.config.paths import code_file
from burnish.data.config import DataConfig
from burnish.data.files import content_digest
from burnish.models.digest import WEIGHT_SUFFIXES, file_parts_digest

Inputs = dict[str, dict[str, Any]]
"""Group (a key of :data:`_FIXES`) -> name -> value. Keys that end in :data:`_DIGEST` have a digest,
or None if this rank did not compute it."""

_FIXES = {
    "versions": "Install the same versions on every node (docs/install.md: one locked set, or the "
    "container).",
    "devices": "Start all ranks on nodes with the same devices, or set train.engine.device.",
    "recipe": "Start all ranks with the same recipe and the same overrides.",
    "files": "Copy the files to every node, or read them from a shared disk.",
}
"""Groups of inputs in the order of the comparison, and the fix of a difference."""
_DIGEST = "content"
_READ_TEXTS = (".json", ".jinja", ".txt", ".model", ".py")
"""Suffixes of the files of a model folder that are compared, next to its weights."""
_MAX_SHOWN = 3


def inputs_of(
    config: JobConfig, *, resumed: bool, device: str, reads_contents: bool = True
) -> Inputs:
    """Return the inputs of this rank.

    ``device``: type of its device. ``reads_contents``: compute digests of files, which one rank of
    each node does; the others return names and sizes. Data files with ``validate: off`` are
    compared by name and size only.
    """
    recipe = flat(config.model_dump(mode="json"))
    recipe["--resume"] = resumed
    files: dict[str, Any] = {}
    for place, data in config.paths_of(DataConfig):
        reads = reads_contents and data.validate != "off"
        for number, source in enumerate(data.sources):
            key, copies = f"{_dotted(place)}.sources.{number}", source.copies()
            if copies is None:
                continue
            recipe |= {f"{key}.{name}": value for name, value in copies.keys.items()}
            del recipe[f"{key}.path"]
            files |= _described(f"{key}.path", copies.files, reads=reads)
    for place, model in config.paths_of(ModelConfig):
        named = {"path": model.path, "tokenizer_path": model.tokenizer_path}
        named |= {"chat_template": model.chat_template}
        named |= {"lora.path": model.lora.path if model.lora is not None else None}
        for name, value in named.items():
            if value is not None and os.path.exists(value):
                key = f"{_dotted(place)}.{name}"
                del recipe[key]
                files |= _described(key, _model_files(Path(value)), reads=reads_contents)
    for key, spec in config.all_user_code():
        file = code_file(spec)
        if file is not None:
            files |= _described(_dotted(key), [Path(file)], reads=reads_contents)
    versions = _versions(recipe, reads_code=reads_contents)
    return {"versions": versions, "devices": {"device": device}, "recipe": recipe, "files": files}


def _dotted(path: str) -> str:
    return path.replace("[", ".").replace("]", "")


def _model_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    kinds = (*WEIGHT_SUFFIXES, *_READ_TEXTS)
    return sorted(path for path in place.iterdir() if path.suffix in kinds and path.is_file())


def _described(key: str, paths: Sequence[Path], *, reads: bool) -> dict[str, Any]:
    """Return the sizes and digests of files, by their names below their common folder. Of a weight
    file, only parts are read."""
    common = os.path.commonpath([path.absolute().parent for path in paths]) if paths else ""
    described: dict[str, Any] = {}
    for path in paths:
        name = f"{key}, file {os.path.relpath(path, common)}"
        exists = path.is_file()
        described[f"{name}, bytes"] = path.stat().st_size if exists else None
        digest = None
        if reads and exists:
            weights = path.suffix in WEIGHT_SUFFIXES
            digest = file_parts_digest(path) if weights else content_digest(path).hex()
        described[f"{name}, {_DIGEST}"] = digest
    return described


def _versions(recipe: Mapping[str, Any], *, reads_code: bool) -> dict[str, Any]:
    """Return the versions of the packages that a run uses, and a digest of this package's code: two
    working copies may have the same version."""
    names = ["burnish", "torch", "transformers", "tokenizers"]
    if any(".lora." in key for key in recipe):
        names.append("peft")
    if any(key.endswith("engine.kind") and recipe[key] == "deepspeed" for key in recipe):
        names.append("deepspeed")
    versions: dict[str, Any] = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    versions["python"] = platform.python_version()
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")) if reads_code else ():
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    versions[f"burnish, {_DIGEST}"] = digest.hexdigest() if reads_code else None
    return versions


def different_inputs(inputs: Sequence[Inputs], where: Sequence[str]) -> str | None:
    """Return the error message for ranks with other inputs than rank 0; None if there is none.

    ``where``: host of each rank. Ranks of one host with the same differences share a line.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    kinds: set[str] = set()
    for rank, inputs_of_rank in enumerate(inputs):
        differences: list[str] = []
        for group in _FIXES:
            for key, values in different_values(inputs_of_rank[group], inputs[0][group]).items():
                if key.endswith(_DIGEST) and None in values:
                    continue
                value, expected = (_shown(key, value) for value in values)
                differences.append(f"{key} is {value}, but {expected} on rank 0")
                kinds.add(group)
        if differences:
            groups.setdefault((where[rank], tuple(differences)), []).append(rank)
    if not groups:
        return None
    lines = []
    for (host, texts), ranks in groups.items():
        label = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} (host {host})"
        left = f"; and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
        lines.append(f"  - {label}: {'; '.join(texts[:_MAX_SHOWN])}{left}")
    fixes = " ".join(fix for group, fix in _FIXES.items() if group in kinds)
    return (
        "the ranks have different inputs, so they would train different models (rank 0 is on host "
        f"{where[0]}):\n" + "\n".join([*lines, fixes])
    )


def _shown(key: str, value: Any) -> str:
    if key.endswith(_DIGEST) and value is not None:
        return f"sha256 {value[:12]}"
    text = "missing" if value is None and ", file " in key else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
