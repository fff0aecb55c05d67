"""Relations of rows: promised and trained rows, held-out parts, and forms of files."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from metamorphic.base import Draw, equal, relation

from burnish.config import load_config
from burnish.data.batches import BatchStream, load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.forms import open_rows
from burnish.models.load import load_tokenizer
from burnish.preflight.usable import usable_rows

MODEL = {"scratch": {"alphabet": "0123456789+=", "hidden_size": 16, "num_layers": 1}}


def _written(path: Path, rows: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(text)
    return str(path)


def _recipe(data: dict[str, Any], **more: Any) -> Any:
    tree = {"job": "sft", "model": MODEL, "train": {"train_batch_size": 3}, "data": data}
    return load_config(tree | more)


@relation
def planned_rows_are_trained(draw: Draw) -> None:
    """An epoch without drop_last trains each usable row exactly once. Exact: rows are counted."""
    rng, rows = draw.rng, list[dict[str, Any]]()
    num = draw.one(num=range(1, 9))
    for i in range(num):
        rows.append({"prompt": f"{i}=", "response": str(i)})
        rows += [{"prompt": "1=", "response": 3}] * rng.randint(0, 2)  # unusable
        rows += [{"prompt": "1" * 60, "response": "1"}] * rng.randint(0, 1)  # too long
    path = _written(draw.folder / "rows.jsonl", rows)
    epochs = draw.one(epochs=[1, 2, 3])
    data = {"sources": [path], "max_len": 32, "overlong": "drop", "on_bad_row": "skip"}
    config = _recipe(data, max_epochs=epochs, drop_last=False)
    stream = BatchStream(config.data, load_tokenizer(config.model), seed=rng.randrange(9))
    total = usable_rows(config, stream.num_rows).num_rows
    seen: Counter[str] = Counter()
    for step in range(1, config.steps_for(total) + 1):
        batch = stream.next(config.batch_size_at(step, total))
        ends = batch.offsets.tolist()
        spans = pairwise(ends)
        seen.update(str(batch.tokens[a:b].tolist()) for a, b in spans)
    equal(sorted(seen.values()), [epochs] * num, "times that each usable row is trained")


@relation
def held_out_rows_are_not_trained(draw: Draw) -> None:
    """No held-out part has a row of the training part of the same file, and it has the sources,
    number and part that the recipe sets, or the recipe is refused. Exact: places are compared."""
    rng = draw.rng
    rows = [{"prompt": f"{i}=", "response": str(i)} for i in range(rng.randint(6, 30))]
    path = _written(draw.folder / "rows.jsonl", rows)

    def section(**more: Any) -> dict[str, Any]:
        source: dict[str, Any] = {"path": path}
        source |= rng.choice([{}, {}, {"name": "b"}, {"max_samples": 5}])
        return {"sources": [source], "held_out": rng.choice([2, 3, 0.3]), **more}

    data, few = section(), section(part="held_out")
    others = {"sources": [_written(draw.folder / "other.jsonl", rows)]}
    keys = rng.choice([{}, {}, few, few | others, {"held_out": 2}, {"held_out": None}, others])
    draw.note(data=data, few=few, keys=keys)
    config = _recipe(data, eval={"data": keys, "sets": {"few": few}})
    written = SFTDataConfig.model_validate({**data, **keys}).model_dump(include=set(keys))
    equal(config.eval.data.model_dump(include=set(keys)), written, "keys of eval.data")
    trained, *held = (
        {source[i].where for source in open_rows(part) for i in range(len(source))}
        for part in (config.data, config.eval.data, config.eval.sets["few"])
    )
    equal([sorted(trained & part) for part in held], [[], []], "evaluated rows that are trained")


@relation
def forms_of_files_are_equal(draw: Draw) -> None:
    """The same rows in JSON lines, compressed lines, CSV and Parquet have the same ids. Exact."""
    rng = draw.rng
    rows = [
        {"prompt": f"{rng.randrange(99)}=", "response": str(rng.randrange(1, 99))}
        for _ in range(rng.randint(1, 6))
    ]
    draw.note(rows=rows)
    suffix = draw.one(suffix=["jsonl.gz", "csv", "parquet"])
    found = []
    for name in ("rows.jsonl", f"rows.{suffix}"):
        config = _recipe({"sources": [_written(draw.folder / name, rows)]})
        batch = load_batch(config.data, load_tokenizer(config.model))
        found.append((batch.tokens.tolist(), batch.offsets.tolist(), batch.action_mask.tolist()))
    equal(found[1], found[0], "rows of the file")
