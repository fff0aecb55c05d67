"""Single responses with scores or a class: recognized columns, targets, and broken rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from burnish.config import load_config
from burnish.config.job import WITHOUT_RULES
from burnish.data.batches import BatchStream, load_batch
from burnish.data.forms import open_rows
from burnish.data.rated.config import ClassesDataConfig, RatedDataConfig
from burnish.data.reader import reader_of
from burnish.data.sources import DataError

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]
BASE = {"prompt": "1+1=", "response": "2"}


def data_of(path: str, **options: Any) -> RatedDataConfig:
    """The data section of a recipe of the job rm, with its kind recognized."""
    data = {"sources": [path], **options}
    tree = {"job": "rm", "model": {"scratch": {}}, "train": {"train_batch_size": 2}, "data": data}
    section: Any = vars(load_config(tree))["data"]
    return section


@pytest.mark.parametrize(
    ("columns", "kind", "names"),
    [
        ({"score": 0.5}, "scores", ("score",)),
        ({"rating": 3}, "scores", ("rating",)),
        ({"verbosity": 1, "helpfulness": 4}, "scores", ("helpfulness", "verbosity")),
        ({"label": 0.25}, "scores", ("label",)),
        ({"label": True}, "classes", ("pass",)),
        ({"passed": 1}, "classes", ("pass",)),
        ({"passed": 1.0}, "classes", ("pass",)),
        ({"correct": "0.0"}, "classes", ("pass",)),
    ],
)
def test_the_target_is_recognized_and_named_in_the_batch_table(
    columns: dict[str, Any], kind: str, names: tuple[str, ...], jsonl: Jsonl
) -> None:
    data = data_of(jsonl([BASE | columns]))
    assert (data.kind_of_rows, data.names) == (kind, names)
    (line,) = data.form_lines()
    assert line[1].startswith(kind) and f"mapped ({', '.join(data.columns)})" in line[2]


def test_rows_become_batches_with_their_targets_and_a_stream_resumes(
    chars: Tok, jsonl: Jsonl
) -> None:
    rows = [BASE | {"score": k, "rating": -k, "grade": "xyz"[k]} for k in range(3)]
    path = jsonl(rows)
    scores = load_batch(data_of(path, score_keys=["rating", "score"]), chars)
    assert scores.labels is not None and scores.labels.tolist() == [[0, 0], [-1, 1], [-2, 2]]
    assert scores.rows_per_unit == 1
    bounds = list(pairwise(scores.offsets.tolist()))
    assert chars.decode(scores.tokens[slice(*bounds[0])].tolist()) == "<s>1+1=2<|im_end|>"
    classes = data_of(path, kind="classes", label_key="grade", classes=["z", "y", "x"])
    found = load_batch(classes, chars).labels
    assert found is not None and found.tolist() == [2, 1, 0]
    stream, other = (BatchStream(classes, chars, seed=1) for _ in range(2))
    stream.next(2)
    other.load_state_dict(stream.state_dict())
    after, again = stream.next(4).labels, other.next(4).labels
    assert after is not None and again is not None and after.tolist() == again.tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "1+1=", "output": "2", "rating": 1},
        {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]},
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
    ],
)
def test_public_forms_with_a_score_are_read(row: dict[str, Any], jsonl: Jsonl) -> None:
    data = data_of(jsonl([row | {"score": 1.0}] if "rating" not in row else [row]))
    assert data.kind_of_rows == "scores"
    (source,) = open_rows(data)
    values = source[0].values
    assert values["response"] == "2" and "1+1=" in str(values["prompt"])
    assert data.columns[0] in values


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"score": None},
            {"score_keys": ["score"]},
            r"rows\.jsonl:2.*\(score_keys\)",
        ),
        ({"score": "high"}, {"score_keys": ["score"]}, "'high'"),
        ({"score": 1e39}, {"score_keys": ["score"]}, r"rows\.jsonl:2"),
        ({"score": 10**400}, {"score_keys": ["score"]}, r"rows\.jsonl:2"),
        ({"score": True}, {"score_keys": ["score"]}, "contains True"),
        ({"ok": 0.5}, {"kind": "classes", "label_key": "ok"}, "contains 0.5"),
        (
            {"ok": 7},
            {"kind": "classes", "label_key": "ok", "classes": ["no", "yes"]},
            "data.classes",
        ),
        ({"score": 1, "prompt": ""}, {"score_keys": ["score"]}, "the prompt is empty"),
    ],
)
def test_broken_rows_are_errors_with_their_line(
    row: dict[str, Any], options: dict[str, Any], message: str, chars: Tok, jsonl: Jsonl
) -> None:
    good = BASE | {"score": 1.0, "ok": 1 if "classes" in options else True}
    with pytest.raises(DataError, match=message):
        load_batch(data_of(jsonl([good, BASE | row]), **options), chars)


def test_rows_without_a_known_label_are_no_second_fault(jsonl: Jsonl) -> None:
    """A rule reports that several columns, or none, are recognized."""
    for names in (("label", "class"), ("category",)):
        path = jsonl([BASE | dict.fromkeys(names, "pass")])
        data = ClassesDataConfig.model_validate(
            {"kind": "classes", "sources": [str(path)]}, context=WITHOUT_RULES
        )
        (source,) = open_rows(data)
        assert reader_of(data).contents(source[0])


@pytest.mark.parametrize(
    ("classes", "label", "index"),
    [
        ([1, 2, 3], 1, 0),
        ([1, 2, 3], "3", 2),
        ([1, 2, 3], 2.0, 1),
        ([1, 2, 3], 0, None),
        ([0, 2], 1, None),
        (["a", "1"], 0, None),
        (["a", "1"], 1, 1),
        (["a", "b"], 1, 1),
        (["a", "b"], 1.0, 1),
        (["a", "b"], 0.5, None),
        (["a", "b"], True, None),
        (["a", "b"], "1", None),
        (["False", "True"], True, 1),
        (None, 1.0, 1),
        (None, 0.0, 0),
        (None, "1.0", 1),
        ([0, 1], "1.0", 1),
        (["a", "b"], "1.0", None),
        (["1.0", "0.0"], "0.0", 1),
    ],
)
def test_an_integer_label_is_never_the_index_of_another_integer_class(
    classes: Any, label: Any, index: int | None, chars: Tok, jsonl: Jsonl
) -> None:
    options: dict[str, Any] = {"kind": "classes", "label_key": "grade", "classes": classes}
    data = data_of(jsonl([BASE | {"grade": label}]), **options)
    if index is None:
        with pytest.raises(DataError, match=r"grade.*a label is one of data.classes"):
            load_batch(data, chars)
    else:
        labels = load_batch(data, chars).labels
        assert labels is not None and labels.tolist() == [index]


def test_yes_and_no_of_yaml_are_no_names() -> None:
    with pytest.raises(ValidationError, match="in quotes"):
        ClassesDataConfig(sources=("a.jsonl",), kind="classes", classes=(True, False))
    names = ClassesDataConfig(sources=("a.jsonl",), kind="classes", classes=("yes", "no")).names
    assert names == ("yes", "no")


def test_score_keys_may_be_dotted_paths(chars: Tok, jsonl: Jsonl) -> None:
    """Into objects, and lists in JSON text; a column with that name comes first."""
    path = jsonl([BASE | {"of": {"helpful": 1, "all": json.dumps([2])}, "of.x": 3}])
    data = data_of(path, score_keys=["of.helpful", "of.all.0", "of.x"])
    assert data.broken_rules() == []
    labels = load_batch(data, chars).labels
    assert labels is not None
    assert labels.tolist() == [[1, 2, 3]]
    assert "of.y" in data.model_copy(update={"score_keys": ("of.y",)}).broken_rules()[0]
