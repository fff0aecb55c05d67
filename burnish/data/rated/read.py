"""Read the scores or the class of a row, for regression and classification reward models. This
module imports no torch: the first rows are checked before it is loaded."""

from __future__ import annotations

from typing import Any

from burnish.config.columns import finite_number, without_fraction
from burnish.data.rated.config import ClassesDataConfig, RatedDataConfig
from burnish.data.reader import RowReader
from burnish.data.rows import column
from burnish.data.sources import DataError, Row

PASS_LABELS = {
    **dict.fromkeys(("true", "1", "pass", "passed", "yes", "good", "correct", "+"), 1),
    **dict.fromkeys(("false", "0", "fail", "failed", "no", "bad", "incorrect", "-"), 0),
}


class Reader(RowReader[RatedDataConfig]):
    """Reads single responses with a target."""

    def contents(self, row: Row) -> list[Any]:
        if self.config.columns:  # a rule reports that none or several are recognized
            target_of(row, self.config)
        return super().contents(row)


def target_of(row: Row, config: RatedDataConfig) -> tuple[float, ...] | int:
    """Return the scores or the index of the class of a row. Raises DataError."""
    if isinstance(config, ClassesDataConfig):
        (key,) = config.columns
        return _class(column(row, key, "label_key"), key, config)
    scores = []
    for key in config.columns:
        value = column(row, key, "score_keys")
        number = None if isinstance(value, bool) else finite_number(value)
        if number is None:
            raise DataError(
                f"column {key!r} (score_keys) contains {value!r}, not a finite number; correct or "
                "remove the row"
            )
        scores.append(number)
    return tuple(scores)


def _class(value: Any, key: str, config: ClassesDataConfig) -> int:
    """Return the index of a class. An integer is an index only if no class has an integer as its
    name. Whole floats count as integers."""
    if config.classes is None or str(value).strip() not in config.names:
        value = without_fraction(value)
    text = str(value).strip()
    if config.classes is None:
        number = PASS_LABELS.get(text.lower())
        known = "true or false, 1 or 0, pass or fail, yes or no, good or bad; set data.classes for "
        known += "other classes"
    else:
        names = config.names
        numbered = any(map(_is_integer, names))
        number = names.index(text) if text in names else None
        if number is None and not numbered and type(value) is int and 0 <= value < len(names):
            number = value
        known = f"one of data.classes: {', '.join(names)}" + ("" if numbered else ", or an index")
    if number is None:
        raise DataError(f"column {key!r} (label_key) contains {value!r}; a label is {known}")
    return number


def _is_integer(name: str) -> bool:
    try:
        int(name)
    except ValueError:
        return False
    return True
