"""Rewards read the answer behind the reasoning, and the text of a response has its tags: whether
these are special tokens, and whether the policy or the prompt writes the first one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_families import chat_tokenizer
from chat_templates import REASONING_FORMS, reasoning_tokenizer, trl_tokenizer
from reasoning_players import reasoning_player
from scripted_episodes import Player, Scripted

from burnish.config.generate import AllSamples
from burnish.data.chat import encode_conversation, encode_prompt
from burnish.data.decoding import response_text
from burnish.data.forms import open_rows
from burnish.data.pieces import encode_piece
from burnish.data.prompts.generation import GenerationPrompt
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import ResponseEncoder
from burnish.data.selection import select
from burnish.data.sources import DataError
from burnish.data.stream import RowRef
from burnish.data.thoughts import without_channels
from burnish.reasoning_tags import REASONING_TAGS, Tags, after_reasoning, split_channels
from burnish.rewards.base import RewardInput
from burnish.rewards.function.reward import conversation
from burnish.rewards.math.reward import MathScorer
from burnish.rewards.model.reward import step_ends
from burnish.rewards.model.rows import RowEncoder, reward_encoder
from burnish.rewards.python_code.tests import read_code
from burnish.rewards.texts import prompt_and_query, prompt_end
from burnish.rollout.base import Sampling
from burnish.rollout.requests import StopRule
from burnish.types import Group

START = [{"role": "user", "content": "q"}]
TAGS = pytest.mark.parametrize("tags", REASONING_TAGS, ids=lambda tags: str(tags.begin))
SPECIAL = pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
OPENED = pytest.mark.parametrize("opened", [False, True], ids=["own", "opened"])


@pytest.fixture(scope="module")
def answers_of() -> Iterator[Any]:
    """Score responses to a label."""
    rewards: list[MathScorer] = []

    def score(tokenizer: Any, items: list[RewardInput]) -> list[float]:
        rewards.append(MathScorer(tokenizer=tokenizer))
        return rewards[-1].score(items)

    yield score
    for reward in rewards:
        reward.close()


FINAL = "<|start|>assistant<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Maybe \\boxed{5}.<|end|>"
CHANNELS = {
    "reasoning": (f"{THOUGHT}{FINAL}The answer is 7", "The answer is 7"),
    "no reasoning": (FINAL.removeprefix("<|start|>assistant") + "7", "7"),
    "two blocks": (f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}7", "7"),
    "a preamble": (
        f"{THOUGHT}{FINAL.replace('final', 'commentary')}Now.<|end|>{FINAL}7",
        "Now.\n7",
    ),
    "cut in the reasoning": (THOUGHT.removesuffix("<|end|>"), ""),
    "no answer": (THOUGHT, ""),
}
"""Response of gpt-oss -> its answer."""


@pytest.mark.parametrize("case", CHANNELS)
def test_answers_are_read_in_the_final_channel(case: str, answers_of: Any) -> None:
    """Without the special tokens of channels, the text would be ``analysisMaybe .assistantfinal7``.
    Reward models read the same message of a single response and of an episode."""
    text, answer = CHANNELS[case]
    player = Player(chat_tokenizer("harmony"), history="keep")
    turn, prompt = Scripted(text), replace(player.prompt(START), label="7")
    samples = [player.single(prompt, turn), player.episode(START, [turn], prompt=prompt)]
    items = [RewardInput(prompt, sample) for sample in samples]
    assert [sample.text for sample in samples] == [text, text]
    expected = [float("7" in answer)] * 2
    assert answers_of(player.tokenizer, items) == expected
    assert read_code(text, "all") == (answer or None)
    assert conversation(items[0])[-1]["content"] == answer
    for family in ("harmony", "chatml"):
        encode = reward_encoder(chat_tokenizer(family), player.tokenizer, "rm")
        rows = [[list(part) for part in encode(item)] for item in items]
        if answer:
            assert rows[0] == rows[1]
            read = chat_tokenizer(family).decode(rows[0][1], skip_special_tokens=True)
            assert read.endswith(answer) and "assistantfinal<" not in read


def test_a_row_of_text_with_channels_is_trained_as_the_message() -> None:
    """Rows of ``generate`` without token ids, which had channels inside of the final one."""
    tokenizer, (text, answer) = chat_tokenizer("harmony"), CHANNELS["reasoning"]
    message = {"content": answer, "reasoning_content": "Maybe \\boxed{5}."}
    rows = [
        encode_conversation(tokenizer, [*START, {"role": "assistant", **answer_message}])
        for answer_message in ({"content": text}, message)
    ]
    assert rows[0] == rows[1]


@OPENED
@SPECIAL
@TAGS
def test_answers_are_read_behind_the_reasoning(
    tags: Tags, special: bool, opened: bool, answers_of: Any
) -> None:
    player = reasoning_player(tags, special=special, opened=opened)
    begin = "" if opened else tags.begin
    items = []
    for thought, answer in (("5", "7"), ("7", "5")):
        turn = Scripted(f"{begin}Maybe \\boxed{{{thought}}}.{tags.end}\n\nThe answer is {answer}")
        prompt = replace(player.prompt(START), label="7")
        for sample in (player.single(prompt, turn), player.episode(START, [turn], prompt=prompt)):
            assert sample.text == turn.text
            item = RewardInput(prompt, sample)
            before = prompt_end(item, player.tokenizer)
            assert read_code(sample.text, "all", before) == f"\n\nThe answer is {answer}"
            items.append(item)
            texts = prompt_and_query(item, player.tokenizer, special_tokens=False)
            assert texts[1] == texts[0] + turn.text
    assert answers_of(player.tokenizer, items) == [1.0, 1.0, 0.0, 0.0]


@OPENED
@TAGS
def test_the_text_of_a_response_gives_its_tokens_again(
    tags: Tags, opened: bool, tmp_path: Path
) -> None:
    """Written by generate without tokens and read by score; streamed; with log-probs."""
    player = reasoning_player(tags, special=True, opened=opened)
    tokenizer, prompt = player.tokenizer, player.prompt(START)
    sample = player.single(
        prompt, Scripted(f"{'' if opened else tags.begin}a\n\nb{tags.end}\n\nc\n\n")
    )
    data = GenerationPrompt(prompt, START, START, None, True, {})
    group = Group(0, prompt, (sample,))
    (row,) = select(
        AllSamples(), [group], {prompt.id: data}, with_tokens=False, tokenizer=tokenizer
    ).rows
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    config = ResponseDataConfig(sources=(str(path),))  # type: ignore[arg-type]
    (source,) = open_rows(config)
    scored = ResponseEncoder(config, tokenizer).encode(source[0], RowRef("rows", 0, 0))
    (read,) = scored.group.samples
    assert list(read.response_ids) == list(sample.response_ids)
    assert read.text == sample.text == row["response"]
    stream = player.renderer.stream_text(prompt.token_ids)
    parts = "".join(stream.feed([token])[1] for token in sample.response_ids)
    assert parts == sample.text
    parts = player.renderer.text_parts(prompt.token_ids, sample.response_ids)
    assert "".join(part.text for part in parts) == sample.text
    assert len(step_ends(tokenizer, sample.response_ids, "\n\n")) == 3


@SPECIAL
def test_special_tokens_that_are_no_tags_are_not_in_the_text(special: bool) -> None:
    tags = REASONING_TAGS[1]
    tokenizer = reasoning_player(tags, special=special, opened=False).tokenizer
    prompt, ids = (
        tokenizer(text)["input_ids"]
        for text in ("<|im_start|>a", f"{tags.begin}b<|other|>{tags.end}c<|im_end|>")
    )
    shown = f"{tags.begin}b{tags.end}c"
    assert response_text(tokenizer, prompt, ids) == shown
    rule = StopRule(tokenizer, Sampling(max_tokens=99, stop=(f"b{tags.end}",)), ())
    check = rule.begin()
    ends = [check.add(token, 99) for token in ids]
    assert rule.text_of(ids[: ends.index("stop") + 1]) == shown[:-1]


def test_words_of_an_answer_are_no_tags_unless_the_prompt_opened_them(answers_of: Any) -> None:
    tags = next(tags for tags in REASONING_TAGS if tags.is_word)
    player = reasoning_player(tags, special=False, opened=False)
    prompt = replace(player.prompt(START), label="7")
    sample = player.single(prompt, Scripted(f"\\boxed{{7}} is no {tags.end}, 5 may be"))
    assert answers_of(player.tokenizer, [RewardInput(prompt, sample)]) == [1.0]


TAGGED = ["<think>x</think> y", "a </think> b", "</think>", "<think></think>", "<think>x"]


@pytest.mark.parametrize("text", TAGGED)
@pytest.mark.parametrize("form", REASONING_FORMS)
def test_a_reward_model_reads_reasoning_behind_a_prompt_that_closes_it(
    form: str, text: str
) -> None:
    """No trained row has such an answer, but a policy may write it: it follows the prompt."""
    tokenizer = reasoning_tokenizer(form, thinking=False)
    head, response = RowEncoder(tokenizer, "rm").of_messages(START, text)
    try:
        wanted, _ = encode_conversation(tokenizer, [*START, {"role": "assistant", "content": text}])
    except DataError:
        wanted = encode_piece(tokenizer, text, after=head[-1:])
        wanted = [*encode_prompt(tokenizer, START)[1], *wanted, tokenizer.eos_token_id]
    assert [*head, *response] == wanted[: len(head) + len(response)]
    assert response[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("thinking", [True, False], ids=["opened", "closed"])
@pytest.mark.parametrize("text", ["<think>\nwhy unfi", "<think>why unfi", "\n<think>", "half an "])
@pytest.mark.parametrize("form", REASONING_FORMS)
def test_a_reward_model_reads_a_cut_response_as_it_was_trained(
    form: str, text: str, thinking: bool
) -> None:
    """Also if its own prompt opens reasoning. Where it closes reasoning, no trained row has any:
    the text follows the prompt."""
    tokenizer = reasoning_tokenizer(form, thinking=thinking)
    head, response = RowEncoder(tokenizer, "rm").of_messages(START, text, ended=False)
    answer = {"role": "assistant", "content": text, "finish_reason": "length"}
    try:
        wanted, _ = encode_conversation(tokenizer, [*START, answer])
    except DataError:
        assert not thinking and "<think>" in text
        wanted = encode_piece(tokenizer, text, after=head[-1:])
        wanted = [*encode_prompt(tokenizer, START)[1], *wanted]
    assert [*head, *response] == wanted
    assert str(tokenizer.decode(wanted)).count("<think>") <= (1 if thinking else 2)


@pytest.mark.parametrize(
    "text",
    [
        "In harmony, <|channel|> marks a channel. The answer is 4.",
        "<think>gpt-oss writes <|channel|> tokens</think>The answer is 4.",
        "Use <|channel|>final<|message|> before 5. The answer is 4.",
    ],
)
def test_a_response_that_mentions_channels_has_none(text: str) -> None:
    """Of any policy: a response in channels consists of their messages."""
    assert after_reasoning(text).endswith("The answer is 4.")
    message = {"role": "assistant", "content": text}
    assert without_channels(message) is message
    assert split_channels("<|channel|>final<|message|>4 <|start|>5") == ("", "4 \n5", False)


@pytest.mark.parametrize("family", ["gptoss", "qwen3", "llama3"])
def test_rows_in_channels_are_those_of_their_messages(family: str) -> None:
    """For any template, if they are one text of reasoning and one answer; others are refused."""
    tokenizer = trl_tokenizer(family)
    final = "<|channel|>final<|message|>4"
    thought = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'

    def row(answer: dict[str, str]) -> Any:
        question = {"role": "user", "content": "2+2?"}
        return encode_conversation(tokenizer, [question, {"role": "assistant", **answer}])

    parsed = {"content": "4", "reasoning_content": "I add."}
    assert row({"content": thought + final}) == row(parsed)
    assert row({"content": final}) == row({"content": "4"})
    for other in (thought + call, thought, f"<|channel|>commentary<|message|>So:<|end|>{final}"):
        with pytest.raises(DataError, match="tool_calls and reasoning_content"):
            row({"content": other})
