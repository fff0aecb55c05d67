"""Tokenizers made on the spot, chat templates, conversations and rows of data, drawn at random."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metamorphic.base import Draw
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

Tok = PreTrainedTokenizerFast
Message = dict[str, Any]
SPACE = "\u2581"
BOS, EOS = "<s>", "</s>"
MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?+-*/=()[]{}<>|_#\n"

TEMPLATES = {
    "chatml": (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
        "<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
        "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
        "{% for m in rest %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
        "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "no end token": (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "strips reasoning": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}"
        "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "drops system": (
        "{% for m in messages %}{% if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] }}</s>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def _characters() -> Tokenizer:
    pieces = ["<unk>", *LETTERS, "ä", "é", "世", "🙂"]
    backend = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _byte_level(*, prefix: bool = False) -> Tokenizer:
    """``prefix``: a space goes before the text and behind special tokens."""
    backend = Tokenizer(models.BPE())
    # One word per line: merges cross spaces and punctuation.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["ab", "A:b", "assistant:", ": a", "the cat", " = 1", "\n\n", ".\n", "user\nab"]
    backend.train_from_iterator([word for word in words for _ in range(20)], trainer)
    return backend


def _sentencepiece(scheme: str) -> Tokenizer:
    """``first`` (Mistral) or ``always`` (Llama 2): a space goes before the text; unknown characters
    become bytes."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), SPACE, *LETTERS.replace(" ", "")]
    pieces += [f"{SPACE}a", f"{SPACE}b", "ab", f"{SPACE}{SPACE}", f"{SPACE}="]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [(SPACE, "a"), (SPACE, "b"), ("a", "b"), (SPACE, SPACE), (SPACE, "=")]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if scheme == "always":  # Llama 2's own file: a normalizer in place of a pre-tokenizer
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def _unigram() -> Tokenizer:
    """A space goes before the text and behind special tokens; line breaks merge with both."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), SPACE, *LETTERS.replace(" ", "")]
    words = ["\n\n", "\na", "\nA:", f"\n{SPACE}", f"{SPACE}a", "ab", f"{SPACE}the", ":\n"]
    scores = {**dict.fromkeys(pieces, -9.0), **dict.fromkeys(words, -5.0)}
    backend = Tokenizer(models.Unigram(list(scores.items()), unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    strip = decoders.Strip(" ", 1, 0)
    space = decoders.Replace(SPACE, " ")
    backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return backend


def _wordpiece() -> Tokenizer:
    letters = [c for c in LETTERS if not c.isspace()]
    pieces = ["<unk>", *letters, *(f"##{c}" for c in letters if c.isalnum()), "ab", "##ab"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "characters": _characters,
    "byte-level": _byte_level,
    "llama 2": lambda: _sentencepiece("always"),
    "mistral": lambda: _sentencepiece("first"),
    "wordpiece": _wordpiece,
    "byte-level with a space": lambda: _byte_level(prefix=True),
    "unigram": _unigram,
}
FAITHFUL = ("byte-level", "byte-level with a space", "llama 2", "mistral", "unigram")
"""Tokenizers whose ids decode to any text that they were made from, but for a first space."""


def tokenizer_of(draw: Draw, kinds: Sequence[str] = tuple(KINDS)) -> Tok:
    """Draw a tokenizer with a chat template; it may add BOS in front and EOS behind."""
    kind = draw.one(tokenizer=kinds)
    backend = KINDS[kind]()
    backend.add_special_tokens([AddedToken(t, special=True) for t in (BOS, EOS, *MARKS)])
    adds = draw.one(adds=["nothing", "bos", "bos", "bos and eos"])
    if adds != "nothing":
        special = [(t, backend.token_to_id(t)) for t in (BOS, EOS)]
        single = f"{BOS} $A {EOS}" if "eos" in adds else f"{BOS} $A"
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=special
        )
    template = draw.one(template=TEMPLATES)
    ends = {"chatml": "<|im_end|>", "strips reasoning": "<|im_end|>", "llama3": "<|eot_id|>"}
    eos = ends.get(template, EOS) if draw.rng.random() < 0.7 else EOS
    tokenizer = Tok(tokenizer_object=backend, bos_token=BOS, eos_token=eos, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATES[template]
    draw.note(eos=eos)
    return tokenizer


PIECES = (
    *("ab", " a", "a ", "  ", "\n", "\n\n", "1", "=", ": ", "世", "ä", "é", "🙂", "{x}", "#"),
    *("A:b", "the cat", "x", ".", "<think>", "</think>", "user", "\t", "e\u0301", "\u200b"),
)


def text_of(draw: Draw, *, longest: int = 12, plain: bool = False) -> str:
    """Draw a text. ``plain``: of letters, digits and single spaces, with a letter at both ends."""
    rng = draw.rng
    if plain:
        words = ["".join(rng.choices("abcde123", k=rng.randint(1, 4))) for _ in range(longest // 3)]
        return "a" + " ".join(words[: rng.randint(1, len(words))]) + "b"
    return "".join(rng.choices(PIECES, k=rng.randint(0, longest)))


def conversation_of(draw: Draw, *, plain: bool = False, answered: bool = True) -> list[Message]:
    """Draw a conversation of one to three exchanges, perhaps behind a system message. ``answered``:
    it ends with an assistant message."""
    rng = draw.rng
    found = []
    if rng.random() < 0.3:
        found.append({"role": "system", "content": text_of(draw, plain=plain)})
    turns = rng.choice([1, 1, 2, 3])
    for turn in range(turns):
        found.append({"role": "user", "content": text_of(draw, plain=plain)})
        if answered or turn < turns - 1:
            found.append({"role": "assistant", "content": text_of(draw, plain=plain)})
    return found


def tools_of(draw: Draw) -> list[dict[str, Any]] | None:
    """Draw the tools of a row: most rows have none."""
    if draw.rng.random() < 0.7:
        return None
    function = {"name": text_of(draw, plain=True), "parameters": {"type": "object"}}
    return [{"type": "function", "function": function}]


def write_rows(draw: Draw, rows: Sequence[Mapping[str, Any]], name: str = "rows.jsonl") -> str:
    """Write rows as JSON lines into the folder of the draw; returns the path."""
    path = draw.folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
