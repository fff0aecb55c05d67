"""Tokens of samples: numbers of a batch survive, size is bounded, texts join."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import burnish.observe.sample_tokens as sample_tokens
from burnish.batches import groups_to_batch
from burnish.data.base import Row
from burnish.data.forms import open_rows
from burnish.data.prompts.config import PromptDataConfig
from burnish.data_files.arrow_files import (
    INSPECTED_SAMPLE_COLUMNS,
    SAMPLE_COLUMNS,
    data_columns,
)
from burnish.data_files.reading import first_row
from burnish.observe.sample_tokens import TokenTexts, token_table
from burnish.observe.samples import (
    SCHEMA,
    TOKEN_SCHEMA,
    read_sample_file,
    read_tokens,
    samples_with_tokens,
    write_samples,
)
from burnish.runs.errors import RunFolderError
from burnish.runs.folder import load_run
from burnish.types import Batch, Group, Prompt, Sample, TokenRow

TEXT = "naïve 日本語 → 😀👩‍🔬 def f(x):\n\treturn x  # ok\x00\u202e<b>&amp;</b>"


def _byte_level() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat 日本 def return"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _byte_fallback() -> PreTrainedTokenizerBase:
    """SentencePiece's form: a space is part of the next piece, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁the", "▁a", "▁", "cat"]
    pieces += list("abcdefhinorstx(.,:;!')")
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


TOKENIZERS = {"byte-level": _byte_level(), "byte-fallback": _byte_fallback()}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_of_tokens_join_to_the_text(kind: str) -> None:
    """SentencePiece strips the space of the first token, which is the row's own text here."""
    tokenizer = TOKENIZERS[kind]
    ids = list(tokenizer.encode(TEXT))
    texts = TokenTexts(tokenizer)(ids)
    assert len(texts) == len(ids)
    joined = "".join(texts)
    assert joined.removeprefix(" ") == TEXT == tokenizer.decode(ids).removeprefix(" ")


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(ids=st.lists(st.integers(0, 299), max_size=30))
@example(ids=[299, 0, 2, 1])
@settings(max_examples=150, deadline=None)
def test_any_ids_have_texts_that_can_be_stored(kind: str, ids: list[int]) -> None:
    """Parts of characters, ids outside of the vocabulary: one text per token, and valid UTF-8.
    The texts of tokens that are complete alone do not depend on their neighbors."""
    tokenizer = TOKENIZERS[kind]
    texts = TokenTexts(tokenizer)(ids)
    assert len(texts) == len(ids)
    "".join(texts).encode()
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if "\ufffd" not in decoded and all(i < len(tokenizer) for i in ids):
        assert "".join(texts).lstrip(" ") == decoded.lstrip(" ")


def test_bytes_that_are_no_character_have_the_form_of_the_tokenizer() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    whole = list(tokenizer.encode("😀", add_special_tokens=False))
    assert len(whole) == 4
    assert TokenTexts(tokenizer)([*whole, *whole[:2]]) == ["", "", "", "😀", "ð", "Ł"]
    assert TokenTexts(tokenizer)([10**6]) == ["<1000000>"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_replacement_character_of_the_text_is_kept(kind: str) -> None:
    """U+FFFD has three bytes, as bytes that are no character may have."""
    tokenizer = TOKENIZERS[kind]
    text = "a\ufffd\ufffd日 \ufffd"
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    joined = "".join(TokenTexts(tokenizer)(ids))
    assert joined.removeprefix(" ") == text


def test_a_row_of_wordpiece_may_begin_inside_a_word() -> None:
    words = ["[UNK]", "play", "##ing", "cat", "\ufffd"]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    for ids in ([2, 3], [1, 2, 3], [3, 4, 2]):
        joined = "".join(TokenTexts(tokenizer)(ids))
        assert joined.removeprefix(" ") == tokenizer.decode(ids)


# ---- the table


def _sample(name: str, *, prompt: int, response: int, rows: int = 1) -> Sample:
    """A sample whose sampled tokens alternate with observations; numbers are those of its place."""

    def row(at: int) -> TokenRow:
        mask = [i % 3 != 2 for i in range(response)]
        turn = [at if on else -1 for on in mask]
        logprobs = [-(at + 1) - i / 8 for i in range(response)]
        return TokenRow(
            [20 + at] * prompt, range(response), logprobs, mask, range(4, 4 + response), turn
        )

    *earlier, last = map(row, range(rows))
    return Sample(
        sample_id=name,
        prompt_id="p",
        group_id=0,
        prompt_ids=last.prompt_ids,
        response_ids=last.response_ids,
        sampler_logprobs=last.sampler_logprobs,
        action_mask=last.action_mask,
        versions=last.versions,
        turns=last.turns,
        text="",
        finish_reason="stop",
        reward=1.0,
        earlier_rows=tuple(earlier),
    )


def _batch(samples: list[Sample]) -> Batch:
    batch = groups_to_batch([Group(0, Prompt("p", (20,), ""), tuple(samples))])
    numbers = torch.arange(float(batch.tokens.numel()))
    numbers[3], numbers[4] = math.nan, -math.inf
    return replace(batch, advantages=numbers + 0.5, ref_logprobs=-numbers)


def _texts() -> TokenTexts:
    return TokenTexts(TOKENIZERS["byte-level"])


def test_the_file_has_the_numbers_of_the_batch(tmp_path: Path) -> None:
    """Samples of one row and of three; each number is compared by its place in the batch."""
    samples = [_sample("a", prompt=2, response=5), _sample("b", prompt=3, response=4, rows=3)]
    samples += [_sample("without", prompt=1, response=1)]
    batch = _batch(samples)
    part = batch.select((batch.row_samples()[0] < 2).nonzero()[:, 0].tolist())
    entropies = torch.rand(part.tokens.numel())
    trainer = -torch.rand(part.tokens.numel())
    table = token_table(samples[:2], part, _texts(), trainer_logprobs=trainer, entropies=entropies)
    group = Group(0, Prompt("p", (20,), ""), tuple(samples))
    path = write_samples(tmp_path, 7, [group], None, limit=9, tokens=table)
    assert path is not None and samples_with_tokens(path) == ["a", "b"]
    assert read_tokens(path, "without") is None
    begin = 0
    for sample in samples[:2]:
        columns = read_tokens(path, sample.sample_id)
        assert columns is not None and list(columns) == TOKEN_SCHEMA.names
        rows = sample.rows
        count = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        span = slice(begin, begin + count)
        begin += count
        assert columns["token_ids"] == part.tokens[span].tolist()
        mask = columns["action_mask"]
        assert mask == part.action_mask[span].tolist()
        turns: list[int | None] = []
        versions: list[int | None] = []
        numbers: list[int] = []
        for number, row in enumerate(rows):
            numbers += [number] * (len(row.prompt_ids) + len(row.response_ids))
            turns += [None] * len(row.prompt_ids) + list(row.turns)
            versions += [None] * len(row.prompt_ids) + list(row.versions)
        assert columns["row_numbers"] == numbers and columns["turns"] == turns
        assert columns["versions"] == [
            v if on else None for v, on in zip(versions, mask, strict=True)
        ]
        expected = {
            "sampler_logprobs": part.sampler_logprobs,
            "trainer_logprobs": trainer,
            "entropies": entropies,
            "ref_logprobs": part.ref_logprobs,
            "token_advantages": part.advantages,
        }
        for name, values in expected.items():
            assert values is not None
            wanted = [
                repr(v) if on else "None" for v, on in zip(values[span].tolist(), mask, strict=True)
            ]
            assert list(map(repr, columns[name])) == wanted, name
        assert columns["values"] is None and columns["teacher_logprobs"] is None
        assert columns["tokens_omitted"] == 0


@pytest.mark.parametrize(("prompt", "response", "rows"), [(50, 3, 1), (2, 90, 1), (30, 20, 4)])
def test_the_last_tokens_of_prompts_and_samples_are_saved(
    prompt: int, response: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 tokens of each prompt, 40 of a sample: the last ones, in every column."""
    monkeypatch.setattr(sample_tokens, "MAX_PROMPT_TOKENS", 8)
    monkeypatch.setattr(sample_tokens, "MAX_TOKENS", 40)
    samples = [_sample("a", prompt=prompt, response=response, rows=rows)] * 2
    batch = _batch(samples)
    (first, second) = token_table(samples, batch, _texts()).to_pylist()
    kept = (min(prompt, 8) + response) * rows
    for number, columns in enumerate((first, second)):
        lists = {name: v for name, v in columns.items() if isinstance(v, list)}
        assert {len(values) for values in lists.values()} == {min(kept, 40)}
        assert columns["tokens_omitted"] == (prompt + response) * rows - min(kept, 40)
        row = response + min(prompt, 8)
        end = (number + 1) * (prompt + response) * rows
        last = batch.tokens[end - row : end].tolist()[-40:]
        assert columns["token_ids"][-len(last) :] == last
    assert len(set(second["row_numbers"])) <= rows and second["row_numbers"][-1] == rows - 1


def test_other_readers_do_not_read_the_tokens(tmp_path: Path) -> None:
    """Also of files of older versions, which lack the columns."""
    samples = [_sample("a", prompt=2, response=5)]
    group = Group(0, Prompt("p", (20,), ""), tuple(samples))
    old = write_samples(tmp_path, 1, [group], None, limit=9)
    table = token_table(samples, _batch(samples), _texts())
    new = write_samples(tmp_path, 2, [group], None, limit=9, tokens=table)
    assert old is not None and new is not None
    assert [list(row) for row in read_sample_file(new)] == [SCHEMA.names]
    assert samples_with_tokens(old) == [] and read_tokens(old, "a") is None
    names = [*SCHEMA.names, *TOKEN_SCHEMA.names]
    assert pq.read_schema(old).names == pq.read_schema(new).names == names


def _rows(source: str) -> list[Row]:
    source_of_rows = open_rows(PromptDataConfig(sources=(source,)))[0]
    return [source_of_rows[i] for i in range(len(source_of_rows))]


@pytest.mark.parametrize("older", [(), ("without tokens",), ("without tokens", "unmarked")])
def test_sample_files_of_all_kinds_are_one_source_of_data(
    tmp_path: Path, older: tuple[str, ...]
) -> None:
    """Without the columns that people read, which files of older versions do not have, or have
    without metadata."""
    group = Group(0, Prompt("p", (20,), "q"), (_sample("a", prompt=2, response=5),))
    table = token_table(group.samples, _batch(group.samples), _texts())
    write_samples(tmp_path, 1, [group], None, limit=9, tokens=table)
    write_samples(tmp_path, 2, [group], None, limit=9)
    write_samples(tmp_path, 2, [group], None, limit=9, split="dropped", dropped={"p": "equal"})
    folder = tmp_path / "samples"
    if "without tokens" in older:
        kept = pq.read_table(folder / "step_000002.parquet").drop([*TOKEN_SCHEMA.names, "dropped"])
        pq.write_table(kept, folder / "step_000002.parquet")
    if "unmarked" in older:
        for name, left_out in (("step_000001", []), ("dropped_000002", TOKEN_SCHEMA.names)):
            file = folder / f"{name}.parquet"
            table = pq.read_table(file).drop(left_out)
            fields = [field.remove_metadata() for field in table.schema]
            pq.write_table(table.cast(pa.schema(fields)), file)
    rows = _rows(str(folder))
    assert [row.values["step"] for row in rows] == [2, 1, 2]
    assert all(list(row.values) == [n for n in SCHEMA.names if n != "dropped"] for row in rows)
    first = first_row(str(folder / "step_000001.parquet"))
    assert first is not None and list(first) == list(rows[0].values)


def test_a_table_with_the_names_of_tokens_and_others_keeps_them() -> None:
    """Only files with all columns of a sample file and no others are those of a run."""
    names = [*SCHEMA.names, *TOKEN_SCHEMA.names]
    assert names == [*SAMPLE_COLUMNS, *INSPECTED_SAMPLE_COLUMNS]
    for table in (names[1:], [*names, "category"], ["prompt", "turns", "values"]):
        assert data_columns(pa.schema([(name, pa.string()) for name in table])) == table


def test_files_in_a_folder_whose_name_is_not_utf_8_are_read(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"run_\xff")
    group = Group(0, Prompt("p", (20,), "q"), (_sample("a", prompt=2, response=5),))
    table = token_table(group.samples, _batch(group.samples), _texts())
    path = write_samples(run, 1, [group], None, limit=9, tokens=table)
    assert path is not None and len(read_sample_file(path)) == 1
    columns = read_tokens(path, "a")
    assert columns is not None and len(columns["tokens"]) == 7
    (row,) = _rows(str(path))
    assert row.values["response"] == group.samples[0].text
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file:
        with pa.ipc.new_file(file, pa.schema([("prompt", pa.string())])) as writer:
            writer.write(pa.record_batch({"prompt": ["q"]}))
    (tmp_path / "rows.arrow").rename(run / "rows.arrow")
    assert [row.values for row in _rows(str(run / "rows.arrow"))] == [{"prompt": "q"}]


def test_a_run_gives_the_tokens_of_a_sample_as_a_data_frame(tmp_path: Path) -> None:
    """The ratio of trainer and sampler is e^(-0.5 - -1) = e^0.5."""
    samples = [_sample("a", prompt=2, response=3)]
    batch = _batch(samples)
    table = token_table(
        samples, batch, _texts(), trainer_logprobs=torch.full((5,), -0.5), entropies=None
    )
    group = Group(0, Prompt("p", (20,), ""), tuple(samples))
    write_samples(tmp_path, 3, [group], None, limit=9, tokens=table)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "time": 1.0}\n')
    frame = load_run(tmp_path).tokens(3, "a")
    assert frame["mask"].tolist() == [False, False, True, True, False]
    assert frame["ratio"][2] == pytest.approx(math.exp(0.5)) and math.isnan(frame["ratio"][4])
    assert frame["difference"][3] == pytest.approx(-0.5 + 1.125)
    assert frame["entropy"].isna().all() and frame["turn"].isna().tolist()[:2] == [True, True]
    for step, name in ((3, "b"), (4, "a")):
        with pytest.raises(RunFolderError, match="samples_with_tokens"):
            load_run(tmp_path).tokens(step, name)
    with pytest.raises(RunFolderError, match="samples_with_tokens"):
        load_run(tmp_path).tokens(3, "a", split="eval")
    other = token_table(
        samples, batch, _texts(), trainer_logprobs=torch.full((5,), -0.75), entropies=None
    )
    write_samples(tmp_path, 3, [group], None, limit=9, split="eval", tokens=other)
    logprobs = {
        split: load_run(tmp_path).tokens(3, "a", split=split)["trainer_logprob"][2]
        for split in (None, "train", "eval")
    }
    assert logprobs == {None: -0.5, "train": -0.5, "eval": -0.75}  # equal ids: train is first
