"""Chat templates of the common families, written for the tests, with tokenizers and renderers.

Each template is shorter than the published one of its family and has the same markers and habits.
``byte_bpe`` and ``sentencepiece_bpe`` train a small tokenizer in some milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from burnish.episodes.renderer import ChatRenderer

Ids = tuple[int, ...]
TODAY = datetime(2026, 3, 1)

_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
_RESULT = (
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>user{% endif %}{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_CHATML_END = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + _CALLS + "<|im_end|>\n" + _RESULT + "{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}" + _CHATML_END
)
"""ChatML with Hermes tool calls. It keeps all reasoning and only appends."""

CHATML_DROPS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + CHATML.replace("m.reasoning_content %}", "m.reasoning_content and loop.index0 > ns.last %}")
)
"""ChatML that drops the reasoning of turns before the last user message, as Qwen3 does."""

LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: "
    "{{ strftime_now('%d %b %Y') }}\n{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3.1: a date in the system block, one JSON call per turn, texts are stripped."""

MISTRAL = (
    "<s>{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    '{% endif %}{"name": "{{ c.function.name }}", "arguments": '
    '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Mistral v3: no generation prompt, tools before the last user message, ids of 9 characters."""

XML = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    + _RESULT
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    + _CHATML_END
)
"""ChatML with tool calls in XML, as Qwen3-Coder writes them."""

HARMONY = (
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
    "{% if tools %}<|start|>developer<|message|># Tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% set ns = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and (m.tool_calls or loop.last and not add_generation_prompt) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set ns.name = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""gpt-oss: channels, another end token for the last turn, results named after the last call."""

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "chatml": (CHATML, _CHATML_TOKENS, "<|im_end|>"),
    "chatml_drops": (CHATML_DROPS, _CHATML_TOKENS, "<|im_end|>"),
    "llama3": (
        LLAMA3,
        (
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            *("<|end_of_text|>", "<|python_tag|>"),
        ),
        "<|end_of_text|>",
    ),
    "mistral": (
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        "</s>",
    ),
    "xml": (XML, _CHATML_TOKENS, "<|im_end|>"),
    "harmony": (
        HARMONY,
        (
            *("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>", "<|channel|>"),
            "<|constrain|>",
        ),
        "<|return|>",
    ),
}
"""Family -> (template, special tokens, end-of-sequence token)."""

_TEXT = [
    "The user asks and the assistant answers. I look it up and then I answer the question.",
    '{"name": "look_up", "arguments": {"key": "value", "limit": 12}}',
    "user assistant system tool content function parameter Hello. What is the answer to this?",
] * 4


def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the template of ``family``: SentencePiece-style for mistral, else
    byte-level BPE."""
    template, special, eos = FAMILIES[family]
    make = sentencepiece_bpe if family == "mistral" else byte_bpe
    tokenizer = make(special, eos=eos)
    tokenizer.chat_template = template
    return tokenizer


def byte_bpe(special: tuple[str, ...], *, eos: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer. Markup such as ``<tool_call>`` is one ordinary token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT, trainer)
    return _finished(backend, special, eos)


def sentencepiece_bpe(special: tuple[str, ...], *, eos: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts a space before any text, with bytes for unknown characters."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", *(f"<0x{i:02X}>" for i in range(256))],
        initial_alphabet=list("\u2581\n{}[]\"':,.?0123456789"),
        show_progress=False,
    )
    backend.train_from_iterator([line.replace(" ", "\u2581") for line in _TEXT], trainer)
    return _finished(backend, special, eos)


def _finished(backend: Tokenizer, special: tuple[str, ...], eos: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in _MARKUP])
    return tokenizer


def renderer_of(family: str, **options: Any) -> tuple[ChatRenderer, PreTrainedTokenizerBase]:
    """A renderer with ``history: keep`` and its tokenizer."""
    tokenizer = chat_tokenizer(family)
    options = {"history": "keep", "today": TODAY, **options}
    return ChatRenderer(tokenizer, **options), tokenizer


def rendered(
    renderer: ChatRenderer, messages: Sequence[Mapping[str, Any]], tools: Any, *, answered: bool
) -> str:
    """Text of the complete rendering, with a generation prompt unless the last turn is the
    assistant's."""
    return renderer._template.text(messages, tools, generate=not answered)


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    """Ids of a text without added special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def kept(prompt: Ids, sampled: Ids, following: Ids) -> bool:
    """True if ``following`` begins with the prompt and the sampled ids."""
    return following[: len(prompt) + len(sampled)] == prompt + sampled
