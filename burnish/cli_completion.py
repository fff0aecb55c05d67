"""Completion of the arguments of a job: keys of the recipe. The shell completes files, typer the
commands and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import typer
from pydantic.fields import FieldInfo

from burnish.config import JOBS
from burnish.config.base import Node
from burnish.config.docs import default_text
from burnish.config.schema import is_list, nodes_in, type_words, value_of
from burnish.config.shipped import existing_path


def complete_key(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the keys that continue ``incomplete``, one level of the recipe at a time, each with
    its default. Return [] for the recipe, the first argument: the shell then completes files."""
    words = ctx.params.get("arguments") or []
    resumes = any(ctx.params.get(option) for option in ("resume", "replay"))
    job = _job_of(ctx.info_name or "", words)
    if job is None or not (words or resumes) or "=" in incomplete:
        return []
    return _continuing(job, incomplete)


def _continuing(job: str, incomplete: str) -> list[tuple[str, str]]:
    section, _, name = incomplete.rpartition(".")
    above = f"{section}." * bool(section)
    fields = {key: field for key, field in _fields(job, section) if key.startswith(name)}
    keys = [item for key, field in fields.items() for item in _candidates(above + key, field)]
    is_section = len(keys) == 1 and keys[0][0].endswith(".")
    return _continuing(job, keys[0][0]) if is_section else keys  # bash adds a space to a single one


def _candidates(path: str, field: FieldInfo) -> Iterator[tuple[str, str]]:
    """Yield ``train.lr=`` for a key with a value, and ``train.fp16.`` for one with keys below."""
    kind = type_words(field.annotation)
    if kind != "mapping":
        yield f"{path}=", default_text(field)
    if nodes_in(field.annotation) and value_of(field.annotation) is None:
        yield f"{path}.{'0.' * is_list(field.annotation)}", kind


def _fields(job: str, section: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of a section (``train``; "" is the root) of all its kinds."""
    nodes: list[type[Node]] = [JOBS[job]]
    needs_number = False
    for part in section.split(".") if section else ():
        if needs_number and part.isdigit():
            needs_number = False
            continue
        fields = [node.model_fields[part] for node in nodes if part in node.model_fields]
        nodes = [node for field in fields for node in nodes_in(field.annotation)]
        needs_number = any(is_list(field.annotation) for field in fields)
    if not needs_number:
        yield from (item for node in nodes for item in node.model_fields.items())


def _job_of(command: str, words: list[str]) -> str | None:
    """Return the job of a command; for ``check`` and ``plan`` that of the recipe, None if it
    cannot be read."""
    if command in JOBS:
        return command
    try:
        text = existing_path(Path(words[0])).read_text(encoding="utf-8") if words else ""
    except (OSError, ValueError):
        return None
    job = re.search(r"^job: *(\w+)", text, re.MULTILINE)
    return job[1] if job and job[1] in JOBS else None
