"""Tokenizers with published chat templates (``templates/*.jinja``), for tests of data.

``chat_families.py`` has shorter templates, for tests of episodes."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from chat_families import byte_bpe, sentencepiece_bpe
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
PUBLISHED: dict[str, tuple[tuple[str, ...], str]] = {
    "chatml": (_CHATML_TOKENS, "<|im_end|>"),
    "smollm2": (_CHATML_TOKENS, "<|im_end|>"),
    "qwen3": (_CHATML_TOKENS, "<|im_end|>"),
    "qwq": (_CHATML_TOKENS, "<|im_end|>"),
    "deepseek_r1": (
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>"),
        ),
        "<｜end▁of▁sentence｜>",
    ),
    "llama3": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "mistral": (
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        "</s>",
    ),
    "gemma": (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>"),
}
"""Family -> (special tokens, end-of-sequence token)."""


def published_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with the published template of ``family``."""
    special, eos = PUBLISHED[family]
    make = sentencepiece_bpe if family in ("mistral", "gemma") else byte_bpe
    tokenizer = make(special, eos=eos)
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    begins = [token for token in special if token in ("<s>", "<bos>") or "begin" in token]
    if begins:
        tokenizer.bos_token = begins[0]
    return tokenizer


_SPECIAL = re.compile(r"<\|[^|<>'\"\s]+\|>|<｜[^｜]+｜>")


def trl_templates() -> list[str]:
    """Return the names of the templates with reasoning in the package trl; [] without it."""
    trl = find_spec("trl")
    files = Path(str(trl and trl.origin)).parent.glob("chat_templates/*.jinja")
    return sorted(
        file.stem
        for file in files
        if "</think>" in file.read_text(encoding="utf-8") and "_training" not in file.stem
    )


def trl_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a template of the package trl."""
    trl = find_spec("trl")
    path = Path(str(trl and trl.origin)).parent / "chat_templates" / f"{name}.jinja"
    template = path.read_text(encoding="utf-8")
    special = tuple(sorted(set(_SPECIAL.findall(template))))
    ends = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|user|>")
    tokenizer = byte_bpe(special, eos=next(end for end in ends if end in special))
    tokenizer.chat_template = template
    return tokenizer
