"""A response ends with the first token with which its text has a stop string, whatever its
tokenizer writes for a part of the tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from chat_templates import trl_tokenizer
from tokenizer_kinds import KINDS, response, sentencepiece_bytes, tokenizer_of

from burnish.byte_tokens import TailTokens, byte_tokens
from burnish.data.decoding import response_decoder
from burnish.rollout.base import Sampling
from burnish.rollout.requests import StopRule


def finished(tokenizer: Any, stops: Sequence[str], ids: Sequence[int]) -> int | None:
    """Index of the token that ends a response."""
    check = StopRule(tokenizer, Sampling(max_tokens=999, stop=tuple(stops)), ()).begin()
    return next((i for i, token in enumerate(ids) if check.add(token, 10**6)), None)


def by_the_text(tokenizer: Any, stops: Sequence[str], ids: Sequence[int]) -> int | None:
    """Index of the first token with which the text of the tokens has a stop string."""
    decode = response_decoder(tokenizer)
    texts = (decode(ids[: end + 1]) for end in range(len(ids)))
    return next((i for i, text in enumerate(texts) if any(s in text for s in stops)), None)


def stop_strings(tokenizer: Any, ids: Sequence[int], rng: random.Random) -> list[str]:
    """Parts of the text, or of the text of a part, and a text that is nowhere."""
    begin = rng.randrange(len(ids))
    part = ids[begin : begin + rng.choice((1, 3, 8, 20))]
    text = response_decoder(tokenizer)(ids if rng.random() < 0.6 else part)
    stops = ["nowhere"] * (rng.random() < 0.3)
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.randrange(max(1, len(text)))
        stops.append(text[place : place + rng.choice((1, 2, 3, 5, 9))])
    if rng.random() < 0.9:
        stops = [stop.replace("\ufffd", "") for stop in stops]
    return [stop for stop in stops if stop] or ["é"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_ends_where_its_whole_text_has_a_stop_string(kind: str) -> None:
    """Random tokens against decoding all of them after each one."""
    tokenizer, num_stopped = tokenizer_of(kind), 0
    for seed in range(150):
        rng = random.Random(f"{kind}/{seed}")
        if not (ids := response(tokenizer, rng)):
            continue
        stops = stop_strings(tokenizer, ids, rng)
        expected = by_the_text(tokenizer, stops, ids)
        num_stopped += expected is not None
        assert finished(tokenizer, stops, ids) == expected, (seed, stops, ids)
    assert 40 < num_stopped < 150


def test_a_run_of_bytes_that_is_broken_far_before_has_no_stop_string() -> None:
    """A wrong byte makes all 201 bytes of its run U+FFFD, so the text has no "STOP"."""
    tokenizer = sentencepiece_bytes()
    values = {byte: i for i, byte in byte_tokens(tokenizer).items()}
    run = [values[byte] for byte in b"\xe6" + b"x" * 196 + b"STOP"]
    assert finished(tokenizer, ["STOP"], run) is None
    assert finished(tokenizer, ["STOP"], run[1:]) == 199
    behind = tokenizer.convert_tokens_to_ids(["ST", "OP"])
    assert finished(tokenizer, ["STOP"], [*run, *behind]) == 202


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_decoded_tokens_does_not_grow_with_the_response(kind: str) -> None:
    """8 bytes of the stop string, three times if spaces are removed, 4 around them, and 3 to the
    first byte of a character."""
    tokenizer = tokenizer_of(kind)
    rule = StopRule(tokenizer, Sampling(max_tokens=9, stop=("nowhere!",)), ())
    assert rule.num_searched is not None
    tail = TailTokens(tokenizer, rule.num_searched)
    for token in range(len(tokenizer)):
        tail.add(token)
        assert len(tail.ids) <= (24 if "removes" in kind else 8) + 4 + 3


def test_a_form_of_reasoning_that_is_not_read_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Once: rewards would read the reasoning, and the words around it, as the answer."""
    for name, is_read in (("qwen3", True), ("gptoss", True), ("muse_glimmer", False)):
        caplog.clear()
        tokenizer = trl_tokenizer(name)
        for _ in range(2):
            StopRule(tokenizer, Sampling(max_tokens=9), ())
        reports = [record for record in caplog.records if "does not read" in record.getMessage()]
        assert len(reports) == (not is_read), name
