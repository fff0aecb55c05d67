"""Relations: statements about two computations that must agree, whatever is drawn.

A relation is a function of one :class:`Draw`. Everything random comes from ``draw.rng``, which one
integer seeds, so that a failure is reproduced by the relation's name and that integer.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from burnish.config import ConfigError
from burnish.data.sources import DataError
from burnish.models.load import ModelError

T = TypeVar("T")
Relation = Callable[["Draw"], None]
RELATIONS: dict[str, Relation] = {}
"""All relations by name."""
CLOSERS: list[Callable[[], None]] = []
"""Ends of what relations keep open between draws (worker processes)."""

REFUSALS = (ModelError, DataError, ConfigError)
"""Errors by which the project refuses what was drawn, with a sentence. Not a failure."""


class Broken(AssertionError):
    """A relation that does not hold, with the facts of the draw."""


class Refused(Exception):
    """What was drawn is outside of the relation."""


class Draw:
    """The random choices of one case, and a folder for its files."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(f"{name}/{seed}")
        self.facts: dict[str, Any] = {}
        """What was drawn, for the message of a failure."""

    def note(self, **facts: Any) -> None:
        """Remember what was drawn."""
        self.facts |= facts

    def one(self, **choices: Any) -> Any:
        """Draw one entry of a list and note it: ``draw.one(layout=["packed", "padded"])``."""
        ((name, values),) = choices.items()
        found = self.rng.choice(list(values))
        self.note(**{name: found})
        return found

    @cached_property
    def folder(self) -> Path:
        """An empty folder, removed at the end."""
        return Path(tempfile.mkdtemp(prefix="metamorphic-"))

    def close(self) -> None:
        """Remove the folder."""
        if "folder" in vars(self):
            shutil.rmtree(self.folder, ignore_errors=True)


def relation(function: Relation) -> Relation:
    """Register a relation under its name."""
    RELATIONS[function.__name__] = function
    return function


def check(name: str, seed: int) -> str:
    """Run one relation on one draw; returns "holds" or "refused: ...".

    Raises Broken if it does not hold, and if the project raises anything that is no refusal.
    """
    draw = Draw(name, seed)
    try:
        with _quiet():
            RELATIONS[name](draw)
    except (*REFUSALS, Refused) as error:
        return f"refused: {_line(error)}"
    except Exception as error:
        facts = ", ".join(f"{k}={v!r}" for k, v in draw.facts.items())
        raise Broken(f"{name}, seed {seed}: {type(error).__name__}: {error}\n  {facts}") from error
    finally:
        draw.close()
    return "holds"


def equal(found: Any, wanted: Any, what: str) -> None:
    """Raise Broken unless both are equal."""
    if found != wanted:
        raise Broken(f"{what}: {_short(found)} is not {_short(wanted)}")


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Raise Broken unless the largest difference of two tensors is within ``tolerance``."""
    if found.shape != wanted.shape:
        raise Broken(f"{what}: shapes {tuple(found.shape)} and {tuple(wanted.shape)}")
    if not found.numel():
        return
    worst = float((found.detach().double() - wanted.detach().double()).abs().max())
    if not worst <= tolerance:  # also if it is NaN
        raise Broken(f"{what}: they differ by {worst:.2e}, allowed are {tolerance:.0e}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 600 else text[:600] + " ..."


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines and warnings, and with the global random state as it was."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
