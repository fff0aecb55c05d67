"""Tokenizers with published chat templates (``templates/*.jinja``), for tests of data.

``chat_families.py`` has shorter templates, for tests of episodes."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from chat_families import byte_bpe, sentencepiece_bpe
from transformers import PreTrainedTokenizerFast

from burnish.templates import with_defaults

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


_NAMED = {
    "default": (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "tool_use": (
        "{{ '<|im_start|>system\\nTools:' }}"
        "{% for t in tools %}{{ '\\n' ~ (t | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}"
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>\\n' ~ ({'name': c.function.name, "
        "'arguments': c.function.arguments} | tojson) ~ '\\n</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}


def named_tokenizer() -> PreTrainedTokenizerFast:
    """Return a small tokenizer with two named templates, as Hermes 2 Pro and Command R have: only
    ``tool_use`` writes tools and calls, and it does not expect to be without tools."""
    tokenizer = byte_bpe(_CHATML_TOKENS, eos="<|im_end|>")
    tokenizer.chat_template = dict(_NAMED)
    return tokenizer


_TURNS = (
    "{% set on = ON %}{% set off = OFF %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}ANSWER{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{{ on if thinking else off }}{% endif %}"
)
_ALONE = "{{ m.content.split('</think>')[-1].strip() }}"
_KEY = (
    "{% set parts = m.content.split('</think>') %}"
    "{% set r = m.reasoning_content or (parts[0].split('<think>')[-1] if parts[1:] else '') %}"
    "{% set c = parts[-1].strip() %}"
)
_OPEN, _CLOSED = "'<think>\\n'", "'<think>\\n\\n</think>\\n\\n'"
_REASONING: dict[str, tuple[str, str, str]] = {
    "bare end": (
        *("'<think>'", "'</think>'"),
        "{{ '</think>' + (m.content.split('</think>', 1)[-1]) }}",
    ),
    "bare end, key": (
        *("'<think>'", "'</think>'"),
        _KEY + "{{ ('<think>' + r.strip() if r else '') + '</think>' + c }}",
    ),
    "last answer after the prompt": (
        *(_OPEN, "'<think></think>'"),
        "{% if loop.last %}{{ (on if thinking else off) + m.content.strip() }}"
        "{% else %}" + _ALONE + "{% endif %}",
    ),
    "closed in the prompt alone": ("''", _CLOSED, "{{ m.content }}"),
    "opened in the prompt alone": (_OPEN, _CLOSED, _ALONE),
    "closed in all answers": ("''", _CLOSED, "{{ (on if thinking else off) + m.content }}"),
    "block in the last answer": (
        *(_OPEN, "''"),
        _KEY + "{{ (on + r.strip() + '\\n</think>\\n' if loop.last else '') + c }}",
    ),
    "block if there is reasoning": (
        *(_OPEN, _CLOSED),
        _KEY + "{{ (on + r.strip() + '\\n</think>\\n\\n' if loop.last and r else '') + c }}",
    ),
}
"""Form of a published template -> (end of its prompt with reasoning, and without; an answer):
DeepSeek-V3.1, GLM-4.7, Nemotron Nano v2, Hunyuan, QwQ, SmolLM3, Step-3.5, MiniMax-M2."""
REASONING_FORMS = tuple(_REASONING)


def reasoning_tokenizer(form: str, *, thinking: bool) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a template that opens or closes reasoning in its prompt."""
    on, off, answer = _REASONING[form]
    tokenizer = byte_bpe(_CHATML_TOKENS, eos="<|im_end|>")
    template = _TURNS.replace("ON", on).replace("OFF", off).replace("ANSWER", answer)
    tokenizer.chat_template = with_defaults(template, {"thinking": thinking})
    return tokenizer


_SPECIAL = re.compile(
    r"<\|[^|<>'\"\s]+\|>|<｜[^｜]+｜>|<\|?(?:turn|channel|tool_call|tool_response)\|>"
    r"|<\|(?:turn|channel|tool_call|tool_response)>|<(?:start|end)_of_turn>|<end_of_utterance>"
)
_ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "glm4": "<|user|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "muse_glimmer": "<|eot|>",
    "phi3": "<|end|>",
    "smolvlm": "<end_of_utterance>",
}
"""Beginning of a name -> the end of its answers; others: that of ChatML."""
_NO_TEXT = ("idefics3", "llava_next", "smolvlm")
"""Templates whose content has to be a list of parts."""


def trl_templates(*, thinking: bool = True) -> list[str]:
    """Return the names of the templates in the package trl, or of those with ``</think>``; []
    without the package."""
    trl = find_spec("trl")
    files = Path(str(trl and trl.origin)).parent.glob("chat_templates/*.jinja")
    return sorted(
        file.stem
        for file in files
        if ("</think>" in file.read_text(encoding="utf-8") or not thinking)
        and "_training" not in file.stem
        and file.stem not in _NO_TEXT
    )


def trl_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a template of the package trl."""
    trl = find_spec("trl")
    path = Path(str(trl and trl.origin)).parent / "chat_templates" / f"{name}.jinja"
    template = path.read_text(encoding="utf-8")
    end = next((end for head, end in _ENDS.items() if name.startswith(head)), "<|im_end|>")
    begin = ("<bos>",) if "bos_token" in template else ()
    special = tuple(sorted({*_SPECIAL.findall(template), end, *begin}))
    tokenizer = byte_bpe(special, eos=end)
    if begin:
        tokenizer.bos_token = begin[0]
    tokenizer.chat_template = template
    return tokenizer
