"""Answers without text: refused where the model would learn them, counted where it would not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chat_templates import published_tokenizer
from transformers import PreTrainedTokenizerFast

from burnish.agents.calls import CallError
from burnish.agents.replies import checked_ids
from burnish.data.batches import BatchStream, load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptStream
from burnish.data.rated.config import ScoresDataConfig
from burnish.data.sources import DataError
from burnish.episodes.renderer import ChatRenderer, RendererError
from burnish.vocabulary import set_embeddings

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]
USER = {"role": "user", "content": "1+1"}


def messages(text: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": text}]}


def stream_of(row: dict[str, Any], tokenizer: Tok, path: str, **options: Any) -> Any:
    """The stream of the job that reads such a row."""
    if "chosen" in row:
        return BatchStream(PreferenceDataConfig(sources=(path,), **options), tokenizer, seed=0)
    if "desirable" in row:
        config = PreferenceDataConfig(sources=(path,), label_key="desirable", **options)
        return BatchStream(config, tokenizer, seed=0)
    if "score" in row:
        config = ScoresDataConfig(sources=(path,), kind="scores", score_keys=("score",), **options)
        return BatchStream(config, tokenizer, seed=0)
    if "label" in row:
        return PromptStream(PromptDataConfig(sources=(path,), **options), tokenizer, seed=0)
    return BatchStream(SFTDataConfig(sources=(path,), **options), tokenizer, seed=0)


KINDS = ("messages", "response", "chosen", "desirable")
EMPTY = ("", " \n", "<|im_end|>")


@pytest.mark.parametrize(
    ("kind", "empty"),
    [
        *((kind, empty) for kind in (*KINDS, "text") for empty in EMPTY),
        *((kind, [{"type": "text", "text": " "}]) for kind in KINDS),
    ],
)
def test_an_empty_answer_that_is_trained_is_unusable(
    kind: str, empty: Any, chars: Tok, jsonl: Jsonl
) -> None:
    if isinstance(empty, list) and kind != "messages":
        empty = [{"role": "assistant", "content": empty}]
    row = {
        "messages": messages(empty),
        "response": {"prompt": "1+1", "response": empty},
        "chosen": {"prompt": "1+1", "chosen": empty, "rejected": "3"},
        "desirable": {"prompt": "1+1", "response": empty, "desirable": True},
        "text": {"text": empty},
    }[kind]
    path = jsonl([row])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*empty"):
        stream_of(row, chars, path).next(1)
    good = {
        "messages": messages("2"),
        "response": {"prompt": "1+1", "response": "2"},
        "chosen": {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        "desirable": {"prompt": "1+1", "response": "2", "desirable": True},
        "text": {"text": "2"},
    }[kind]
    stream = stream_of(row, chars, jsonl([good, row], "two.jsonl"), on_bad_row="skip")
    stream.next(3)
    unit = "pairs" if kind == "chosen" else "rows"
    assert stream.counts[f"{unit}_skipped"] >= 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "chosen": "2", "rejected": ""},
        {"prompt": [USER], "chosen": "2", "rejected": [{"role": "assistant", "content": " "}]},
        {"prompt": "1+1", "response": "", "desirable": False},
        {"prompt": "1+1", "response": "", "score": 0.0},
    ],
)
def test_an_empty_answer_that_is_not_learned_is_counted(
    row: dict[str, Any], chars: Tok, jsonl: Jsonl
) -> None:
    chars.chat_template = chars.chat_template if isinstance(row["prompt"], list) else None
    stream = stream_of(row, chars, jsonl([row]))
    stream.next(2)
    assert next(n for key, n in stream.counts.items() if key.endswith("_empty_answer")) == 2


def test_an_empty_answer_of_the_context_is_no_mistake(chars: Tok, jsonl: Jsonl) -> None:
    turns = [USER, {"role": "assistant", "content": "", "train": False}, *messages("2")["messages"]]
    batch = load_batch(SFTDataConfig(sources=(jsonl([{"messages": turns}]),)), chars)
    assert chars.decode(batch.tokens[batch.action_mask].tolist()) == "2<|im_end|>"


def test_reasoning_that_is_not_rendered_is_no_answer(jsonl: Jsonl) -> None:
    turns = [USER, {"role": "assistant", "content": None, "reasoning": "why"}]
    config = SFTDataConfig(sources=(jsonl([{"messages": turns}]),))
    with pytest.raises(DataError, match="empty"):
        load_batch(config, published_tokenizer("smollm2"))
    assert load_batch(config, published_tokenizer("qwen3")).num_rows == 1


@pytest.mark.parametrize(
    ("row", "options", "counted"),
    [
        ({"prompt": "1+1", "response": "2"}, {}, True),
        ({"prompt": "1+1", "chosen": "2", "rejected": "3"}, {}, True),
        ({"prompt": "1+1", "label": "2"}, {}, True),
        ({"prompt": "1+1", "label": "2"}, {"apply_chat_template": True}, False),
        ({"prompt": "1+1", "label": "2"}, {"prompt_template": "Q: {prompt} A:"}, False),
        ({"prompt": "<|im_start|>user\n1+1<|im_end|>\n", "response": "2"}, {}, False),
        ({"text": "1+1=2"}, {}, False),
        (messages("2"), {}, False),
    ],
)
def test_plain_prompts_of_a_chat_model_are_noticed(
    row: dict[str, Any], options: dict[str, Any], counted: bool, chars: Tok, jsonl: Jsonl
) -> None:
    stream = stream_of(row, chars, jsonl([row]), **options)
    stream.next(1)
    assert any("template_unused" in key for key in stream.counts) == counted
    chars.chat_template = None
    if not counted and "text" not in row:
        return
    stream = stream_of(row, chars, jsonl([row]), **options)
    stream.next(1)
    assert not any("template_unused" in key for key in stream.counts)


def test_plain_prompts_that_start_episodes_are_rendered(chars: Tok, jsonl: Jsonl) -> None:
    config = PromptDataConfig(sources=(jsonl([{"prompt": "1+1"}]),))  # type: ignore[arg-type]
    stream = PromptStream(config, chars, seed=0, in_episodes=True)
    stream.next(1)
    assert not any("template_unused" in key for key in stream.counts)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1<extra>", "response": "2"},
        {"prompt": "1+1", "response": "2<extra>"},
        {"text": "<extra>1+1"},
        {"prompt": "1+1<extra>", "label": "2"},
        {"prompt": "1+1", "chosen": "2", "rejected": "<extra>"},
        {"prompt": "1+1", "response": "<extra>", "desirable": False},
        {"prompt": "1+1", "response": "<extra>", "score": 1.0},
        messages("2<extra>"),
        {"messages": [{"role": "user", "content": "<extra>"}, messages("2")["messages"][1]]},
    ],
)
def test_a_token_without_an_embedding_is_found_with_its_row(
    row: dict[str, Any], chars: Tok, jsonl: Jsonl
) -> None:
    size = len(chars)
    chars.add_tokens(["<extra>"])
    path = jsonl([row])
    stream_of(row, chars, path).next(1)
    set_embeddings(chars, size)
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: the token '<extra>' has the id {size}"):
        stream_of(row, chars, path).next(1)


def test_prompts_of_clients_and_environments_have_embeddings(chars: Tok) -> None:
    """As ids, as text, and in messages: an engine would fail with an index error."""
    size = len(chars)
    chars.add_tokens(["<extra>"])
    set_embeddings(chars, size)
    renderer = ChatRenderer(chars, history="keep")
    with pytest.raises(CallError, match=f"ids below {size}"):
        checked_ids((size,), renderer)
    user = {"role": "user", "content": "1+1"}
    prompt, extra = renderer.render([user]), {"role": "user", "content": "<extra>"}
    for read in (
        lambda: renderer.encode("<extra>"),
        lambda: renderer.encode("<extra>", after=prompt),
        lambda: renderer.render([extra]),
        lambda: renderer.bridge(prompt, renderer.encode("2", after=prompt), [extra]),
    ):
        with pytest.raises(RendererError, match=f"'<extra>' has the id {size}"):
            read()


def test_sampled_ids_without_an_embedding_are_not_used(chars: Tok, jsonl: Jsonl) -> None:
    size = len(chars)
    chars.add_tokens(["<extra>"])
    ids = chars("2", add_special_tokens=False)["input_ids"]
    row = {"prompt": "1+1", "chosen": "2", "rejected": "<extra>", "rejected_tokens": [size]}
    config = PreferenceDataConfig(sources=(jsonl([row | {"chosen_tokens": ids}]),))
    assert load_batch(config, chars).tokens.max() == size
    set_embeddings(chars, size)
    with pytest.raises(DataError, match="'<extra>'"):
        load_batch(config, chars)
