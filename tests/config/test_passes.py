"""The batch table says how often each row is seen, and ``drop_last: false`` sees each equally
often."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from burnish.config import ConfigError, JobConfig, load_config
from burnish.data.batches import BatchStream
from burnish.models.load import load_tokenizer


def data_file(folder: Path, name: str, size: int) -> str:
    path = folder / name
    rows = [
        {"prompt": f"{i}+{i}", "response": str(i), "chosen": "1", "rejected": "2"}
        for i in range(size)
    ]
    if path.suffix == ".csv":
        path.write_text("prompt,response\n" + "".join(f"{i}+1,{i}\n" for i in range(size)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path)


def sft(sources: list[Any], batch: int, **options: Any) -> JobConfig:
    data = {"sources": sources, **options.pop("data", {})}
    recipe = {"job": "sft", "model": {"scratch": {}}, "train": {"train_batch_size": batch}}
    return load_config(recipe | {"data": data} | options)


def lines(config: JobConfig) -> dict[str, tuple[str, str]]:
    return {name: (value, how) for name, value, how in config.launch_table()}


def rl(source: Any, **options: Any) -> JobConfig:
    recipe = {"job": "rl", "model": {"scratch": {}}, "train": {"train_batch_size": 4}}
    rollout = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "generate_max_len": 4}
    return load_config(recipe | {"data": {"sources": [source]}, "rollout": rollout} | options)


def test_steps_of_rl_follow_from_epochs_over_prompts(tmp_path: Path) -> None:
    """3 passes over 10 prompts, 4 at a time: 30 // 4 = 7 steps draw 28."""
    table = lines(rl(data_file(tmp_path, "a.jsonl", 10), max_epochs=3))
    assert table["max_steps"] == ("7", "max_epochs=3 x 10 prompts / 4")
    assert table["rows drawn"][:1] == ("28",)
    few = lines(rl(data_file(tmp_path, "b.jsonl", 3), max_epochs=1))
    assert few["max_steps"][0] == "1"


def test_prompts_that_only_the_run_can_count_are_not_read(tmp_path: Path) -> None:
    table = lines(rl({"kind": "dataset", "path": str(tmp_path / "absent")}, max_epochs=3))
    assert table["max_steps"] == ("?", "max_epochs=3 x prompts / 4, counted when the run starts")


def test_frozen_steps_are_compared_with_the_derived_steps(tmp_path: Path) -> None:
    """2 passes over 10 prompts are 5 steps."""
    ppo = {"algorithm": {"advantage": "gae"}, "critic": {"freeze_policy_steps": 5}}
    source = data_file(tmp_path, "a.jsonl", 10)
    rl(source, max_epochs=3, **ppo)
    with pytest.raises(ConfigError, match="with max_steps=5: the policy would never"):
        rl(source, max_epochs=2, **ppo)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize(
    ("size", "batch", "options", "says"),
    [
        (10, 4, {}, "2 steps: 0.80 passes; 2 rows are never drawn"),
        (10, 4, {"drop_last": False}, "3 steps: each row once"),
        (3, 8, {}, "1 step: 2.67 passes; 2 rows 3 times, the others twice"),
        (3, 8, {"drop_last": False}, "1 step: each row once"),
        (10, 4, {"max_epochs": 2}, "5 steps: each row twice"),
        (10, 4, {"max_epochs": 2, "max_steps": 1}, "1 step: 0.40 passes; 6 rows are never"),
    ],
)
def test_unseen_and_repeated_rows_are_reported(
    tmp_path: Path, name: str, size: int, batch: int, options: dict[str, Any], says: str
) -> None:
    table = lines(sft([data_file(tmp_path, name, size)], batch, **options))
    assert table["rows of data (N)"][0] == str(size)
    assert table["rows drawn"][1].startswith(says)


def test_sources_of_different_sizes_are_reported_with_their_passes(tmp_path: Path) -> None:
    """100 draws, half from each: 5 passes over 10 rows and half a pass over 100."""
    sources: list[Any] = [data_file(tmp_path, f"{n}.jsonl", k) for n, k in (("a", 10), ("b", 100))]
    table = lines(sft(sources, 10, max_steps=10))
    assert table["rows of data (N)"] == ("110", "a 10; b 100")
    assert table["rows drawn"][1].startswith("10 steps: about a 5.00, b 0.50 passes by weight")
    by_size = lines(sft(sources, 10, data={"mix": "size"}))
    assert by_size["rows drawn"] == ("110", "11 steps: each row once")


def test_pairs_split_for_kto_count_twice(tmp_path: Path) -> None:
    recipe = {"job": "preference", "model": {"scratch": {}}, "train": {"train_batch_size": 4}}
    data = {"sources": [data_file(tmp_path, "a.jsonl", 6)]}
    table = lines(load_config(recipe | {"data": data, "loss": "kto"}))
    assert (table["rows of data (N)"][0], table["rows drawn"][0]) == ("12", "12")


def test_prompts_of_rl_are_reported_in_passes(tmp_path: Path) -> None:
    recipe = {"job": "rl", "model": {"scratch": {}}, "train": {"train_batch_size": 8}}
    recipe |= {"rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2}, "max_steps": 6}
    data = {"sources": [data_file(tmp_path, "a.jsonl", 10)]}
    table = lines(load_config(recipe | {"data": data}))
    assert table["rows drawn"] == (
        "24",
        "6 steps: 2.40 passes; 4 rows 3 times, the others twice",
    )


def test_data_of_unknown_size_has_no_passes(tmp_path: Path) -> None:
    known = data_file(tmp_path, "a.jsonl", 3)
    for other in (str(tmp_path / "none.jsonl"), {"kind": "dataset", "path": "some/set"}):
        assert "rows drawn" not in lines(sft([known, other], 2))


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("sizes", [[10], [3, 8]])
def test_without_drop_last_every_row_is_drawn_exactly_once_per_epoch(
    tmp_path: Path, sizes: list[int], epochs: int
) -> None:
    sources: list[Any] = [data_file(tmp_path, f"{i}.jsonl", k) for i, k in enumerate(sizes)]
    config: Any = sft(sources, 4, drop_last=False, max_epochs=epochs, data={"mix": "size"})
    stream = BatchStream(config.data, load_tokenizer(config.model), seed=0)
    seen: Counter[str] = Counter()
    steps = config.steps_for(stream.num_rows)
    for step in range(1, steps + 1):
        batch = stream.next(config.batch_size_at(step, stream.num_rows))
        seen.update(str(batch.tokens[a:b].tolist()) for a, b in batch_spans(batch))
        assert step == steps or batch.num_rows == 4
    assert sum(seen.values()) == epochs * sum(sizes) and stream.counts["epoch"] == epochs


def batch_spans(batch: Any) -> list[tuple[int, int]]:
    ends = batch.offsets.tolist()
    return list(pairwise(ends))


def test_kto_has_no_partial_batch() -> None:
    recipe = {"job": "preference", "model": {"scratch": {}}, "train": {"train_batch_size": 4}}
    with pytest.raises(ConfigError, match="drop_last=false with loss=kto"):
        load_config(recipe | {"data": {"sources": ["a"]}, "loss": "kto", "drop_last": False})
