"""Flags of OpenRLHF and TRL, and the keys of Burnish that replace them."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from burnish.config.registry import JOBS
from burnish.config.schema import is_list, item_of, nodes_in, value_of


class Equivalent(NamedTuple):
    """One row: flags of another framework with the same replacement."""

    flags: tuple[str, ...]
    keys: tuple[str, ...] = ()
    """Dotted keys of a recipe, some with ``=value``."""
    note: str = ""
    missing: str = ""
    """Advice if there is no replacement, else empty."""
    new: str = ""
    """Later name of the flags, if they were renamed."""


class Command(NamedTuple):
    """A command or config class of another framework."""

    job: str
    blocks: tuple[str, ...]
    own: tuple[Equivalent, ...]


class Framework(NamedTuple):
    """All flags of one framework."""

    about: str
    blocks: Mapping[str, tuple[Equivalent, ...]]
    commands: Mapping[str, Command]
    left_out: Mapping[str, str]
    """Reason by flag, for flags without a row."""

    def flags(self, command: str) -> dict[str, Equivalent]:
        """Return the row of each flag of a command. Its own rows replace those of its blocks."""
        chosen = self.commands[command]
        tables = [*(self.blocks[name] for name in chosen.blocks), chosen.own]
        return {flag: row for table in tables for row in table for flag in row.flags}


def equivalents() -> dict[str, Framework]:
    """Return the flags of every framework, from the package's ``equivalents.yaml``."""
    file = importlib.resources.files("burnish.config") / "equivalents.yaml"
    tree = yaml.safe_load(file.read_text("utf-8"))
    return {name: _framework(content) for name, content in tree.items()}


def key_types(job: str, dotted: str) -> list[Any]:
    """Return the annotations of a job's key, one per kind that has it; empty if there is no such
    key. A number in the key is an item of a list.

    >>> key_types("rl", "rewards.0.weight")[0], key_types("sft", "rewards.0.weight")
    (<class 'float'>, [])
    """
    below: list[Any] = [JOBS[job]]
    for name in dotted.split("."):
        if name.isdigit():
            below = [item_of(annotation) for annotation in below if is_list(annotation)]
            continue
        plain = [annotation for annotation in below if not is_list(annotation)]
        fields = [node.model_fields for annotation in plain for node in nodes_in(annotation)]
        values = [value_of(annotation) for annotation in plain]
        below = [known[name].annotation for known in fields if name in known]
        below += [value for value in values if value is not None]
    return below


def _framework(content: Mapping[str, Any]) -> Framework:
    commands = {
        name: Command(command["job"], tuple(command["blocks"]), _rows(command["flags"]))
        for name, command in content["commands"].items()
    }
    left_out = content.get("left_out", {})
    return Framework(
        about=content["about"],
        blocks={name: _rows(rows) for name, rows in content["blocks"].items()},
        commands=commands,
        left_out={flag: why for flags, why in left_out.items() for flag in _names(flags)},
    )


def _rows(content: Mapping[str, Any]) -> tuple[Equivalent, ...]:
    return tuple(_row(flags, row) for flags, row in content.items())


def _row(flags: str, content: Any) -> Equivalent:
    fields = dict(content) if isinstance(content, dict) else {"key": content}
    keys = fields.pop("key", [])
    listed = (keys,) if isinstance(keys, str) else tuple(keys)
    return Equivalent(_names(flags), listed, **fields)


def _names(flags: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in flags.split(","))
