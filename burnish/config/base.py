"""Base class of config nodes: frozen, no unknown keys, docstrings as help, rules.

Reading order of this package: base, model, rewards, algorithm, rollout, train, sync, job, the
jobs, arithmetic, load; then schema, explain and docs, which inspect these classes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

N = TypeVar("N", bound="Node")

_NUMBERS = (int, float, int | None, float | None)


PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a name; ``~`` is expanded to the home folder."""


LOCK_FILE = ".lock"
"""Lock file in a folder that one process writes."""


def lock_of(output: Path) -> Path:
    """Return the lock file of an output file or folder: next to it, since it may not exist yet; in
    an existing folder if only that is writable (a mounted one)."""
    output = output.resolve()
    if output.is_dir() and not os.access(output.parent, os.W_OK):
        return output / LOCK_FILE
    return output.with_name(f".{output.name}.lock")


def absolute_program(program: str) -> str:
    """Return the path of a program as an absolute path, and a name on PATH unchanged."""
    return os.path.abspath(program) if os.sep in program else program


Section = dict[str, Any] | None


class OlderKeys(NamedTuple):
    """Keys of a node that earlier versions had in place of one section."""

    section: str
    switch: str
    """Older key that enabled the others. Its name may be that of the section. Empty: there was
    none, and each of them begins the section."""
    begin: Callable[[Any], Section]
    """Return the section for a value of ``switch`` (without one: for a short form of the section);
    None if that value disabled the others."""
    keys: Mapping[str, tuple[str, Any]]
    """Older key -> (key in the section, its default). Saved recipes have all keys, so a value that
    equals the default is left out."""

    def move(self, tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Move the values of the older keys of ``tree`` into the section, in place. Yield (older
        key, dotted present key) for those that are not their defaults. A key that is set in both
        forms gets the older form's value. Keys that a switch disables stay, so that they are
        refused as unknown."""
        renamed = self.switch != self.section
        keys = [key for key in self.keys if key in tree]
        switched = bool(self.switch) and self.switch in tree
        switched = switched and (renamed or not isinstance(tree[self.switch], dict))
        if not keys and not (switched and renamed):
            return
        present = tree.get(self.section)
        if not (self.switch or present is None or isinstance(present, dict)):
            is_node = isinstance(present, BaseModel)
            present = dict(present) if is_node else self.begin(present)
        section = dict(present) if isinstance(present, dict) else {}
        begun = self.begin(tree.pop(self.switch)) if switched else None
        if begun is not None:
            section |= begun
            if renamed:
                yield self.switch, f"{self.section}.{next(iter(begun), '')}"
        is_off = switched and begun is None
        for key in keys:
            name, default = self.keys[key]
            if tree[key] == default:
                section.pop(name, None)
                del tree[key]
            elif not is_off:
                section[name] = tree.pop(key)
                yield key, f"{self.section}.{name}"
        if is_off:
            tree[self.section] = None
        elif section or begun is not None or (self.switch and isinstance(present, dict)):
            tree[self.section] = section
        elif isinstance(present, dict):
            del tree[self.section]


def switched_by(key: str, *off: Any) -> Callable[[Any], Section]:
    """Return ``begin`` for a switch that is ``key`` in the section, unless it is null or one of
    ``off``."""
    return lambda value: None if value is None or value in off else {key: value}


def on_off(value: Any) -> Any:
    """Read ``true`` as a section with its defaults and ``false`` as none, also as text, which a
    plain value in place of a mapping is."""
    words: dict[str, Any] = {
        "true": {},
        "yes": {},
        "on": {},
        "false": None,
        "no": None,
        "off": None,
    }
    return words.get(str(value).lower(), value) if isinstance(value, (bool, str)) else value


def named_kind(default: str | None = None) -> BeforeValidator:
    """Return a validator that expands the name of a kind to a mapping, ``dpo`` to ``{kind: dpo}``,
    and adds the kind ``default`` to a mapping without one."""

    def expand(value: Any) -> Any:
        if isinstance(value, str):
            return {"kind": value}
        if default is not None and isinstance(value, dict):
            return {"kind": default, **value}
        return value

    return BeforeValidator(expand)


class Node(BaseModel):
    """A frozen config node. The string under a field is its help text."""

    older_keys: ClassVar[tuple[OlderKeys, ...]] = ()
    short_key: ClassVar[str] = ""
    """Key that a plain value in place of the mapping sets; empty if there is none."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return cls.as_mapping(data)

    @classmethod
    def as_mapping(cls, data: Any) -> Any:
        """Expand a plain value to the mapping that it abbreviates. Convert booleans in numeric
        fields to text, so that ``lr: true`` is refused instead of read as 1. Move older
        keys, which also saved engines have."""
        if cls.short_key and isinstance(data, (str, int, float)):
            data = {cls.short_key: data}
        if not isinstance(data, dict):
            return data
        if cls.older_keys:
            data = dict(data)
            for older in cls.older_keys:
                list(older.move(data))
        numbers = {n for n, field in cls.model_fields.items() if field.annotation in _NUMBERS}
        texts = {n: str(v).lower() for n, v in data.items() if n in numbers and isinstance(v, bool)}
        return {**data, **texts}

    def is_own(self, field: str) -> bool:
        """Return whether a field differs from its default. Unlike ``model_fields_set``, this
        survives a dump, which writes every field."""
        default = type(self).model_fields[field].get_default(call_default_factory=True)
        return bool(self.value_of(field) != default)

    def value_of(self, field: str) -> Any:
        """Return the value of a field by its name."""
        return dict(self)[field]

    @property
    def user_code(self) -> list[tuple[str, str]]:
        """(key, ``path/to/file.py:name`` or ``package.module:name``) of the user's code that this
        node names."""
        return []

    def rules(self) -> Iterator[str]:
        """Yield one sentence for each broken rule between fields of this node (what, why, what to
        do)."""
        yield from ()

    def advice(self) -> Iterator[str]:
        """Yield one sentence for each setting of this node that is valid but rarely intended."""
        yield from ()

    def broken_rules(self) -> list[str]:
        """Return the broken rules of this node and all nodes below it, each prefixed with its
        dotted path."""
        return [f"{path or 'recipe'}: {p}" for path, node in self._nodes() for p in node.rules()]

    def warnings(self) -> list[str]:
        """Return the advice of this node and all nodes below it, each prefixed with its dotted
        path."""
        return [f"{path or 'recipe'}: {p}" for path, node in self._nodes() for p in node.advice()]

    def nodes_of(self, kind: type[N]) -> list[N]:
        """Return the nodes of class ``kind`` at and below this one."""
        return [node for _, node in self._nodes() if isinstance(node, kind)]

    def paths_of(self, kind: type[N]) -> list[tuple[str, N]]:
        """Return (dotted path, node) of the nodes of class ``kind`` at and below this one."""
        return [(path, node) for path, node in self._nodes() if isinstance(node, kind)]

    def all_user_code(self) -> list[tuple[str, str]]:
        """Return (dotted key, name) of the user's code that this node and all below it name."""
        return [
            (f"{path}.{key}" if path else key, spec)
            for path, node in self._nodes()
            for key, spec in node.user_code
        ]

    def _nodes(self, path: str = "") -> Iterator[tuple[str, Node]]:
        """Yield (dotted path, node) for this node and all below it."""
        yield path, self
        for name, value in self:
            yield from _nodes_below(value, f"{path}.{name}" if path else name)


def _nodes_below(value: Any, path: str) -> Iterator[tuple[str, Node]]:
    if isinstance(value, Node):
        yield from value._nodes(path)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _nodes_below(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _nodes_below(item, f"{path}.{key}")


def module_of(config: Node, name: str) -> Any:
    """Return the module ``name`` in the folder of the class of ``config``, imported now. Configs
    import neither torch nor the code of their kind."""
    folder = type(config).__module__.rpartition(".")[0]
    return importlib.import_module(f"{folder}.{name}")
