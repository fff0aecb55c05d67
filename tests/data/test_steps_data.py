"""Step-labeled solutions: contents of a row, positions of its labels, and refused rows."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.data.batches import BatchStream, load_batch
from burnish.data.sources import DataError
from burnish.data.steps.config import StepsDataConfig
from burnish.data.steps.encode import without_separator
from burnish.models.load import load_tokenizer
from burnish.rewards.model.reward import step_ends
from burnish.types import Batch

ROW = {"prompt": "1+1+1=", "completions": ["1+1=2", "2+1=3"], "labels": [True, False]}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig(scratch=ScratchConfig(alphabet="0123456789+=; \n")))


@pytest.fixture
def config(tmp_path: Path):
    def make(rows: list[dict[str, Any]], **options: Any) -> StepsDataConfig:
        path = tmp_path / "steps.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = {"kind": "steps", "sources": [str(path)], "step_separator": ";", **options}
        return StepsDataConfig.model_validate(tree)

    return make


def text_of(tokenizer: PreTrainedTokenizerBase, batch: Batch, row: int = 0) -> str:
    begin, end = batch.offsets[row : row + 2].tolist()
    return tokenizer.decode(batch.tokens[begin:end])


def marked(tokenizer: PreTrainedTokenizerBase, batch: Batch) -> list[tuple[str, float]]:
    """(token, label) of every token with a label."""
    assert batch.step_labels is not None
    places = batch.action_mask.nonzero()[:, 0].tolist()
    return [
        (tokenizer.decode(batch.tokens[t]), round(float(batch.step_labels[t]), 6)) for t in places
    ]


def test_labels_are_on_the_last_token_of_each_step(config, tokenizer) -> None:
    """``1+1+1=`` | ``1+1=2;`` | ``2+1=3<eos>``: 6 prompt tokens, labels on ``;`` and on the end."""
    batch = load_batch(config([ROW]), tokenizer)
    assert text_of(tokenizer, batch) == "1+1+1=1+1=2;2+1=3" + tokenizer.eos_token
    assert marked(tokenizer, batch) == [(";", 1.0), (tokenizer.eos_token, 0.0)]
    assert batch.prompt_lens.tolist() == [6]
    assert (batch.num_tokens, batch.num_sequences) == (2, 1)


def test_without_an_end_token_every_step_ends_with_the_separator(config, tokenizer) -> None:
    batch = load_batch(config([ROW], add_end_token=False), tokenizer)
    assert text_of(tokenizer, batch) == "1+1+1=1+1=2;2+1=3;"
    assert marked(tokenizer, batch) == [(";", 1.0), (";", 0.0)]


def test_a_step_that_ends_with_the_separator_gets_no_second_one(config, tokenizer) -> None:
    row = {**ROW, "completions": ["1+1=2;", "2+1=3"]}
    assert text_of(tokenizer, load_batch(config([row]), tokenizer)).count(";") == 1


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([True, False], [1.0, 0.0]),
        ([1, 0], [1.0, 0.0]),
        (["+", "-"], [1.0, 0.0]),
        (["good", "Bad"], [1.0, 0.0]),
        ([0.25, 1.0], [0.25, 1.0]),
        (["0.75", "0"], [0.75, 0.0]),
    ],
)
def test_hard_and_soft_labels_in_every_form_of_public_sets(
    config, tokenizer, labels, expected
) -> None:
    batch = load_batch(config([{**ROW, "labels": labels}]), tokenizer)
    assert [label for _, label in marked(tokenizer, batch)] == expected


def test_the_column_of_steps_is_found_by_either_of_its_usual_names(config, tokenizer) -> None:
    row = {"prompt": "1+1=", "steps": ["2"], "labels": [1]}
    assert load_batch(config([row]), tokenizer).num_rows == 1
    row = {"prompt": "1+1=", "chain": ["2"], "labels": [1]}
    assert load_batch(config([row], steps_key="chain"), tokenizer).num_rows == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": [1]}, "1 labels"),
        ({"labels": [1, 2]}, "holds 2 for step 1"),
        ({"labels": [1, -1]}, "holds -1 for step 1"),
        ({"labels": [1, None]}, "holds None for step 1"),
        ({"labels": [1, float("nan")]}, "holds nan for step 1"),
        ({"labels": "+-"}, "not a list of labels"),
        ({"labels": None}, "is empty here"),
        ({"completions": "1+1=2"}, "texts"),
        ({"completions": [], "labels": []}, "the list"),
        ({"completions": ["1", " "]}, "step 1 is ' '"),
        ({"completions": ["1", 3]}, "step 1 is 3"),
        ({"completions": [";", "3"]}, "only a part of step_separator"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_an_unusable_row_is_refused_with_its_location(config, tokenizer, change, said) -> None:
    with pytest.raises(DataError, match=r"steps\.jsonl") as caught:
        load_batch(config([{**ROW, **change}]), tokenizer)
    assert said in str(caught.value)


def test_a_missing_column_is_named_with_those_that_exist(config, tokenizer) -> None:
    with pytest.raises(DataError, match=r"no column 'completions' \(steps_key\).*prompt, labels"):
        load_batch(config([{"prompt": "1", "labels": [1]}]), tokenizer)


def test_a_separator_inside_a_step_is_logged_once(config, tokenizer, caplog) -> None:
    row = {**ROW, "completions": ["1;2", "3"]}
    with caplog.at_level(logging.WARNING, "burnish"):
        load_batch(config([row, row]), tokenizer)
    assert sum("contains the step_separator" in r.message for r in caplog.records) == 1


def test_a_long_row_loses_the_left_of_its_prompt_and_no_label(config, tokenizer) -> None:
    """18 tokens, 12 of them steps and end: limit 13 keeps 1 of the 6 prompt tokens; 12 none."""
    cut = load_batch(config([ROW], max_len=13, overlong="truncate_left"), tokenizer)
    assert text_of(tokenizer, cut) == "=1+1=2;2+1=3" + tokenizer.eos_token
    assert cut.lengths.tolist() == [13]
    assert marked(tokenizer, cut) == [(";", 1.0), (tokenizer.eos_token, 0.0)]
    with pytest.raises(DataError, match="exceeds max_len=12"):
        load_batch(config([ROW], max_len=12, overlong="truncate_left"), tokenizer)


def test_a_resumed_stream_continues_at_its_position(config, tokenizer) -> None:
    rows = [{**ROW, "prompt": f"{k}="} for k in range(7)]
    made = config(rows)
    whole = BatchStream(made, tokenizer, seed=3)
    first = BatchStream(made, tokenizer, seed=3)
    whole.next(4), first.next(4)
    again = BatchStream(made, tokenizer, seed=3)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    a, b = whole.next(5), again.next(5)
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.group_ids.tolist() == b.group_ids.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("response", "ends"),
    [
        ("1+1=2;2+1=3", [5, 10]),
        ("1+1=2;2+1=3;", [5, 11]),
        ("1;;2", [1, 3]),  # nothing between two separators is no step
        (";1;2", [2, 3]),
        ("1; ", [2]),  # what follows has no text: the step ends with the response
        ("123", [2]),
        (";;", [1]),  # no step at all: one place, the last
        ("7", [0]),
    ],
)
def test_steps_of_a_response_end_where_the_separator_does(tokenizer, response, ends) -> None:
    ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(response)  # one token per character
    assert step_ends(tokenizer, ids, ";") == ends


def test_the_end_token_belongs_to_the_last_step(tokenizer) -> None:
    ids = tokenizer("1;2", add_special_tokens=False)["input_ids"]
    assert step_ends(tokenizer, [*ids, tokenizer.eos_token_id], ";") == [1, 3]
    ids = tokenizer("1;", add_special_tokens=False)["input_ids"]
    assert step_ends(tokenizer, [*ids, tokenizer.eos_token_id], ";") == [2]


def test_training_rows_are_split_where_rewards_split_them(config, tokenizer) -> None:
    """Labels of a row and places of a response with its tokens are the same."""
    row = {**ROW, "completions": ["1+1=2", "2+1=3", "3"], "labels": [1, 1, 0]}
    batch = load_batch(config([row]), tokenizer)
    prompt = int(batch.prompt_lens[0])
    places = (batch.action_mask.nonzero()[:, 0] - prompt).tolist()
    assert step_ends(tokenizer, batch.tokens[prompt:].tolist(), ";") == places


@pytest.mark.parametrize("separator", [";", "\n\n", ";;", "+;+", "; ;"])
@pytest.mark.parametrize("ends", [True, False])
def test_random_steps_are_split_where_rewards_split_them(
    config, tokenizer, separator, ends
) -> None:
    """Steps that end with the separator, or with any part of it, have the same ends in both."""
    rng = random.Random(separator)
    for _ in range(60):
        steps = [
            f"{k}{''.join(rng.choices([*separator, separator], k=rng.randrange(4)))}"
            for k in range(rng.randint(1, 4))
        ]
        steps = [step for step in steps if separator not in without_separator(step, separator)]
        if not steps:
            continue
        row = {"prompt": "1=", "completions": steps, "labels": [1] * len(steps)}
        made = config([row], step_separator=separator, add_end_token=ends)
        batch = load_batch(made, tokenizer)
        prompt = int(batch.prompt_lens[0])
        places = (batch.action_mask.nonzero()[:, 0] - prompt).tolist()
        assert step_ends(tokenizer, batch.tokens[prompt:].tolist(), separator) == places, steps


@pytest.mark.parametrize("separator", ["<extra_0>", "<extra_0>\n", ";<extra_0>"])
@pytest.mark.parametrize("special", [True, False])
def test_a_separator_with_a_special_token_splits_rows_and_responses(
    config, separator: str, special: bool
) -> None:
    """The text of a response lacks other special tokens, such as its end token."""
    tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig(alphabet="0123456789+=; \n")))
    tokenizer.add_tokens([AddedToken("<extra_0>", special=special, normalized=False)])
    row = {**ROW, "completions": ["1+1=2", "2+1=3", "3"], "labels": [1, 1, 0]}
    batch = load_batch(config([row], step_separator=separator), tokenizer)
    prompt = int(batch.prompt_lens[0])
    places = (batch.action_mask.nonzero()[:, 0] - prompt).tolist()
    assert len(places) == 3
    assert step_ends(tokenizer, batch.tokens[prompt:].tolist(), separator) == places


def test_a_separator_that_ends_responses_is_refused(config, tokenizer) -> None:
    with pytest.raises(DataError, match="ends a response"):
        load_batch(config([ROW], step_separator=f"{tokenizer.eos_token}\n"), tokenizer)


def test_a_token_that_reaches_beyond_the_separator_ends_the_step() -> None:
    """Byte-level tokens ``a;b``, the two bytes of ``é`` apart, and ``;``: the step ends with the
    token in which its separator is complete, and half a character moves no place."""
    letters = ["a", "b", ";", "Ã", "©"]  # é is C3 A9, which byte-level tokenizers write as Ã and ©
    words = [*letters, "a;", "a;b"]
    merges = [("a", ";"), ("a;", "b")]
    model = BPE({word: i for i, word in enumerate(words)}, merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer("a;béé;bé")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a;b", *("Ã", "©") * 2, ";", "b", "Ã", "©"]
    assert step_ends(tokenizer, ids, ";") == [0, 5, 8]
