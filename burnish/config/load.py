"""Recipe file + dotted overrides -> a frozen config, or one error that lists all that is wrong."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, create_model

from burnish.config.base import Node
from burnish.config.explain import explain, meant_by, nearest
from burnish.config.job import JobConfig
from burnish.config.overrides import OverrideError, apply_override
from burnish.config.registry import JOBS
from burnish.config.yaml_text import compose, construct, dump
from burnish.errors import BurnishError

_log = logging.getLogger("burnish")


class ConfigError(BurnishError, ValueError):
    """A recipe that cannot be run. The message lists every problem found, with where and what to
    do."""


def load_config(
    recipe: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    job: str | None = None,
) -> JobConfig:
    """Read a recipe and return its frozen config.

    ``recipe`` is the path of a YAML file or a mapping. ``overrides`` are ``dotted.key=value``
    strings whose values are YAML (``train.lr=1e-6``, ``rollout.stop=["\\n"]``); list items are
    reached by number (``rewards.0.weight=2``). ``job`` is the job the caller wants; a recipe for
    another one is refused.

    Raises ConfigError: unreadable file, unknown or misspelt key (with the nearest name), wrong
    type, or a broken rule between fields. All problems are in the one message. Settings that work
    and are rarely meant are warnings of the logger ``burnish`` (without a handler: on stderr), here
    and nowhere else but in a run's run.log."""
    where, tree, cls = _read(recipe, overrides, wanted=job)
    problems: list[str] = []
    for override in overrides:
        try:
            apply_override(tree, override, cls)
        except OverrideError as error:
            problems.append(str(error))
    try:
        config = cls.model_validate({"job": cls.model_fields["job"].default, **tree})
    except ValidationError as error:
        problems += explain(cls, error) + _rules_despite_errors(cls, tree, error)
    if not problems:
        for warning in config.warnings():
            _log.warning("%s: warning: %s", where, warning)
        return config
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    raise ConfigError(f"{where}: {count}\n" + "\n".join(f"  - {p}" for p in problems))


def dump_yaml(config: JobConfig) -> str:
    """The resolved config as YAML that :func:`load_config` reads back to an equal config."""
    return dump(config.model_dump(mode="json"))


def _read(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str], *, wanted: str | None
) -> tuple[str, dict[str, Any], type[JobConfig]]:
    """Where the recipe is from, its tree, and the class of its job."""
    if isinstance(recipe, Mapping):
        tree = _copy(recipe)
        return "recipe", tree, JOBS[_job_name("recipe", tree, overrides, wanted=wanted)]
    path = Path(recipe)
    if not path.is_file():
        siblings = [str(p) for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        hint = "" if path.is_dir() else nearest(str(path), siblings)
        raise ConfigError(f"recipe {path} {what}{hint}")
    try:
        text = path.read_text(encoding="utf-8")
        loader, node = compose(text, name=str(path))
        cls = JobConfig
        if isinstance(node, yaml.MappingNode):
            cls = JOBS[_job_name(str(path), _named_job(node), overrides, wanted=wanted)]
        tree = construct(loader, node, cls, source=text)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"recipe {path} cannot be read as YAML: {error}") from None
    if not isinstance(tree, dict):
        found = "empty" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"recipe {path} must be a mapping of keys to values, and it is {found}")
    return str(path), _copy(tree), cls


def _named_job(node: yaml.MappingNode) -> dict[str, str]:
    """Return the value of ``job`` in the recipe, before the rest is parsed with that job's
    types."""
    said = {k.value: v.value for k, v in node.value if isinstance(k, yaml.ScalarNode)}
    return {"job": said["job"]} if isinstance(said.get("job"), str) else {}


def _copy(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {str(k): _copy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value


def _job_name(
    where: str, tree: Mapping[str, Any], overrides: Sequence[str], *, wanted: str | None
) -> str:
    """The job the recipe is for. Raises ConfigError if it is not known or not the wanted one."""
    said = [o.removeprefix("job=") for o in overrides if o.startswith("job=")]
    named = str(said[-1] if said else tree.get("job") or wanted or "")
    jobs = ", ".join(JOBS)
    if not named:
        raise ConfigError(f"{where}: no job is named; add a line such as 'job: rl' (jobs: {jobs})")
    if named not in JOBS:
        raise ConfigError(
            f"{where}: job {named!r} is not known{nearest(named, JOBS)}; jobs: {jobs}"
        )
    if wanted is not None and named != wanted:
        raise ConfigError(
            f"{where}: this recipe is for the job {named!r}, and {wanted!r} was asked for; "
            f"run 'burnish {named} {where}', or give a recipe with 'job: {wanted}'"
        )
    return named


def _rules_despite_errors(
    cls: type[JobConfig], tree: Mapping[str, Any], error: ValidationError
) -> list[str]:
    """Broken rules beside what is wrong already: pydantic looks at no rule while any field is
    wrong, and the user wants both in one go.

    The rules are those of the recipe with misspelt keys in the place of what they most probably
    mean, and without the other wrong values. What they say of such a key may only be so because of
    that, and is left out."""
    mended = _copy(tree)
    wrong = [_correct_misspelled_keys(cls, mended, e) for e in error.errors()]
    if None in wrong:  # too much is wrong
        return _rules_of_valid_nodes(cls, tree, error)
    try:
        cls.model_validate({"job": cls.model_fields["job"].default, **mended})
    except ValidationError as again:
        if any(e["loc"] for e in again.errors()):
            return _rules_of_valid_nodes(cls, tree, error)
        keys = re.compile(rf"\b({'|'.join(re.escape(str(key)) for key in wrong)})\b")
        return [line for line in explain(cls, again) if not keys.search(line)]
    return []


def _correct_misspelled_keys(cls: type[JobConfig], tree: Any, error: Any) -> str | None:
    """Take the key that ``error`` is about out of ``tree``, or put it where it was meant to be. Its
    name; None where the error is not about one key of a mapping."""
    if error["type"] in ("missing", "value_error") or "union" in error["type"]:
        return None
    holder, key = None, None
    for part in error["loc"]:  # among them are names of branches of unions, which are no keys
        if isinstance(tree, dict) and part in tree:
            holder, key, tree = tree, part, tree[part]
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            holder, tree = None, tree[part]
    if holder is None or (isinstance(tree, dict) and error["type"] != "extra_forbidden"):
        return None
    value = holder.pop(key)
    meant = meant_by(cls, error)
    if meant is not None:
        holder.setdefault(meant, value)
    return meant or str(key)


def _rules_of_valid_nodes(
    cls: type[JobConfig], tree: Mapping[str, Any], error: ValidationError
) -> list[str]:
    """Broken rules inside those of the root's fields that are valid themselves. Rules between the
    root's fields have to wait: they need all of them."""
    wrong = {e["loc"][0] for e in error.errors() if e["loc"]}
    sound = {
        name: (field.annotation, field)
        for name, field in cls.model_fields.items()
        if wrong and name in tree and name not in wrong
    }
    part: type[Node] = create_model("SoundParts", __base__=Node, **sound)  # type: ignore[call-overload]
    return part.model_validate({name: tree[name] for name in sound}).broken_rules()
