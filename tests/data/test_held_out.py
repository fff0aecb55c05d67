"""Held-out rows: disjoint from the training rows, together all rows, the same for every seed."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import ConfigError, load_config
from burnish.config.passes import num_held_out
from burnish.data.batches import BatchStream, load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.forms import open_rows
from burnish.data.held_out import held_out_rows
from burnish.data.sources import DataError
from burnish.models.load import load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.preflight.launch import check_launch, num_shared_prompts
from burnish.types import Batch

MODEL = {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}}


def rows_file(folder: Path, size: int, name: str = "rows", first: int = 0) -> str:
    path = folder / f"{name}.jsonl"
    rows = [
        {"prompt": f"{i}=", "response": str(i), "chosen": str(i), "rejected": "7", "label": str(i)}
        for i in range(first, first + size)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe(job: str, path: str, **data: Any) -> dict[str, Any]:
    """A tree of ``job`` with ``data`` on one file; 4 rows per step."""
    tree: dict[str, Any] = {"job": job, "model": MODEL, "train": {"train_batch_size": 4}}
    if job == "rl":
        tree |= {"max_steps": 1, "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}}
        tree["rollout"]["generate_max_len"] = 4
    if job == "distill":
        tree["teacher"] = {"model": MODEL}
    return tree | {"data": {"sources": [path]} | data}


def where(data: Any) -> list[str]:
    return [source[i].where for source in open_rows(data) for i in range(len(source))]


def spans(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(batch.tokens[a:b].tolist()) for a, b in pairwise(batch.offsets.tolist())]


@pytest.mark.parametrize("job", ["sft", "rm", "preference", "distill", "rl"])
@pytest.mark.parametrize("held_out", [0.2, 5])
def test_the_parts_are_disjoint_and_together_all_rows(
    tmp_path: Path, job: str, held_out: float
) -> None:
    """12 of 30 rows (max_samples) and 11 rows: 0.2 of 23 is 4.6, so 5 rows, 3 and 2 of them."""
    sources = [
        {"path": rows_file(tmp_path, 30, "a"), "max_samples": 12, "weight": 3},
        {"path": rows_file(tmp_path, 11, "b", first=100)},
    ]
    tree = recipe(job, "") | {"data": {"sources": sources, "held_out": held_out}}
    config: Any = load_config(tree)
    assert load_config(tree | {"eval": {"data": {}}}) == config
    train, held = where(config.data), where(config.eval.data)
    assert len(train) == 18 and Counter("a.jsonl" in row for row in held) == {True: 3, False: 2}
    everything = where(config.data.model_copy(update={"held_out": None}))
    assert sorted([*train, *held]) == sorted(everything)
    assert ("rows held out", "5") in [line[:2] for line in config.launch_table()]
    dumped: Any = load_config(json.loads(config.model_dump_json()))  # as a resumed run reads it
    assert dumped == config


@pytest.mark.parametrize("mix", ["weight", "size"])
def test_two_epochs_with_any_seed_never_draw_a_held_out_row(tmp_path: Path, mix: str) -> None:
    tree = recipe("sft", rows_file(tmp_path, 20), held_out=0.25, mix=mix)
    config: Any = load_config(tree | {"max_epochs": 2, "seed": 1})
    tokenizer = load_tokenizer(config.model)
    held = set(spans(load_batch(config.eval.data, tokenizer)))
    assert len(held) == 5
    for seed in (0, 1, 2):
        stream = BatchStream(config.data, tokenizer, seed=seed)
        first = spans(stream.next(7))
        resumed = BatchStream(config.data, tokenizer, seed=seed)
        resumed.load_state_dict(stream.state_dict())
        rest = spans(resumed.next(23))
        assert rest == spans(stream.next(23))
        drawn = Counter([*first, *rest])
        assert set(drawn.values()) == {2} and len(drawn) == 15 and not held & set(drawn)
    changed = config.data.model_copy(update={"held_out": 0.5})
    with pytest.raises(DataError, match="had 15 rows when the run was saved but has 10"):
        BatchStream(changed, tokenizer, seed=2).load_state_dict(stream.state_dict())


def test_the_choice_is_proportional_and_a_larger_part_contains_a_smaller_one() -> None:
    """0.1 of 25 and 14 rows is 3.9: 4 rows, 2.6 and 1.4 of them, so 3 and 1."""
    assert num_held_out(0.1, [25, 14]) == [3, 1]
    assert num_held_out(7, [100, 50, 50]) == [3, 2, 2]  # 3.5, 1.75 and 1.75
    assert num_held_out(8, [2, 5, 5]) == [1, 4, 3]
    assert num_held_out(9, [2, 5, 5]) == [1, 4, 4]


def test_more_held_out_rows_contain_fewer() -> None:
    """Of each source, and never more than its rows."""
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.choice([1, 2, 5, 9, 40]) for _ in range(draw.randint(1, 5))]
        counts = [num_held_out(number, sizes) for number in range(1, sum(sizes))]
        assert [sum(count) for count in counts] == list(range(1, sum(sizes)))
        for fewer, more in pairwise([*counts, sizes]):
            assert all(a <= b for a, b in zip(fewer, more, strict=True)), (sizes, fewer, more)
    assert set(held_out_rows("a", 50, 3)) < set(held_out_rows("a", 50, 9))
    assert list(held_out_rows("a", 50, 9)) != list(held_out_rows("b", 50, 9))


def test_the_evaluation_section_may_change_other_keys(tmp_path: Path) -> None:
    tree = recipe("sft", rows_file(tmp_path, 20), held_out=0.2, max_len=64)
    config: Any = load_config(tree, ["eval.data.overlong=drop"])
    assert isinstance(config.eval.data, SFTDataConfig) and config.eval.data.max_len == 64
    assert (config.eval.data.overlong, config.data.overlong) == ("drop", "error")
    tree = recipe("rl", rows_file(tmp_path, 20), held_out=4) | {"eval": {"every_n_steps": 2}}
    config = load_config(tree)
    assert config.eval.every_n_steps == 2 and config.eval.data.part == "held_out"


def test_equal_prompts_in_both_parts_are_counted_as_a_warning(tmp_path: Path) -> None:
    """Rows 0 to 9 twice: every held-out row whose copy is not held out too is counted."""
    path = Path(rows_file(tmp_path, 10))
    path.write_text(path.read_text() * 2)
    config: Any = load_config(recipe("sft", str(path), held_out=0.2))
    prompts = [row % 10 for row in held_out_rows("rows", 20, 4)]
    shared = sum(prompts.count(prompt) == 1 for prompt in prompts)
    assert shared and num_shared_prompts(config.eval.data) == shared
    said: list[str] = []
    check_launch(config, say=said.append)
    assert any(
        f"eval.data: {shared} held-out rows have the prompt of a training" in s for s in said
    )


@pytest.mark.parametrize("job", ["sft", "rm", "rl"])
def test_runs_evaluate_their_held_out_rows(tmp_path: Path, job: str) -> None:
    tree = recipe(job, rows_file(tmp_path, 16), held_out=4) | {"run_dir": str(tmp_path / "run")}
    more = {"rewards": lambda response: float(len(response))} if job == "rl" else {}
    lines = read_metrics(burnish.run(load_config(tree), **more).run_dir)
    last = {"sft": 3, "rm": 3, "rl": 1}[job]  # 12 rows of 16, in steps of 4
    assert [line["step"] for line in lines if any(n.startswith("eval/") for n in line)] == [0, last]
    if job == "rl":
        assert lines[0]["eval/prompts"] == 4


@pytest.mark.parametrize(
    ("train", "other", "problem"),
    [
        ({"held_out": 4}, {"held_out": 8}, "eval.sets.more.held_out=8"),
        ({"held_out": 4}, {"held_out": 0.5}, "eval.sets.more.held_out=0.5"),
        ({"held_out": 4}, {"name": "b"}, "max_samples"),
        ({"held_out": 4}, {"max_samples": 10}, "max_samples"),
        ({"held_out": 4, "max_samples": 10}, {}, "max_samples"),
        ({}, {"name": "b"}, "data.held_out"),
    ],
)
def test_a_set_that_would_evaluate_trained_rows_is_refused(
    tmp_path: Path, train: dict[str, Any], other: dict[str, Any], problem: str
) -> None:
    path = rows_file(tmp_path, 20)

    def section(changes: dict[str, Any]) -> dict[str, Any]:
        source = {key: changes[key] for key in ("name", "max_samples") if key in changes}
        rest = {key: changes[key] for key in ("held_out",) if key in changes}
        return {"sources": [{"path": path} | source]} | rest

    tree = recipe("sft", path) | {"data": section(train)}
    held = {"held_out": 4, "part": "held_out"} | section(other)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    for place in (path, str(link)):  # the same file by another name
        source = held["sources"][0] | {"path": place, "name": other.get("name", "rows")}
        more = held | {"sources": [source]}
        tree["eval"] = {"sets": {"more": more}} | ({} if "held_out" in train else {"data": more})
        with pytest.raises(ConfigError, match=problem):
            load_config(tree)


def test_a_smaller_set_of_the_same_file_is_part_of_the_held_out_rows(tmp_path: Path) -> None:
    path = rows_file(tmp_path, 20)
    sets = {"few": {"sources": [path], "held_out": 2, "part": "held_out"}}
    config: Any = load_config(recipe("sft", path, held_out=4) | {"eval": {"sets": sets}})
    few = where(config.eval.sets["few"])
    assert len(few) == 2 and not set(few) & set(where(config.data))


@pytest.mark.parametrize("job", ["sft", "rm", "preference", "distill", "rl"])
def test_the_rows_of_eval_data_are_those_that_the_recipe_names(tmp_path: Path, job: str) -> None:
    """``data`` holds out 6 of two files with 20 rows each, so 3 of each."""
    a, b, other = (rows_file(tmp_path, 20, name) for name in ("a", "b", "other"))
    tree = recipe(job, a) | {"data": {"sources": [a, b], "held_out": 6}}

    def load(keys: dict[str, Any]) -> Any:
        return load_config(tree | {"eval": {"data": keys}})

    for keys, count in (
        ({}, 6),
        ({"held_out": 2}, 2),
        ({"sources": [b], "held_out": 3, "part": "held_out"}, 3),
        ({"sources": [a, b], "held_out": 6, "part": "held_out"}, 6),
    ):
        config = load(keys)
        rows = where(config.eval.data)
        assert len(rows) == count and not set(rows) & set(where(config.data))
    for keys, problem in (
        ({"held_out": 9}, "eval.data.held_out=9 would hold out other rows"),
        ({"held_out": None}, "part=held_out needs held_out"),
        ({"part": "train"}, "set eval.data.part=held_out, or remove held_out"),
        ({"part": "train", "held_out": None}, "part=train would evaluate trained rows"),
        ({"sources": [b]}, "part=train would evaluate trained rows"),
        ({"sources": [b], "held_out": 4, "part": "held_out"}, "eval.data.held_out=4"),
        ({"sources": [other], "held_out": 3, "part": "held_out"}, "both give rows"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load(keys)


def test_a_resolved_recipe_evaluates_the_rows_that_changed_data_hold_out(tmp_path: Path) -> None:
    path, other = rows_file(tmp_path, 20), rows_file(tmp_path, 10, "other")
    saved = json.loads(load_config(recipe("sft", path, held_out=5)).model_dump_json())
    for overrides in (
        ["data.held_out=8"],
        ["data.held_out=3"],
        [f"data.sources=[{other}]"],
        ["data.sources.0.max_samples=12", "eval.data.held_out=2"],
    ):
        config: Any = load_config(saved, overrides)
        assert config.eval.data.sources == config.data.sources
        named = "eval.data.held_out=2" in overrides
        assert config.eval.data.held_out == (2 if named else config.data.held_out)
    with pytest.raises(ConfigError, match=r"data.held_out is not set"):
        load_config(saved, ["data.held_out=null"])


def test_a_file_with_held_out_rows_is_not_trained_again_by_another_source(tmp_path: Path) -> None:
    path = rows_file(tmp_path, 20)
    twice = [path, {"path": path, "name": "again"}]
    with pytest.raises(ConfigError, match=r"data.sources\[1\]"):
        load_config(recipe("sft", path) | {"data": {"sources": twice, "held_out": 4}})
    ptx = {"ptx_coef": 0.1, "batch_size": 4, "data": {"sources": [path]}}
    with pytest.raises(ConfigError, match=r"ptx.data.sources\[0\]"):
        load_config(recipe("rl", path, held_out=4) | {"ptx": ptx})
