"""The table of refused recipes, and the messages that each gets when it is loaded.

    python tests/support/refusals.py          # write the messages of all cases again

``tests/config/refusals.txt`` is both the table and the snapshot. A case begins with ``$``, a base
recipe of ``BASES`` and overrides, quoted as in a shell. Loading it gives the lines below: ``-`` for
an error, ``~`` for a warning. A line with ``+`` has overrides of a way out: with them added, the
recipe loads. With those after ``/`` it loads if they are instead of the last override of the case.
To add a case, write its ``$`` line, run the command, and read the difference as a user
would read the messages."""

from __future__ import annotations

import json
import logging
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config import ConfigError, load_config

TABLE = Path(__file__).parents[1] / "config" / "refusals.txt"

_MODEL: dict[str, Any] = {"scratch": {}}
_PAIRS = {
    "job": "rm",
    "model": _MODEL,
    "data": {"sources": ["pairs.jsonl"]},
    "train": {"train_batch_size": 8},
}
BASES: dict[str, dict[str, Any]] = {
    "rl": {
        "job": "rl",
        "model": _MODEL,
        "max_steps": 3,
        "data": {"sources": ["prompts.jsonl"]},
        "rollout": {"rollout_batch_size": 8, "n_samples_per_prompt": 8},
        "train": {"train_batch_size": 64},
    },
    "sft": {
        "job": "sft",
        "model": _MODEL,
        "data": {"sources": ["demos.jsonl"]},
        "train": {"train_batch_size": 8},
    },
    "rm": _PAIRS,
    "preference": {**_PAIRS, "job": "preference"},
    "steps": {**_PAIRS, "data": {"kind": "steps", "sources": ["steps.jsonl"]}},
    "distill": {
        "job": "distill",
        "model": _MODEL,
        "teacher": {"model": _MODEL},
        "data": {"sources": ["demos.jsonl"]},
        "train": {"train_batch_size": 8},
    },
    "evaluate": {
        "job": "evaluate",
        "model": _MODEL,
        "eval": {"data": {"sources": ["prompts.jsonl"]}, "generate_max_len": 8},
    },
    "generate": {
        "job": "generate",
        "model": _MODEL,
        "data": {"sources": ["prompts.jsonl"]},
    },
    "score": {"job": "score", "model": _MODEL, "data": {"sources": ["pairs.jsonl"]}},
}
"""A small valid recipe for each job, to break."""
_CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
_ROW = {"prompt": "1+1=", "response": "2"}
FILES: dict[str, list[Any]] = {
    "rows.jsonl": [{**_ROW, "chosen": "2", "rejected": "7", "label": "2"}] * 20,
    "responses.jsonl": [_ROW],
    "unscored.jsonl": [{**_ROW, "score": None}],
    "liked.jsonl": [{**_ROW, "liked": True}],
    "margins.jsonl": [{"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 1}],
    "solutions.jsonl": [{"prompt": "1+1=", "completions": ["2"], "labels": [True]}],
    "levels.jsonl": [{"prompt": "1+1=", "label": "2", "level": "easy"}],
    "grades.jsonl": [{**_ROW, "grade": "a"}],
    "numbers.jsonl": [{**_ROW, "label": 1}],
    "scores.jsonl": [{**_ROW, "score": 0.5}],
    "scores_and_labels.jsonl": [{**_ROW, "score": 0.5, "label": "good"}],
    "scores_and_ratings.jsonl": [{**_ROW, "score": 0.5, "rating": 2}],
    "text.jsonl": [{"text": "1+1=2"}],
    "chat.jsonl": [{"messages": _CHAT}],
    "everything.jsonl": [{**_ROW, "messages": _CHAT, "text": "no"}],
    "set/train.jsonl": [{"prompt": "1+1=", "label": "2"}] * 2,
    "set/test.jsonl": [{"prompt": "2+2=", "label": "4"}] * 2,
    "parts/train.jsonl": [_ROW],
    "parts/more.jsonl": [_ROW],
    "parts/test.jsonl": [_ROW],
    "adapters/list/adapter_config.json": [[]],
    "adapters/empty/adapter_config.json": [{"peft_type": "LORA"}],
    "adapters/ia3/adapter_config.json": [{"peft_type": "IA3"}],
    "adapters/rank8/adapter_config.json": [
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    ],
}
"""Rows of the files in the folder of the cases; others that a case names do not exist."""


MARKS = ("-", "~", "+", "/")


@dataclass
class Case:
    """One recipe of the table."""

    base: str
    overrides: list[str]
    messages: list[str] = field(default_factory=list)
    ways_out: list[tuple[str, list[str]]] = field(default_factory=list)
    """(mark, overrides)"""

    def load(self) -> list[str]:
        """Return the messages of loading the case, in the working folder."""
        try:
            config = load_config(BASES[self.base], self.overrides)
        except ConfigError as error:
            return [f"- {line}" for line in error.problems or [str(error)]]
        return [f"~ {line}" for line in config.warnings()]

    def recipes_of_ways_out(self) -> Iterator[list[str]]:
        """Yield the overrides with which the base loads."""
        for mark, overrides in self.ways_out:
            yield [*(self.overrides if mark == "+" else self.overrides[:-1]), *overrides]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the case in the table."""
        yield " ".join(["$", self.base, *map(_quoted, self.overrides)])
        yield from (f"  {message}" for message in self.messages)
        for mark, overrides in self.ways_out:
            yield " ".join([" ", mark, *map(_quoted, overrides)])


def _quoted(word: str) -> str:
    """Return a word as a shell reads it, with double quotes if it has single ones."""
    if "'" in word and not set(word) & set('"$`\\!'):
        return f'"{word}"'
    return shlex.quote(word)


def read(text: str) -> Iterator[str | Case]:
    """Yield the cases of a table, and its other lines (headings) as they are."""
    case: Case | None = None
    for line in text.splitlines():
        mark, _, rest = line.strip().partition(" ")
        if mark in MARKS and case is not None:
            if mark in "+/":
                case.ways_out.append((mark, shlex.split(rest)))
            else:
                case.messages.append(line.strip())
            continue
        if case is not None:
            yield case
            case = None
        if mark == "$":
            base, *overrides = shlex.split(rest)
            case = Case(base, overrides)
        else:
            yield line
    if case is not None:
        yield case


def cases() -> list[Case]:
    """Return the cases of the table."""
    return [item for item in read(TABLE.read_text(encoding="utf-8")) if isinstance(item, Case)]


def write_files(folder: Path) -> None:
    """Write ``FILES`` to ``folder``."""
    for name, rows in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def with_messages() -> str:
    """Return the text of the table with the messages of now. Loads the cases in the working
    folder, which needs the files of :func:`write_files`."""
    items = list(read(TABLE.read_text(encoding="utf-8")))
    for item in items:
        if isinstance(item, Case):
            item.messages = item.load()
    lines = [
        line for item in items for line in (item.lines() if isinstance(item, Case) else [item])
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the messages of the table again."""
    logging.getLogger("burnish").addHandler(logging.NullHandler())  # instead of on stderr
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_files(Path())
        text = with_messages()
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
