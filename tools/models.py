"""Run every causal language model that transformers maps through the project: ``make models``.

``python tools/models.py [--types llama,gpt2] [--jobs 2]`` measures each row of ``families.py`` with
``family_cells.py``, in a separate process with a timeout. It writes docs/models.json after every
row and docs/models.md at the end. An interrupted run continues: rows measured by this code with
these versions are kept (``--fresh``: none). The exit code is 1 if a cell is wrong or failed."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from families import composite_names, config_of, model_type_of, names
from family_cells import CELLS, Cell, as_json, measure

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md"
PACKAGES = ("torch", "transformers", "peft")
TIME_LIMIT_S = 300
Row = dict[str, Any]
"""``{"cells": {name: cell}, "seconds": s, "code": digest of the code that measured it}``"""


def main(arguments: list[str]) -> int:
    """Measure and write. Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", help="rows to measure, separated by commas (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent processes")
    parser.add_argument("--fresh", action="store_true", help="measure existing rows again")
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder of the results")
    options = parser.parse_args(arguments)
    known = [*names(), *composite_names()]
    wanted = options.types.split(",") if options.types else known
    if unknown := sorted(set(wanted) - set(known)):
        print(
            f"unknown row {unknown[0]}; rows are model types, and variants of tools/families.yaml"
        )
        return 2
    store = Store(options.out / RESULTS.name, fresh=options.fresh)
    missing = [name for name in wanted if options.types or not store.has(name)]
    for number, (name, row) in enumerate(run_all(missing, options.jobs), 1):
        store.add(name, row)
        print(f"[{number}/{len(missing)}] {name}: {summary_of(row)}", flush=True)
    (options.out / PAGE.name).write_text(page(store.rows, store.versions), encoding="utf-8")
    bad = [name for name in wanted if defects(store.rows[name])]
    print(f"{len(wanted)} rows, {len(bad)} with a wrong or failed cell{': ' * bool(bad)}", end="")
    print(", ".join(bad))
    return 1 if bad else 0


class Store:
    """Results in a file, for one set of versions."""

    def __init__(self, file: Path, *, fresh: bool = False) -> None:
        self.file, self.versions = file, {name: version(name) for name in PACKAGES}
        self.rows: dict[str, Row] = {}
        self._fresh, self._code = fresh, code_digest()
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["versions"] == self.versions:
                self.rows = found["rows"]

    def has(self, name: str) -> bool:
        """Return whether this code measured the row already."""
        return not self._fresh and self.rows.get(name, {}).get("code") == self._code

    def add(self, name: str, row: Row) -> None:
        """Store a row and write the file."""
        self.rows[name] = {**row, "code": self._code}
        order = {known: i for i, known in enumerate([*names(), *composite_names()])}
        rows = dict(sorted(self.rows.items(), key=lambda item: order.get(item[0], len(order))))
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()]
        body = ",\n".join(lines)
        text = f'{{\n "versions": {json.dumps(self.versions)},\n "rows": {{\n{body}\n }}\n}}'
        partial = self.file.with_suffix(".tmp")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(self.file)


def code_digest() -> str:
    """Return a digest of everything in this repository that a result depends on."""
    files = [*ROOT.glob("burnish/**/*.py"), *ROOT.glob("tools/famil*")]
    content = [file.read_bytes() for file in sorted(files) if file.is_file()]
    return hashlib.sha256(b"".join(content)).hexdigest()[:16]


# ---- running -----------------------------------------------------------------------------------


@dataclass
class _Job:
    name: str
    process: BaseProcess
    folder: tempfile.TemporaryDirectory[str]
    started: float

    def result(self) -> Row | None:
        """Return the row once the process has ended or timed out, and None before."""
        seconds = time.monotonic() - self.started
        if self.process.is_alive() and seconds < TIME_LIMIT_S:
            return None
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        file = Path(self.folder.name) / "row.json"
        if file.is_file():
            row: Row = json.loads(file.read_text(encoding="utf-8"))
        else:
            code = self.process.exitcode
            why = (
                "no result within the time limit"
                if seconds >= TIME_LIMIT_S
                else f"exit code {code}"
            )
            row = {"cells": as_json({"load": Cell("failed", text=f"the process failed: {why}")})}
        self.folder.cleanup()
        return {**row, "seconds": round(seconds, 1)}


def run_all(wanted: Iterable[str], jobs: int) -> Iterator[tuple[str, Row]]:
    """Yield (name, row) as rows are finished, ``jobs`` at a time."""
    context, waiting = multiprocessing.get_context("fork"), list(wanted)
    running: list[_Job] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            name, folder = waiting.pop(0), tempfile.TemporaryDirectory()
            process = context.Process(target=_child, args=(name, folder.name))
            process.start()
            running.append(_Job(name, process, folder, time.monotonic()))
        multiprocessing.connection.wait([job.process.sentinel for job in running], timeout=1)
        finished = [(job, row) for job in running if (row := job.result()) is not None]
        running = [job for job in running if job not in [done for done, _ in finished]]
        for job, row in finished:
            yield job.name, row


def _child(name: str, folder: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    work = Path(folder) / "work"
    work.mkdir()
    os.environ["XDG_CACHE_HOME"] = folder  # earlier answers about a family are not read
    try:
        cells = measure(config_of(name), work)
    except Exception as error:  # of a default config that transformers itself does not accept
        text = f"transformers rejects its default config: {' '.join(str(error).split())[:200]}"
        cells = {"load": Cell("refused", text=text)}
    (Path(folder) / "row.json").write_text(json.dumps({"cells": as_json(cells)}), encoding="utf-8")


# ---- the page ----------------------------------------------------------------------------------


def defects(row: Row) -> list[str]:
    """Return the names of the cells that are wrong or failed."""
    return [name for name, cell in row["cells"].items() if cell["state"] in ("WRONG", "failed")]


def summary_of(row: Row) -> str:
    """Return one line for the terminal."""
    states = Counter(cell["state"] for cell in row["cells"].values())
    return ", ".join(f"{count} {state}" for state, count in states.items())


_WAY = "computed "
"""Prefix of notes of exact cells that are shown in the table."""
_TITLES = {
    "load": "load",
    "padded": "padded",
    "packed": "packed",
    "shared_prefix": "shared prefix",
    "greedy": "greedy",
    "sampled": "sampled",
    "lora": "LoRA",
    "checkpoint": "checkpoint",
    "export": "export",
    "reward_model": "reward model",
    "tensor_parallel": "tensor parallel",
    "bf16": "bf16",
    "fp16": "fp16",
    "experts": "experts",
}
_INTRODUCTION = """# Model families

This page shows which model families run through which code path of Burnish. For each causal-LM type
that transformers maps, one small random fp32 model runs on the CPU through every path. The type's
config is shrunk to one layer of each layer type (`burnish/models/shrink.py`). The reference is
transformers' own forward pass of each row alone.

Generated by `make models`; do not edit. Versions: {versions}.

{summary}

| column | comparison |
| --- | --- |
| load | logits of the model before saving and after loading |
| padded, packed, shared prefix | log-probs and gradients of each `train.layout`; "as padded": \
Burnish uses padded rows for this model |
| greedy | each token of the local engine is the arg max of the reference; "row by row" and \
"without a cache" are the sampling methods for this model |
| sampled | log-probs reported by the local engine |
| LoRA | log-probs with adapters and with merged weights |
| checkpoint | log-probs after save and load, bit for bit |
| export | every key, tensor and log-prob of the exported folder |
| reward model | scores after one step, and of the export used as a reward; "in Burnish's form": \
transformers has no classifier with these scores \
([rewards.md](rewards.md#exports-of-reward-models)) |
| tensor parallel | `plan`: the layers can be sharded over ranks |
| bf16, fp16 | median error of the log-probs of the train engine against fp32, at most twice \
that of transformers' own pass in the format; dtypes and bits of the weights after load, in the \
sampler and in the export, with the weights that stay in fp32 |
| experts | mixtures: the experts counted for every token are those whose weights compute it |

A number is the largest difference: in nats for log-probs, as a fraction of the largest entry for
gradients. `0` means bit-identical. A number in parentheses refers to a note below the table.

Every job checks its models in the same way before it loads them, on a small random copy of their
configs, and selects the fastest exact method: packed rows, then padded rows through transformers'
own attention; otherwise the model is refused. `burnish doctor MODEL` prints the result for one
model. Two rules follow from the config alone:

- Models with a rotary embedding that depends on the longest row of a batch (`longrope`, dynamic
  NTK) accept rows up to the length at which the embedding changes (Phi-3.5: 4096 tokens). A longer
  row would change the log-probs of the other rows.
- Local sampling row by row is slow; `rollout.engine.kind: vllm` samples most of these models with
  its own caches.
"""


_COMPOSITE = """## Text-only training of composite checkpoints

Checkpoints of text with images or sound that transformers maps as multimodal models, not as causal
language models. Burnish builds all parts and computes and trains the decoder and the output
projection, on text. The export has the layout of the checkpoint, with all other tensors and the
processor files unchanged. Images in rows are refused.

{summary}
"""


def page(rows: dict[str, Row], versions: dict[str, str]) -> str:
    """Return the text of docs/models.md."""
    notes: dict[str, int] = {}
    causal = {name: rows[name] for name in names() if name in rows}
    composite = {name: rows[name] for name in composite_names() if name in rows}
    named = ", ".join(f"{name} {release}" for name, release in versions.items())
    text = _INTRODUCTION.format(versions=named, summary=_summary(causal))
    lines = [text, *_table(causal, notes)]
    if composite:
        lines += ["", _COMPOSITE.format(summary=_summary(composite)), *_table(composite, notes)]
    reasons = [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join([*lines, "", "## Notes", "", *reasons, ""])


def _table(rows: dict[str, Row], notes: dict[str, int]) -> list[str]:
    lines = ["| model | " + " | ".join(_TITLES[name] for name in CELLS) + " |"]
    lines.append("| --- |" + " --- |" * len(CELLS))
    for name, row in rows.items():
        cells = row["cells"]
        shown = [_shown(cells.get(cell), model_type_of(name), notes) for cell in CELLS]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def _summary(rows: dict[str, Row]) -> str:
    loads = Counter(row["cells"]["load"]["state"] for row in rows.values())
    bad = [name for name, row in rows.items() if defects(row)]
    packed = padded = 0
    for row in rows.values():
        cell = row["cells"].get("shared_prefix", {"state": "not run"})
        if cell["state"] == "exact":
            packed, padded = packed + ("text" not in cell), padded + ("text" in cell)
    return textwrap.fill(
        f"{len(rows)} rows: {loads['exact']} load and {loads['refused']} are refused before their "
        f"weights are loaded. Packed rows are exact for {packed}; {padded} run as padded rows. "
        + (f"Rows with a wrong or failed cell: {', '.join(bad)}." if bad else "No cell is wrong."),
        width=100,
    )


def _shown(cell: Row | None, model_type: str, notes: dict[str, int]) -> str:
    if cell is None or cell["state"] == "not run":
        return ""
    state, found, text = cell["state"], cell.get("difference"), cell.get("text", "")
    text = text.replace("|", "\\|")
    if state == "rounded":
        return f"{found:.0e}" if found else "0"
    if state == "exact":
        shown = f"{found:.0e}" if found else "0"
        return f"{shown} {text.removeprefix('computed ')}" if text.startswith(_WAY) else shown
    if state == "plan":
        return "plan"
    if state == "WRONG" and found is not None:
        text = f"largest difference {found:.1e}. {text}".strip()
    number = notes.setdefault(_general(text, model_type), len(notes) + 1)
    return f"{state} ({number})"


def _general(text: str, model_type: str) -> str:
    """Return a note without model-specific names, so that models can share it."""
    text = re.sub(r"does not fit [\w-]+: ", "does not fit this model: ", text)
    text = text.removeprefix(f"{model_type} cannot be used: ").replace(f"{model_type}: ", "")
    text = re.sub(r"this [\w-]+ model( \(\w+\))?", "this model", text)
    text = re.sub(r" \(they differ by [^)]*\)", "", text)
    return re.sub(r" \(model_type='\w+'\)", "", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
