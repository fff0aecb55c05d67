"""Number of rows that a training run can use: all rows, less those over the length limit and those
that cannot be read. The number of steps follows from it."""

from __future__ import annotations

import logging
from dataclasses import replace

from burnish.config.job import SupervisedJob, TrainingJob
from burnish.config.passes import total_rows
from burnish.config.rl import RLConfig
from burnish.data.forms import open_rows
from burnish.driver.base import Usable
from burnish.models.load import load_tokenizer
from burnish.preflight.launch import checked_section, sections_of
from burnish.preflight.row_scan import Found

log = logging.getLogger("burnish")

_LEFT_OUT = ("skipped", "dropped")


def usable_rows(config: SupervisedJob, num_rows: int | None) -> Usable:
    """Return the usable rows of the training data, of which ``num_rows`` exist.

    Rows that are left out are counted if the number of steps depends on them, or if the recipe
    checks all rows anyway.
    """
    scanned = _counted(config, needed=config.counts_rows)
    if scanned is not None and num_rows is not None:
        num_rows = config.rows_per_item * _num_usable(scanned)
    notes = _left_out(scanned)
    if config.max_steps is not None and config.max_epochs is not None and num_rows is not None:
        by_epochs = config.model_copy(update={"max_steps": None}).steps_for(num_rows)
        if by_epochs != config.max_steps:
            notes = (
                *notes,
                f"max_epochs={config.max_epochs} of {num_rows} rows are {by_epochs} steps, and "
                f"max_steps={config.max_steps}: the run ends after "
                f"{min(by_epochs, config.max_steps)} steps, the smaller number",
            )
    return Usable(num_rows, notes)


def usable_prompts(config: RLConfig) -> Usable:
    """Return the usable prompts of the job rl, if the recipe checks all rows."""
    scanned = _counted(config, needed=False)
    return Usable() if scanned is None else Usable(_num_usable(scanned), _left_out(scanned))


def count_prompts(config: RLConfig) -> int:
    """Return the number of usable prompts of the job rl. Raises DataError if they cannot be
    read."""
    scanned = _counted(config, needed=True, again=True)
    if scanned is not None:
        return _num_usable(scanned)
    num = total_rows(config.data)
    return num if num is not None else sum(len(source) for source in open_rows(config.data))


def _num_usable(scanned: Found) -> int:
    return scanned.rows - sum(scanned.counts[kind] for kind in _LEFT_OUT)


def _left_out(scanned: Found | None) -> tuple[str, ...]:
    if scanned is None or _num_usable(scanned) == scanned.rows:
        return ()
    usable = _num_usable(scanned)
    counts = ", ".join(
        f"{scanned.counts[kind]} {kind}" for kind in _LEFT_OUT if scanned.counts[kind]
    )
    first = f"; the first skipped: {scanned.problems[0]}" if scanned.problems else ""
    return (
        f"data: {scanned.rows - usable} of {scanned.rows} rows are left out ({counts}), so an "
        f"epoch has {usable} rows{first}",
    )


def _counted(config: TrainingJob, *, needed: bool, again: bool = False) -> Found | None:
    """Return the result of a check of all training rows. Return None if no row can be left out, if
    rows are streamed, or if the numbers are not ``needed`` and the recipe does not check all
    rows."""
    section = next(section for section in sections_of(config) if section.name == "data")
    data = section.data
    if not data.may_lose_rows or data.streamed or not (needed or data.validate == "all"):
        return None
    entire = replace(section, data=data.model_copy(update={"validate": "all"}))
    scanned, _ = checked_section(entire, load_tokenizer(config.model), log.info, again=again)
    return scanned
