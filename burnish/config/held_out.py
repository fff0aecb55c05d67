"""Held-out rows of a data section (``data.held_out``): their number, their evaluation section, and
the rules of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

from burnish.config.base import Node
from burnish.config.eval_section import EvalSection
from burnish.config.passes import num_held_out, source_sizes
from burnish.config.sources import SourceConfig
from burnish.data.config import DataConfig
from burnish.data.rated.config import recognized_kind
from burnish.data_files.splits import FilesError

EVAL_SECTIONS = ("eval.data", "eval.sets.")


def with_evaluation_sections(tree: Any) -> Any:
    """Return the tree of a recipe with the keys of ``data`` in all evaluation sections, and with
    ``eval.data`` if rows are held out."""
    if not isinstance(tree, dict) or not (data := _as_dict(tree.get("data"))):
        return tree
    section = tree.get("eval")
    if section is not None and not isinstance(section, dict):
        return tree
    section = section or {}
    filled = {}
    if section.get("data") is not None:
        filled["data"] = _with_data_keys(section["data"], data)
    if isinstance(sets := section.get("sets"), dict):
        filled["sets"] = {name: _with_data_keys(keys, data) for name, keys in sets.items()}
    section = _with_held_out({**section, **filled}, data)
    return {**tree, "eval": section} if section else tree


def _with_data_keys(section: Any, data: dict[str, Any]) -> Any:
    """Return an evaluation section with the keys of ``data`` that it does not set, except for its
    sources and its split. A section of another ``kind`` is not changed."""
    if not isinstance(section, dict) or "sources" not in section:
        return section
    if "kind" in section and section["kind"] != _kind(data):
        return section
    return {**{key: value for key, value in data.items() if key not in _OWN_KEYS}, **section}


def _kind(data: dict[str, Any]) -> Any:
    """Return the kind of ``data``, recognized if it names none (job ``rm``). None: its rows have
    several kinds, which is reported with the other errors of ``data``."""
    if "kind" in data:
        return data["kind"]
    with suppress(ValueError):
        return recognized_kind(data)
    return None


_OWN_KEYS = ("sources", "held_out", "part")
"""Keys of a data section that say which rows it has."""


def _with_held_out(section: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the section ``eval`` with the rows that ``data`` holds out: the keys of ``data``,
    replaced by those that the recipe sets in ``eval.data``.

    It is returned unchanged if nothing is held out, or if ``eval.data`` has sources of its own."""
    first = section.get("data")
    keys = _as_dict(first)
    if data.get("held_out") is None or (first is not None and not isinstance(first, dict)):
        return section
    if "sources" in keys:
        return section
    return {**section, "data": {**data, "part": "held_out", **keys}}


def derived_split(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of ``eval.data`` (:data:`_OWN_KEYS`) if they are the held-out rows of
    ``data``, as in a resolved recipe; else an empty dict."""
    data, keys = deepcopy((_as_dict(tree.get("data")), _eval_data(tree)))
    split = {key: data.get(key) for key in ("sources", "held_out")} | {"part": "held_out"}
    if data.get("held_out") is None or any(keys.get(key) != split[key] for key in split):
        return {}
    return split


def _eval_data(tree: dict[str, Any]) -> dict[str, Any]:
    return _as_dict(_as_dict(tree.get("eval")).get("data"))


def renew_split(tree: dict[str, Any], derived: dict[str, Any]) -> None:
    """Remove from ``eval.data`` the keys of :func:`derived_split` that overrides did not change, if
    ``data`` still holds out rows. They are then derived from ``data`` as it is now."""
    if not derived or _as_dict(tree.get("data")).get("held_out") is None:
        return
    keys = _eval_data(tree)
    for key, value in derived.items():
        if key in keys and keys[key] == value:
            del keys[key]


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Node):
        return value.model_dump()
    return value if isinstance(value, dict) else {}


def held_out_rules(sections: Iterable[tuple[str, DataConfig]], *, trains: bool) -> Iterator[str]:
    """Yield an error for each held-out part that cannot be formed or that is used twice.

    ``sections``: all data sections of a job by name. ``trains``: the job trains on ``data``.
    """
    by_name = dict(sections)
    for name, data in by_name.items():
        yield from (f"{name}.{problem}" for problem in _problems(data))
        evaluates = name.startswith(EVAL_SECTIONS)
        if evaluates and data.held_out is not None and data.part == "train":
            yield (
                f"{name}.held_out={data.held_out:g} would evaluate the rows that are left for "
                f"training; set {name}.part=held_out, or remove held_out"
            )
        if trains and not evaluates and name != "data" and data.held_out is not None:
            yield (
                f"{name}.held_out={data.held_out:g} would remove rows from training that are never "
                f"evaluated; remove {name}.held_out (data.held_out holds out rows of data)"
            )
        if trains and not evaluates and data.part == "held_out":
            yield (f"{name}.part=held_out would train on the rows for evaluation; remove part")
    train = by_name.get("data")
    if not trains or train is None:
        return
    for name, data in by_name.items():
        if not name.startswith(EVAL_SECTIONS):
            continue
        if name == "eval.data" and train.held_out is not None:
            shared = _shared(data, train)
            if not shared and data.sources != train.sources:
                yield (
                    f"data.held_out={train.held_out:g} and {name}.sources both give rows for "
                    f"evaluation; remove data.held_out, or the sources of {name}"
                )
            elif data.part == "train" and data.held_out is None:
                yield (
                    f"{name}.part=train would evaluate trained rows of {data.sources[0].place}; "
                    f"remove sources, held_out and part of {name} to evaluate the rows of "
                    f"data.held_out={train.held_out:g}"
                )
        if data.part == "held_out" and data.held_out is not None:
            yield from _same_split(name, data, train)
    if train.held_out is not None:
        others = [(n, d) for n, d in by_name.items() if not n.startswith(EVAL_SECTIONS)]
        yield from _read_once(train, others)


def _same_split(name: str, data: DataConfig, train: DataConfig) -> Iterator[str]:
    """Yield an error if the held-out part ``data`` has rows that are trained. The rows are chosen
    by the name of a source, its number of rows, and the number of rows to hold out."""
    if (data.sources, data.held_out) == (train.sources, train.held_out):
        return
    shared = _shared(data, train)
    if not shared:
        return
    if train.held_out is None:
        yield (
            f"{name}.part=held_out, but data.held_out is not set, so training would see the "
            f"same rows; set data.held_out={data.held_out or 0.05:g}, or remove "
            f"{name.removesuffix('.data')}"
        )
        return
    for source, trained in shared:
        if _identity(source) != _identity(trained):
            yield (
                f"{name}.part=held_out and data read {source.place} with different files, name "
                f"or max_samples ({_described(source)}; {_described(trained)}), so their split "
                "would differ and trained rows would be evaluated; use the same source in both"
            )
            return
    largest, chosen = _num_by_source(train), _num_by_source(data)
    for source, trained in shared:
        if chosen is None or largest is None:
            differ = data.held_out != train.held_out or len(data.sources) != len(train.sources)
        else:
            differ = chosen[data.sources.index(source)] > largest[train.sources.index(trained)]
        if differ:
            yield (
                f"{name}.held_out={data.held_out:g} would hold out other rows of {source.place} "
                f"than data.held_out={train.held_out:g}, so trained rows would be evaluated; use "
                f"the same held_out and the same sources in both"
            )
            return


def _shared(data: DataConfig, train: DataConfig) -> list[tuple[SourceConfig, SourceConfig]]:
    """Return the pairs of a source of ``data`` and one of ``train`` that read the same files."""
    pairs = product(data.sources, train.sources)
    return [
        (source, trained) for source, trained in pairs if source.identities & trained.identities
    ]


def _read_once(train: DataConfig, sections: Sequence[tuple[str, DataConfig]]) -> Iterator[str]:
    """Yield an error for each source that trains rows of a held-out source again."""
    readers = [(name, i, s) for name, data in sections for i, s in enumerate(data.sources)]
    for (k, held), (name, i, source) in product(enumerate(train.sources), readers):
        if (name != "data" or i > k) and source.identities & held.identities:
            yield (
                f"data.held_out={train.held_out:g} holds out rows of {held.place}, but "
                f"{name}.sources[{i}] trains on rows of the same files; read each file once, or "
                "remove held_out and evaluate on another file"
            )
            return


def _identity(source: SourceConfig) -> tuple[frozenset[str], str | None, int | None]:
    """Return the facts that determine the held-out rows of a source, apart from their number."""
    return source.identities, source.source_name, source.row_limit


def _num_by_source(data: DataConfig) -> list[int] | None:
    return source_sizes(data.model_copy(update={"part": "held_out"}))


def _described(source: SourceConfig) -> str:
    _, name, limit = _identity(source)
    return f"path={source.place}, name={name}, max_samples={limit}"


def split_rules(sections: Iterable[tuple[str, DataConfig]]) -> Iterator[str]:
    """Yield an error for each evaluation section that would read the training split of a folder."""
    for name, data in sections:
        if not name.startswith(EVAL_SECTIONS) or data.part == "held_out":
            continue
        for source in data.sources:
            others: Sequence[Path] = ()
            with suppress(FilesError):  # reported with the other rules
                others = source.left_out
            if others:
                yield (
                    f"{name}: {source.place} has files of several splits, and evaluation would "
                    f"read the training split; name the files, such as {others[0]}"
                )


def _problems(data: DataConfig) -> Iterator[str]:
    held_out = data.held_out
    if held_out is None:
        if data.part == "held_out":
            yield "part=held_out needs held_out (a fraction below 1, or a number of rows)"
        return
    if held_out >= 1 and held_out != int(held_out):
        yield f"held_out={held_out:g} must be a fraction below 1, or a whole number of rows"
        return
    generated = [source for source in data.sources if source.is_made]
    if generated:
        yield (
            f"held_out={held_out:g}: rows of kind {generated[0].kind} are made from a seed, not "
            "read from data; remove held_out, and evaluate with the same source and another seed"
        )
        return
    if data.streamed:
        yield (
            f"held_out={held_out:g}: {data.streamed[0].place} is streamed, so its rows cannot be "
            "chosen in advance; remove streaming, or evaluate on another split"
        )
        return
    if data.part == "held_out":  # files are counted once, for the section of training
        return
    sizes = source_sizes(data.model_copy(update={"held_out": None}))
    if sizes is not None and (problem := empty_part(held_out, sizes)):
        yield problem


def empty_part(held_out: float, sizes: Sequence[int]) -> str | None:
    """Return the error of a split that leaves no row for evaluation, or a source without rows for
    training; None if there is none. ``sizes``: rows of each source."""
    counts, total = num_held_out(held_out, sizes), sum(sizes)
    if not sum(counts):
        return f"held_out={held_out:g} of {total} rows is less than one row; set held_out=1 or more"
    for count, size in zip(counts, sizes, strict=True):
        if count >= size:
            return (
                f"held_out={held_out:g} of {total} rows would hold out all {size} rows of a "
                "source and leave none for training; use a smaller held_out"
            )
    return None


def held_out_advice(data: DataConfig, evaluation: EvalSection[DataConfig] | None) -> Iterator[str]:
    """Yield one sentence for each held-out set whose prompts are built differently from those of
    training, if the recipe does not set this explicitly."""
    now = data.model_dump()
    for name, held_out in ({} if evaluation is None else evaluation.sections).items():
        then = held_out.model_dump()
        for key in ("system_prompt", "prompt_template", "apply_chat_template"):
            set_here = key in data.model_fields_set and key in then
            if set_here and key not in held_out.model_fields_set and now[key] != then[key]:
                yield (
                    f"data.{key} is set but {name}.{key} is not, so evaluation would use another "
                    f"prompt than training; set {name}.{key} to the same value (or to null, if "
                    "this is intended)"
                )
