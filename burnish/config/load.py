"""Load a recipe file and dotted overrides into a frozen config, or raise one error that lists all
problems. Compare two recipes."""

from __future__ import annotations

import contextlib
import logging
import re
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, create_model

from burnish.config.base import Node, on_off
from burnish.config.equivalents import advice_on
from burnish.config.explain import explain, meant_by, nearest
from burnish.config.held_out import derived_split, renew_split
from burnish.config.job import WITHOUT_RULES, JobConfig
from burnish.config.launch import launched_rank, use_launched_ranks
from burnish.config.older import (
    MovedKey,
    OlderAdamValues,
    move_older_keys,
    notice,
    present_value,
    type_below,
)
from burnish.config.registry import JOBS
from burnish.config.schema import is_list, item_of, kinds_of, nodes_in
from burnish.config.shipped import SHIPPED, existing_path, shipped_recipes, use_shipped_files
from burnish.config.yaml_text import compose, construct, dump, field_value, read_text
from burnish.errors import BurnishError

_log = logging.getLogger("burnish")


class ConfigError(BurnishError, ValueError):
    """A recipe that cannot be run. The message lists every problem with its place and a fix.

    ``problems``: one line each, if the recipe could be read. ``corrected``: the recipe with the
    probable meaning of its invalid keys, to find the problems of its files as well; None if there
    are too many errors."""

    where: str = ""
    problems: tuple[str, ...] = ()
    corrected: JobConfig | None = None

    @classmethod
    def listing(
        cls, where: str, problems: Sequence[str], corrected: JobConfig | None
    ) -> ConfigError:
        """Return the error of the recipe ``where`` with all its problems."""
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        error = cls(f"{where}: {count}\n" + "\n".join(f"  - {p}" for p in problems))
        error.where, error.problems, error.corrected = where, tuple(problems), corrected
        return error


def load_config(
    recipe: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    job: str | None = None,
    resumed: bool = False,
) -> JobConfig:
    """Read a recipe and return its frozen config.

    ``recipe`` is the path of a YAML file or a mapping. ``overrides`` are ``dotted.key=value``
    strings whose values are YAML (``train.lr=1e-6``, ``rollout.stop=["\\n"]``); list items are
    addressed by number (``rewards.0.weight=2``). ``job`` is the expected job; a recipe for another
    one is refused. ``resumed``: the recipe is the saved one of a run.

    If torchrun, accelerate or srun started several ranks, ``cluster.runtime`` and
    ``cluster.policy_ranks`` are set to them (:mod:`burnish.config.launch`).

    Raises ConfigError for an unreadable file, an unknown or misspelled key (with the nearest name),
    a wrong type, or a broken rule between fields. One message contains all problems. Settings that
    are valid but rarely intended are logged as warnings by the logger ``burnish`` (on stderr if it
    has no handler). Apart from here, they appear only in the run.log of a run."""
    where, config, moved = _load(recipe, overrides, job=job, resumed=resumed)
    if moved and not resumed:
        _log.warning("%s: notice: %s", where, notice(moved))
    for warning in config.warnings():
        _log.warning("%s: warning: %s", where, warning)
    return config


def changed_config(config: JobConfig, overrides: Sequence[str]) -> JobConfig:
    """Return ``config`` with overrides of :func:`load_config`, without repeating its warnings.
    Raises ConfigError."""
    return _load(config.model_dump(mode="json"), overrides, job=config.job, resumed=False)[1]


def changed_if_valid(config: JobConfig, overrides: Sequence[str]) -> JobConfig | None:
    """Return :func:`changed_config`, or None if the overrides make the recipe invalid, such as
    batch sizes that do not divide."""
    try:
        return changed_config(config, overrides)
    except ConfigError:
        return None


def _load(
    recipe: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    *,
    job: str | None,
    resumed: bool,
) -> tuple[str, JobConfig, list[MovedKey]]:
    """Return the recipe's source, its config and its older keys. Raises ConfigError."""
    where, tree, cls = _read(recipe, overrides, wanted=job)
    adam_values = OlderAdamValues()
    moved = [*adam_values.restore(tree), *move_older_keys(tree, cls)]
    rank = launched_rank()
    problems: list[str] = []
    corrected = None
    if rank is not None and resumed:  # before the overrides, which may not contradict it
        problems += use_launched_ranks(tree, rank, resumed=True)
    derived = derived_split(tree)
    for override in overrides:
        try:
            apply_override(tree, override, cls)
        except OverrideError as error:
            problems.append(str(error))
        moved += [*adam_values.restore(tree), *move_older_keys(tree, cls)]
    renew_split(tree, derived)
    tree = use_shipped_files(tree, recipe if isinstance(recipe, Mapping) else Path(recipe))
    if rank is not None:
        problems += use_launched_ranks(tree, rank, resumed=False)
    try:
        config = cls.model_validate({"job": cls.model_fields["job"].default, **tree})
    except ValidationError as error:
        advice = partial(advice_on, job=cls.model_fields["job"].default)
        rules, corrected = _rules_despite_errors(cls, tree, error)
        problems += [*explain(cls, error, advice), *rules]
    if not problems:
        return where, config, moved
    raise ConfigError.listing(where, problems, corrected)


def dump_yaml(config: JobConfig) -> str:
    """Return the resolved config as YAML that :func:`load_config` reads back to an equal config."""
    return dump(config.model_dump(mode="json"))


def _read(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str], *, wanted: str | None
) -> tuple[str, dict[str, Any], type[JobConfig]]:
    """Return the recipe's source, its tree, and the class of its job."""
    if isinstance(recipe, Mapping):
        tree = _copy(recipe)
        return "recipe", tree, JOBS[_job_name("recipe", tree, overrides, wanted=wanted)]
    path = existing_path(Path(recipe))
    if not path.is_file():
        siblings = [str(p) for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        siblings += [f"{SHIPPED.name}/{p.name}" for p in shipped_recipes()]
        problem, hint = "does not exist", nearest(str(path), siblings)
        if path.exists():
            problem, hint = (
                f"is {'a folder' if path.is_dir() else 'a pipe or device'}, not a file",
                "",
            )
        raise ConfigError(f"recipe {path} {problem}{hint}")
    if path.suffix in (".sh", ".py", ".toml", ".jsonl"):
        raise ConfigError(
            f"recipe {path} is not a YAML file; write the keys of the job into one (README.md has "
            "an example, 'burnish config JOB' lists the keys). docs/compare.md translates the "
            "flags of OpenRLHF's and TRL's scripts"
        )
    try:
        text = read_text(path)
        loader, node = compose(text, name=str(path))
        cls = JobConfig
        if isinstance(node, yaml.MappingNode):
            # The job is read first: the rest is parsed with the types of its class.
            texts = {k.value: v.value for k, v in node.value if isinstance(k, yaml.ScalarNode)}
            named = {"job": texts["job"]} if isinstance(texts.get("job"), str) else {}
            cls = JOBS[_job_name(str(path), named, overrides, wanted=wanted)]
        tree = construct(loader, node, cls, source=text)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"recipe {path} cannot be read as YAML: {error}") from None
    if not isinstance(tree, dict):
        content = "empty" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"recipe {path} must be a mapping of keys to values, but it is {content}")
    return str(path), _copy(tree), cls


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
    """Return the name of the recipe's job. Raises ConfigError if it is unknown or not the wanted
    one."""
    overridden = [o.removeprefix("job=") for o in overrides if o.startswith("job=")]
    named = str(overridden[-1] if overridden else tree.get("job") or wanted or "")
    jobs = ", ".join(JOBS)
    if not named:
        raise ConfigError(
            f"{where}: the recipe does not set job; add a line such as 'job: rl' (jobs: {jobs})"
        )
    if named not in JOBS:
        raise ConfigError(f"{where}: unknown job {named!r}{nearest(named, JOBS)}; jobs: {jobs}")
    if wanted is not None and named != wanted:
        raise ConfigError(
            f"{where}: this recipe is for the job {named!r}, not {wanted!r}; run 'burnish "
            f"{named} {where}', or give a recipe with 'job: {wanted}'"
        )
    return named


def _rules_despite_errors(
    cls: type[JobConfig], tree: Mapping[str, Any], error: ValidationError
) -> tuple[list[str], JobConfig | None]:
    """Return the broken rules of a recipe that has other errors, and the corrected recipe, whether
    or not it breaks rules. pydantic checks no rules while any field is invalid, and one report
    should list both.

    Misspelled keys are first replaced by their most probable meaning, and other invalid values are
    removed. Rule messages about these keys are left out, because the replacement may be their
    cause."""
    if not any(e["loc"] for e in error.errors()):  # only rules, which are in ``error``
        return [], _without_rules(cls, tree)
    mended = _copy(tree)
    wrong = [_correct_misspelled_keys(cls, mended, e) for e in error.errors()]
    if None in wrong:  # too many errors
        return _rules_of_valid_nodes(cls, tree, error), None
    corrected = _without_rules(cls, mended)
    if corrected is None:
        return _rules_of_valid_nodes(cls, tree, error), None
    try:
        cls.model_validate({"job": cls.model_fields["job"].default, **mended})
    except ValidationError as again:
        keys = re.compile(rf"\b({'|'.join(re.escape(str(key)) for key in wrong)})\b")
        return [line for line in explain(cls, again) if not keys.search(line)], corrected
    return [], corrected


def _without_rules(cls: type[JobConfig], tree: Mapping[str, Any]) -> JobConfig | None:
    """Return a recipe that may break rules; None if a field is invalid."""
    complete = {"job": cls.model_fields["job"].default, **tree}
    try:
        return cls.model_validate(complete, context=WITHOUT_RULES)
    except ValidationError:
        return None


def _correct_misspelled_keys(cls: type[JobConfig], tree: Any, error: Any) -> str | None:
    """Remove the key of ``error`` from ``tree``, or move its value to the intended key. Return the
    key's name, or None if the error is not about a single key of a mapping."""
    if error["type"] in ("missing", "value_error") or "union" in error["type"]:
        return None
    holder, key = None, None
    for part in error["loc"]:  # may contain names of union branches, which are not keys
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
    """Return the broken rules inside the root's valid fields. Rules between the root's fields are
    not checked, because they need all fields, nor is a field that the others complete
    (``eval.data`` of held-out rows)."""
    wrong = {e["loc"][0] for e in error.errors() if e["loc"]}
    broken = []
    for name, field in cls.model_fields.items():
        if wrong and name in tree and name not in wrong:
            sound: Any = {name: (field.annotation, field)}
            part: type[Node] = create_model("SoundPart", __base__=Node, **sound)
            with contextlib.suppress(ValidationError):
                broken += part.model_validate({name: tree[name]}).broken_rules()
    return broken


class OverrideError(BurnishError, ValueError):
    """An override that cannot be applied. The message contains the override, the failing part and
    the valid values."""


def apply_override(tree: dict[str, Any], override: str, cls: type[Node]) -> None:
    """Set one ``dotted.key=value`` in ``tree``, which will be validated as ``cls``.

    List items are addressed by number. A short form along the path (``advantage: gae``, a source
    that is only a path) is expanded to its node, so that its options can be set. Raises
    OverrideError."""
    dotted, sign, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not sign or not all(keys):
        raise OverrideError(
            f"override {override!r} is not of the form dotted.key=value, such as train.lr=1e-6"
        )
    node: Any = tree
    annotation: Any = cls  # of node; None below an unknown key, which validation reports
    for i, key in enumerate(keys):
        slot: Any = key
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                items = f"items 0..{len(node) - 1}" if node else "no items"
                above = ".".join(keys[:i])
                raise OverrideError(f"override {override!r}: {above} has {items}, but no {key!r}")
            slot = int(key)
            child = node[slot]
            annotation = item_of(annotation) if is_list(annotation) else annotation
        else:
            child = present_value(node, annotation, key)
            annotation = type_below(annotation, key)
        if i < len(keys) - 1:
            path = ".".join(keys[: i + 1])
            node[slot] = _opened(child, annotation, path=path, override=override)
            node = node[slot]
    try:
        value = field_value(text, annotation)
        node[slot] = _merged(node, slot, value, annotation)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise OverrideError(
            f"override {override!r}: the value is not valid YAML: {reason}"
        ) from None


def _merged(node: Any, slot: Any, value: Any, annotation: Any) -> Any:
    """Return the value of an override. The name of a kind (``train.lr_scheduler=wsd``) keeps the
    keys of the present section, which were on the same level in earlier versions. Keys that the new
    kind does not have are left out if they are at their defaults."""
    present = node.get(slot) if isinstance(node, dict) else None
    kinds = [cls for cls in nodes_in(annotation) if cls.short_key]
    if not kinds or not isinstance(present, dict) or not isinstance(value, (str, int, float)):
        return value
    if on_off(value) != value:
        return value
    key = kinds[0].short_key
    fields = {name: f for cls in kinds for name, f in cls.model_fields.items()}
    chosen = next((cls for cls in kinds if value in kinds_of(cls)), kinds[0])
    section = {
        name: content
        for name, content in present.items()
        if name in chosen.model_fields or name not in fields or content != fields[name].default
    }
    return {**section, key: value}


def _opened(node: Any, annotation: Any, *, path: str, override: str) -> Any:
    """Return ``node`` as a mapping or list that the next key can be set in."""
    if isinstance(node, (dict, list)):
        return node
    below = nodes_in(annotation)
    if node is None and is_list(annotation):
        raise OverrideError(
            f"override {override!r}: the recipe does not set {path}, so it has no items to "
            f"change; set the complete list: '{path}=[...]'"
        )
    if node is None and (annotation is None or below or typing.get_origin(annotation) is dict):
        return {}
    if below and on_off(node) in ({}, None):
        return {}  # true and false, also as text
    if below and below[0].short_key and isinstance(node, (str, int, float)):
        return {below[0].short_key: node}
    if isinstance(node, str) and below:
        is_kind = any(node in kinds_of(variant) for variant in below)
        has_path = "path" in below[0].model_fields
        return {"path": node} if has_path and not is_kind else {"kind": node}
    shown = "a plain value" if node is None else repr(node)
    raise OverrideError(f"override {override!r}: {path} is {shown}, which has no keys below it")
