"""A small Llama-style model with random weights and a character tokenizer, for tests, teaching and
dry runs."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from burnish.config.model import ScratchConfig

_SPECIAL = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def scratch_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of ``alphabet``, plus pad, end, unknown and
    chat role tokens."""
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *dict.fromkeys(alphabet)])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(_SPECIAL[3:]),
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def scratch_config(config: ScratchConfig) -> LlamaConfig:
    """Return the HuggingFace config of the given sizes."""
    tokenizer = scratch_tokenizer(config.alphabet)
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def scratch_model(config: ScratchConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a LlamaForCausalLM of the given sizes.

    The same seed gives the same weights; the global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LlamaForCausalLM(scratch_config(config)).to(dtype)  # type: ignore[arg-type]
