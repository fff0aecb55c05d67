"""Pieces of a text have the tokens that they have in the entire text, for every form of tokenizer.

The tokenizers are made on the spot. Their vocabularies have tokens that merge a line break with
what follows it, so that the end of a prompt and the beginning of an answer may merge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from burnish.data.chat import encode_completion, encode_conversation, encode_prompt
from burnish.data.pieces import encode_piece

SPACE = "\u2581"
SPECIAL = ("<s>", "</s>", "<|user|>", "<|answer|>")
LETTERS = "abcdefghijklmnopqrstuvwxyzAH0123456789.,:()-'\n\t"
CHATML = (
    "{% for m in messages %}<|user|>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
MARKS = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|answer|>' }}"
    "{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<|answer|>{% endif %}"
)
LINES = (
    "{% for m in messages %}{{ m['role'] }}:\n\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n\n{% endif %}"
)
ANSWERS = ("the", "foo the", "\nx", "\n\nthe", " a", "  a", "12", "H H\n\nx", "'s", "- a")


def byte_level(*before: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["foo the cat\n\n"] * 9, trainer)
    return backend


def unigram(scheme: str, *before: Any) -> Tokenizer:
    """The tokens ``\\nthe`` and ``\\n\\n`` cross the end of a prompt."""
    words = ["the", f"{SPACE}the", "\nthe", "\n\n", f"\n{SPACE}", "foo", f"{SPACE}a", "12"]
    pieces = [("<unk>", -9.0), (SPACE, -4.0), *((c, -5.0) for c in LETTERS)]
    backend = Tokenizer(models.Unigram([*pieces, *((w, -3.0) for w in words)], unk_id=0))
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=bool(before))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, space])
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend


def normalized(*steps: Any) -> Tokenizer:
    """Llama 2's form: normalizers replace spaces. BPE merges line breaks."""
    pieces = ["<unk>", SPACE, *LETTERS, f"{SPACE}a", "th", "the", f"{SPACE}the", "\n\n", "\nthe"]
    merges = [(SPACE, "a"), ("t", "h"), ("th", "e"), ("\n", "\n"), ("\n", "the"), (SPACE, "the")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Replace(SPACE, " ")
    return backend


def wordpiece() -> Tokenizer:
    letters = [c for c in LETTERS if not c.isspace()]
    pieces = ["<unk>", *letters, *(f"##{c}" for c in letters), "the", "##the"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python that prepends a space to a text, but not behind special tokens."""

    def __init__(self, **options: Any) -> None:
        pieces = ["<unk>", SPACE, *LETTERS, f"{SPACE}t", "\n\n", *SPECIAL]
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def prepare_for_tokenization(self, text: str, **options: Any) -> tuple[str, dict[str, Any]]:
        return f"{SPACE}{text}", options

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        text = text.replace(" ", SPACE)
        for pair in (f"{SPACE}t", "\n\n"):
            text = text.replace(pair, f"\0{pair}\0")
        parts = text.split("\0")
        return [p for i, part in enumerate(parts) for p in ([part] if i % 2 else part)]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self._ids)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace(SPACE, " ")


FORMS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "digits and byte-level": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "always": lambda: unigram("always"),
    "first": lambda: unigram("first"),
    "never": lambda: unigram("never"),
    "words": lambda: unigram("always", pre_tokenizers.WhitespaceSplit()),
    "prepend": lambda: normalized(normalizers.Prepend(SPACE)),
    "strip": lambda: normalized(normalizers.Strip(left=True, right=False)),
    "wordpiece": wordpiece,
}


def tokenizer_of(form: str, *, rstrip: bool = False) -> Any:
    if form == "slow":
        return Slow(
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            additional_special_tokens=list(SPECIAL[2:]),
        )
    backend = FORMS[form]()
    backend.add_special_tokens([AddedToken(t, special=True, rstrip=rstrip) for t in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def check(tokenizer: Any, ids: list[int], head: list[int], text: str) -> bool:
    """Check the ids of a text that begins with a prompt of the ids ``head``; return whether the
    entire text has such ids."""
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[: len(head)] == head
    if whole[: len(head)] == head:
        assert ids == whole
        return True
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    return False


@pytest.mark.parametrize("rstrip", [False, True])
@pytest.mark.parametrize("template", [CHATML, MARKS, LINES], ids=["chatml", "marks", "lines"])
@pytest.mark.parametrize("form", [*FORMS, "slow"])
def test_answers_have_their_tokens_of_the_entire_text(
    form: str, template: str, rstrip: bool
) -> None:
    tokenizer = tokenizer_of(form, rstrip=rstrip)
    tokenizer.chat_template = template
    equal = 0
    for answer in ANSWERS:
        messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": answer}]
        ids, _ = encode_conversation(tokenizer, messages)
        _, head = encode_prompt(tokenizer, messages[:1])
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        equal += check(tokenizer, ids, head, text)
    assert equal >= 3


@pytest.mark.parametrize("prompt", ["q", "q:", "q ", "q:\n", "the", "a 12"])
@pytest.mark.parametrize("form", [*FORMS, "slow"])
def test_responses_to_plain_text_have_their_tokens_of_the_entire_text(
    form: str, prompt: str
) -> None:
    tokenizer = tokenizer_of(form)
    for answer in ANSWERS:
        text, head = encode_prompt(tokenizer, prompt)
        ids, _ = encode_completion(tokenizer, head, answer, prompt=text, add_eos=False)
        check(tokenizer, ids, head, prompt + answer)


def test_an_unknown_character_remains_behind_another_one() -> None:
    tokenizer = tokenizer_of("first")
    unknown = tokenizer.unk_token_id
    assert encode_piece(tokenizer, "\u4e16a", after=[unknown], before="q\u4e16")[0] == unknown
