"""Splits of a data set that the names of its files say: training, validation and test files of one
folder are not one source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.errors import BurnishError

_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words of file and folder names -> split. They are those of the library datasets."""

_SHARD = re.compile(r"[-._]\d+-of-\d+$")
_SUFFIXES = re.compile(r"(\.[a-z]+){0,2}$", re.IGNORECASE)
_LISTED = 4
"""Most files named in one message."""


class FilesError(BurnishError, ValueError):
    """The files of a source cannot be read together. The message says why, and what to do."""


@dataclass(frozen=True)
class Splits:
    """Files of a source by their split."""

    train: tuple[Path, ...]
    """Files that are read: those of the training split, or all if no name says a split."""
    left_out: tuple[Path, ...] = ()
    """Files of other splits."""


def splits_of(files: Sequence[Path], folder: Path) -> Splits:
    """Return the files to train on. ``folder``: the names below it are considered.

    Names say a split if they contain one of its words, such as ``train-00000-of-00002.parquet`` or
    ``test/rows.jsonl``. Raises FilesError if it is ambiguous which files are meant.
    """
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file, folder), []).append(file)
    others = [name for name in ("validation", "test") if name in by_split]
    if not others or len(by_split) == 1:
        _check_sharded(files, folder)
        return Splits(tuple(files))
    left_out = tuple(file for name in others for file in by_split[name])
    train, unnamed = by_split.get("train", []), by_split.get("", [])
    names = {_SHARD.sub("", _stem(file)) for file in train if _SHARD.search(_stem(file))}
    if not train:
        why = "no name says which files are those of training"
    elif unnamed:
        why = f"the names of {_listed(unnamed)} do not say their split"
    elif len(names) > 1:
        why = f"there are several training splits ({', '.join(sorted(names))})"
    else:
        return Splits(tuple(train), left_out)
    evaluation_first = sorted(by_split, key=lambda name: name in ("", "train"))
    examples = [by_split[name][0] for name in evaluation_first]
    chosen = (train or unnamed or list(left_out))[0]
    stem = _stem(chosen)
    begin = _SHARD.sub("", stem)
    pattern = chosen.name if begin == stem else f"{begin}-*{chosen.name.removeprefix(stem)}"
    raise FilesError(
        f"{folder} has files of several splits, such as {_listed(examples)}, and {why}; select "
        f"the files of one split with a glob such as {chosen.parent / pattern}"
    )


def _check_sharded(files: Sequence[Path], folder: Path) -> None:
    """Raise FilesError if files in one folder are parts of several splits, whose names are in no
    list (``raw-00000-of-00001.parquet``)."""
    first: dict[tuple[Path, str], Path] = {}
    for file in files:
        if _SHARD.search(_stem(file)):
            first.setdefault((file.parent, _SHARD.sub("", _stem(file))), file)
    for (parent, name), file in first.items():
        others = [other for place, other in first if place == parent and other != name]
        if others:
            pattern = file.parent / f"{name}-*{file.name.removeprefix(_stem(file))}"
            raise FilesError(
                f"{folder} has files of several splits ({', '.join([name, *others])}), such as "
                f"{file}; select one with a glob such as {pattern}, or list several as sources"
            )


def left_out_line(splits: Splits) -> str:
    """Return a sentence about the files that are not read."""
    return (
        f"only the training split is read ({len(splits.train)} of "
        f"{len(splits.train) + len(splits.left_out)} files); left out by their names: "
        f"{_listed(splits.left_out)}"
    )


def _split_of(file: Path, folder: Path) -> str:
    """Return the split of a file by its name, or by the folders between it and ``folder``: train,
    validation, test, or nothing."""
    inside = file.relative_to(folder) if file.is_relative_to(folder) else Path(file.name)
    for part in (_stem(file), *reversed(inside.parts[:-1])):
        words = re.split(r"[^a-z]+", part.lower())
        if named := next((_WORDS[word] for word in words if word in _WORDS), None):
            return named
    return ""


def _stem(file: Path) -> str:
    return _SUFFIXES.sub("", file.name)


def _listed(files: Sequence[Path]) -> str:
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return ", ".join(str(file) for file in files[:_LISTED]) + more
