"""Tokenizers made on the spot, and a writer of .jsonl files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = "0123456789+-*/= abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?:.,\n"
SPECIAL = ("<pad>", "<|im_end|>", "<unk>", "<s>", "<|im_start|>", "<|eot|>")


@pytest.fixture
def chars() -> PreTrainedTokenizerFast:
    """One token per character, ChatML, end token ``<|im_end|>``, puts ``<s>`` before plain
    strings."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        bos_token="<s>",
        additional_special_tokens=["<|im_start|>", "<|eot|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def bpe() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which ``a`` and ``b``, and ``:`` and ``b``, merge; no special token in
    front."""
    backend = Tokenizer(models.BPE())
    # One word per line, so that merges can cross spaces and punctuation.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["ab"] * 50 + ["A:b"] * 40 + ["the cat sat"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@pytest.fixture
def metaspace() -> PreTrainedTokenizerFast:
    """A SentencePiece-style tokenizer, which puts a space before any text."""
    vocab = ["<unk>", "</s>", "\u2581", *"abc\nx:", "\u2581a", "\u2581x"]
    backend = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocab)},
            [("\u2581", "a"), ("\u2581", "x")],
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """``jsonl(rows, name="rows.jsonl")`` writes the rows and returns the path."""

    def write(rows: Sequence[Mapping[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
