"""Rows of episodes by reader: with tokens, as text, and with another tokenizer, each sampled
response is trained once, with an end only if it has one; score gives rewards what generate gave."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from chat_families import chat_tokenizer
from scripted_episodes import Player, Scripted

from burnish.config.generate import AllSamples, BestOfN
from burnish.config.rewards import ShapingConfig
from burnish.data.batches import load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.demonstrations.encode import SFTEncoder
from burnish.data.episode_rows import TOKEN_COLUMNS
from burnish.data.forms import open_rows
from burnish.data.notices import collecting
from burnish.data.prompts.generation import GenerationPrompt
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import GivenResponses
from burnish.data.selection import select
from burnish.data.stream import RowRef
from burnish.data_files.writing import json_line, write_parquet
from burnish.rewards.base import RewardInput
from burnish.rewards.function.reward import conversation
from burnish.rewards.model.rows import reward_encoder
from burnish.rewards.shaping import shaped
from burnish.rewards.texts import prompt_and_query
from burnish.special_tokens import special_tokens
from burnish.transcript import EpisodeStatus
from burnish.types import Group, Prompt, Sample

START = [{"role": "user", "content": "q"}]
GO = [{"role": "user", "content": "go\non"}]
EDITED = [*START, {"role": "assistant", "content": "written by the client"}, *GO]
CUT = "length"

EPISODES: dict[str, tuple[EpisodeStatus, list[Scripted], list[list[tuple[str, bool]]]]] = {
    "one turn": ("done", [Scripted("a b")], [[("a b", True)]]),
    "one cut turn": ("max_turn_tokens", [Scripted("a b", finish=CUT)], [[("a b", False)]]),
    "turns, the environment has the last word": (
        "done",
        [Scripted("a", GO), Scripted("b", GO)],
        [[("a", True), ("b", True)]],
    ),
    "the last turn is cut": (
        "max_turn_tokens",
        [Scripted("a", GO), Scripted("b", finish=CUT)],
        [[("a", True), ("b", False)]],
    ),
    "an observation was too long": (
        "max_tokens",
        [Scripted("a", GO), Scripted("b", GO)],
        [[("a", True), ("b", True)]],
    ),
    "a sub-agent and an edited conversation": (
        "done",
        [
            Scripted("a", GO),
            Scripted("summary", prompt=GO, finish=CUT),
            Scripted("b", GO, prompt=EDITED),
            Scripted("c"),
        ],
        [[("a", True)], [("summary", False)], [("b", True), ("c", True)]],
    ),
}
"""Status, turns, and of each row the trained responses and whether they are trained with an end."""


def written(
    folder: Path,
    player: Player,
    prompt: Prompt,
    sample: Sample,
    *,
    with_tokens: bool = True,
    suffix: str = ".jsonl",
) -> tuple[str, list[dict[str, Any]]]:
    """Write the rows of an episode as the job generate does; returns (path, rows)."""
    group = Group(0, prompt, (sample,))
    content: Any = [dict(message) for message in prompt.messages or ()]
    data = GenerationPrompt(prompt, content, content, "L", True, {"level": 3})
    rows = select(
        *(AllSamples(), [group], {prompt.id: data}),
        with_tokens=with_tokens,
        tokenizer=player.tokenizer,
        as_text=suffix == ".parquet",
    ).rows
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        write_parquet([lambda: rows], path)
    else:
        path.write_bytes(b"".join(map(json_line, rows)))
    return str(path), list(rows)


def trained(path: str, tokenizer: Any, **options: Any) -> list[list[tuple[str, bool]]]:
    """Texts that are trained in each row, and whether they end with a special token."""
    config = SFTDataConfig(sources=(path,), max_len=400, **options)  # type: ignore[arg-type]
    encoder, (source,) = SFTEncoder(config, tokenizer), open_rows(config)
    rows = []
    for number in range(len(source)):
        row = encoder.encode(source[number], RowRef("rows", number, 0))
        runs = [
            [row.ids[i] for i in run]
            for on, run in groupby(range(len(row.ids)), row.mask.__getitem__)
            if on
        ]
        ends = [ids[-1] in special_tokens(tokenizer) for ids in runs]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in runs]
        rows.append(list(zip(texts, ends, strict=True)))
    return rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", EPISODES)
def test_every_reader_trains_each_sampled_response_once(
    name: str, suffix: str, tmp_path: Path
) -> None:
    status, turns, expected = EPISODES[name]
    player, other = Player(chat_tokenizer("chatml")), chat_tokenizer("llama3")
    prompt, sample = player.prompt(START), player.episode(START, turns, status=status)
    path, rows = written(tmp_path, player, prompt, sample, suffix=suffix)
    assert trained(path, player.tokenizer) == expected
    assert trained(path, player.tokenizer, use_tokens=False) == expected
    assert trained(path, other) == expected
    path, without = written(tmp_path, player, prompt, sample, with_tokens=False, suffix=suffix)
    assert trained(path, player.tokenizer) == expected
    assert without == [{k: v for k, v in row.items() if k not in TOKEN_COLUMNS} for row in rows]


def test_rows_of_rendered_histories_train_their_own_turn(tmp_path: Path) -> None:
    """A template that rewrites history: a row begins where it drops reasoning, and the turns before
    are its context."""
    player = Player(chat_tokenizer("chatml_drops"), "template")
    turns = [Scripted("<think>\nx\n</think>\n\na", GO), Scripted("b", GO), Scripted("c")]
    prompt, sample = player.prompt(START), player.episode(START, turns)
    path, rows = written(tmp_path, player, prompt, sample)
    assert [len(row["messages"]) for row in rows] == [2, 6]
    for options in ({}, {"use_tokens": False}):
        texts = [[text for text, _ in row] for row in trained(path, player.tokenizer, **options)]
        assert texts == [["<think>\nx\n</think>\n\na"], ["b", "c"]]


def edited(**changes: Any) -> Any:
    """Change the last message of a row."""
    return lambda row: row["messages"][-1].update(changes)


def improved(row: dict[str, Any]) -> None:
    row["improved"] = [*START, {"role": "assistant", "content": "better"}]


def answered(row: dict[str, Any]) -> None:
    del row["messages"]
    row["response"] = "better"


CHANGES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "only the last turn": (None, {"train_on_turns": "last"}, True),
    "a message is not trained": (edited(train=False), {}, True),
    "flags of the row's other readers": (edited(weight=1), {}, True),
    "the text is corrected": (edited(content="corrected"), {}, False),
    "a call is added": (
        edited(tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
        {},
        False,
    ),
    "the question is another": (lambda row: row["messages"][0].update(content="r"), {}, False),
    "a turn is removed": (lambda row: row["messages"].pop(), {}, False),
    "a client's message is trained": (lambda row: row["messages"][1].pop("train"), {}, False),
    "tools": (lambda row: row.update(tools=[{"name": "f", "parameters": {}}]), {}, False),
    "tools_key": (lambda row: row.update(t=[{"name": "f"}]), {"tools_key": "t"}, False),
    "messages_key": (improved, {"messages_key": "improved"}, False),
    "a response": (answered, {}, False),
    "system_prompt": (None, {"system_prompt": "Be kind."}, False),
}
"""Edit of a row, settings, and whether its tokens are still those of the messages."""


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", CHANGES)
def test_tokens_do_not_override_messages_flags_and_settings(
    name: str, suffix: str, tmp_path: Path
) -> None:
    """The last row of an episode is trained as its text is, with its own tokens if these are those
    of the messages; a row that is not is counted."""
    edit, options, keeps_tokens = CHANGES[name]
    status, turns, _ = EPISODES["a sub-agent and an edited conversation"]
    player = Player(chat_tokenizer("chatml"))
    prompt, sample = player.prompt(START), player.episode(START, turns, status=status)
    _, rows = written(tmp_path, player, prompt, sample)
    row = json.loads(json_line(rows[-1]))
    if edit is not None:
        edit(row)
    path = tmp_path / f"edited{suffix}"
    if suffix == ".parquet":
        write_parquet([lambda: [row]], path)
    else:
        path.write_bytes(json_line(row))
    with collecting() as notices:
        found = trained(str(path), player.tokenizer, **options)
    assert found == trained(str(path), player.tokenizer, use_tokens=False, **options)
    assert ("other_tokens" not in notices) == keeps_tokens
    batch = load_batch(SFTDataConfig(sources=(str(path),), **options), player.tokenizer)  # type: ignore[arg-type]
    assert (batch.tokens.tolist() == row["tokens"]) == keeps_tokens


@pytest.mark.parametrize("keep", [False, True])
def test_an_episode_whose_last_response_was_cut_is_no_candidate(keep: bool) -> None:
    """Also if the status is done: the agent did not continue after it."""
    player = Player(chat_tokenizer("chatml"))
    prompt = player.prompt(START)
    samples = [player.episode(START, [Scripted("a", finish=f)]) for f in ("stop", CUT)]  # type: ignore[arg-type]
    scored = [
        replace(sample, sample_id=f"{prompt.id}/{k}", reward=float(k), reward_parts={"r": float(k)})
        for k, sample in enumerate(samples)
    ]
    group, data = (
        Group(0, prompt, tuple(scored)),
        GenerationPrompt(prompt, "q", "q", None, False, {}),
    )
    chosen = select(BestOfN(kind="best_of_n", keep_truncated=keep), [group], {prompt.id: data})
    assert [row["sample"] for row in chosen.rows] == [int(keep)]
    assert chosen.dropped == ({} if keep else {"samples_truncated": 1})


def read_by_rewards(prompt: Prompt, sample: Sample, player: Player) -> list[Any]:
    """Everything that rewards and shaping read of a sample."""
    item = RewardInput(prompt, sample)
    encoders = [
        reward_encoder(
            chat_tokenizer(family),
            player.tokenizer,
            "rm",
            step_separator="\n" if continues else None,
        )
        for family in ("chatml", "llama3")
        for continues in (False, True)
    ]
    shaping = ShapingConfig(truncation_penalty=1.0, length_penalty=0.25)
    return [
        *([list(ids) for ids in encode(item)] for encode in encoders),
        *(prompt_and_query(item, player.tokenizer, special_tokens=s) for s in (True, False)),
        (prompt.text, sample.text, prompt.label, dict(prompt.metadata), conversation(item)),
        shaped(0.0, sample, config=shaping, generate_max_len=400),
    ]


@pytest.mark.parametrize("name", [name for name in EPISODES if "sub-agent" not in name])
def test_score_reads_an_episode_as_its_rewards_did(name: str, tmp_path: Path) -> None:
    """The only row of an episode: reward models, servers, functions and penalties."""
    status, turns, _ = EPISODES[name]
    player = Player(chat_tokenizer("chatml"))
    prompt = player.prompt(START)
    prompt = Prompt(
        prompt.id, prompt.token_ids, prompt.text, "L", {"level": 3}, messages=prompt.messages
    )
    sample = player.episode(START, turns, status=status, prompt=prompt)
    path, _ = written(tmp_path, player, prompt, sample)
    config = ResponseDataConfig(sources=(path,))  # type: ignore[arg-type]
    (given,) = GivenResponses(config, player.tokenizer).take(0, 1)
    found = read_by_rewards(given.group.prompt, given.group.samples[0], player)
    assert found == read_by_rewards(prompt, sample, player)


def test_rows_of_several_conversations_are_scored_as_their_own(tmp_path: Path) -> None:
    """Also by a tokenizer without the tokens of the rows."""
    status, turns, _ = EPISODES["a sub-agent and an edited conversation"]
    player = Player(chat_tokenizer("chatml"))
    prompt, sample = player.prompt(START), player.episode(START, turns, status=status)
    path, _ = written(tmp_path, player, prompt, sample)
    config = ResponseDataConfig(sources=(path,))  # type: ignore[arg-type]
    ended = ResponseDataConfig(sources=(path,), finish_reason_key=None)  # type: ignore[arg-type]
    all_given = GivenResponses(ended, player.tokenizer).take(0, 9)
    assert not any(given.group.samples[0].is_cut for given in all_given)
    for tokenizer in (player.tokenizer, chat_tokenizer("llama3")):
        samples = [g.group.samples[0] for g in GivenResponses(config, tokenizer).take(0, 9)]
        assert [(s.text, s.is_cut) for s in samples] == [
            *(("a", False), ("summary", True), ("c", False)),
        ]
        assert [len(conversation(RewardInput(prompt, s))) for s in samples] == [2, 2, 6]


@pytest.mark.parametrize("change", ["text", "system_prompt"])
def test_rewards_of_score_read_one_version_of_a_row(change: str, tmp_path: Path) -> None:
    """After an edit, or with another system message, texts, messages and tokens agree."""
    player = Player(chat_tokenizer("chatml"))
    turns = [Scripted("a", GO), Scripted("b", GO)]
    prompt, sample = player.prompt(START), player.episode(START, turns)
    path, (row,) = written(tmp_path, player, prompt, sample)
    options: dict[str, Any] = {}
    if change == "text":
        row["messages"][-2]["content"] = "corrected"
        Path(path).write_bytes(json_line(row))
    else:
        options["system_prompt"] = "Be kind."
    config = ResponseDataConfig(sources=(path,), **options)  # type: ignore[arg-type]
    (given,) = GivenResponses(config, player.tokenizer).take(0, 1)
    scored = given.group.samples[0]
    messages = conversation(RewardInput(given.group.prompt, scored))
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert scored.text == answers[-1] == ("corrected" if change == "text" else "b")
    assert ("Be kind." in player.tokenizer.decode(scored.prompt_ids)) == (change != "text")
    assert (messages[0]["role"] == "system") == (change != "text")


@pytest.mark.parametrize("finish", ["stop", CUT])
@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("family", ["chatml", "chatml_drops", "xml"])
def test_score_reads_the_reasoning_of_the_last_response(
    family: str, with_tokens: bool, finish: Any, tmp_path: Path
) -> None:
    """Also without the tokens of the row: as the template writes the response."""
    player = Player(chat_tokenizer(family), "template")
    last = Scripted("<think>\nso\n</think>\n\nfour", finish=finish)
    prompt = player.prompt(START)
    sample = player.episode(START, [Scripted("a", GO), last])
    path, _ = written(tmp_path, player, prompt, sample, with_tokens=with_tokens)
    config = ResponseDataConfig(sources=(path,))  # type: ignore[arg-type]
    given = GivenResponses(config, player.tokenizer).take(0, 9)[-1]
    scored = given.group.samples[0]
    assert scored.text == sample.text
    assert tuple(scored.last_response[1]) == tuple(sample.last_response[1])
    assert conversation(RewardInput(given.group.prompt, scored)) == conversation(
        RewardInput(prompt, sample)
    )


def test_score_reads_the_response_column_that_a_recipe_names(tmp_path: Path) -> None:
    player = Player(chat_tokenizer("chatml"))
    prompt, sample = player.prompt(START), player.episode(START, [Scripted("a")])
    path, (row,) = written(tmp_path, player, prompt, sample)
    Path(path).write_bytes(json_line(row | {"improved": "better"}))
    config = ResponseDataConfig(sources=(path,), response_key="improved")  # type: ignore[arg-type]
    (given,) = GivenResponses(config, player.tokenizer).take(0, 1)
    assert given.group.samples[0].text == "better"
