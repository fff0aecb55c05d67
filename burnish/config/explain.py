"""Convert pydantic's errors to readable lines: the key, the problem, and a fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from burnish.config.base import Node
from burnish.config.help_texts import help_text
from burnish.config.schema import is_list, item_of, kinds_of, nodes_in, type_words, value_of

_ALIASES = {
    "learning_rate": "lr",
    "warmup_ratio": "lr_warmup_ratio",
    "lr_scheduler_type": "lr_scheduler",
    "batch_size": "train_batch_size",
    "per_device_train_batch_size": "micro_train_batch_size",
    "micro_batch_size": "micro_train_batch_size",
    "num_generations": "n_samples_per_prompt",
    "max_new_tokens": "generate_max_len",
    "max_completion_length": "generate_max_len",
    "beta": "init_kl_coef",
    "model_name_or_path": "path",
}
"""Names of our keys in other trainers."""

_BOUNDS = {
    "greater_than": ("gt", "must be greater than {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be less than {}"),
    "less_than_equal": ("le", "must be at most {}"),
}


_OF_A_KEY = "[key]"
"""Last part of the location of an error in a name of a mapping, after that name."""


Advice = Callable[[str], str]
"""Return what to use instead of a name from another framework (of a value: with = before it), or an
empty string."""


def explain(cls: type[Node], error: ValidationError, advice: Advice = lambda name: "") -> list[str]:
    """Return every problem of a failed validation of ``cls``, one line each, without consequential
    errors."""
    errors = error.errors()
    paths = [_Place(cls, e["loc"]).path for e in errors]
    lines: list[str] = []
    for e, path in zip(errors, paths, strict=True):
        below = any(other.startswith((f"{path}[", f"{path}.")) for other in paths)
        if e["type"] in ("too_short", "missing") and below:
            continue  # the list is only short because an item failed, which is reported
        if e["type"] == "literal_error" and paths.count(path) > 1:
            # A branch of a union. Another branch names all values, or is the last of its literals.
            later = [other for other, at in zip(errors, paths, strict=True) if at == path]
            if later[-1] is not e or any(other["type"] != "literal_error" for other in later):
                continue
        lines += _explain_one(cls, e, advice)
    return list(dict.fromkeys(lines))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (nearest: x)`` for the closest of the known names, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (nearest: {close[0]})" if close else ""


def meant_by(cls: type[Node], error: Any) -> str | None:
    """Return the known key at the same place that an unknown key is nearest to, by its name or its
    name in other trainers. Return None if there is none, or for any other error."""
    if error["type"] != "extra_forbidden":
        return None
    place = _Place(cls, error["loc"])
    meant = _meant(place)
    return meant if meant in place.owners[0].model_fields else None


class _Place:
    """Place of an error in the tree: ``loc`` without union tags, and the classes that own its last
    key."""

    def __init__(self, cls: type[Node], loc: tuple[int | str, ...]) -> None:
        self.owners: list[type[Node]] = [cls]
        self.key: str | None = None
        self.below: list[type[Node]] = [cls]
        self.annotation: Any = cls
        self.path = ""
        self.other_kinds: list[type[Node]] = []
        """Other kinds of the owner, if it is one of several."""
        below_others: list[type[Node]] = []
        for part in loc:
            if isinstance(part, int):
                self.path += f"[{part}]" if is_list(self.annotation) else ""
            elif value_of(self.annotation) is not None and part != _OF_A_KEY:
                self.path += f".{part}"
                self.annotation = value_of(self.annotation)
                self.below = nodes_in(self.annotation)
            elif len(self.below) > 1:  # pydantic appends the tag of a union
                below_others = [node for node in self.below if part not in kinds_of(node)]
                self.below = [node for node in self.below if part in kinds_of(node)]
            elif self.below:
                self.other_kinds, below_others = below_others, []
                self.owners, self.key = self.below, part
                self.path += f".{part}" if self.path else part
                field = self.below[0].model_fields.get(part)
                self.annotation = None if field is None else field.annotation
                self.below = nodes_in(self.annotation)
            # else: pydantic's name for one branch of a plain union, which is not a key

    def help(self) -> str:
        """Return the field's help text in parentheses."""
        field = self.owners[0].model_fields.get(self.key or "")
        if field is None or not self.path.endswith(self.key or ""):
            return ""
        text = help_text(field)
        return f" ({self.key}: {' '.join(text.split())})" if text else ""


def _explain_one(cls: type[Node], error: Any, advice: Advice) -> Iterator[str]:
    kind, place = error["type"], _Place(cls, error["loc"])
    if not error["loc"]:  # the root's rules, one a line
        yield from str(error["ctx"]["error"]).split("\n") if "ctx" in error else [error["msg"]]
    elif kind == "extra_forbidden":
        yield _unknown_key(cls, place, advice)
    elif kind == "missing":
        yield f"{place.path}: is required and not set{place.help()}"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield _unknown_kind(place, error, advice)
    elif kind == "value_error":
        yield f"{place.path}: {error['msg'].removeprefix('Value error, ')}"
    else:
        value = error["input"]
        got = "null" if value is None else repr(value)
        if isinstance(value, bool):
            got = str(value).lower()
        replacement = advice(f"={value}") if kind == "literal_error" else ""
        instead = f". {replacement}" if replacement else place.help()
        yield f"{place.path}: {_complaint(place, error)}, got {got}{instead}"


def _unknown_key(cls: type[Node], place: _Place, advice: Advice) -> str:
    key, owner, meant = place.key or "", place.owners[0], _meant(place)
    known = list(owner.model_fields)
    if meant not in known and key not in _ALIASES:  # the same name elsewhere is the nearest
        meant = key if any(p.rpartition(".")[2] == key for p in _paths(cls)) else meant
    elsewhere = [p for p in _paths(cls) if p.rpartition(".")[2] == meant and p != place.path]
    same_name = key in _ALIASES or (elsewhere and meant == key)
    others = [node for node in place.other_kinds if key in node.model_fields]
    replacement = next((text for kind in kinds_of(owner) if (text := advice(f"{kind}.{key}"))), "")
    if replacement or (not same_name and not others and (replacement := advice(key))):
        hint = f". {replacement}"
    elif meant in known and not others:
        hint = f" (nearest: {meant})"
    elif (elsewhere or (elsewhere := _flat(cls, place))) and not others:
        places = [p if "." in p or p == place.path else f"{p} at the top level" for p in elsewhere]
        hint = f" (did you mean {' or '.join(dict.fromkeys(places[:2]))}?)"
    else:
        chosen = f" under kind {' | '.join(kinds_of(owner))}" if kinds_of(owner) else ""
        kinds = ", ".join(kind for node in others for kind in kinds_of(node))
        elsewhere_kind = f" (a key of kind {kinds})" if kinds else ""
        hint = f"{elsewhere_kind}; known here{chosen}: {', '.join(sorted(known))}"
    return f"{place.path}: unknown key {key!r}{hint}"


def _meant(place: _Place) -> str:
    key, known = place.key or "", place.owners[0].model_fields
    close = difflib.get_close_matches(key, [*known, *_ALIASES], n=1, cutoff=0.6)
    close = close or [name for name in known if name.startswith(f"{key}_")]
    return _ALIASES.get(close[0], close[0]) if len(close) == 1 else key


def _flat(cls: type[Node], place: _Place) -> list[str]:
    """Return the path that a key of the root spells with underscores, such as ``eval_delay_steps``
    for ``eval.delay_steps``; empty if there is none."""
    if place.path != place.key:
        return []
    flat = {path.replace(".", "_"): path for path in _paths(cls)}
    return [flat[name] for name in difflib.get_close_matches(place.path, flat, n=1, cutoff=0.85)]


def _paths(cls: type[Node], above: str = "") -> Iterator[str]:
    for name, field in cls.model_fields.items():
        yield above + name
        named = value_of(field.annotation) is not None  # its keys have no fixed path
        for node in () if named else nodes_in(field.annotation):
            yield from _paths(node, f"{above}{name}.")


def _unknown_kind(place: _Place, error: Any, advice: Advice) -> str:
    kinds = [kind for node in place.below for kind in kinds_of(node)]
    if error["type"] == "union_tag_invalid":
        tag = error["ctx"]["tag"]
        instead = (
            f". {replacement}" if (replacement := advice(f"={tag}") or advice(str(tag))) else ""
        )
        close = "" if instead else nearest(tag, kinds)
        return f"{place.path}: unknown kind {tag!r}{close}; kinds: {', '.join(kinds)}{instead}"
    options = ", ".join(k for k in error["input"] if k != "kind") if error["input"] else ""
    why = f" ({options} can only be set together with it)" if options else ""
    return f"{place.path}: kind is not set{why}; add kind, one of: {', '.join(kinds)}"


def _complaint(place: _Place, error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        allowed = type_words(place.annotation).removesuffix(", or null").split(" | ")
        if error["loc"][-1] == _OF_A_KEY:
            allowed = re.findall(r"'([^']*)'", context["expected"])
        return f"must be one of {', '.join(allowed)}{nearest(str(error['input']), allowed)}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return words.format(f"{context[bound]:g}")
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "too_short":
        return f"must have {context['min_length']} or more items"
    if kind == "too_long":
        return f"must have at most {context['max_length']} items"
    if kind == "finite_number":
        return "must be a finite number"
    in_list = bool(error["loc"]) and isinstance(error["loc"][-1], int)
    return f"must be {_with_article(item_of(place.annotation) if in_list else place.annotation)}"


def _with_article(annotation: Any) -> str:
    words = type_words(annotation)
    below = nodes_in(annotation)
    if len(below) == 1 and words.startswith("mapping"):
        if value_of(annotation) is not None:
            words = words.replace("mapping", "mapping of names to mappings", 1)
        words += f" (keys: {', '.join(list(below[0].model_fields)[:4])} ...)"
    return words if words.startswith(("true", "text", "anything")) else f"a {words}"
