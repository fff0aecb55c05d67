"""Held-out rows of a data section (``data.held_out``): their number, their evaluation section, and
the rules of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from burnish.config.base import Node
from burnish.config.data import DataConfig, EnvironmentSource, SeedSource
from burnish.config.passes import num_held_out, source_sizes

EVAL_SECTIONS = ("eval_data", "eval_sets.", "eval.")


def with_held_out_section(tree: Any, path: Sequence[str]) -> Any:
    """Return the tree of a recipe with the evaluation section of ``data.held_out`` at ``path``: the
    keys of ``data``, replaced by those that the recipe sets at ``path``.

    The tree is returned unchanged if nothing is held out, or if ``path`` has sources of its own.
    """
    if not isinstance(tree, dict):
        return tree
    data = _as_dict(tree.get("data"))
    if data.get("held_out") is None:
        return tree
    *outer, last = path
    parent = tree if not outer else _as_dict(tree.get(outer[0]))
    own = parent.get(last)
    given = _as_dict(own)
    if own is not None and (not given or ("sources" in given and given.get("part") != "held_out")):
        return tree
    same = {"sources": data.get("sources"), "held_out": data["held_out"], "part": "held_out"}
    parent = {**parent, last: {**data, **given, **same}}
    return parent if not outer else {**tree, outer[0]: parent}


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
        first = name in ("eval_data", "eval.data")
        if first and train.held_out is not None and data.part == "train":
            yield (
                f"data.held_out={train.held_out:g} and {name}.sources both give rows for "
                f"evaluation; remove data.held_out, or the sources of {name}"
            )
        if train.held_out is None and data.part == "held_out" and data.sources == train.sources:
            yield (
                f"{name}.part=held_out, but data.held_out is not set, so training would see the "
                f"same rows; set data.held_out={data.held_out or 0.05:g}, or remove {name}"
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
    made = [s for s in data.sources if isinstance(s, EnvironmentSource | SeedSource)]
    if made:
        yield (
            f"held_out={held_out:g}: rows of kind {made[0].kind} are made from a seed, not read "
            "from data; remove held_out, and evaluate with the same source and another seed"
        )
        return
    if data.streamed:
        yield (
            f"held_out={held_out:g}: {data.streamed[0].path} is streamed, so its rows cannot be "
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
