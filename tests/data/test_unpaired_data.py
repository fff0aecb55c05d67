"""Labeled responses: labels, split pairs, and prompts with other prompts' responses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from burnish.data.batches import BatchStream, load_batch
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.preferences.unpaired import (
    SplitPairsStream,
    _of_the_next_prompt,
    load_unpaired,
    mismatched_pairs,
    split_pairs,
)
from burnish.data.sources import DataError
from burnish.types import Batch

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]
ROWS = [
    {"prompt": "1+1=", "response": "2", "good": True},
    {"prompt": "2+2=", "response": "55", "good": "false"},
    {"prompt": "3+3=", "response": "6", "good": 1},
]
PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "31"},
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
]


def config(path: str, **options: Any) -> PreferenceDataConfig:
    return PreferenceDataConfig(sources=(path,), **options)


def texts(tokenizer: Tok, batch: Batch) -> list[str]:
    return [
        tokenizer.decode(batch.tokens[a:b].tolist()) for a, b in pairwise(batch.offsets.tolist())
    ]


def test_rows_carry_their_label(chars: Tok, jsonl: Jsonl) -> None:
    batch = load_unpaired(config(jsonl(ROWS), label_key="good"), chars)
    assert texts(chars, batch)[1] == "<s>2+2=55<|im_end|>"
    assert batch.labels is not None and batch.labels.tolist() == [True, False, True]
    assert batch.rows_per_unit == 1 and batch.group_ids.tolist() == [0, 1, 2]


def test_a_stream_gives_every_row_once_per_epoch_and_resumes(chars: Tok, jsonl: Jsonl) -> None:
    settings = config(jsonl(ROWS), label_key="good")
    stream = BatchStream(settings, chars, seed=0)
    first = [texts(chars, stream.next(1))[0] for _ in range(3)]
    assert len(set(first)) == 3
    state, rest = stream.state_dict(), texts(chars, stream.next(4))
    again = BatchStream(settings, chars, seed=0)
    again.load_state_dict(state)
    assert texts(chars, again.next(4)) == rest


@pytest.mark.parametrize("value", ["maybe", 2, 0.5])
def test_an_invalid_label_is_refused_with_its_location(
    value: Any, chars: Tok, jsonl: Jsonl
) -> None:
    rows = [{"prompt": "1", "response": "2", "good": value}]
    with pytest.raises(DataError, match=r"label_key\) contains .*use true or 1"):
        load_unpaired(config(jsonl(rows), label_key="good"), chars)


def test_whole_floats_are_labels(chars: Tok, jsonl: Jsonl) -> None:
    rows = [{"prompt": "1", "response": "2", "good": value} for value in (1.0, "0.0")]
    batch = load_unpaired(config(jsonl(rows), label_key="good"), chars)
    assert batch.labels is not None and batch.labels.tolist() == [True, False]


def test_a_missing_column_is_named(chars: Tok, jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match="there is no column 'verdict'"):
        load_unpaired(config(jsonl(ROWS), label_key="verdict"), chars)


def test_pairs_become_a_desirable_and_an_undesirable_response(chars: Tok, jsonl: Jsonl) -> None:
    batch = load_unpaired(config(jsonl(PAIRS)), chars)
    assert batch.labels is not None and batch.labels.tolist() == [True, False] * 2
    assert batch.rows_per_unit == 1 and batch.num_sequences == 4
    stream = SplitPairsStream(config(jsonl(PAIRS), shuffle=False), chars, seed=0)
    assert stream.num_rows == 4
    assert texts(chars, stream.next(2)) == texts(chars, batch)[:2]


def test_every_prompt_gets_the_response_of_another(chars: Tok, jsonl: Jsonl) -> None:
    batch = mismatched_pairs(
        load_unpaired(config(jsonl(ROWS), label_key="good"), chars), max_len=99
    )
    expected = ["<s>1+1=55<|im_end|>", "<s>2+2=6<|im_end|>", "<s>3+3=2<|im_end|>"]
    assert texts(chars, batch) == expected
    lengths = [3, 2, 2]  # trained: the response and its end
    ends = batch.offsets.tolist()
    trained = [int(batch.action_mask[a:b].sum()) for a, b in pairwise(ends)]
    assert trained == lengths


def test_responses_of_one_pair_are_not_mismatched_with_their_own_prompt(
    chars: Tok, jsonl: Jsonl
) -> None:
    """And the rejected responses are among those that others get."""
    batch = mismatched_pairs(split_pairs(load_batch(config(jsonl(PAIRS)), chars)), max_len=99)
    assert texts(chars, batch) == [
        "<s>1+1=4<|im_end|>",
        "<s>1+1=5<|im_end|>",
        "<s>2+2=2<|im_end|>",
        "<s>2+2=31<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("prompts", "taken"),
    [
        ("aab", [2, 2, 0]),
        ("abbbc", [1, 4, 4, 4, 0]),
        ("abba", [2, 3, 0, 1]),  # the a's stand together over the end: rows 3 and 0
        ("abac", [1, 2, 3, 0]),
        ("aa", [0, 1]),
    ],
)
def test_rows_of_a_prompt_get_the_responses_of_the_next_one_in_turn(
    prompts: str, taken: list[int]
) -> None:
    """Letters are prompts, numbers the rows whose responses are taken."""
    assert _of_the_next_prompt([(ord(prompt),) for prompt in prompts]) == taken


def test_a_row_over_the_limit_loses_the_left_of_its_prompt(chars: Tok, jsonl: Jsonl) -> None:
    """<s> 1 + 1 = and 5 5 <end>: 8 tokens, 5 are left."""
    batch = mismatched_pairs(load_unpaired(config(jsonl(ROWS), label_key="good"), chars), max_len=5)
    assert texts(chars, batch)[0] == "1=55<|im_end|>"


def test_the_last_token_of_a_prompt_is_always_kept(chars: Tok, jsonl: Jsonl) -> None:
    """It predicts the response's first token, which is trained on."""
    batch = mismatched_pairs(load_unpaired(config(jsonl(ROWS), label_key="good"), chars), max_len=2)
    assert texts(chars, batch) == ["=55<|im_end|>", "=6<|im_end|>", "=2<|im_end|>"]
    assert batch.action_mask.tolist() == [False, *3 * [True], False, *2 * [True], False, True, True]
