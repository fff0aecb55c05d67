"""Length of a run over its data: the number of times each row is seen, as lines of the batch table,
and the rules of steps, epochs and streamed sources, whose rows are read in order and may be of
unknown number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from burnish.data.config import DataConfig

Line = tuple[str, str, str]

NOT_COUNTED: Line = (
    "rows dropped or skipped",
    "?",
    "the numbers above include them; the run counts them at its start",
)
"""Line of the batch table before the usable rows are counted."""


def total_rows(data: DataConfig, rows_per_item: int = 1) -> int | None:
    """Return the number of rows of all sources, each counted as ``rows_per_item``, or None if
    unknown."""
    sizes = source_sizes(data)
    return None if sizes is None else rows_per_item * sum(sizes)


def source_sizes(data: DataConfig) -> list[int] | None:
    """Return the number of rows of each source, of the part that ``data`` uses, or None if one is
    unknown or empty."""
    counts = [source.num_rows() for source in data.sources]
    sizes = [size for size in counts if size]
    if len(sizes) < len(counts):
        return None
    if data.held_out is None:
        return sizes
    held_out = num_held_out(data.held_out, sizes)
    if data.part == "held_out":
        return held_out
    return [size - out for size, out in zip(sizes, held_out, strict=True)]


def num_held_out(held_out: float, sizes: Sequence[int]) -> list[int]:
    """Return the number of held-out rows of each source, in proportion to its rows. More held-out
    rows are never fewer of one source.

    The sources share an order of their rows, in which row k of ``size`` is at (k + 1/2) / size.
    Example: 0.1 of 25 and 14 rows is 3.9, so 4 rows, at 0.02, 0.06 and 0.1 of the first source and
    at 0.036 of the second.
    """
    total = sum(sizes)
    count = int(held_out * total + 0.5) if held_out < 1 else int(held_out)
    begin = max(0, count - len(sizes))  # the rows up to begin / total are fewer than count
    counts = [(2 * begin * size + total) // (2 * total) for size in sizes]
    places = [i for i, size in enumerate(sizes) if size]
    for _ in range(count - sum(counts)):
        counts[min(places, key=lambda i: Fraction(2 * counts[i] + 1, sizes[i]))] += 1
    return counts


def held_out_line(data: DataConfig) -> list[Line]:
    """Return the line (name, value, origin) of the batch table with the number of held-out rows;
    none if it is unknown or nothing is held out."""
    if data.held_out is None:
        return []
    held_out = source_sizes(data.model_copy(update={"part": "held_out"}))
    if held_out is None:
        return []
    origin = f"held_out={data.held_out:g}; never drawn for training, the same for every seed"
    return [("rows held out", str(sum(held_out)), origin)]


def passes_lines(
    data: DataConfig, total: int, length: tuple[int, int], *, counted: bool, more: str = ""
) -> list[Line]:
    """Return lines (name, value, origin) with the number of times each of ``total`` rows is seen.

    ``length``: number of steps, and of the rows that they draw. ``counted``: ``total`` counts only
    usable rows. ``more``: appended to the number of steps."""
    steps, drawn = length
    over = f"{steps} step{'s' * (steps > 1)}{more}"
    sizes = source_sizes(data) or []
    items = [size * total // sum(sizes) for size in sizes]
    if total % sum(sizes or [1]):  # rows are left out, and which sources have them is not counted
        items = []
    origin = ""
    if len(items) > 1:
        each = zip(data.sources, items, strict=True)
        origin = "; ".join(f"{source.source_name or source.place} {size}" for source, size in each)
    if len(data.sources) == 1 or data.mix == "size":
        over += f": {_evenly(drawn, total)}"
    elif items:
        over += f": {_by_weight(data, items, drawn)}"
    else:
        over += ": by weight"
    lines = [("rows of data (N)", str(total), origin), ("rows drawn", str(drawn), over)]
    return lines if counted or not data.may_lose_rows else [*lines, NOT_COUNTED]


def _evenly(drawn: int, total: int) -> str:
    rounds, rest = divmod(drawn, total)
    if drawn < total:
        return f"{drawn / total:.2f} passes; {total - drawn} rows are never drawn"
    if not rest:
        return f"each row {_times(rounds)}"
    return (
        f"{drawn / total:.2f} passes; {rest} rows {_times(rounds + 1)}, the others {_times(rounds)}"
    )


def _by_weight(data: DataConfig, sizes: Sequence[int], drawn: int) -> str:
    """Return the expected passes over each source as text."""
    weights = [source.weight for source in data.sources]
    shares = [drawn * weight / sum(weights) for weight in weights]
    each = zip(data.sources, sizes, shares, strict=True)
    passes = ", ".join(
        f"{source.source_name or source.place} {share / size:.2f}" for source, size, share in each
    )
    return f"about {passes} passes by weight (data.mix=size: all rows equally often)"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def table_rules(
    sections: Iterable[tuple[str, DataConfig]], *, in_order: Sequence[str]
) -> Iterator[str]:
    """Yield an error for each streamed data section that is not ``in_order``: names of those that
    the job reads in order, not as a table."""
    for name, data in sections:
        if data.streamed and name not in in_order:
            yield (
                f"{name}: {data.streamed[0].place} is streamed, but all rows of {name} are read "
                "before they are used, and counted; remove streaming (max_samples limits the rows)"
            )


def step_rules(data: DataConfig, *, max_steps: int | None, max_epochs: int | None) -> Iterator[str]:
    """Yield an error unless exactly one of ``max_steps`` and ``max_epochs`` sets the length of a
    run of ``rl``, and if epochs are counted over prompts of unknown number."""
    if max_steps is None and max_epochs is None:
        yield (
            "max_steps is not set (number of RL steps; each is one rollout and its updates); set "
            "it, or max_epochs (passes over the prompts)"
        )
    if max_steps is not None and max_epochs is not None:
        yield (
            f"max_steps={max_steps} and max_epochs={max_epochs} both set the length "
            "of the run; remove one, or set it to null (a run of max_epochs is saved with the "
            "max_steps derived from it)"
        )
    if max_epochs is not None:
        why = f"max_epochs={max_epochs} counts the prompts"
        yield from _unknown_length(data, why)
        yield from _unknown_losses(data, why)


def supervised_rules(
    data: DataConfig, *, max_steps: int | None, max_epochs: int | None, drop_last: bool
) -> Iterator[str]:
    """Yield an error if the length of a run over given rows, or its last batch, depends on an
    unknown number of rows."""
    if max_steps is None:
        why = f"max_epochs={max_epochs or 1} counts the rows"
        yield from _unknown_length(data, why)
        yield from _unknown_losses(data, why)
    elif max_epochs is not None:
        why = f"max_epochs={max_epochs} with max_steps={max_steps} counts the rows"
        yield from _unknown_length(data, why, instead="remove max_epochs")
        yield from _unknown_losses(data, why, instead="remove max_epochs")
    if not drop_last:
        yield from _unknown_length(
            data, "drop_last=false counts the rows", instead="remove drop_last"
        )


def _unknown_losses(data: DataConfig, why: str, instead: str = "set max_steps") -> Iterator[str]:
    if data.streamed and data.may_lose_rows:
        yield (
            f"{why}, but {data.streamed[0].place} is streamed, so it is unknown how many rows "
            f"overlong={data.overlong} and on_bad_row={data.on_bad_row} leave out; {instead}, or "
            "use overlong=error and on_bad_row=fail"
        )


def _unknown_length(data: DataConfig, why: str, instead: str = "set max_steps") -> Iterator[str]:
    for source in data.streamed:
        if source.row_limit is None:
            yield (
                f"{why}, but {source.place} is streamed, so their number is unknown; {instead}, or "
                "set max_samples of the source"
            )
