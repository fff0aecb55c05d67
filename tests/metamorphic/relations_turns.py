"""Relations of episodes of one turn, which are single responses for rewards and readers of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from metamorphic.base import Draw, Refused, equal, relation
from metamorphic.draw_text import conversation_of, text_of, tokenizer_of
from metamorphic.relations_rewards import THOUGHTS, _reward_tokenizer
from scripted_episodes import Player, Scripted

from burnish.episodes.template import RendererError
from burnish.rewards import remote, rows
from burnish.rewards.base import RewardInput
from burnish.rewards.steps import step_ends


def draw_player(draw: Draw) -> Player:
    """A policy with a random tokenizer and template."""
    tokenizer = tokenizer_of(draw)
    if draw.rng.random() < 0.3:
        tokenizer.chat_template = THOUGHTS
    try:
        return Player(tokenizer, "template")
    except RendererError as error:
        raise Refused(str(error)) from error


def draw_turn(draw: Draw) -> Scripted:
    """A response of plain text, which may be cut, and may end without the end token."""
    text = text_of(draw, plain=draw.rng.random() < 0.7) + draw.rng.choice(["", "\nb", " "])
    end = draw.one(end=["stop", "stop", "length", "stop string"])
    turn = Scripted(text, finish="length" if end == "length" else "stop")
    return replace(turn, has_end=end != "stop string")


@relation
def one_turn_is_a_single_response(draw: Draw) -> None:
    """Rewards read an episode of one turn as the same tokens and texts as the single response:
    reward models and process reward models with and without the policy's tokens, and servers.
    Exact."""
    player, turn = draw_player(draw), draw_turn(draw)
    start = conversation_of(draw, answered=False)
    reward = _reward_tokenizer(draw, player.tokenizer)
    draw.note(start=start, turn=turn, template=player.tokenizer.chat_template)
    prompt = player.prompt(start)
    status: Any = "max_turn_tokens" if turn.finish == "length" else "done"
    try:
        episode = player.episode(start, [turn], status=status, prompt=prompt)
    except RendererError as error:
        raise Refused(str(error)) from error
    samples = [player.single(prompt, turn), episode]
    if samples[0].prompt_ids != episode.prompt_ids:
        raise Refused("the prompt of episodes is rendered in another way")
    assert episode.episode is not None
    if episode.episode.turns[0].message["content"].strip() != episode.text.strip():
        raise Refused("the response has reasoning or special tokens")
    items = [RewardInput(prompt, sample) for sample in samples]
    for continues in (False, True):
        encode = rows.reward_encoder(reward, player.tokenizer, "rm", continues=continues)
        single, of_episode = (tuple(map(list, encode(item))) for item in items)
        equal(of_episode, single, f"tokens of the reward model, continues={continues}")
        counts = [step_ends(reward, ids, "\n") for _, ids in (single, of_episode)]
        equal(counts[1], counts[0], "ends of steps")
    texts = [remote.prompt_and_query(item, player.tokenizer) for item in items]
    equal(texts[1], texts[0], "texts of a request")
