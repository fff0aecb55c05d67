"""Rules of the length of a run, and of streamed sources, whose rows are read in order and may be of
unknown number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from burnish.data.config import DataConfig


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
