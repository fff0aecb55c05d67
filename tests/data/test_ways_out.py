"""Every setting that an error of a row advises is accepted by the data of its job, and works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_templates import published_tokenizer
from transformers import PreTrainedTokenizerFast

from burnish.data.config import DataConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.encoded import encoder_of, fit, load_all
from burnish.data.forms import open_rows
from burnish.data.notices import Notices
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import GenerationDataConfig, PromptDataConfig
from burnish.data.rated.config import ScoresDataConfig
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.sources import DataError
from burnish.data.steps.config import StepsDataConfig
from burnish.data.stream import RowRef

RATED = {"kind": "scores", "score_keys": ["score"]}
LIMITS: list[tuple[type[DataConfig], dict[str, Any]]] = [
    (PromptDataConfig, {"prompt_max_len": 3}),
    (GenerationDataConfig, {"prompt_max_len": 3}),
    (ResponseDataConfig, {"prompt_max_len": 3}),
    (SFTDataConfig, {"max_len": 3}),
    (PreferenceDataConfig, {"max_len": 8}),
    (ScoresDataConfig, {"max_len": 8, **RATED}),
    (StepsDataConfig, {"kind": "steps", "max_len": 8}),
]
LONG = {
    "prompt": "1+1=2+2=",
    "response": "4",
    "chosen": "4",
    "rejected": "5",
    "score": 1,
    "steps": ["4"],
    "labels": [True],
}
_SETTINGS = re.compile(
    r"(?<![a-z.])(?:data\.)?([a-z_]+): ((?:[a-z_]+)(?:(?:, (?:or )?| or )[a-z_]+)*)"
)


_VALUES = {"true": True, "false": False, "null": None}


def advised(error: DataError, kind: type[DataConfig]) -> list[dict[str, Any]]:
    """Settings such as ``overlong: truncate_left or drop``. A key that the data do not have is
    advice for a message (``train: false``)."""
    return [
        {key: _VALUES.get(value, value)}
        for key, values in _SETTINGS.findall(str(error))
        if key in kind.model_fields or key.startswith("train_on")
        for value in re.split(r", or | or |, ", values)
        if value in ("drop", "skip", "last", *_VALUES) or "truncate" in value
    ]


def encoded(
    kind: type[DataConfig], options: dict[str, Any], path: str, tokenizer: PreTrainedTokenizerFast
) -> Any:
    """The fitted first row. Raises DataError for a broken rule, too."""
    config = kind.model_validate({"sources": [path], **options})
    if problems := config.broken_rules():
        raise DataError("\n".join(problems))
    opened = open_rows(config)
    encoder = encoder_of(config, tokenizer, opened)
    return fit(opened[0], RowRef("rows", 0, 0), encoder, config, notices=Notices())


@pytest.mark.parametrize(("kind", "options"), LIMITS, ids=lambda case: str(case)[:40])
def test_a_long_row_advises_only_what_its_job_accepts(
    kind: type[DataConfig], options: dict[str, Any], chars: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(LONG))
    with pytest.raises(DataError, match="tokens") as long:
        encoded(kind, options, str(path), chars)
    settings = advised(long.value, kind)
    assert {"overlong": "drop"} in settings
    for setting in settings:
        encoded(kind, {**options, **setting}, str(path), chars)
    config = kind.model_validate({"sources": [str(path)], **options, "overlong": "drop"})
    sources = open_rows(config)
    with pytest.raises(DataError, match="no data is left") as empty:
        load_all(sources, config, encoder_of(config, chars, sources))
    for setting in advised(empty.value, kind):
        encoded(kind, {**options, **setting}, str(path), chars)


def user(text: str, **rest: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **rest}


def answer(text: str, **rest: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **rest}


REWRITTEN = [
    answer("", reasoning_content="I look.", tool_calls=[{"name": "f", "arguments": {}}]),
    {"role": "tool", "content": "4"},
    answer("4"),
    user("3+3?"),
    answer("6"),
]
"""Answers whose reasoning Qwen3 removes from the later prompts."""


@pytest.mark.parametrize(
    ("kind", "options", "row", "num_settings"),
    [
        (SFTDataConfig, {}, {"messages": [user("2+2?"), *REWRITTEN]}, 1),
        (SFTDataConfig, {}, {"prompt": [user("2+2?")], "response": REWRITTEN}, 0),
        (PreferenceDataConfig, {}, {"prompt": [user("2+2?")], "chosen": REWRITTEN,
         "rejected": "5"}, 0),
        (ScoresDataConfig, RATED, {"prompt": [user("2+2?")], "response": REWRITTEN, "score": 1}, 0),
        (SFTDataConfig, {"system_prompt": "Be kind."}, {"text": "Hi"}, 0),
        (SFTDataConfig, {"system_prompt": "Be kind."}, {"prompt": "Hi", "response": "Hello"}, 1),
        (PromptDataConfig, {"system_prompt": "Be kind."}, {"prompt": "Hi"}, 1),
        (SFTDataConfig, {"tools_key": "t"}, {"prompt": "Hi", "response": "Ho", "t": [1]}, 1),
        (SFTDataConfig, {}, {"prompt": "", "response": "Hello"}, 1),
    ],
)  # fmt: skip
def test_a_refused_row_advises_only_what_its_job_accepts(
    kind: type[DataConfig],
    options: dict[str, Any],
    row: dict[str, Any],
    num_settings: int,
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    tokenizer = published_tokenizer("qwen3")
    with pytest.raises(DataError) as refused:
        encoded(kind, options, str(path), tokenizer)
    settings = advised(refused.value, kind)
    assert len(settings) == num_settings
    for setting in settings:
        encoded(kind, {**options, **setting}, str(path), tokenizer)


ENDS = [user("2+2?"), answer("It is")]


@pytest.mark.parametrize(
    ("kind", "options", "row"),
    [
        (SFTDataConfig, {}, {"prompt": ENDS, "response": " 4"}),
        (SFTDataConfig, {}, {"prompt": ENDS, "completion": [answer(" 4")]}),
        (PreferenceDataConfig, {}, {"prompt": ENDS, "chosen": " 4", "rejected": " 5"}),
        (PreferenceDataConfig, {"label_key": "ok"}, {"prompt": ENDS, "response": "4", "ok": True}),
        (ScoresDataConfig, RATED, {"prompt": ENDS, "response": " 4", "score": 1}),
        (PromptDataConfig, {}, {"prompt": ENDS}),
        (ResponseDataConfig, {}, {"prompt": ENDS, "response": " 4"}),
    ],
)
def test_a_prompt_that_ends_with_an_answer_is_refused_in_every_job(
    kind: type[DataConfig], options: dict[str, Any], row: dict[str, Any], tmp_path: Path
) -> None:
    """The response would become a second assistant turn. Moved into the response, it is read."""
    path = tmp_path / "rows.jsonl"
    tokenizer = published_tokenizer("qwen3")
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*ends with an assistant message"):
        encoded(kind, options, str(path), tokenizer)
    path.write_text(json.dumps({**row, "prompt": ENDS[:1]}))
    encoded(kind, options, str(path), tokenizer)
