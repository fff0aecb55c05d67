"""Special tokens of a tokenizer: which exist, which end a turn, and which never do.

Training, sampling, serving, rewards and exports ask the functions of this module, so that a model
stops at the token with which its training rows end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from burnish.templates import TemplateLimitError, render_chat

if TYPE_CHECKING:  # recipes are checked without transformers
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
EndTokens = int | Sequence[int] | None
"""``eos_token_id`` of a generation config."""

_special: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, dict[int, str]]] = (
    WeakKeyDictionary()
)
_configured: WeakKeyDictionary[PreTrainedTokenizerBase, frozenset[int]] = WeakKeyDictionary()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """Return id -> text of all special tokens: those with a name (``eos_token``), and added tokens
    that are marked as special.

    transformers' ``all_special_ids`` contains only tokens with a name, in Llama 3 two of 256.
    """
    key = f"{len(tokenizer)} {tokenizer.special_tokens_map}"
    known = _special.get(tokenizer)
    if known is None or known[0] != key:
        added = tokenizer.added_tokens_decoder.items()
        texts = {int(i): str(token) for i, token in added if token.special}
        named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        texts |= {int(i): str(token) for i, token in named if i is not None}
        known = _special[tokenizer] = (key, texts)
    return known[1]


def turn_length(tokenizer: PreTrainedTokenizerBase, turn: Sequence[int]) -> int | None:
    """Return the number of tokens of an assistant's turn up to and including its end token.

    The end token is the one with which the template also ends a turn that others follow, if EOS is
    written behind it (Phi-3.5: ``<|end|>``, a line break and EOS behind the last turn). Else it is
    the first EOS token, or else a special token at the end, before white space (some templates end
    turns with ``<|eot_id|>``). Return None if there is none.
    """
    length = _length_to_eos(tokenizer, turn)
    if length is None:
        return None
    before = _without_space(tokenizer, turn[: length - 1])
    return len(before) if before and before[-1] in inner_ends(tokenizer) else length


def _length_to_eos(tokenizer: PreTrainedTokenizerBase, turn: Sequence[int]) -> int | None:
    """Return the number of tokens of a turn up to its EOS token, else to a special token at its
    end."""
    if tokenizer.eos_token_id in turn:
        return list(turn).index(int(tokenizer.eos_token_id)) + 1
    written = _without_space(tokenizer, turn)
    return len(written) if written and written[-1] in special_tokens(tokenizer) else None


def _without_space(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Sequence[int]:
    end = len(ids)
    while end and not str(tokenizer.decode([ids[end - 1]])).strip():
        end -= 1
    return ids[:end]


_inner: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, frozenset[int]]] = WeakKeyDictionary()


def inner_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special token with which the chat template ends an answer, whether or not a
    message follows it. Empty if there is none."""
    template = str(tokenizer.chat_template)
    known = _inner.get(tokenizer)
    if known is None or known[0] != template:
        answer = {"role": "assistant", "content": _MARK}
        last, inner = (_after_mark(tokenizer, answer, *more) for more in ((), (_QUESTION,)))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(last, inner, strict=False))
        ends = [token for token, _ in same if token in special_tokens(tokenizer)]
        known = _inner[tokenizer] = (template, frozenset(ends[-1:]))
    return known[1]


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens that end an assistant's turn in the chat template.

    They are the last tokens of a turn that is text, and of one that is a tool call, and the special
    token directly after a text (``<|end|>`` of Phi-3, which is followed by EOS). Trained turns end
    with one of them (:func:`turn_length`). They often differ from the end-of-sequence token, as in
    a base model with a chat template. The result is empty without a chat template or such a token.
    Raises TemplateLimitError if the template exceeds its limits.
    """
    if not tokenizer.chat_template:
        return frozenset()
    text = _after_mark(tokenizer, {"role": "assistant", "content": _MARK})
    special = special_tokens(tokenizer)
    ends = {next(i for i in text if i in special)} if special.keys() & text else set()
    calls = (_after_mark(tokenizer, _call(arguments)) for arguments in _ARGUMENTS)
    call = next(filter(None, calls), [])
    for tail in (text, call):
        length = _length_to_eos(tokenizer, tail)
        ends |= set() if length is None else {tail[length - 1]}
    return frozenset(ends)


_MARK = "xyzzy"
_QUESTION = {"role": "user", "content": "a"}
_ARGUMENTS = ({"key": _MARK}, f'{{"key": "{_MARK}"}}')
"""Arguments of a tool call as templates expect them: a mapping, or JSON text (DeepSeek V3)."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a value.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": arguments}
    call = {"id": "probe0000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _after_mark(
    tokenizer: PreTrainedTokenizerBase, answer: dict[str, Any], *more: dict[str, Any]
) -> list[int]:
    """Return the tokens of a conversation after the mark in its answer, which ``more`` messages
    follow. Empty if the template rejects or drops the answer."""
    tools = [_TOOL] if answer.get("tool_calls") else None
    try:
        text = render_chat(tokenizer, [_QUESTION, answer, *more], tools=tools)
    except TemplateLimitError:
        raise
    except (TemplateError, TypeError, ValueError):
        return []
    _, mark, tail = text.rpartition(_MARK)
    return list(tokenizer(tail, add_special_tokens=False)["input_ids"]) if mark else []


def set_configured_ends(tokenizer: PreTrainedTokenizerBase, configured: EndTokens) -> None:
    """Record the end tokens in the generation config of the model that ``tokenizer`` is used with
    (Qwen: ``<|im_end|>`` and ``<|endoftext|>``). The tokenizer does not name them."""
    ids = [configured] if isinstance(configured, int) else configured or ()
    _configured[tokenizer] = frozenset(i for i in ids if isinstance(i, int) and i >= 0)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, configured: EndTokens = None) -> set[int]:
    """Return the tokens that end a response: the tokenizer's end token, and those of the model's
    generation config (``configured``, or as recorded by :func:`set_configured_ends`)."""
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    ends |= _configured.get(tokenizer, frozenset())
    return ends | ({configured} if isinstance(configured, int) else set(configured or ()))


def padding_id(
    tokenizer: PreTrainedTokenizerBase, configured: EndTokens, *, size: int | None = None
) -> int | None:
    """Return a special token that ends no row, for padding. Return None if there is none.
    ``configured``: as in :func:`end_token_ids`. ``size``: number of embeddings; tokens beyond have
    none. None: all tokens have one."""
    ends = end_token_ids(tokenizer, configured) | turn_end_ids(tokenizer)
    named = [tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids]
    candidates = [*named, *special_tokens(tokenizer)]
    usable = (int(i) for i in candidates if i is not None and i not in ends)
    return next((i for i in usable if size is None or i < size), None)
