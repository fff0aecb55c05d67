"""Prompts of text with turn marks inside (HelpSteer2) are the messages of their turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import published_tokenizer

from burnish.data.batches import load_batch
from burnish.data.messages import as_messages
from burnish.data.notices import collecting
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import load_prompts
from burnish.data.rated.config import ScoresDataConfig

ASSISTANT, USER = "\n<extra_id_1>Assistant\n", "\n<extra_id_1>User\n"
TEXT = f"Hi{ASSISTANT}Hello{USER}Bye"
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize(
    ("text", "turns", "notices"),
    [
        (TEXT, TURNS, []),
        (USER[1:] + TEXT, TURNS, []),
        ((USER[1:] + TEXT).replace("\n", "\r\n"), TURNS, []),
        (f"{TEXT}{ASSISTANT}a\n{USER}b", 5, []),
        ("Hi <extra_id_1>User", 1, []),
        (f"Hi{USER}Bye", 1, ["turn_marks"]),
        (f"Hi{ASSISTANT}Hello", 1, ["turn_marks"]),
        (f"Hi{ASSISTANT}Hello{USER}", 1, ["turn_marks"]),
        (f"{ASSISTANT}Hello{USER}Bye", 1, ["turn_marks"]),
        ("", 1, []),
    ],
)
def test_only_turns_that_alternate_are_messages(text: str, turns: Any, notices: list[str]) -> None:
    with collecting() as notes:
        messages = as_messages(text)
    assert list(notes) == notices
    if isinstance(turns, list):
        assert messages == turns
    else:
        assert len(messages) == turns
        assert turns > 1 or messages[0]["content"] == text


def test_every_kind_of_data_reads_them_with_a_chat_template_and_keeps_them_in_plain_text(
    tmp_path: Path,
) -> None:
    tokenizer = published_tokenizer("chatml")
    rated = {"response": "See you", "helpfulness": 4}
    compared = {"response_1": "See you", "response_2": "No", "preference_strength": -2}
    kinds: tuple[tuple[Any, dict[str, Any]], ...] = (
        (ScoresDataConfig, {"kind": "scores", "score_keys": ["helpfulness"]} | {"row": rated}),
        (PreferenceDataConfig, {"row": compared}),
    )
    prompt: Any
    for kind, options in kinds:
        row = options.pop("row")
        texts = {}
        for name, prompt in (("text", TEXT), ("messages", TURNS)):
            path = tmp_path / f"{name}.jsonl"
            path.write_text(json.dumps(row | {"prompt": prompt}))
            config = kind(sources=(str(path),), apply_chat_template=True, **options)
            texts[name] = tokenizer.decode(load_batch(config, tokenizer).tokens)
        assert texts["text"] == texts["messages"]
        assert "extra_id" not in texts["text"]
    path = tmp_path / "text.jsonl"
    for chat in (True, False):
        prompt_config = PromptDataConfig(sources=(str(path),), apply_chat_template=chat)  # type: ignore[arg-type]
        (prompt,) = load_prompts(prompt_config, tokenizer)
        messages = prompt.messages and [dict(message) for message in prompt.messages]
        assert messages == (TURNS if chat else None)
        assert ("extra_id" in prompt.text) != chat


@pytest.mark.parametrize("repeated", [None, "text", "turns"])
def test_responses_may_repeat_the_text_or_its_turns(repeated: str | None, tmp_path: Path) -> None:
    """UltraFeedback's form has the prompt as the first message of both responses."""
    before = {"text": [{"role": "user", "content": TEXT}], "turns": TURNS, None: []}[repeated]
    sides = {
        side: [*before, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")
    }
    tokenizer = published_tokenizer("chatml")
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": TEXT, **sides}))
    batch = load_batch(PreferenceDataConfig(sources=(str(path),)), tokenizer)
    start, end = batch.offsets[:2].tolist()
    expected: Any = tokenizer.apply_chat_template([*TURNS, sides["chosen"][-1]], tokenize=False)
    assert tokenizer.decode(batch.tokens[start:end]) == expected.rstrip("\n")
    assert tokenizer.decode(batch.tokens[batch.action_mask]) == "chosen<|im_end|>rejected<|im_end|>"
