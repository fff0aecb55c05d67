"""Relations of episodes of one turn: rewards and readers of rows read them as single responses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from metamorphic.base import Draw, Refused, equal, relation
from metamorphic.draw_text import Tok, conversation_of, text_of, tokenizer_of, write_rows
from metamorphic.relations_rewards import THOUGHTS, _reward_tokenizer
from reasoning_players import reasoning_player
from scripted_episodes import Player, Scripted

from burnish.config.generate import AllSamples
from burnish.data.batches import load_batch
from burnish.data.chat import encode_completion
from burnish.data.decoding import response_text
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.demonstrations.encode import SFTEncoder
from burnish.data.forms import open_rows
from burnish.data.prompts.generation import GenerationPrompt
from burnish.data.rated.config import ScoresDataConfig
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import ResponseEncoder
from burnish.data.selection import select
from burnish.data.stream import RowRef
from burnish.episodes.template import RendererError
from burnish.reasoning_tags import REASONING_TAGS
from burnish.rewards.base import RewardInput
from burnish.rewards.math.text import judge, read_label
from burnish.rewards.model import rows
from burnish.rewards.model.reward import step_ends
from burnish.rewards.texts import prompt_and_query, prompt_end
from burnish.special_tokens import special_tokens
from burnish.types import Group, Prompt, Sample


def draw_player(draw: Draw) -> Player:
    """A policy with a random tokenizer and template."""
    tokenizer = tokenizer_of(draw)
    if draw.rng.random() < 0.3:
        tokenizer.chat_template = THOUGHTS
    try:
        return Player(tokenizer, "template")
    except RendererError as error:
        raise Refused(str(error)) from error


def draw_turn(draw: Draw, tokenizer: Tok) -> Scripted:
    """A response of plain text, which may be cut, and may end without the end token, or with
    another special token (an end token of the model that the template does not write)."""
    text = text_of(draw, plain=draw.rng.random() < 0.7) + draw.rng.choice(["", "\nb", " "])
    end = draw.one(end=["stop", "stop", "length", "stop string", "another end"])
    turn = Scripted(text, finish="length" if end == "length" else "stop")
    if end == "another end":
        return replace(turn, end=draw.rng.choice(sorted(special_tokens(tokenizer))))
    return replace(turn, has_end=end != "stop string")


@relation
def one_turn_is_a_single_response(draw: Draw) -> None:
    """Rewards read an episode of one turn as the same tokens and texts as the single response:
    reward models and process reward models with and without the policy's tokens, and servers.
    Exact."""
    player = draw_player(draw)
    turn = draw_turn(draw, player.tokenizer)
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
    content = episode.episode.turns[0].message["content"].strip()
    if content != episode.text.strip():
        usual = player.episode(start, [replace(turn, end=None)], status=status, prompt=prompt)
        assert usual.episode is not None
        equal(content, usual.episode.turns[0].message["content"].strip(), "text before the end")
        raise Refused("the response has reasoning or special tokens")
    items = [RewardInput(prompt, sample) for sample in samples]
    for continues in (False, True):
        encode = rows.reward_encoder(
            reward, player.tokenizer, "rm", step_separator="\n" if continues else None
        )
        single, of_episode = (tuple(map(list, encode(item))) for item in items)
        equal(of_episode, single, f"tokens of the reward model, continues={continues}")
        counts = [step_ends(reward, ids, "\n") for _, ids in (single, of_episode)]
        equal(counts[1], counts[0], "ends of steps")
    texts = [prompt_and_query(item, player.tokenizer) for item in items]
    equal(texts[1], texts[0], "texts of a request")


def rows_of(draw: Draw, player: Player, prompt: Prompt, sample: Sample) -> str:
    """Write the row of a sample as the job generate does; returns the path."""
    content: Any = [dict(message) for message in prompt.messages or ()]
    data = GenerationPrompt(prompt, content, content, "L", True, {})
    group = Group(0, prompt, (sample,))
    chosen = select(
        *(AllSamples(), [group], {prompt.id: data}),
        with_tokens=draw.facts["with_tokens"],
        tokenizer=player.tokenizer,
    )
    name = "single.jsonl" if sample.episode is None else "episode.jsonl"
    return write_rows(draw, chosen.rows, name)


def trained(path: str, tokenizer: Tok, *, use_tokens: bool, **options: Any) -> Any:
    """(ids, mask) that ``burnish sft`` trains on."""
    config = SFTDataConfig(sources=(path,), max_len=4000, use_tokens=use_tokens, **options)  # type: ignore[arg-type]
    (source,) = open_rows(config)
    row = SFTEncoder(config, tokenizer).encode(source[0], RowRef("rows", 0, 0))
    return list(row.ids), list(row.mask)


def scored(path: str, tokenizer: Tok, reward: Tok) -> Any:
    """Text, end and number of tokens that rewards of ``burnish score`` read, and the row of a
    reward model."""
    config = ResponseDataConfig(sources=(path,))  # type: ignore[arg-type]
    (source,) = open_rows(config)
    group = ResponseEncoder(config, tokenizer).encode(source[0], RowRef("rows", 0, 0)).group
    item = RewardInput(group.prompt, group.samples[0])
    sample = item.sample
    read = (item.prompt.text, sample.text, sample.finish_reason, sample.num_sampled_tokens)
    pair = rows.reward_encoder(reward, tokenizer, "rm")(item)
    return read, [list(ids) for ids in pair], prompt_and_query(item, tokenizer)


@relation
def one_turn_is_a_row_of_a_response(draw: Draw) -> None:
    """The row of an episode of one turn is read as that of the single response: by sft with tokens,
    as text and with another tokenizer, and by score. Exact."""
    player = draw_player(draw)
    draw.one(with_tokens=[True, False])
    end = draw.one(end=["stop", "stop", "length"])
    turn = Scripted(text_of(draw, plain=True), finish=end)
    start = conversation_of(draw, answered=False, plain=True)
    prompt = player.prompt(start)
    status: Any = "max_turn_tokens" if end == "length" else "done"
    episode = player.episode(start, [turn], status=status, prompt=prompt)
    samples = [player.single(prompt, turn), episode]
    texts = {samples[0].text, response_text(player.tokenizer, *samples[0].last_response)}
    if samples[0].prompt_ids != episode.prompt_ids or texts != {turn.text}:
        raise Refused("the prompt is rendered in another way, or the tokenizer is not faithful")
    other = _reward_tokenizer(draw, player.tokenizer)
    draw.note(start=start, turn=turn)
    single, of_episode = (rows_of(draw, player, prompt, sample) for sample in samples)
    for tokenizer, use_tokens in (
        (player.tokenizer, True),
        (player.tokenizer, False),
        (other, False),
    ):
        found = trained(of_episode, tokenizer, use_tokens=use_tokens)
        equal(found, trained(single, tokenizer, use_tokens=use_tokens), "trained row")
    read = (scored(path, player.tokenizer, other) for path in (of_episode, single))
    equal(next(read), next(read), "input of rewards")


@relation
def a_reward_model_learns_what_it_reads(draw: Draw) -> None:
    """A written response, or an episode of several turns, is the same row for ``burnish rm`` as for
    a reward of kind model, also with sampled ids that the template would not write. Exact."""
    player = draw_player(draw)
    start = conversation_of(draw, answered=False, plain=True)
    prompt = player.prompt(start)
    turns = [draw_turn(draw, player.tokenizer) for _ in range(draw.one(turns=[1, 1, 2, 3]))]
    turns[:-1] = [Scripted(f"{turn.text.strip()}.") for turn in turns[:-1]]
    draw.one(with_tokens=[True, False])
    status: Any = "max_turn_tokens" if turns[-1].finish == "length" else "done"
    is_episode = len(turns) > 1 or draw.one(episode=[True, False])
    try:
        if is_episode:
            sample = player.episode(start, turns, status=status, prompt=prompt)
        else:
            sample = player.single(prompt, turns[0])
    except RendererError as error:
        raise Refused(str(error)) from error
    unknown = player.tokenizer.unk_token_id
    if unknown in sample.last_response[1] or (sample.text != sample.text.strip() and is_episode):
        raise Refused("no text (unknown tokens), or outer white space, which messages lack")
    draw.note(start=start, turns=turns, template=player.tokenizer.chat_template)
    path = rows_of(draw, player, prompt, sample)
    with open(path, encoding="utf-8") as file:
        row = json.loads(file.read())
    Path(path).write_text(json.dumps(row | {"score": 1.0}), encoding="utf-8")
    _, read, _ = scored(path, player.tokenizer, player.tokenizer)
    batch = load_batch(
        ScoresDataConfig(kind="scores", sources=(path,), score_keys=("score",), max_len=4000),
        player.tokenizer,
    )  # type: ignore[arg-type]
    equal(batch.tokens.tolist(), [*read[0], *read[1]], "row of the reward model")


@relation
def tokens_follow_messages_and_settings(draw: Draw) -> None:
    """The row of an episode of several turns, edited or read with other settings, is trained as its
    text is: the same words, and the same answers with the same ends. Exact."""
    from chat_families import FAMILIES, chat_tokenizer

    rng = draw.rng
    families = sorted(set(FAMILIES) - {"harmony"})  # it writes a channel before each answer
    player = Player(chat_tokenizer(draw.one(family=families)), "keep")
    draw.note(with_tokens=True)
    words = [f"w{rng.randrange(99)}" for _ in range(2 * rng.randint(1, 4))]
    messages = [{"role": "user", "content": word} for word in words[::2]]
    turns = [
        Scripted(word, [message])
        for word, message in zip(words[1::2], [*messages[1:], messages[0]], strict=True)
    ]
    prompt = player.prompt(messages[:1])
    path = rows_of(draw, player, prompt, player.episode(messages[:1], turns))
    row = json.loads(Path(path).read_text().splitlines()[-1])
    kind = draw.one(edit=["none", "flags", "text", "shorter", "longer", "tools"])
    place = draw.one(place=range(len(row["messages"])))
    if kind == "flags":
        row["messages"][place]["train"] = False
    elif kind == "text":
        row["messages"][place]["content"] += " more"
    elif kind == "shorter":
        row["messages"] = row["messages"][: place + 1]
    elif kind == "longer":
        row["messages"] += [messages[0], {"role": "assistant", "content": "more"}]
    elif kind == "tools":
        row["tools"] = [{"name": "more", "parameters": {"type": "object"}}]
    options = draw.one(options=[{}, {"train_on_turns": "last"}, {"system_prompt": "Be kind."}])
    path = write_rows(draw, [row], "edited.jsonl")
    read = []
    for use_tokens in (True, False):
        ids, mask = trained(path, player.tokenizer, use_tokens=use_tokens, **options)
        runs = [[i for i, _ in run] for on, run in groupby(zip(ids, mask, strict=True), _on) if on]
        end = len(mask) - mask[::-1].index(True)
        words = re.findall(r"w\d+|more|kind", player.tokenizer.decode(ids[:end]))
        read.append((words, [player.tokenizer.decode(run).strip() for run in runs]))
    equal(read[0], read[1], "words of the row, and trained answers")


def _on(item: tuple[int, bool]) -> bool:
    return item[1]


@relation
def answers_follow_their_reasoning(draw: Draw) -> None:
    """The math reward reads the answer behind the reasoning, of a single response and of an
    episode: whatever its tags are, whether these are special tokens, and whether the prompt writes
    the first one. The text of the response gives its tokens again. Exact."""
    tags = draw.rng.choice(REASONING_TAGS)
    special, opened = draw.one(special=[True, False]), draw.one(opened=[True, False])
    player = reasoning_player(tags, special=special, opened=opened)
    thought, answer = draw.rng.sample(range(100), 2)
    begin, gap = "" if opened else tags.begin, draw.rng.choice(["", " ", "\n"])
    turn = Scripted(f"{begin}So \\boxed{{{thought}}}.{gap}{tags.end}{gap}The answer is {answer}.")
    start = [{"role": "user", "content": "q"}]
    prompt = replace(player.prompt(start), label=str(draw.rng.choice([thought, answer])))
    draw.note(tags=tags, turn=turn, label=prompt.label)
    samples = [player.single(prompt, turn), player.episode(start, [turn], prompt=prompt)]
    items = [RewardInput(prompt, sample) for sample in samples]
    label, ends = read_label(prompt.label), [prompt_end(i, player.tokenizer) for i in items]
    for sample, end in zip(samples, ends, strict=True):
        equal(judge(label, sample.text, end), prompt.label == str(answer), "the answer is right")
    for sample in samples:
        ids = encode_completion(player.tokenizer, prompt.token_ids, sample.text)[0]
        equal(ids[len(prompt.token_ids) :], list(sample.last_response[1]), "tokens of the text")
