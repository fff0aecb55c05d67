"""A model stops at the token with which its training rows end, wherever it is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_families import CHATML, FAMILIES, byte_bpe, chat_tokenizer, sentencepiece_bpe
from gguf import GGUFWriter
from transformers import (
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.data.chat import encode_completion, encode_conversation
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.demonstrations.encode import SFTEncoder
from burnish.data.notices import collecting
from burnish.data.sources import Row
from burnish.data.stream import RowRef
from burnish.episodes.renderer import ChatRenderer, RendererError
from burnish.models.end_tokens import add_end_tokens
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.rollout.base import Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import make_engine as make_local_engine
from burnish.rollout.requests import StopRule
from burnish.special_tokens import end_token_ids, padding_id, special_tokens, turn_end_ids
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine

GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}"
    "\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
CALLS_WITH_AN_END_OF_THEIR_OWN = CHATML.replace(
    "<|im_end|>\n{% elif m.role == 'tool'",
    "{{ '<|eom|>' if m.tool_calls else '<|im_end|>' }}\n{% elif m.role == 'tool'",
)
CASES: dict[str, tuple[Any, str, tuple[str, ...], str]] = {
    **{
        f"{name}, its own end": (sentencepiece_bpe if name == "mistral" else byte_bpe, *family)
        for name, family in FAMILIES.items()
    },
    "chatml, base": (byte_bpe, CHATML, ("<|im_start|>", "<|im_end|>"), "<|endoftext|>"),
    "chatml, SentencePiece": (
        sentencepiece_bpe,
        *(CHATML, ("<s>", "</s>", "<|im_start|>", "<|im_end|>"), "</s>"),
    ),
    "gemma": (
        sentencepiece_bpe,
        *(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>"),
    ),
    "phi": (byte_bpe, PHI, ("<|user|>", "<|assistant|>", "<|end|>"), "<|endoftext|>"),
    "calls end differently": (
        byte_bpe,
        CALLS_WITH_AN_END_OF_THEIR_OWN,
        ("<|im_start|>", "<|im_end|>", "<|eom|>"),
        "<|endoftext|>",
    ),
}
"""Name -> (tokenizer, template, added special tokens, end-of-sequence token)."""
TEXT = {"role": "assistant", "content": "It is 4."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefgh1",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 2, "b": 2}},
        }
    ],
}
USER = {"role": "user", "content": "2 + 2?"}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    make, template, special, eos = CASES[name]
    tokenizer: PreTrainedTokenizerFast = make(special, eos=eos)
    tokenizer.chat_template = template
    return tokenizer


def turns_of(name: str) -> list[dict[str, Any]]:
    return [TEXT] if name in ("gemma", "phi") else [TEXT, CALL]


def last_trained(tokenizer: PreTrainedTokenizerFast, turn: dict[str, Any]) -> int:
    ids, mask = encode_conversation(tokenizer, [USER, turn])
    return ids[max(i for i, trained in enumerate(mask) if trained)]


@pytest.mark.parametrize("name", CASES)
def test_the_last_trained_token_of_a_turn_is_a_stop_token(name: str) -> None:
    """Of plain sampling, by the end tokens of the model, and of episodes, by those of the renderer
    as well. They are what an export's generation config contains."""
    tokenizer = tokenizer_of(name)
    model = load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=16)))
    add_end_tokens(model, tokenizer)
    engine = make_local_engine(model, tokenizer, LocalEngine(), name="model")
    rule = StopRule(tokenizer, Sampling(max_tokens=9), engine._end_tokens)
    for turn in turns_of(name):
        end = last_trained(tokenizer, turn)
        assert end in special_tokens(tokenizer) and tokenizer.decode([end], True) == ""
        assert rule.begin().add(end, 9) == "stop"
    try:
        renderer = ChatRenderer(tokenizer, history="keep")
    except RendererError:
        return
    ends = {last_trained(tokenizer, turn) for turn in turns_of(name)}
    assert ends <= renderer.stop_token_ids


@pytest.mark.parametrize("name", CASES)
def test_only_tokens_that_end_a_turn_are_stop_tokens(name: str) -> None:
    """A role's or a channel's token as a stop token would cut responses."""
    tokenizer = tokenizer_of(name)
    ends = {last_trained(tokenizer, turn) for turn in turns_of(name)}
    if name == "phi":  # writes EOS behind the end of the last turn
        ends.add(tokenizer.eos_token_id)
    assert turn_end_ids(tokenizer) == ends


@pytest.mark.parametrize(
    ("stop", "texts", "stops"),
    [
        ("im", ["x", "<|im_start|>"], False),  # the text of the completion is "x"
        ("xy", ["x", *["<|im_start|>"] * 9, "y"], True),
        ("<|im_start|>", ["x", "<|im_start|>"], True),
    ],
)
def test_a_stop_string_is_searched_in_the_text_that_is_returned(
    stop: str, texts: list[str], stops: bool
) -> None:
    """It has no special tokens, unless a stop string names one."""
    tokenizer = tokenizer_of("chatml, base")
    rule = StopRule(tokenizer, Sampling(max_tokens=99, stop=(stop,)), ())
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    check = rule.begin()
    assert ([check.add(token, 99) for token in ids][-1] == "stop") is stops


def test_a_model_stops_and_is_exported_with_the_end_of_turn_it_was_trained_on(
    tmp_path: Path,
) -> None:
    """Llama 3 base with its template: turns end with an added special token other than EOS."""
    tokenizer = chat_tokenizer("llama3")
    base = ModelConfig(scratch=ScratchConfig(hidden_size=16))
    model = load_causal_lm(base)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    add_end_tokens(model, tokenizer)
    spec = EngineSpec(TrainRole.alone("policy", TrainConfig(), base))
    engine = TorchTrainEngine(model, spec, tokenizer=tokenizer)
    store = CheckpointStore(tmp_path / "c", keep_last=1, best_mode="max")
    folder = store.save(1, lambda part: engine.save(part / "policy"))
    out = export(folder, tmp_path / "out")
    ends = {tokenizer.convert_tokens_to_ids(t) for t in ("<|eot_id|>", "<|end_of_text|>")}
    assert set(GenerationConfig.from_pretrained(out).eos_token_id) == ends
    again = ModelConfig(path=str(out))
    sampler = make_local_engine(
        load_causal_lm(again), load_tokenizer(again), LocalEngine(), name=""
    )
    assert sampler._end_tokens == ends


@pytest.mark.parametrize("name", CASES)
def test_padding_ends_no_row(name: str) -> None:
    """transformers scores the last token that is not padding."""
    tokenizer = tokenizer_of(name)
    tokenizer.pad_token = "<|im_end|>" if "chatml" in name else None
    ends = {last_trained(tokenizer, turn) for turn in turns_of(name)} | {tokenizer.eos_token_id}
    pad = padding_id(tokenizer, None)
    assert pad is not None and pad not in ends


@pytest.fixture
def second_end(tmp_path: Path) -> tuple[Path, PreTrainedTokenizerFast]:
    """A folder with a tokenizer and a config, and its tokenizer: ChatML, which also has
    ``<|endoftext|>`` and ``<|extra|>``."""
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|extra|>")
    tokenizer = byte_bpe(special, eos="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    LlamaConfig(vocab_size=len(tokenizer), eos_token_id=ends).save_pretrained(tmp_path / "model")
    return tmp_path / "model", tokenizer


def trained_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool]) -> str:
    return str(tokenizer.decode([i for i, trained in zip(ids, mask, strict=True) if trained]))


@pytest.mark.parametrize("home", ["config", "generation config", "another tokenizer", "gguf"])
def test_rows_end_at_all_end_tokens_of_the_model(
    home: str, second_end: tuple[Path, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    """The tokens at which sampling stops: of the model's files, not of the tokenizer's folder."""
    folder, own = second_end
    path, end, options = folder, "<|endoftext|>", {}
    if home != "config":
        own_end = own.convert_tokens_to_ids("<|extra|>")
        GenerationConfig(eos_token_id=[own_end]).save_pretrained(folder)
        end = "<|extra|>"
    if home == "another tokenizer":
        own.save_pretrained(tmp_path / "tokenizer")
        GenerationConfig(eos_token_id=0).save_pretrained(tmp_path / "tokenizer")
        options = {"tokenizer_path": str(tmp_path / "tokenizer")}
    if home == "gguf":
        path = tmp_path / "gguf"
        path.mkdir()
        writer = GGUFWriter(path / "m.gguf", "llama")
        writer.add_eos_token_id(own.convert_tokens_to_ids("<|extra|>"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        options = {"tokenizer_path": str(folder), "gguf_file": "m.gguf"}
    tokenizer = load_tokenizer(ModelConfig(path=str(path), **options))
    assert end_token_ids(tokenizer) >= {own.convert_tokens_to_ids(t) for t in (end, "<|im_end|>")}
    for text, trained in (("A", "A<|im_end|>"), (f"A{end}B", f"A{end}"), (f"A{end}", f"A{end}")):
        turn = {"role": "assistant", "content": text}
        with collecting() as notices:
            row = encode_conversation(tokenizer, [USER, turn])
        assert trained_text(tokenizer, *row) == trained
        assert ("text_after_end" in notices) is (text != "A")
        with collecting() as notices:
            row = encode_completion(tokenizer, [1], text)
        assert trained_text(tokenizer, *row) == trained
        assert ("text_after_end" in notices) is (text != "A")
    assert padding_id(tokenizer, None) not in end_token_ids(tokenizer)


def test_documents_contain_end_tokens(second_end: tuple[Path, PreTrainedTokenizerFast]) -> None:
    """A text is no answer: end tokens separate its documents."""
    tokenizer = load_tokenizer(ModelConfig(path=str(second_end[0])))
    encoder = SFTEncoder(SFTDataConfig(sources=("rows.jsonl",)), tokenizer)
    row = encoder.encode(Row({"text": "A<|endoftext|>B"}, "rows.jsonl:1"), RowRef("rows", 0, 0))
    text = trained_text(tokenizer, list(row.ids), list(row.mask))
    assert text == "<|endoftext|>B<|im_end|>"  # nothing predicts the first token
