"""Streamed datasets: the order of their rows, exact resuming, and the recipes that refuse them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from burnish.config import load_config
from burnish.config.passes import total_rows
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptStream, load_prompts
from burnish.data.sources import DataError
from burnish.preflight import launch as validate

Tok = PreTrainedTokenizerFast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of 9 rows in two files."""
    path = tmp_path / "sums"
    path.mkdir()
    rows = [json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(9)]
    (path / "a.jsonl").write_text("".join(rows[:5]))
    (path / "b.jsonl").write_text("".join(rows[5:]))
    return path


def streamed(folder: Path, *others: Any, **more: Any) -> PromptDataConfig:
    own = {key: more.pop(key) for key in ("max_samples", "weight") if key in more}
    buffer = more.pop("shuffle_buffer", 4)
    source = {"kind": "dataset", "path": str(folder), "streaming": {"shuffle_buffer": buffer}}
    return PromptDataConfig(sources=(source | own, *others), **more)


def ids(stream: PromptStream, num: int) -> list[str]:
    return [prompt.id for prompt in stream.next(num)]


def test_rows_are_shuffled_within_blocks_and_each_occurs_once_per_epoch(
    folder: Path, chars: Tok
) -> None:
    """9 rows in blocks of 4: rows 0 to 3, 4 to 7, and 8."""
    assert ids(PromptStream(streamed(folder, shuffle=False), chars, seed=0), 11) == [
        *(f"sums:{i}@0" for i in range(9)),
        *("sums:0@1", "sums:1@1"),
    ]
    prompts = PromptStream(streamed(folder), chars, seed=0).next(27)
    assert all(p.text == f"{p.id.split(':')[1].split('@')[0]}+1=" for p in prompts)
    rows = [int(prompt.text.split("+")[0]) for prompt in prompts]
    for epoch in range(3):
        drawn = rows[9 * epoch : 9 * epoch + 9]
        assert (set(drawn[:4]), set(drawn[4:8]), drawn[8]) == ({0, 1, 2, 3}, {4, 5, 6, 7}, 8)
    assert len({tuple(rows[begin : begin + 4]) for begin in (0, 9, 18)}) > 1


@pytest.mark.parametrize("stop", [0, 3, 8, 18, 25])
@pytest.mark.parametrize("saved", [False, True], ids=["files", "save_to_disk"])
def test_an_interrupted_stream_gives_the_rows_of_one_that_was_not(
    folder: Path, chars: Tok, tmp_path: Path, stop: int, saved: bool
) -> None:
    """Two sources, of which one is streamed, and rows over the limit on the way."""
    if saved:
        rows = [json.loads(line) for file in sorted(folder.iterdir()) for line in file.open()]
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved" / "sums")
        folder = tmp_path / "saved" / "sums"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": "7" * n}) + "\n" for n in (2, 30, 3)))
    data = streamed(folder, str(other), weight=2.0, overlong="drop", prompt_max_len=9)
    whole = PromptStream(data, chars, seed=5)
    expected = ids(whole, stop + 14)
    found, state = [], PromptStream(data, chars, seed=5).state_dict()
    for part in (stop, 6, 8):  # resumed twice
        stream = PromptStream(data, chars, seed=5)
        stream.load_state_dict(json.loads(json.dumps(state)))
        found += ids(stream, part)
        state = stream.state_dict()
    assert found == expected
    assert stream.counts == whole.counts
    assert any("sums" in i for i in expected) and any("other" in i for i in expected)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("form", ["file", "two files", "streamed", "streamed, of known length"])
@pytest.mark.parametrize("unusable", [[], [0, 1], [4, 8], [2, 7, 8], [0, 3, 4, 6, 7, 8]])
def test_a_pass_ends_with_its_last_usable_row(
    folder: Path, chars: Tok, unusable: list[int], form: str, shuffle: bool
) -> None:
    """Also in blocks of 3, of which the last is full, and after a resume before each step."""
    long = {"prompt": "7" * 30, "label": "7"}
    lines = [line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    lines = [json.dumps(long) if i in unusable else line for i, line in enumerate(lines)]
    for name, part in (("a.jsonl", lines[:5]), ("b.jsonl", lines[5:])):
        (folder / name).write_text("\n".join(part))
    options = {"shuffle": shuffle, "overlong": "drop", "prompt_max_len": 9}
    if form == "two files":
        paths = tuple(str(folder / name) for name in ("a.jsonl", "b.jsonl"))
        data = PromptDataConfig(sources=paths, mix="size", **options)
    elif form == "file":
        data = PromptDataConfig(sources=(str(folder),), **options)
    else:
        known = {"max_samples": 9} if "known" in form else {}
        data = streamed(folder, shuffle_buffer=3, **known, **options)
    usable = 9 - len(unusable)
    stream, state = PromptStream(data, chars, seed=3), None
    for step in range(3 * usable):
        (prompt,) = stream.next(1)
        again = PromptStream(data, chars, seed=3)
        if state is not None:
            again.load_state_dict(state)
        assert again.next(1) == [prompt] and again.counts == stream.counts
        state = json.loads(json.dumps(stream.state_dict()))
        passes, rest = divmod(step + 1, usable)
        assert prompt.id.endswith(f"@{step // usable}")
        assert stream.counts["epoch"] == passes
        if not rest:
            assert stream.counts["prompts_dropped"] == passes * len(unusable)
    large = PromptStream(data, chars, seed=3)
    large.next(3 * usable)
    assert large.counts == stream.counts and large.state_dict() == stream.state_dict()


def test_a_row_that_no_step_needs_does_not_fail(folder: Path, chars: Tok) -> None:
    """Rows 2 and 3: one is left out, the other is an error when it is drawn."""
    bad = [{"prompt": "7" * 30, "label": "7"}, {"prompt": 3, "label": "3"}]
    good = (folder / "a.jsonl").read_text().splitlines()
    lines = [*good[:2], *map(json.dumps, bad), *good[2:]]
    (folder / "a.jsonl").write_text("\n".join(lines))
    stream = PromptStream(
        streamed(folder, shuffle=False, overlong="drop", prompt_max_len=9), chars, seed=0
    )
    assert ids(stream, 2) == ["sums:0@0", "sums:1@0"] and stream.counts["prompts_dropped"] == 1
    for _ in range(2):
        with pytest.raises(DataError, match="row 3"):
            stream.next(1)


def test_a_position_of_other_blocks_or_files_is_refused(folder: Path, chars: Tok) -> None:
    stream = PromptStream(streamed(folder), chars, seed=0)
    stream.next(3)
    state = stream.state_dict()
    for data, says in (
        (streamed(folder, shuffle_buffer=3), "had shuffle_buffer=4 .* but has 3 now"),
        (streamed(folder, max_samples=9), "had None rows when the run was saved but has 9 now"),
        (PromptDataConfig(sources=({"path": str(folder)},)), "was streamed when the run was saved"),
    ):
        with pytest.raises(DataError, match=says):
            PromptStream(data, chars, seed=0).load_state_dict(state)
    (folder / "c.jsonl").write_text((folder / "b.jsonl").read_text())
    with pytest.raises(DataError, match=r"had num_shards=2 .* but has 3 now"):
        PromptStream(streamed(folder), chars, seed=0).load_state_dict(state)


def test_max_samples_is_the_length_which_the_dataset_must_have(folder: Path, chars: Tok) -> None:
    data = streamed(folder, max_samples=6)
    stream = PromptStream(data, chars, seed=0)
    assert stream.num_rows == total_rows(data) == 6
    assert sorted(ids(stream, 12)) == sorted(f"sums:{i}@{e}" for e in (0, 1) for i in range(6))
    assert PromptStream(streamed(folder), chars, seed=0).num_rows is None
    with pytest.raises(DataError, match="max_samples=10"):
        PromptStream(streamed(folder, max_samples=10), chars, seed=0).next(9)
    with pytest.raises(DataError, match="streamed"):
        load_prompts(streamed(folder), chars)


def test_a_dataset_that_cannot_be_streamed_is_named_with_its_rows(folder: Path, chars: Tok) -> None:
    (folder / "b.jsonl").write_text('{"prompt": \n')
    stream = PromptStream(streamed(folder, shuffle=False), chars, seed=0)
    for _ in range(2):
        with pytest.raises(DataError, match=r"sums\[train\]"):
            stream.next(9)
    with pytest.raises(DataError, match="loaded: Bad"):
        source = {"kind": "dataset", "path": str(folder), "streaming": True, "split": "tets"}
        PromptStream(PromptDataConfig(sources=(source,)), chars, seed=0)


def sft(folder: Path, **more: Any) -> dict[str, Any]:
    source = {"kind": "dataset", "path": str(folder), "streaming": True}
    data = {"sources": [source], "response_key": "label"}
    base: dict[str, Any] = {"job": "sft", "model": {"scratch": {}}, "data": data}
    return base | {"train": {"train_batch_size": 4}, "max_steps": 3} | more


def test_a_check_of_a_recipe_reads_only_the_first_rows_and_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(validate, "HEAD_ROWS", 6)
    said: list[str] = []
    config = load_config(sft(folder))
    assert ("streamed rows", "?", f"{folder}: 1000 in memory") in config.launch_table()
    validate.check_launch(config, say=said.append)
    assert said == ["data: first 6 rows of each streamed source, 6 rows checked, no problems"]
    (folder / "b.jsonl").write_text('{"prompt": "1+1=", "label": null}\n')
    with pytest.raises(DataError, match=r"sums\[train\] row 5: "):
        validate.check_launch(load_config(sft(folder)), say=said.append)
