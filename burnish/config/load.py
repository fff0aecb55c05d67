"""Recipe file + dotted overrides -> a frozen config, or one error that lists everything wrong with it."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from burnish.config.jobs import JOBS, JobConfig


class ConfigError(ValueError):
    """A recipe that cannot be run. The message lists every problem found, with where and what to do."""


def load_config(
    recipe: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    job: str | None = None,
) -> JobConfig:
    """Read a recipe and return its frozen config.

    ``recipe`` is the path of a YAML file or a mapping. ``overrides`` are ``dotted.key=value`` strings whose
    values are YAML (``train.lr=1e-6``, ``rollout.stop=["\\n"]``); list items are reached by number
    (``rewards.0.weight=2``). ``job`` is the job the caller wants; a recipe for another one is refused.

    Raises ConfigError: unreadable file, unknown or misspelt key (with the nearest name), wrong type, or a
    broken rule between fields. All problems are in the one message.
    """
    where, tree = _read(recipe)
    for override in overrides:
        _apply(tree, override)
    named = tree.get("job", job)
    if named is None:
        raise ConfigError(f"{where}: no job is named; add a line such as 'job: rl' (jobs: {', '.join(JOBS)})")
    if job is not None and named != job:
        raise ConfigError(
            f"{where} is a recipe for the job {named!r}, and {job!r} was asked for; run 'burnish {named} {where}'"
        )
    if named not in JOBS:
        raise ConfigError(f"{where}: job: {named!r} is not known{_nearest(str(named), JOBS)}; jobs: {', '.join(JOBS)}")
    cls = JOBS[named]
    try:
        return cls.model_validate({**tree, "job": named})
    except ValidationError as error:
        problems = [line for e in error.errors() for line in _explain(cls, e)]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(f"{where}: {count}\n" + "\n".join(f"  - {p}" for p in problems)) from None


def dump_yaml(config: JobConfig) -> str:
    """The resolved config as YAML that :func:`load_config` reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(recipe: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(recipe, Mapping):
        return "recipe", _copy(recipe)
    path = Path(recipe)
    if not path.is_file():
        siblings = [str(p) for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        raise ConfigError(f"recipe {path} does not exist{_nearest(str(path), siblings)}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {path} must be a mapping of keys to values, not {type(tree).__name__}")
    return str(path), tree


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _copy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-6`` (no dot) as a string; every user means a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} is not of the form dotted.key=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from None
    node: Any = tree
    *parents, last = key.split(".")
    for i, part in enumerate(parents):
        node = _step(node, part, ".".join(parents[: i + 1]), override)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    else:
        node[last] = value


def _step(node: Any, part: str, path: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    child = node.get(part)
    if child is None or isinstance(child, str):
        # A short form (``advantage: gae``) opens into its node, so that its options can be set.
        node[part] = child = {} if child is None else {"kind": child}
    if not isinstance(child, (dict, list)):
        raise ConfigError(f"override {override!r}: {path} is {child!r}, which has no fields below it")
    return child


def _index(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"override {override!r}: {part!r} is not an item number in 0..{len(items) - 1}")
    return int(part)


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (nearest: {close[0]})" if close else ""


def _explain(cls: type[BaseModel], error: Any) -> Iterator[str]:
    """One pydantic error as lines for people."""
    if not error["loc"]:  # the root's rules, one a line
        yield from str(error["ctx"]["error"]).split("\n") if "ctx" in error else [error["msg"]]
        return
    nodes, path = _walk(cls, error["loc"])
    if error["type"] == "extra_forbidden":
        known = sorted({name for node in nodes for name in node.model_fields})
        key = str(error["loc"][-1])
        hint = _nearest(key, known) or f"; known here: {', '.join(known)}"
        yield f"{path}: unknown key {key!r}{hint}"
    elif error["type"] == "missing":
        yield f"{path}: is required and not set{_help(nodes, error['loc'][-1])}"
    else:
        message = error["msg"].removeprefix("Value error, ")
        yield f"{path}: {message}, got {error['input']!r}{_help(nodes, error['loc'][-1])}"


def _help(nodes: list[type[BaseModel]], name: Any) -> str:
    for node in nodes:
        info = node.model_fields.get(name) if isinstance(name, str) else None
        if info is not None and info.description:
            return f" ({name}: {' '.join(info.description.split())})"
    return ""


def _walk(cls: type[BaseModel], loc: tuple[Any, ...]) -> tuple[list[type[BaseModel]], str]:
    """The node classes that the last part of ``loc`` may belong to, and the dotted path without union tags."""
    nodes: list[type[BaseModel]] = [cls]
    path: list[str] = []
    for i, part in enumerate(loc):
        last = i == len(loc) - 1
        tagged = [n for n in nodes if "kind" in n.model_fields and part in _kinds(n)]
        if tagged and not last and not any(part in n.model_fields for n in nodes):
            nodes = tagged
            continue
        path.append(f"[{part}]" if isinstance(part, int) else f".{part}")
        if not last and isinstance(part, str):
            below = [m for n in nodes if part in n.model_fields for m in _models(n.model_fields[part])]
            nodes = below or nodes
    return nodes, "".join(path).lstrip(".")


def _kinds(node: type[BaseModel]) -> tuple[Any, ...]:
    return typing.get_args(node.model_fields["kind"].annotation)


def _models(info: FieldInfo | Any) -> list[type[BaseModel]]:
    """Every node class inside an annotation."""
    annotation = info.annotation if isinstance(info, FieldInfo) else info
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [m for arg in typing.get_args(annotation) for m in _models(arg)]
