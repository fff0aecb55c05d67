"""Rows of the job generate, read by SFT and DPO: they train exactly the ids that were sampled, with
every kind of tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from burnish.config.generate import AllSamples, BestWorstPairs
from burnish.data.batches import BatchStream, load_batch
from burnish.data.decoding import response_text
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.generation import GenerationPrompts
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import GivenResponses
from burnish.data.selection import select
from burnish.data_files.writing import json_line, write_parquet
from burnish.types import Group, Sample

Tok = PreTrainedTokenizerFast
Jsonl = Callable[..., str]
SPACE = "\u2581"
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def sentencepiece(scheme: str) -> Tok:
    """``first`` (Mistral) and ``always`` (Llama 2): a space goes before the text, and decoding
    takes one off."""
    pieces = ["<unk>", "</s>", SPACE, *"abcde[]=+usrinto", f"{SPACE}a", f"{SPACE}b", "ab"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [(SPACE, "a"), (SPACE, "b"), ("a", "b")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    if scheme == "always":  # Llama 2's own file: a normalizer in place of a pre-tokenizer
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        steps = [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return made(backend)


def wordpiece() -> Tok:
    pieces = ["<unk>", "</s>", *"abcde[]=+usrinto", "##a", "##b", "##c", "ab", "##ab"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return made(backend)


def made(backend: Tokenizer) -> Tok:
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(params=["llama 2", "mistral", "gpt-2", "bert", "characters"])
def tokenizer(request: pytest.FixtureRequest, bpe: Tok, chars: Tok) -> Tok:
    bpe.chat_template = CHAT.replace("</s>", "<|end|>")
    kinds: dict[str, Callable[[], Tok]] = {
        "llama 2": lambda: sentencepiece("always"),
        "mistral": lambda: sentencepiece("first"),
        "gpt-2": lambda: bpe,
        "bert": wordpiece,
        "characters": lambda: chars,
    }
    return kinds[str(request.param)]()


def sampled(
    tokenizer: Tok, generation_prompts: GenerationPrompts, *, ended: bool = True
) -> list[Group]:
    """Two responses of random ids to every prompt: splits that no tokenizer would make of a text,
    too."""
    rng = random.Random(0)
    special = set(tokenizer.all_special_ids)
    usable = [i for i in range(len(tokenizer)) if i not in special]
    end = (tokenizer.eos_token_id,) if ended else ()
    groups = []
    for number, generation_prompt in enumerate(generation_prompts.take(0, len(generation_prompts))):
        prompt = generation_prompt.prompt
        samples = []
        for k in range(2):
            ids = (*rng.choices(usable, k=3 + number % 5), *end)
            samples.append(
                Sample(
                    sample_id=f"{prompt.id}/{k}",
                    prompt_id=prompt.id,
                    group_id=number,
                    prompt_ids=prompt.token_ids,
                    response_ids=ids,
                    sampler_logprobs=(-1.0,) * len(ids),
                    action_mask=(True,) * len(ids),
                    versions=(0,) * len(ids),
                    text=str(tokenizer.decode(list(ids), skip_special_tokens=True)),
                    finish_reason="stop",
                    reward=float(k),
                    reward_parts={"r": float(k)},
                )
            )
        groups.append(Group(number, prompt, tuple(samples)))
    return groups


def written(
    mode: Any,
    tokenizer: Tok,
    groups: list[Group],
    generation_prompts: GenerationPrompts,
    path: Path,
) -> str:
    by_id = {q.prompt.id: q for q in generation_prompts.take(0, len(generation_prompts))}
    rows = select(mode, groups, by_id, with_tokens=True, tokenizer=tokenizer).rows
    if path.suffix == ".parquet":
        write_parquet([lambda: rows], path)
    else:
        path.write_bytes(b"".join(map(json_line, rows)))
    return str(path)


def trained(batch: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, trained ids) of every row."""
    found = []
    for a, b in pairwise(batch.offsets.tolist()):
        ids, mask = batch.tokens[a:b].tolist(), batch.action_mask[a:b].tolist()
        first = mask.index(True)
        assert all(mask[first:])
        found.append((ids[:first], ids[first:]))
    return found


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_sft_and_dpo_train_exactly_the_sampled_ids(
    tokenizer: Tok, jsonl: Jsonl, tmp_path: Path, chat: bool, suffix: str
) -> None:
    prompts = jsonl([{"prompt": text} for text in ("ab", "a b =", "c+d= ", "ab ab", "e\n")])
    data = PromptDataConfig(sources=(prompts,), apply_chat_template=chat)
    generation_prompts = GenerationPrompts(data, tokenizer)
    groups = sampled(tokenizer, generation_prompts)
    samples = [s for group in groups for s in group.samples]
    path = written(AllSamples(), tokenizer, groups, generation_prompts, tmp_path / f"all{suffix}")
    rows = load_batch(SFTDataConfig(sources=(path,)), tokenizer)
    assert trained(rows) == [(list(s.prompt_ids), list(s.response_ids)) for s in samples]
    mode = BestWorstPairs(kind="pairs")
    path = written(mode, tokenizer, groups, generation_prompts, tmp_path / f"pairs{suffix}")
    pairs = load_batch(PreferenceDataConfig(sources=(path,)), tokenizer)
    flipped = [s for group in groups for s in reversed(group.samples)]
    assert trained(pairs) == [(list(s.prompt_ids), list(s.response_ids)) for s in flipped]


def test_a_truncated_response_has_no_trained_end_token(
    chars: Tok, jsonl: Jsonl, tmp_path: Path
) -> None:
    generation_prompts = GenerationPrompts(
        PromptDataConfig(sources=(jsonl([{"prompt": "ab"}]),)), chars
    )
    groups = sampled(chars, generation_prompts, ended=False)
    path = written(AllSamples(), chars, groups, generation_prompts, tmp_path / "rows.jsonl")
    for _, ids in trained(load_batch(SFTDataConfig(sources=(path,)), chars)):
        assert chars.eos_token_id not in ids
    for _, ids in trained(load_batch(SFTDataConfig(sources=(path,), use_tokens=False), chars)):
        assert ids[-1] == chars.eos_token_id


SYSTEM = {"role": "system", "content": "b"}
TOOL = {"name": "d", "description": "e", "parameters": {"type": "object", "properties": {}}}
WITH_TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHAT


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "a", "system": "b"}, {"apply_chat_template": True}),
        ({"prompt": "a", "system": "b"}, {"prompt_template": "{system}{prompt}"}),
        ({"prompt": "a", "system_prompt": "b"}, {"prompt_template": "{prompt}c"}),
        *(
            ({"prompt": "a", "system": "b"}, {"prompt_template": text, "apply_chat_template": True})
            for text in ("{system}{prompt}", "{prompt}c")
        ),
        ({"prompt": [SYSTEM, {"role": "user", "content": "a"}], "system": "b"}, {}),
        ({"prompt": "a", "tools": [TOOL]}, {"apply_chat_template": True}),
        ({"prompt": "a", "f": [TOOL]}, {"apply_chat_template": True, "tools_key": "f"}),
        ({"prompt": "a", "tools": [TOOL]}, {"apply_chat_template": True, "tools_key": None}),
        (
            {
                "request": {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]},
                "response": {"choices": [{"message": {"role": "assistant", "content": "b"}}]},
            },
            {},
        ),
    ],
)
def test_the_next_job_reads_the_prompt_that_was_sampled(
    row: dict[str, Any],
    keys: dict[str, Any],
    tokens: bool,
    chars: Tok,
    jsonl: Jsonl,
    tmp_path: Path,
) -> None:
    """Whichever column, template or key its system message and tools came from."""
    chars.chat_template = WITH_TOOLS
    data = PromptDataConfig(sources=(jsonl([row]),), **keys)
    prompts = GenerationPrompts(data, chars)
    groups = sampled(chars, prompts)
    by_id = {q.prompt.id: q for q in prompts.take(0, len(prompts))}
    rows = select(AllSamples(), groups, by_id, with_tokens=tokens, tokenizer=chars).rows
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(map(json_line, rows)))
    read = load_batch(SFTDataConfig(sources=(str(path),)), chars)
    given = GivenResponses(ResponseDataConfig(sources=(str(path),)), chars).take(0, 2)
    for (prompt, _), response, sample in zip(trained(read), given, groups[0].samples, strict=True):
        assert prompt == list(sample.prompt_ids) == list(response.group.prompt.token_ids)


def test_a_sampled_text_that_is_json_of_messages_is_a_text(chars: Tok, jsonl: Jsonl) -> None:
    text = json.dumps([{"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}])
    row = {"prompt_id": "data:0@0", "prompt": "1+1=", "response": text, "finish_reason": "stop"}
    expected = [*chars(text, add_special_tokens=False)["input_ids"], chars.eos_token_id]
    for more in ({}, {"response_tokens": expected}):
        rows = load_batch(SFTDataConfig(sources=(jsonl([row | more]),)), chars)
        assert trained(rows)[0][1] == expected


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_the_text_of_a_row_keeps_the_first_space(scheme: str) -> None:
    """``a`` after ``ab`` is `` a`` with these tokenizers; decoded alone it is ``a``."""
    tokenizer = sentencepiece(scheme)
    prompt = tokenizer("ab")["input_ids"]
    response = tokenizer.convert_tokens_to_ids([f"{SPACE}a", "b"])
    assert tokenizer.decode(response) == "ab"
    assert response_text(tokenizer, prompt, response) == " ab"
    assert response_text(tokenizer, [], response) == "ab"


def test_the_text_of_a_wordpiece_row_has_no_marks() -> None:
    tokenizer = wordpiece()
    ids = tokenizer.convert_tokens_to_ids(["##b", "a"])
    assert tokenizer.decode(ids) == "##b a"
    assert response_text(tokenizer, tokenizer("a")["input_ids"], ids) == "b a"


def test_a_character_that_begins_in_the_prompt_keeps_its_decoded_form(bpe: Tok) -> None:
    """The prompt ends within the two bytes of a character: its text is no prefix of the full
    text."""
    first, second = bpe("\u00e4", add_special_tokens=False)["input_ids"]
    assert response_text(bpe, [first], [second]) == bpe.decode([second])


@pytest.mark.parametrize("change", ["text", "tokenizer"])
def test_ids_that_do_not_decode_to_the_text_are_ignored_and_counted(
    chars: Tok, bpe: Tok, jsonl: Jsonl, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    ids = [*chars("12", add_special_tokens=False)["input_ids"], chars.eos_token_id]
    row = {"prompt": "1+1=", "response": "12", "response_tokens": ids}
    if change == "text":
        row["response"] = "13"
    reader = bpe if change == "tokenizer" else chars
    plain = {key: row[key] for key in ("prompt", "response")}
    stream = BatchStream(SFTDataConfig(sources=(jsonl([row] * 2),)), reader, seed=0)
    with caplog.at_level("WARNING", logger="burnish"):
        batch = stream.next(2)
    expected = BatchStream(SFTDataConfig(sources=(jsonl([plain] * 2),)), reader, seed=0).next(2)
    assert batch.tokens.tolist() == expected.tokens.tolist()
    assert stream.counts["rows_other_tokens"] == 2
    assert caplog.text.count("do not decode to its text") == 1


def test_a_column_of_another_type_is_not_read_as_ids(chars: Tok, jsonl: Jsonl) -> None:
    row: dict[str, Any] = {"prompt": "1+1=", "response": "2"}
    expected = load_batch(SFTDataConfig(sources=(jsonl([row]),)), chars).tokens.tolist()
    for other in (3, "12", [], ["1"], [True], [-1], [10**9], json.dumps([1])):
        path = jsonl([row | {"response_tokens": other}])
        assert load_batch(SFTDataConfig(sources=(path,)), chars).tokens.tolist() == expected


@pytest.mark.parametrize("same", [True, False])
def test_a_response_after_another_prompt_is_counted(chars: Tok, jsonl: Jsonl, same: bool) -> None:
    ids = [*chars("12", add_special_tokens=False)["input_ids"], chars.eos_token_id]
    before = chars("1+1=" if same else "1+2=")["input_ids"]
    row = {"prompt": "1+1=", "response": "12", "response_tokens": ids, "prompt_tokens": before}
    stream = BatchStream(SFTDataConfig(sources=(jsonl([row] * 2),)), chars, seed=0)
    stream.next(2)
    assert stream.counts.get("rows_other_prompt", 0) == (0 if same else 2)
