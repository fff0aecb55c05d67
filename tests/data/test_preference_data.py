"""Preference pairs: row order, shared prompts, margins, and the length limit on both rows at
once."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import named_tokenizer
from transformers import PreTrainedTokenizerFast

from burnish.data.batches import BatchStream, load_batch
from burnish.data.chat import encode_prompt
from burnish.data.held_out import held_out_rows
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.preferences.unpaired import load_unpaired
from burnish.data.sources import DataError
from burnish.types import Batch

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]
PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "31", "by": 0.5},
    {"prompt": "2+2=", "chosen": "4", "rejected": "5", "by": 2},
]


def config(path: str, **options: Any) -> PreferenceDataConfig:
    return PreferenceDataConfig(sources=(path,), **options)


def texts(tokenizer: Tok, batch: Batch) -> list[str]:
    ends = batch.offsets.tolist()
    return [tokenizer.decode(batch.tokens[a:b].tolist()) for a, b in pairwise(ends)]


def test_pairs_are_chosen_then_rejected_and_share_a_group(chars: Tok, jsonl: Jsonl) -> None:
    batch = load_batch(config(jsonl(PAIRS), margin_key="by"), chars)
    assert texts(chars, batch) == [
        "<s>1+1=2<|im_end|>",
        "<s>1+1=31<|im_end|>",
        "<s>2+2=4<|im_end|>",
        "<s>2+2=5<|im_end|>",
    ]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.prompt_lens.tolist() == [5, 5, 5, 5]
    assert batch.rows_per_unit == 2 and batch.num_sequences == 4
    assert batch.num_tokens == 2 + 3 + 2 + 2
    assert batch.margins is not None and batch.margins.tolist() == [0.5, 0.5, 2.0, 2.0]


def test_without_a_margin_column_there_are_no_margins(chars: Tok, jsonl: Jsonl) -> None:
    assert load_batch(config(jsonl(PAIRS)), chars).margins is None


def test_the_mask_is_on_the_response_tokens(chars: Tok, jsonl: Jsonl) -> None:
    batch = load_batch(config(jsonl(PAIRS)), chars, limit=1)
    assert batch.action_mask.tolist() == [False] * 5 + [True] * 2 + [False] * 5 + [True] * 3


@pytest.mark.parametrize(
    "row",
    [
        {
            "prompt": [{"role": "user", "content": "1+1"}],
            "chosen": [{"role": "assistant", "content": "2"}],
            "rejected": "3",
        },
        {
            "prompt": "1+1",
            "chosen": [
                {"role": "user", "content": "1+1"},
                {"role": "assistant", "content": "2"},
            ],
            "rejected": [
                {"role": "user", "content": "1+1"},
                {"role": "assistant", "content": "3"},
            ],
        },
    ],
)
def test_messages_go_through_the_template_and_keep_the_prompt_exact(
    chars: Tok, jsonl: Jsonl, row: dict[str, Any]
) -> None:
    """Also where the responses repeat the prompt, as many published sets do. Rows end with the end
    token, not with the newline the template writes after it: no sampled response has that."""
    batch = load_batch(config(jsonl([row]), system_prompt="brief"), chars)
    before = "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n"
    before += "<|im_start|>assistant\n"
    assert texts(chars, batch) == [before + "2<|im_end|>", before + "3<|im_end|>"]
    prompt = [{"role": "system", "content": "brief"}, {"role": "user", "content": "1+1"}]
    ids = encode_prompt(chars, prompt)[1]
    assert batch.prompt_lens.tolist() == [len(ids)] * 2
    assert batch.tokens[: len(ids)].tolist() == ids
    assert chars.decode(batch.tokens[batch.action_mask].tolist()) == "2<|im_end|>3<|im_end|>"


def test_a_resumed_stream_gives_the_very_next_pairs(chars: Tok, jsonl: Jsonl) -> None:
    chars.chat_template = None
    path = jsonl([{**PAIRS[0], "prompt": f"{i}+1="} for i in range(5)])
    whole = BatchStream(config(path), chars, seed=4)
    whole.next(3)
    resumed = BatchStream(config(path), chars, seed=4)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    expected, got = whole.next(4), resumed.next(4)
    assert torch.equal(got.tokens, expected.tokens)
    assert got.group_ids.tolist() == expected.group_ids.tolist() == [3, 3, 4, 4, 5, 5, 6, 6]
    assert resumed.counts == whole.counts
    assert whole.counts == {"pairs_seen": 7, "pairs_dropped": 0, "pairs_truncated": 0, "epoch": 1}


def test_an_overlong_pair_loses_the_same_prompt_tokens_in_both_rows(
    chars: Tok, jsonl: Jsonl
) -> None:
    """The rejected row is ``<s> 1 + 1 = 3 1 <|im_end|>``, 8 tokens; under 6, both lose ``<s>
    1``."""
    path = jsonl(PAIRS[:1])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the pair has 8 tokens, but max_len is 6"):
        load_batch(config(path, max_len=6), chars)
    stream = BatchStream(config(path, max_len=6, overlong="truncate_left"), chars, seed=0)
    batch = stream.next(1)
    assert texts(chars, batch) == ["+1=2<|im_end|>", "+1=31<|im_end|>"]
    assert batch.prompt_lens.tolist() == [3, 3]
    assert stream.counts["pairs_truncated"] == 1
    stream = BatchStream(config(path, max_len=7, overlong="truncate_right"), chars, seed=0)
    assert texts(chars, stream.next(1)) == ["<s>1+1=2<|im_end|>", "<s>1+1=31"]


def test_pairs_that_are_equal_without_their_ends_are_dropped(chars: Tok, jsonl: Jsonl) -> None:
    rows = [{"prompt": "1+1=", "chosen": "22", "rejected": "23"}, PAIRS[1]]
    data = config(jsonl(rows), max_len=6, shuffle=False, overlong="truncate_right")
    stream = BatchStream(data, chars, seed=0)
    assert texts(chars, stream.next(1)) == ["<s>2+2=4", "<s>2+2=5"]
    assert stream.counts["pairs_dropped"] == 1


def test_pairs_of_equal_responses_are_counted(chars: Tok, jsonl: Jsonl) -> None:
    pairs = [{"prompt": "2+2", "chosen": "4", "rejected": other} for other in ("5", "4", "4")]
    stream = BatchStream(config(jsonl(pairs)), chars, seed=0)
    stream.next(3)
    assert stream.counts["pairs_equal"] == 2


def test_a_pair_whose_response_alone_fills_the_limit_is_dropped(chars: Tok, jsonl: Jsonl) -> None:
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "12345"}, PAIRS[1]]
    data = config(jsonl(rows), max_len=6, shuffle=False, overlong="truncate_left")
    stream = BatchStream(data, chars, seed=0)
    assert texts(chars, stream.next(1)) == ["2+2=4<|im_end|>", "2+2=5<|im_end|>"]
    assert stream.counts["pairs_dropped"] == 1 and stream.counts["pairs_truncated"] == 1


def test_dropped_pairs_are_counted(chars: Tok, jsonl: Jsonl) -> None:
    data = config(jsonl(PAIRS), max_len=7, shuffle=False, overlong="drop")
    stream = BatchStream(data, chars, seed=0)
    assert texts(chars, stream.next(1))[0] == "<s>2+2=4<|im_end|>"
    assert stream.counts["pairs_dropped"] == 1


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rejected": None}, r"rows\.jsonl:1.*\(rejected_key\)"),
        (
            {"by": "much"},
            r"rows\.jsonl:1.*\(margin_key\) contains",
        ),
        ({"by": "nan"}, r"rows\.jsonl:1.*finite number"),
        ({"by": 1e39}, r"rows\.jsonl:1.*finite number"),
        ({"by": 10**400}, r"rows\.jsonl:1.*finite number"),
        ({"prompt": ""}, r"rows\.jsonl:1.*prompt"),
    ],
)
def test_an_unusable_pair_is_refused_with_its_location(
    chars: Tok, jsonl: Jsonl, changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        load_batch(config(jsonl([{**PAIRS[0], **changed}]), margin_key="by"), chars)


def test_a_mistyped_column_is_named_with_the_nearest(chars: Tok, jsonl: Jsonl) -> None:
    with pytest.raises(DataError, match=r"no column 'choosen' \(chosen_key\).*nearest: chosen"):
        load_batch(config(jsonl(PAIRS), chosen_key="choosen"), chars)


def test_a_pair_of_text_and_messages_has_one_prompt(chars: Tok, jsonl: Jsonl) -> None:
    """The chosen row went through the chat template, the rejected one did not."""
    answer = [{"role": "assistant", "content": "2"}]
    mixed = load_batch(config(jsonl([{"prompt": "1+1", "chosen": answer, "rejected": "3"}])), chars)
    chat = [{"role": "assistant", "content": text} for text in "23"]
    both = {"prompt": "1+1", "chosen": chat[:1], "rejected": chat[1:]}
    assert mixed.tokens.tolist() == load_batch(config(jsonl([both])), chars).tokens.tolist()
    first, second = mixed.prompt_lens.tolist()
    assert first == second and texts(chars, mixed)[1].endswith("assistant\n3<|im_end|>")


def test_rows_that_follow_other_conversations_are_refused(chars: Tok, jsonl: Jsonl) -> None:
    """``chosen`` follows another question than ``rejected``."""
    chars.chat_template = chars.chat_template.replace(
        "{% for", "{% if messages | length > 3 %}long\n{% endif %}{% for", 1
    )
    turns = [{"role": r, "content": "1"} for r in ("assistant", "user", "assistant")]
    row = {"prompt": "1+1", "chosen": turns, "rejected": turns[:1]}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*(different prompts|only appends)"):
        load_batch(config(jsonl([row])), chars)


def test_pairs_of_which_one_calls_a_tool_need_tools_under_templates_with_names(
    jsonl: Jsonl,
) -> None:
    """``default`` renders the prompt of the response without a call, ``tool_use`` the other's."""
    function = {"name": "f", "arguments": {"x": 1}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    answer = {"role": "assistant", "content": "No."}
    row = {"prompt": "1+1", "chosen": [call], "rejected": [answer]}
    with pytest.raises(DataError, match=r"templates with names.*column 'tools' \(tools_key\)"):
        load_batch(config(jsonl([row])), named_tokenizer())
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]
    batch = load_batch(config(jsonl([{**row, "tools": tools}])), named_tokenizer())
    first, second = batch.prompt_lens.tolist()
    assert first == second


DIALOGUES = [
    {"prompt": "Human: hi\nAssistant:", "chosen": " hello", "rejected": " no"},
    {"prompt": "Human: what is 1+1\nAssistant:", "chosen": " 2", "rejected": " 3"},
]


def repeated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As hh-rlhf has them: each response is the full dialogue."""
    return [
        {"prompt": row["prompt"]} | {k: row["prompt"] + row[k] for k in ("chosen", "rejected")}
        for row in rows
    ]


def test_both_parts_of_a_source_repeat_their_prompts_or_none(chars: Tok, jsonl: Jsonl) -> None:
    """Of 130 rows one, which is held out and among the first 100, does not repeat its prompt."""
    chars.chat_template = None
    rows = [{"prompt": f"{i}?", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(130)]
    name = Path(jsonl(rows, "pairs.jsonl")).stem
    odd = int(held_out_rows(name, len(rows), 5)[0])
    mixed = [row if i == odd else repeated([row])[0] for i, row in enumerate(rows)]
    path = jsonl(mixed, "pairs.jsonl")
    for part in ("train", "held_out"):
        shown = {
            choice: load_batch(
                config(path, held_out=5, part=part, repeated_prompt=choice), chars
            ).tokens.tolist()
            for choice in ("auto", "keep")
        }
        assert odd < 100 and shown["auto"] == shown["keep"], part


def test_responses_that_repeat_their_prompt_have_it_once(
    chars: Tok, jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    chars.chat_template = None
    bare = load_batch(config(jsonl(DIALOGUES)), chars)
    assert not caplog.records
    path = jsonl(repeated(DIALOGUES), "twice.jsonl")
    with caplog.at_level("WARNING", logger="burnish"):
        assert load_batch(config(path), chars).tokens.tolist() == bare.tokens.tolist()
    assert caplog.text.count("begins with its prompt") == 1
    kept = load_batch(config(path, repeated_prompt="keep"), chars)
    assert texts(chars, kept)[0].count("Human: hi") == 2
    judged = [{"prompt": r["prompt"], "response": r["chosen"], "ok": 1} for r in DIALOGUES]
    twice = [{**r, "response": r["prompt"] + r["response"]} for r in judged]
    options = {"label_key": "ok"}
    assert (
        load_unpaired(config(jsonl(twice), **options), chars).tokens.tolist()
        == load_unpaired(config(jsonl(judged), **options), chars).tokens.tolist()
    )


def test_an_answer_that_happens_to_begin_with_its_prompt_is_kept(chars: Tok, jsonl: Jsonl) -> None:
    rows = [{"prompt": "hi", "chosen": "hi there", "rejected": "hi no"}, *DIALOGUES]
    assert texts(chars, load_batch(config(jsonl(rows)), chars))[0] == "<s>hihi there<|im_end|>"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", "<|eot|>"])
def test_an_end_token_in_the_data_is_not_duplicated(
    chars: Tok, jsonl: Jsonl, chat: bool, end: str
) -> None:
    if end == "<|eot|>":
        if not chat:
            return
        chars.chat_template = chars.chat_template.replace("<|im_end|>", "<|eot|>")
    bare = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    ended = {"prompt": "1+1", "chosen": f"2{end}", "rejected": f"3{end}"}
    ours, theirs = (
        load_batch(config(jsonl([row]), apply_chat_template=chat), chars) for row in (ended, bare)
    )
    assert texts(chars, ours) == texts(chars, theirs)
