"""The report shows an episode as its conversation, within limits, and all of it stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_page import HOSTILE, PAYLOADS, Page, samples_of

from burnish.observe.samples import SCHEMA, episode_record, write_samples
from burnish.report.build import build_report
from burnish.report.samples import MAX_EPISODE_CHARS, embed_samples
from burnish.transcript import Episode, Turn
from burnish.types import Group, Prompt, Sample, TokenRow

TOOL = {"type": "function", "function": {"name": "add", "description": "Add two numbers."}}


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def _turn(text: str = "ok", **changes: Any) -> Turn:
    answer = ({"role": "user", "content": f"answer to {text}"},)
    given = {"message": {"role": "assistant", "content": text}, "answer": answer, "num_tokens": 2}
    return Turn(**(given | changes))


def _sample(episode: Episode | None, number: int = 0, turns: tuple[int, ...] = ()) -> Sample:
    ids = (1, 2, 3)
    return Sample(
        f"p/{number}", "p", 0, (7,), ids, (0.0,) * 3, (True,) * 3, (0,) * 3, "last", "stop", 0.5,
        turns=turns, episode=episode,
    )  # fmt: skip


def _write(run_dir: Path, *samples: Sample) -> None:
    write_samples(run_dir, 1, [Group(0, Prompt("p", (7,), "task"), samples)], None, limit=8)


def _data(run_dir: Path) -> tuple[dict[str, Any], str]:
    found = embed_samples(run_dir)
    assert found is not None
    return samples_of(found.json), found.note


def test_tools_of_every_turn_are_shown_once(tmp_path: Path) -> None:
    """A planner without tools, two sub-agents with tools."""
    other = {"type": "function", "function": {"name": "sub"}}
    turns = (
        _turn(),
        _turn(prompt=(), tools=(TOOL, other)),
        _turn(),
        _turn(prompt=(), tools=(TOOL,)),
    )
    sample = _sample(Episode("done", (), (), turns))
    _write(tmp_path, sample)
    assert [tool["name"] for tool in _data(tmp_path)[0]["openings"][0]["tools"]] == ["add", "sub"]
    record = episode_record(sample)["turns"]
    assert [turn.get("tools") for turn in record] == [None, ["add", "sub"], None, ["add"]]


def test_an_episode_has_its_messages_calls_numbers_and_rows(tmp_path: Path) -> None:
    """Turn 0 calls a tool and is in the earlier row; turn 1 is in the last one."""
    call = _turn(
        "",
        message={
            "role": "assistant", "content": None, "reasoning_content": "I add.",
            "tool_calls": [_call("add", {"a": 1, "b": "é"})],
        },
        answer=({"role": "tool", "name": "add", "tool_call_id": "1", "content": "3"},),
        counts={"tool_calls": 1.0}, num_prompt_tokens=9, engine_s=0.5, environment_s=0.25,
    )  # fmt: skip
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    end = _turn("3", answer=(), rewards={"right": 1.0}, cached_tokens=8, problem="not closed")
    start = ({"role": "user", "content": blocks},)
    sample = _sample(Episode("done", start, (TOOL,), (call, end), 1.5), turns=(-1, 1, 1))
    earlier = TokenRow((7,), (5,), (0.0,), (True,), (0,), (0,))
    both = (
        Sample(**{**vars(sample), "sample_id": f"p/{i}", "earlier_rows": (earlier,)}) for i in "ab"
    )
    _write(tmp_path, *both)
    data, note = _data(tmp_path)
    assert note == "" and len(data["openings"]) == 1  # shared by the group
    (tool,) = data["openings"][0]["tools"]
    assert tool["name"] == "add" and "Add two numbers." in tool["schema"]
    assert data["openings"][0]["messages"] == [{"role": "user", "text": "one\ntwo"}]
    episode = data["rows"][1]["episode"]
    assert (episode["status"], episode["seconds"]) == ("done", 1.5)
    assert (episode["num_turns"], episode["num_rows"], episode["opening"]) == (2, 2, 0)
    first, second = episode["turns"]
    assert first["message"] == {
        "role": "assistant",
        "text": "",
        "reasoning": "I add.",
        "calls": [{"name": "add", "arguments": '{\n "a": 1,\n "b": "é"\n}'}],
    }
    assert first["answer"] == [{"role": "tool", "text": "3", "name": "add"}]
    assert (first["counts"], first["prompt_tokens"]) == ({"tool_calls": 1.0}, 9)
    assert (first["engine_s"], first["environment_s"], first["row"]) == (0.5, 0.25, 0)
    assert (second["rewards"], second["problem"], second["row"]) == (
        {"right": 1.0},
        "not closed",
        1,
    )
    assert (second["tokens"], second["cached_tokens"], second["answer"]) == (2, 8, [])


def test_a_single_response_has_no_conversation(tmp_path: Path) -> None:
    _write(tmp_path, _sample(None))
    data, _ = _data(tmp_path)
    assert data["rows"][0]["episode"] is None and data["openings"] == []


@pytest.mark.parametrize("payload", [HOSTILE, *PAYLOADS])
def test_no_text_of_an_episode_becomes_markup(payload: str, tmp_path: Path) -> None:
    """In messages, roles, names, arguments, rewards, counts, schemas and the problem."""
    tags = []
    for name, text in (("plain", "plain"), ("hostile", payload)):
        folder = tmp_path / name
        folder.mkdir()
        message = {
            "role": text, "content": text, "reasoning_content": text, "name": text,
            "tool_calls": [_call(text, {text: text}), _call(text, text)],
        }  # fmt: skip
        turn = _turn(
            text, message=message, answer=(message,), rewards={text: 1.0}, counts={text: 1.0},
            problem=text,
        )  # fmt: skip
        tool = {"type": "function", "function": {"name": text, "description": text}}
        _write(folder, _sample(Episode("done", (message,), (tool,), (turn,))))
        (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward/mean": 1.0}\n')
        page = Page(build_report(folder))
        (shown,) = page.samples()["rows"][0]["episode"]["turns"]
        assert shown["message"]["text"] == shown["problem"] == text
        assert shown["message"]["calls"][1] == {"name": text, "arguments": text}
        tags.append([tag for tag, _ in page.tags])
    assert tags[0] == tags[1]


def test_a_long_episode_keeps_both_ends_and_the_page_says_so(tmp_path: Path) -> None:
    """Turns of 2 x 1,000 characters and about 40 more: about 30 of 200 fit, in equal parts from
    both ends."""
    turns = tuple(_turn(f"{i} " + "x" * 1000) for i in range(200))
    _write(tmp_path, _sample(Episode("max_turns", (), (), turns)))
    data, note = _data(tmp_path)
    episode = data["rows"][0]["episode"]
    numbers = [turn["number"] for turn in episode["turns"]]
    assert numbers == [*range(15), *range(200 - len(numbers) + 15, 200)]
    assert len(numbers) in (29, 30) and episode["num_turns"] == 200
    assert "1 long episodes are shortened; everything is in samples/*.parquet" in note


def test_a_turn_of_many_long_messages_stays_near_the_limit(tmp_path: Path) -> None:
    """Messages of 20,000 characters: ten of 6,000, then 200 each; the last turn is kept too."""
    answer = tuple({"role": "tool", "content": "y" * 20_000} for _ in range(100))
    _write(tmp_path, _sample(Episode("done", (), (), (_turn(answer=answer), _turn("end")))))
    data, note = _data(tmp_path)
    assert len(json.dumps(data)) < 2 * MAX_EPISODE_CHARS and "long episodes are shortened" in note
    first, last = data["rows"][0]["episode"]["turns"]
    assert len(first["answer"]) == 100 and last["message"]["text"] == "end"
    assert "14,000 characters left out" in first["answer"][0]["text"]
    assert "19,800 characters left out" in first["answer"][-1]["text"]


@pytest.mark.parametrize(
    "record",
    ["", "{", "[]", "1", '{"status": "done"}', "[" * 100_000,
     '{"status": "done", "seconds": 1, "start": [1], "tools": [], "turns": [], "rows": []}',
     '{"status": "done", "seconds": 1, "start": [], "tools": [], "turns": [{}], "rows": []}'],
)  # fmt: skip
def test_a_record_that_cannot_be_read_leaves_the_response(record: str, tmp_path: Path) -> None:
    row = {field.name: None for field in SCHEMA} | {
        "step": 1, "split": "train", "prompt": "task", "response": "said", "episode": record,
    }  # fmt: skip
    (tmp_path / "samples").mkdir()
    table = pa.Table.from_pylist([row], schema=SCHEMA)
    pq.write_table(table, tmp_path / "samples" / "step_000001.parquet")
    data, note = _data(tmp_path)
    assert data["rows"][0]["response"] == "said" and data["rows"][0]["episode"] is None
    assert "the episodes of 1 samples cannot be read" in note


def test_numbers_that_are_not_finite_and_surrogates_do_not_break_the_page(tmp_path: Path) -> None:
    """A policy may write NaN in arguments, which Python's JSON reads, and half of a pair."""
    message = {"role": "assistant", "content": "\ud800", "tool_calls": [_call("f", float("nan"))]}
    turn = _turn(message=message, engine_s=float("inf"), rewards={"r": 1e308 * 10})
    _write(tmp_path, _sample(Episode("done", (), (), (turn,))))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward/mean": 1.0}\n')
    (shown,) = Page(build_report(tmp_path)).samples()["rows"][0]["episode"]["turns"]
    assert shown["message"]["calls"][0]["arguments"] == "NaN"
    assert shown["engine_s"] is None and shown["rewards"] == {"r": None}
