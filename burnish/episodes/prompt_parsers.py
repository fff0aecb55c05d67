"""The parser of the responses to a prompt: whether the prompt has opened reasoning decides.

A word of a message, such as ``/no_think``, may close the reasoning that other prompts open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from burnish.episodes.parsing import ResponseParser
from burnish.reasoning_tags import Tags

_MOST_PARSERS = 16


@dataclass(frozen=True)
class PromptParsers:
    """Parsers of responses, one for each form of the generation prompt.

    Example: with the generation prompt ``A:<think>``, responses to ``...A:<think></think>`` have a
    parser of their own.
    """

    make: Callable[..., ResponseParser]
    """Makes a parser for a ``prefix``, the text before a response."""
    generation_prompt: str
    """The usual one."""
    tags: Tags
    keeps_head: bool
    """The prefix is the entire generation prompt, as a response template of the tokenizer's own
    needs it, and not only its block of reasoning."""
    turn_ends: Collection[str]
    """Texts of tokens that end a turn, which no generation prompt contains."""
    _parsers: dict[str, ResponseParser] = field(default_factory=dict)

    @property
    def usual(self) -> ResponseParser:
        """Return the parser for the usual generation prompt."""
        return self._of(self.generation_prompt)

    def after(self, prompt: str) -> ResponseParser:
        """Return the parser for the end of a prompt. After the result of a tool it may lack the
        text before the block of the usual generation prompt (Gemma 4)."""
        head = self.generation_prompt.partition(self.tags.begin)[0]
        if not head.strip() or prompt.endswith(self.generation_prompt):
            return self.usual
        before, state = self.tags.of_prompt(prompt)
        _, written, opened = prompt.rpartition(head)
        is_later = not written or any(end in opened for end in self.turn_ends if end)
        return self._of(head + (prompt[len(before) :] if is_later or state == "opened" else opened))

    def _of(self, generation_prompt: str) -> ResponseParser:
        begin = generation_prompt.find(self.tags.begin)
        block = generation_prompt[begin:] if begin >= 0 else ""
        prefix = generation_prompt if self.keeps_head else block
        if prefix not in self._parsers:
            if len(self._parsers) >= _MOST_PARSERS:
                self._parsers.clear()
            self._parsers[prefix] = self.make(prefix=prefix)
        return self._parsers[prefix]
