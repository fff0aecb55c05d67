"""Columns of data files that a recipe names. One that a file lacks is reported with the recipe's
other problems."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from burnish.config.explain import nearest
from burnish.data_files.reading import columns_of

_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # of single precision


def finite_number(value: Any) -> float | None:
    """Return a number, or the number that a text contains; None for other values and for numbers
    that are not finite in single precision, in which they are trained on."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= _LARGEST_FLOAT else None


def without_fraction(value: Any) -> Any:
    """Return a whole float as an integer, also in a text, and any other value as it is. Files with
    empty cells store integers as floats.

    >>> without_fraction(1.0), without_fraction("0.0"), without_fraction(0.5), without_fraction("a")
    (1, '0', 0.5, 'a')
    """
    if isinstance(value, str):
        number, point, zeros = value.strip().partition(".")
        is_whole = point and not zeros.strip("0") and number.removeprefix("-").isdecimal()
        return number if is_whole else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def missing_columns(paths: Iterable[str], columns: Mapping[str, str | None]) -> Iterator[str]:
    """Yield an error for each of ``columns`` (field -> name; None: not read) and
    each file without it."""
    names = [name for name in columns.values() if name is not None]
    for path in paths:
        have = columns_of(path, names)
        for field, name in columns.items():
            if have is not None and name is not None and name not in have:
                usual = usual_column(field.rpartition(".")[2], have)
                hint = nearest(name, have) or (f" (perhaps {field}={usual})" if usual else "")
                yield (
                    f"{field}={name}: {path} has no such column; its columns are "
                    f"{', '.join(have)}{hint}. Correct {field}, or add the column"
                )


def usual_column(field: str, have: Collection[str]) -> str | None:
    """Return the column that public data sets use for a field such as ``label_key``, in small or in
    capital letters; None if there is none.

    >>> usual_column("prompt_key", ["Answer", "Question"]), usual_column("label_key", ["Label"])
    ('Question', 'Label')
    """
    by_name = {name.lower(): name for name in reversed(list(have))} | {name: name for name in have}
    names = (field.removesuffix("_key"), *_USUAL.get(field, ()))
    return next((by_name[name] for name in names if name in by_name), None)


_USUAL = {
    "prompt_key": ("question", "problem", "query", "instruction", "input", "text"),
    "label_key": ("answer", "ground_truth", "final_answer", "solution", "answers"),
    "response_key": ("completion", "answer", "solution", "output", "code"),
    "chosen_key": ("preferred_output", "chosen_response", "response_a", "better"),
    "rejected_key": ("non_preferred_output", "rejected_response", "response_b", "worse"),
}
"""Field of a column -> names that public data sets use for it."""
