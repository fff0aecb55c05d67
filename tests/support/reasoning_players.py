"""Policies that reason in the tags of a model family, which may be special tokens."""

from __future__ import annotations

from functools import cache

from chat_families import byte_bpe
from scripted_episodes import Player
from tokenizers import AddedToken

from burnish.reasoning_tags import Tags

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
    "BEGIN{{ m.reasoning_content }}END{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPEN{% endif %}"
)


@cache
def reasoning_player(tags: Tags, *, special: bool, opened: bool) -> Player:
    """Return a policy whose tags are ``special`` tokens. ``opened``: the prompt writes the first
    one."""
    tokenizer = byte_bpe(("<|im_start|>", "<|im_end|>", "<|other|>"), eos="<|im_end|>")
    if special:
        texts = (tags.begin.removesuffix("thought") or tags.begin, tags.end)
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    template = _TEMPLATE.replace("OPEN", "BEGIN\n" if opened else "")
    tokenizer.chat_template = template.replace("BEGIN", tags.begin).replace("END", tags.end)
    return Player(tokenizer, "template")
