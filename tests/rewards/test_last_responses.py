"""The response of an episode that rewards read: its last one, as that response ended, after all
that the policy read before it."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import chat_tokenizer
from scripted_episodes import Player, Scripted

from burnish.rewards.base import RewardInput
from burnish.rewards.model.reward import step_ends
from burnish.rewards.model.rows import reward_encoder
from burnish.rewards.texts import prompt_and_query
from burnish.special_tokens import special_tokens
from burnish.transcript import EpisodeStatus

START = [{"role": "user", "content": "a?\nwith lines\nto skip"}]
GO = [{"role": "user", "content": "go\nnow\nand"}]
OTHER = [{"role": "user", "content": "sum up\nthis"}]
TEXT = "b c\nd"
"""The last response: two steps."""
BEFORE = Scripted("one\ntwo\nthree", GO)

ENDS: dict[str, tuple[EpisodeStatus, Scripted, bool]] = {
    "done": ("done", Scripted(TEXT, GO), True),
    "the limit of a turn": ("max_turn_tokens", Scripted(TEXT, finish="length"), False),
    "the limit of an episode": ("max_tokens", Scripted(TEXT, finish="length"), False),
    "an observation was too long": ("max_tokens", Scripted(TEXT, GO), True),
    "the limit of an agent's call": ("done", Scripted(TEXT, finish="length"), False),
    "a stop string": ("max_tokens", Scripted(TEXT, GO, has_end=False), True),
}
"""Status of the episode, its last turn, and whether that response ended."""
CONVERSATIONS: dict[str, list[Scripted]] = {
    "one turn": [],
    "several turns": [BEFORE, BEFORE],
    "a cut turn before": [Scripted("one\ntwo", GO, finish="length")],
    "another conversation": [BEFORE, Scripted("x\ny\nz", prompt=OTHER)],
}
"""Turns before the last one."""


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_rewards_read_the_last_response_as_it_ended(conversation: str, end: str) -> None:
    """A reward model with the tokens of the policy and one with others, process reward models, and
    servers. The environment's lines, the markup and earlier responses are no steps."""
    status, last, ended = ENDS[end]
    before = CONVERSATIONS[conversation]
    if conversation == "another conversation":  # the agent returns to an edited conversation
        last = Scripted(last.text, last.answer, last.finish, prompt=GO, has_end=last.has_end)
    player = Player(chat_tokenizer("chatml"))
    sample = player.episode(START, [*before, last], status=status)
    item = RewardInput(player.prompt(START), sample)
    for family in ("chatml", "llama3"):
        tokenizer = chat_tokenizer(family)
        for continues in (False, True):
            encode = reward_encoder(
                tokenizer, player.tokenizer, "rm", step_separator="\n" if continues else None
            )
            head, response = encode(item)
            ids = list(response)
            assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
            assert (ids[-1] in special_tokens(tokenizer)) == ended
            assert len(step_ends(tokenizer, response, "\n")) == 2
            if continues and family == "chatml" and last.has_end:
                assert list(head) == list(sample.last_response[0])
    read = player.tokenizer.decode(list(sample.last_response[0]))
    markup = "<|im_end|>" * (ended and last.has_end)
    for special in (True, False):
        found = prompt_and_query(item, player.tokenizer, special_tokens=special)
        assert found == (read, read + TEXT + markup * special)


@pytest.mark.parametrize("end", ENDS)
def test_a_reward_model_without_a_template_reads_an_end_only_if_the_response_ended(
    end: str,
) -> None:
    status, last, ended = ENDS[end]
    player, bare = Player(chat_tokenizer("chatml")), chat_tokenizer("chatml")
    bare.chat_template = None
    item: Any = RewardInput(
        player.prompt(START), player.episode(START, [BEFORE, last], status=status)
    )
    head, response = reward_encoder(bare, player.tokenizer, "rm")(item)
    assert bare.decode(list(response)) == TEXT + "<|im_end|>" * ended
    assert bare.decode(list(head)) == bare.decode(list(item.sample.last_response[0]))
