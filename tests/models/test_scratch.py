"""The model and tokenizer made on the spot."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.scratch import scratch_tokenizer


def test_the_seed_alone_decides_the_weights() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(99 + seed)  # must not matter
        return dict(load_causal_lm(ModelConfig(scratch=ScratchConfig(seed=seed))).state_dict())

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_creating_a_model_does_not_advance_global_generators() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_causal_lm(ModelConfig(scratch=ScratchConfig()))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_are_those_of_the_config(tied: bool) -> None:
    scratch = ScratchConfig(
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        max_position_embeddings=77,
        tie_word_embeddings=tied,
    )
    model = load_causal_lm(ModelConfig(scratch=scratch))
    names = dict(model.named_parameters())
    assert ("lm_head.weight" in names) == (not tied)
    assert names["model.layers.2.self_attn.k_proj.weight"].shape == (24, 48)
    assert model.config.max_position_embeddings == 77
    assert model.config.vocab_size == len(load_tokenizer(ModelConfig(scratch=scratch)))


def test_one_token_is_one_character_and_text_round_trips(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = "12 + 7 = 19.\nok? a  b :"
    ids = tiny_tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tiny_tokenizer.decode(ids) == text
    assert tiny_tokenizer("A")["input_ids"] == [tiny_tokenizer.unk_token_id]


def test_a_repeated_character_in_the_alphabet_is_one_token() -> None:
    tokenizer = scratch_tokenizer("abca")
    assert len(tokenizer) == 6 + 3 and tokenizer("ca")["input_ids"] == [8, 6]


def test_the_chat_template_marks_roles_and_ends_assistant_turns(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    text = tiny_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>be good<|user|>1+1<|assistant|>2<eos><|user|>2+2<|assistant|>"
    ids = tiny_tokenizer(text)["input_ids"]
    assert ids[0] == tiny_tokenizer.convert_tokens_to_ids("<|system|>")
    assert ids.count(tiny_tokenizer.eos_token_id) == 1
    assert tiny_tokenizer.unk_token_id not in ids
