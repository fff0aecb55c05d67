"""Tokenizers of every kind of decoder, and random responses of their tokens."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from chat_families import byte_bpe, chat_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from burnish.byte_tokens import byte_tokens

WORDS = ("a", "b", "the", "tion", "ST", "OP", "\n", ".", ",", "'", "n't", "'s", "?", "漢", "é")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_bytes() -> PreTrainedTokenizerFast:
    """Llama's decoder: pieces with ``▁``, and bytes that are ordinary tokens."""
    pieces = [*BYTES, *(f"{space}{word}" for word in WORDS for space in ("", "▁")), "▁", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(["<unk>", "</s>", *pieces]))}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def unigram_bytes() -> PreTrainedTokenizerFast:
    """Metaspace as decoder behind that of bytes (T5, Gemma-like)."""
    pieces = ["<unk>", "</s>", *BYTES, *WORDS, *(f"▁{word}" for word in WORDS), "▁"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def word_pieces(*, removes_spaces: bool) -> PreTrainedTokenizerFast:
    """WordPiece, whose decoder joins words with spaces."""
    pieces = ["[UNK]", "[SEP]", *WORDS, *(f"##{word}" for word in WORDS)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=removes_spaces)
    names = {"eos_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=removes_spaces, **names
    )


class CharacterByCharacter(PreTrainedTokenizerFast):
    """Decodes the characters of a run of bytes one by one, as SentencePiece's own decoder does."""

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        data = b""
        for token in token_ids:
            piece = self.convert_ids_to_tokens(token)
            if piece is None or (skip_special_tokens and token in self.all_special_ids):
                continue
            is_byte = piece in BYTES
            data += bytes([BYTES.index(piece)]) if is_byte else piece.replace("▁", " ").encode()
        return data.decode("utf-8", "replace").removeprefix(" ")


def sentencepiece_decoder() -> CharacterByCharacter:
    """The vocabulary of :func:`sentencepiece_bytes` with the decoder of SentencePiece."""
    backend = sentencepiece_bytes().backend_tokenizer
    names = {"eos_token": "</s>", "unk_token": "<unk>"}
    return CharacterByCharacter(tokenizer_object=backend, **names)


KINDS = {
    "byte-level": lambda: byte_bpe((), eos="<|end|>"),
    "SentencePiece": sentencepiece_bytes,
    "SentencePiece, bytes are special": lambda: chat_tokenizer("mistral"),
    "SentencePiece, its own decoder": sentencepiece_decoder,
    "Unigram": unigram_bytes,
    "WordPiece": lambda: word_pieces(removes_spaces=False),
    "WordPiece, removes spaces": lambda: word_pieces(removes_spaces=True),
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    return KINDS[kind]()


def response(tokenizer: Any, rng: random.Random) -> list[int]:
    """Random tokens: words, characters in bytes, now and then a wrong or a missing byte, special
    tokens and ids beyond the vocabulary."""
    size, values = len(tokenizer), {byte: i for i, byte in byte_tokens(tokenizer).items()}
    ids: list[int] = []
    for _ in range(rng.choice((3, 12, 40))):
        kind = rng.random()
        if kind < 0.5 or not values:
            ids.append(rng.randrange(size))
        elif kind < 0.9:
            text = rng.choice(("漢字", "é", "🌦", "STOP", "a.b", "\n", "漢 a", "x" * 30, "字" * 12))
            ids += [values[byte] for byte in text.encode()]
        elif kind < 0.95:
            ids.append(values[rng.choice((0x80, 0xE6, 0xFF, 0xF0))])
        elif ids:
            del ids[rng.randrange(len(ids))]
        if rng.random() < 0.1:
            ids.append(rng.choice((size + 7, int(tokenizer.eos_token_id))))
    return ids
