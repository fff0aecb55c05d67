"""Prompts: ids, metadata, the length limit and its counts, exact resuming, and the errors of bad
rows."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from burnish.config import ConfigError, dump_yaml, load_config
from burnish.config.sources import FileSource
from burnish.data import sources
from burnish.data.config import DataConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.encoded import encoder_of
from burnish.data.forms import open_rows
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptStream, load_prompts
from burnish.data.rated.config import ScoresDataConfig
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.sources import DataError, Row
from burnish.data.stream import RowRef

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]


def config(*paths: Any, **options: Any) -> PromptDataConfig:
    return PromptDataConfig(sources=paths, **options)


def sums(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{i}+1=", "label": str(i + 1), "level": "easy"} for i in range(count)]


def test_a_prompt_carries_its_id_tokens_text_label_and_other_columns(
    chars: Tok, jsonl: Jsonl
) -> None:
    stream = PromptStream(config(jsonl(sums(2)), shuffle=False), chars, seed=0)
    first, second, again = stream.next(3)
    assert (first.id, second.id, again.id) == ("rows:0@0", "rows:1@0", "rows:0@1")
    assert (second.text, second.label, second.source) == ("1+1=", "2", "rows")
    assert second.token_ids == tuple(chars("1+1=")["input_ids"])
    assert second.metadata == {"level": "easy"}
    assert stream.num_rows == 2


def test_a_template_makes_the_prompt_and_the_raw_column_stays_in_the_metadata(
    chars: Tok, jsonl: Jsonl
) -> None:
    data = config(jsonl(sums(1)), prompt_template="Question ({level}): {prompt}\nAnswer:")
    (prompt,) = PromptStream(data, chars, seed=0).next(1)
    assert prompt.text == "Question (easy): 0+1=\nAnswer:"
    assert prompt.metadata == {"prompt": "0+1=", "level": "easy"}


def test_a_column_of_messages_goes_through_the_chat_template(chars: Tok, jsonl: Jsonl) -> None:
    path = jsonl([{"prompt": [{"role": "user", "content": "hi"}]}])
    (prompt,) = PromptStream(config(path, system_prompt="brief"), chars, seed=0).next(1)
    assert prompt.text.startswith("<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\nhi")
    assert prompt.label is None and prompt.metadata == {}


def test_an_environment_prompt_identifies_its_item(
    chars: Tok, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = {"name": "gym", "options": {}, "size": 1, "seed": 0}

    class OneItem:
        name = "gym"

        def __len__(self) -> int:
            return 1

        def __getitem__(self, i: int) -> Row:
            values = {"prompt": "1+1=", "label": "2", "level": 3}
            return Row(values, "environment gym row 0", {**origin, "index": i})

    monkeypatch.setattr(sources, "open_source", lambda _: OneItem())
    data = PromptDataConfig(sources=({"kind": "environment", "environment": "gym", "size": 1},))
    (prompt,) = PromptStream(data, chars, seed=0).next(1)
    assert (prompt.id, prompt.label) == ("gym:0@0", "2")
    assert prompt.metadata == {"level": 3, "environment": {**origin, "index": 0}}


@given(stop=st.integers(0, 25), seed=st.integers(0, 100))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_resumed_stream_gives_the_very_next_prompts_and_counts(
    chars: Tok, jsonl: Jsonl, stop: int, seed: int
) -> None:
    """Rows of 5 to 13 tokens under a limit of 9: some are dropped on the way."""
    rows = [{"prompt": "1+" * n + "="} for n in (2, 6, 3, 4, 5, 2)]
    data = config(jsonl(rows, "long.jsonl"), jsonl(sums(4)), overlong="drop", prompt_max_len=9)
    whole = PromptStream(data, chars, seed=seed)
    expected = whole.next(stop + 12)
    first = PromptStream(data, chars, seed=seed)
    before = first.next(stop)
    second = PromptStream(data, chars, seed=seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + second.next(12) == expected
    assert second.counts == whole.counts
    assert second.counts["prompts_seen"] == stop + 12


LENGTHS = (3, 8, 5, 6)
"""Tokens of each row: ``<s>`` and one per character."""


def rows_of_lengths() -> list[dict[str, str]]:
    return [{"prompt": "abcdefgh"[: n - 1], "label": str(n)} for n in LENGTHS]


def test_overlong_error_names_the_row_and_the_setting(chars: Tok, jsonl: Jsonl) -> None:
    stream = PromptStream(
        config(jsonl(rows_of_lengths()), shuffle=False, prompt_max_len=5), chars, seed=0
    )
    assert stream.next(1)[0].label == "3"
    with pytest.raises(DataError) as caught:
        stream.next(1)
    message = str(caught.value)
    assert "rows.jsonl:2: the prompt has 8 tokens, but prompt_max_len is 5" in message
    assert "overlong: truncate_left or drop" in message


def test_overlong_truncate_left_keeps_the_last_tokens_and_counts(chars: Tok, jsonl: Jsonl) -> None:
    chars.chat_template = None
    data = config(
        jsonl(rows_of_lengths()), shuffle=False, prompt_max_len=5, overlong="truncate_left"
    )
    stream = PromptStream(data, chars, seed=0)
    prompts = stream.next(4)
    assert [len(p.token_ids) for p in prompts] == [3, 5, 5, 5]
    assert (prompts[1].text, prompts[3].text) == ("cdefg", "abcde")
    assert list(prompts[1].token_ids) == chars("cdefg", add_special_tokens=False)["input_ids"]
    assert stream.counts == {
        "prompts_seen": 4,
        "prompts_dropped": 0,
        "prompts_truncated": 2,
        "epoch": 1,
    }


def test_overlong_drop_continues_with_the_next_row_and_counts(chars: Tok, jsonl: Jsonl) -> None:
    """Rows 1 and 3 are too long; the third prompt is row 0 of the next epoch, and row 1 is counted
    with it."""
    chars.chat_template = None
    data = config(jsonl(rows_of_lengths()), shuffle=False, prompt_max_len=5, overlong="drop")
    stream = PromptStream(data, chars, seed=0)
    assert [p.id for p in stream.next(3)] == ["rows:0@0", "rows:2@0", "rows:0@1"]
    assert stream.counts == {
        "prompts_seen": 3,
        "prompts_dropped": 3,
        "prompts_truncated": 0,
        "epoch": 1,
    }


def test_dropping_every_row_is_an_error_and_not_an_endless_loop(chars: Tok, jsonl: Jsonl) -> None:
    data = config(jsonl(rows_of_lengths()), prompt_max_len=2, overlong="drop")
    says = r"every prompt of source 'rows' exceeds prompt_max_len=2 tokens"
    with pytest.raises(DataError, match=says):
        PromptStream(data, chars, seed=0).next(1)
    with pytest.raises(DataError, match=r"every prompt of data exceeds prompt_max_len=2"):
        load_prompts(data, chars)


def test_a_single_fitting_row_keeps_the_stream_running(chars: Tok, jsonl: Jsonl) -> None:
    """Of 10 rows one fits. Between two of its draws up to 18 others are dropped in a row: no
    error."""
    rows = [{"prompt": "1+1="}] + [{"prompt": "1+1+1+1="}] * 9
    data = config(jsonl(rows), prompt_max_len=5, overlong="drop")
    ids = [p.id for p in PromptStream(data, chars, seed=0).next(40)]
    assert ids == [f"rows:0@{epoch}" for epoch in range(40)]


def test_load_prompts_gives_all_rows_once_in_file_order(
    chars: Tok, jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    paths = jsonl(sums(3), "a.jsonl"), jsonl(rows_of_lengths(), "b.jsonl")
    everything = load_prompts(config(*paths), chars)
    assert [p.id for p in everything] == [
        *(f"a:{i}@0" for i in range(3)),
        *(f"b:{i}@0" for i in range(4)),
    ]
    assert load_prompts(config(*paths), chars, limit=4) == everything[:4]
    with caplog.at_level(logging.WARNING):
        kept = load_prompts(config(*paths, prompt_max_len=5, overlong="drop"), chars)
    assert [p.id for p in kept] == ["a:0@0", "a:1@0", "a:2@0", "b:0@0", "b:2@0"]
    assert (
        "data: 2 prompts dropped and 0 truncated because they exceed prompt_max_len=5 (5 kept)"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"prompt_key": "promt"},
            r"rows\.jsonl:1.*\(prompt_key\).*nearest: prompt",
        ),
        (
            {"label_key": "lable"},
            r"rows\.jsonl:1.*\(label_key\).*nearest: label",
        ),
        (
            {"prompt_template": "{promt} ="},
            r"rows\.jsonl:1.* prompt_template uses.*nearest: prompt",
        ),
        ({"prompt_template": "{prompt"}, r"rows\.jsonl:1.* prompt_template '\{prompt'"),
        ({"prompt_template": "{}"}, r"rows\.jsonl:1.* prompt_template '\{\}'"),
        (
            {"system_prompt": "x"},
            r"rows\.jsonl:1.*message",
        ),
    ],
)
def test_a_missing_column_is_named_with_location_and_nearest_name(
    chars: Tok, jsonl: Jsonl, options: dict[str, Any], says: str
) -> None:
    data = config(jsonl(sums(1)), **options)
    with pytest.raises(DataError, match=says):
        PromptStream(data, chars, seed=0).next(1)
    with pytest.raises(DataError, match=says):
        load_prompts(data, chars)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": None}, r"rows\.jsonl:2.*\(prompt_key\)"),
        (
            {"prompt": 12},
            r"rows\.jsonl:2.*int 12",
        ),
        ({"prompt": []}, r"rows\.jsonl:2"),
        ({"prompt": 5, "system": "Be kind."}, r"rows\.jsonl:2"),
    ],
)
def test_an_unusable_prompt_is_refused_with_its_location(
    chars: Tok, jsonl: Jsonl, row: dict[str, Any], says: str
) -> None:
    stream = PromptStream(config(jsonl([*sums(1), row]), shuffle=False), chars, seed=0)
    with pytest.raises(DataError, match=says):
        stream.next(2)


@pytest.mark.parametrize(("suffix", "prompt"), [("jsonl", " \n"), ("csv", "")])
@pytest.mark.parametrize(
    "kind",
    [PromptDataConfig, ResponseDataConfig, SFTDataConfig, PreferenceDataConfig, ScoresDataConfig],
)
def test_an_empty_prompt_is_refused_in_every_job(
    kind: type[DataConfig], suffix: str, prompt: str, chars: Tok, tmp_path: Path
) -> None:
    """A CSV file has an empty cell for a missing prompt: the response would be trained alone."""
    row = {"prompt": prompt, "response": "a", "chosen": "a", "rejected": "b", "score": "1"}
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(row), list(row.values())])
    else:
        path.write_text(json.dumps(row))
    options = {"kind": "scores", "score_keys": ["score"]} if kind is ScoresDataConfig else {}
    rows = kind.model_validate({"sources": [str(path)], **options})
    opened = open_rows(rows)
    with pytest.raises(DataError, match=r"the prompt is empty .*on_bad_row: skip"):
        encoder_of(rows, chars, opened).encode(opened[0][0], RowRef("rows", 0, 0))


def test_a_tokenizer_without_end_token_is_refused_at_the_start(chars: Tok, jsonl: Jsonl) -> None:
    chars.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        PromptStream(config(jsonl(sums(1))), chars, seed=0)


def test_files_of_a_folder_resume_at_the_next_row_unless_their_names_changed(
    chars: Tok, tmp_path: Path
) -> None:
    """The folder itself may be moved."""
    rows = [json.dumps(row) + "\n" for row in sums(9)]
    (tmp_path / "sums").mkdir()
    for i in range(3):
        (tmp_path / f"sums/part-{i}.jsonl").write_text("".join(rows[3 * i : 3 * i + 3]))
    data = config(str(tmp_path / "sums"))
    expected = PromptStream(data, chars, seed=0).next(20)
    assert {prompt.text for prompt in expected[:9]} == {row["prompt"] for row in sums(9)}
    first = PromptStream(data, chars, seed=0)
    before, state = first.next(5), first.state_dict()
    (tmp_path / "sums").rename(tmp_path / "moved")
    moved = config({"path": str(tmp_path / "moved"), "name": "sums"})
    second = PromptStream(moved, chars, seed=0)
    second.load_state_dict(json.loads(json.dumps(state)))
    assert before + second.next(15) == expected
    (tmp_path / "moved/part-2.jsonl").rename(tmp_path / "moved/part-00.jsonl")
    with pytest.raises(DataError, match="'sums' consists of other files than when the run was"):
        PromptStream(moved, chars, seed=0).load_state_dict(state)


def test_a_state_is_refused_when_a_source_has_grown(chars: Tok, jsonl: Jsonl) -> None:
    state = PromptStream(config(jsonl(sums(3))), chars, seed=0).state_dict()
    grown = PromptStream(config(jsonl(sums(4))), chars, seed=0)
    with pytest.raises(DataError, match="'rows'"):
        grown.load_state_dict(state)


def test_weights_of_the_sources_decide_the_mix(chars: Tok, jsonl: Jsonl) -> None:
    """Weights 3 : 1 over 400 prompts: standard deviation sqrt(400 * 3 / 16) = 8.7, bound five of
    them."""
    data = PromptDataConfig(
        sources=(
            FileSource(path=jsonl(sums(5), "a.jsonl"), weight=3.0),
            FileSource(path=jsonl(sums(9), "b.jsonl"), name="other"),
        )
    )
    drawn = [p.source for p in PromptStream(data, chars, seed=0).next(400)]
    assert set(drawn) == {"a", "other"}
    assert abs(drawn.count("a") - 300) < 5 * 8.7


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "Q: {{prompt}}",
            "braces",
        ),
        ("Say something.", "same text"),
        ("{prompt.upper}", r"\{prompt\.upper\}"),
        ("{prompt[0]}", r"\{prompt\[0\]\}"),
        ("{}", r"field \{\}"),
        ("{prompt:{label}}", r"a field inside another field"),
        ("{promt}", "prompt_template.*nearest: prompt"),
    ],
)
def test_an_invalid_template_is_refused_when_the_recipe_is_read(
    jsonl: Jsonl, template: str, says: str
) -> None:
    data = {"sources": [jsonl(sums(1))], "prompt_template": template}
    recipe = {"job": "generate", "model": {"scratch": {}}, "data": data}
    with pytest.raises(ConfigError, match=says):
        load_config(recipe)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, r"'x' is empty here, so prompt_template would insert None"),
        (float("nan"), r"'x' is empty here"),
        ([{"role": "user", "content": "hi"}], r"'x' contains a list.*texts and numbers"),
        ({"a": 1}, r"'x' contains a dict"),
    ],
)
def test_a_template_is_filled_only_with_text_and_numbers(
    chars: Tok, jsonl: Jsonl, value: Any, says: str
) -> None:
    path = jsonl([{"x": "1"}, {"x": value}])
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: column {says}"):
        load_prompts(config(path, prompt_template="Q: {x}"), chars)
    filled = load_prompts(
        config(jsonl([{"x": 3, "y": True}]), prompt_template="{x:02d} {y}"), chars
    )
    assert filled[0].text == "03 True"


def test_a_prompt_with_its_own_bos_has_one(chars: Tok, jsonl: Jsonl) -> None:
    ours, theirs = load_prompts(config(jsonl([{"prompt": "<s>1+1"}, {"prompt": "1+1"}])), chars)
    assert ours.token_ids == theirs.token_ids


def test_a_dumped_recipe_asks_for_no_label_column(jsonl: Jsonl, chars: Tok) -> None:
    """A dump writes every key; ``label_key: label`` is the default and may be absent."""
    data = {"sources": [jsonl([{"prompt": "1"}])]}
    first = load_config({"job": "generate", "model": {"scratch": {}}, "data": data})
    again = load_config(yaml.safe_load(dump_yaml(first)))
    assert len(load_prompts(again.data, chars)) == 1
