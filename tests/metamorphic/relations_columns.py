"""Relations of columns whose values have several forms, of the names of columns, and of the files
in an adapter's folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from metamorphic.base import Draw, Refused, equal, relation
from metamorphic.draw_text import KINDS, text_of, tokenizer_of, write_rows

from burnish.config.model import ModelConfig
from burnish.data.batches import load_batch
from burnish.data.chat import encode_prompt
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import load_prompts
from burnish.data.rated.config import ScoresDataConfig
from burnish.data.sources import DataError
from burnish.episodes import runner
from burnish.models.load import load_tokenizer
from burnish.types import Prompt

QUESTION = [{"role": "user", "content": "ab cd?"}]


def _prompts(source: Any) -> list[Prompt]:
    config = PromptDataConfig.model_validate({"sources": [source], "label_key": "label"})
    tokenizer = load_tokenizer(ModelConfig.model_validate({"scratch": {}}))
    return list(load_prompts(config, tokenizer))


@relation
def class_labels_are_their_names(draw: Draw) -> None:
    """A data set whose labels are a ``ClassLabel``, saved as a folder or as Parquet, alone or
    inside of an object, has the prompts of JSON lines with the names. Exact."""
    try:
        import datasets
    except ImportError as error:
        raise Refused("the library datasets is missing") from error
    names = draw.rng.sample(["pass", "fail", "A", "7", "no answer"], draw.rng.randint(1, 4))
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}=", "label": draw.rng.choice(names), "more": {"kind": names[0]}}
        for i in range(draw.rng.randint(1, 5))
    ]
    form = draw.one(form=["folder", "parquet"])
    draw.note(names=names, rows=rows)
    expected = _prompts(write_rows(draw, rows))
    label = datasets.ClassLabel(names=names)
    features = {"prompt": datasets.Value("string"), "label": label, "more": {"kind": label}}
    saved = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    path = str(draw.folder / ("saved" if form == "folder" else "rows.parquet"))
    datasets.disable_progress_bars()
    if form == "folder":
        saved.save_to_disk(path)
    else:
        saved.to_parquet(path)
    found = _prompts({"kind": "dataset", "path": path} if form == "folder" else path)
    equal([p.label for p in found], [p.label for p in expected], "labels")
    equal([p.metadata["more"] for p in found], [p.metadata["more"] for p in expected], "objects")


@relation
def seeds_have_one_value_in_all_files(draw: Draw) -> None:
    """The seed of a row is the same number as an integer, a text, a float of JSON and a cell of
    CSV. Exact."""
    seeds = [draw.rng.randrange(-9, 2**40) for _ in range(draw.rng.randint(1, 5))]
    rows = [{"prompt": f"{i}=", "label": "1", "seed": seed} for i, seed in enumerate(seeds)]
    form = draw.one(form=["text", "float", "csv"])
    draw.note(seeds=seeds)
    if form == "csv":
        path = str(draw.folder / "rows.csv")
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        make = str if form == "text" else float
        path = write_rows(draw, [row | {"seed": make(row["seed"])} for row in rows])
    found = [runner.integer_seed(prompt.metadata.get("seed")) for prompt in _prompts(path)]
    equal(found, seeds, "seeds of the rows")


@relation
def files_of_an_adapter_are_settings(draw: Draw) -> None:
    """A tokenizer, or a chat template alone, in the folder of an adapter gives the prompts of the
    same as ``tokenizer_path`` or ``chat_template``. Exact."""
    base, adapter = draw.folder / "base", draw.folder / "adapter"
    tokenizer_of(draw, [kind for kind in KINDS if kind != "wordpiece"]).save_pretrained(base)
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}" + draw.one(end=["", "a", "b"])
    expected: dict[str, Any] = {"path": str(base)}
    if draw.one(files=["tokenizer", "template"]) == "tokenizer":
        own = tokenizer_of(draw)
        own.chat_template = template
        own.save_pretrained(adapter)
        expected["tokenizer_path"] = str(adapter)
    else:
        (adapter / "chat_template.jinja").write_text(template)
        expected["chat_template"] = template
    trees = [{"path": str(base), "lora": {"path": str(adapter)}}, expected]
    found = [load_tokenizer(ModelConfig.model_validate(tree)) for tree in trees]
    equal(*(encode_prompt(t, QUESTION) for t in found), "the prompt")
    equal(*(t.eos_token for t in found), "the end token")


@relation
def names_of_columns_change_no_row(draw: Draw) -> None:
    """Rows of pairs, rated responses and demonstrations have the same tokens if their columns have
    other names, or are in an object that dotted paths name. Columns about a response (why it ended,
    its token ids) keep their names, or follow that of the response. Exact."""
    tokenizer = tokenizer_of(draw)
    kind, columns = draw.one(kind=list(_KINDS.items()))[1]
    row: dict[str, Any] = {"prompt": QUESTION if draw.one(chat=[True, False]) else "ab: "}
    options = {}
    for name in columns:
        text = text_of(draw, plain=True)
        row[name] = float(len(text)) if name == "score" else text
        if name == "score":
            continue
        if draw.rng.random() < 0.6:
            row[f"{name}_finish_reason"] = draw.rng.choice(["stop", "length"])
        if draw.rng.random() < 0.4:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            row[f"{name}_tokens"] = [*ids, tokenizer.eos_token_id]
    if draw.rng.random() < 0.3:
        row["finish_reason"] = draw.rng.choice(["stop", "length"])
    given = {"kind": "scores", "score_keys": ["score"]} if "score" in columns else {}
    found = []
    for renamed in (False, True):
        other = dict(row)
        for name in ("prompt", *columns) if renamed else ():
            key = "score_keys" if name == "score" else f"{name}_key"
            change = draw.rng.choice(["none", "name", "path", "name of all"])
            if change == "none" or (change == "name of all" and name in ("prompt", "score")):
                continue
            new = f"in.{name}x" if change == "path" else f"{name}x"
            if change == "path":
                other.setdefault("in", {})[f"{name}x"] = other.pop(name)
            else:
                other[new] = other.pop(name)
            options[key] = [new] if name == "score" else new
            if change == "name of all":
                about = [column for column in other if column.startswith(f"{name}_")]
                other |= {f"{new}{c.removeprefix(name)}": other.pop(c) for c in about}
        draw.note(row=row, other=other, options=options)
        path = write_rows(draw, [other], f"{renamed}.jsonl")
        config = kind.model_validate({"sources": [path], **given, **options})
        found.append(_outcome(config, tokenizer))
    equal(found[1], found[0], "rows with other names")


_KINDS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "pairs": (PreferenceDataConfig, ("chosen", "rejected")),
    "scores": (ScoresDataConfig, ("response", "score")),
    "demonstrations": (SFTDataConfig, ("response",)),
}
"""Kind of data, and the columns of its rows besides the prompt."""


def _outcome(config: Any, tokenizer: Any) -> Any:
    """Tokens, mask and targets of the rows. Of an error: its kind, because it names columns."""
    try:
        batch = load_batch(config, tokenizer)
    except DataError as error:
        return type(error)
    labels = None if batch.labels is None else batch.labels.tolist()
    return batch.tokens.tolist(), batch.action_mask.tolist(), batch.offsets.tolist(), labels
