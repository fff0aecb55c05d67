"""Tags around the reasoning of a model: one table of the texts that model families write.

Which of them a model uses is found from its chat template
(:func:`burnish.data.rendering.tags_of`). Channels (gpt-oss) are no tags: a response has messages
of reasoning and of the answer (:func:`split_channels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from burnish.model_text import Pattern

BlockState = Literal["opened", "closed", "none"]
"""State of the block of reasoning at the end of a prompt."""


@dataclass(frozen=True)
class Tags:
    """The texts before and after a block of reasoning."""

    begin: str
    end: str
    is_word: bool = False
    """The tags are usual words of instructions. A template that only mentions them, without writing
    them around reasoning, describes the content of answers."""
    has_lines: bool = True
    """Models write the tags on lines of their own, and ``gap`` behind the block. False: they write
    no white space at the tags. Of interest if a template opens reasoning and renders none."""
    gap: str = "\n\n"
    """White space between the block and the answer."""

    def block(self, text: str) -> tuple[str, str] | None:
        """Return (reasoning, text behind it) of an answer that begins with a block of reasoning.

        >>> THINK.block("<think>why</think>4 </think>"), THINK.block("4 <think>why</think>")
        (('why', '4 </think>'), None)
        """
        begin = text.lstrip()
        if not begin.startswith(self.begin) or self.end not in begin:
            return None
        block, _, rest = begin.removeprefix(self.begin).partition(self.end)
        return block, rest

    def of_prompt(self, prompt: str) -> tuple[str, BlockState]:
        """Return a prompt without the block that it ends with, and the state of the block.

        >>> THINK.of_prompt("A:<think>\\n"), THINK.of_prompt("A:<think></think>")
        (('A:', 'opened'), ('A:', 'closed'))
        >>> THINK.of_prompt("A:</think>")
        ('A:', 'closed')
        """
        text = prompt.rstrip()
        if text.endswith(self.begin):
            return text.removesuffix(self.begin), "opened"
        if not text.endswith(self.end):
            return prompt, "none"
        head = text.removesuffix(self.end)
        opened = head.rstrip()
        return opened.removesuffix(self.begin) if opened.endswith(self.begin) else head, "closed"

    def is_cut(self, text: str) -> bool:
        """Return whether a response ends inside the block that it begins with."""
        return text.lstrip().startswith(self.begin) and self.end not in text


THINK = Tags("<think>", "</think>")
REASONING_TAGS = (
    THINK,
    Tags("[THINK]", "[/THINK]"),  # Magistral
    Tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    Tags("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi-VL, Kimi K1.5
    Tags("<longcat_think>", "</longcat_think>"),  # LongCat
    Tags("<mm:think>", "</mm:think>"),  # MiniMax M3
    Tags("<|START_THINKING|>", "<|END_THINKING|>", has_lines=False),  # Command A Reasoning
    Tags("<|channel>thought", "<channel|>", gap=""),  # Gemma 4
    Tags("<unused94>thought", "<unused95>", gap=""),  # MedGemma
    Tags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Tags("[unused16]", "[unused17]"),  # openPangu
    Tags("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1, OpenThinker
    Tags("<thought>", "</thought>", is_word=True),  # EXAONE Deep
    Tags("<reasoning>", "</reasoning>", is_word=True),  # Reka Flash 3
    Tags("<thinking>", "</thinking>", is_word=True),
)
"""The tags of model families without channels."""


CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
"""Special tokens of the messages in channels of which a response consists."""
_ANSWERS = (["final"], ["commentary"])
_MESSAGE_BEGINS = ("<|channel|>", "<|start|>assistant", "to=functions.")
_MESSAGE_END = Pattern(r"<\|(?:end|return|call)\|>\s*|(?=<\|start\|>)")


class Channels(NamedTuple):
    """Texts of the messages of a response in channels. Calls are in neither of them."""

    reasoning: str
    answer: str
    is_plain: bool = True
    """The response is at most one text of reasoning, and one answer."""


def split_channels(response: str) -> Channels | None:
    """Return the texts of a response that consists of messages in channels, else None. Text before
    the first message continues reasoning that the prompt opens; text between messages belongs to
    the answer.

    >>> thought, begin = "<|channel|>analysis<|message|>7<|end|>", "<|start|>assistant<|channel|>"
    >>> split_channels(f"{thought}{begin}final<|message|>4")
    Channels(reasoning='7', answer='4', is_plain=True)
    >>> split_channels(thought)
    Channels(reasoning='7', answer='', is_plain=False)
    >>> split_channels("In harmony, <|channel|> marks a channel.")
    """
    reasoning: list[str] = []
    answers: list[str] = []
    begin, num_messages = len(response) - len(response.lstrip()), 0
    if not response.startswith(_MESSAGE_BEGINS, begin):
        opened, closes, _ = response.partition("<|end|>")
        begin = len(opened) + len(closes)
        if not closes or not response.startswith(_MESSAGE_BEGINS, begin):
            return None
        reasoning.append(opened)
    headers: list[str] = []
    ends = iter(_MESSAGE_END.finditer(response))
    while begin < len(response):
        if response.startswith(_MESSAGE_BEGINS, begin):
            body = response.find("<|message|>", begin)
            if body < 0:  # a header that was cut
                break
            num_messages += 1
            recipient, _, channel = response[begin:body].partition("<|channel|>")
            begin = body + len("<|message|>")
        else:  # text in no channel
            recipient, channel = "", "final"
            begin += len("<|start|>") * response.startswith("<|start|>", begin)
        end = next((end for end in ends if end.start() >= begin), None)
        text = response[begin : end.start() if end else None]
        if "to=" not in f"{recipient}{channel}" and text.strip():
            (answers if channel.split()[:1] in _ANSWERS else reasoning).append(text)
        headers.append(f"{recipient.removeprefix('<|start|>assistant')}{channel}".strip())
        begin = end.end() if end else len(response)
    if not num_messages:
        return None
    is_plain = headers[-1:] == ["final"] and len(answers) == 1 and len(reasoning) < 2
    is_plain &= all(header in ("analysis", "final") for header in headers)
    return Channels("\n".join(reasoning), "\n".join(answers), is_plain)


def after_reasoning(response: str, prompt: str = "") -> str:
    """Return the response after its last closing tag, or all of it if there is none. Tags that are
    words count in a response that begins with one, and behind a ``prompt`` that ends with one. Of
    a response in channels, return the answer.

    >>> after_reasoning("<think>7</think>4"), after_reasoning("[THINK]7[/THINK]4")
    ('4', '4')
    >>> after_reasoning("7</thought>4"), after_reasoning("7</thought>4", "A: <thought>\\n")
    ('7</thought>4', '4')
    """
    if (parts := split_channels(response)) is not None:
        return parts.answer
    begin, before = response.lstrip(), prompt.rstrip()
    read = (
        tags
        for tags in REASONING_TAGS
        if not tags.is_word or begin.startswith(tags.begin) or before.endswith(tags.begin)
    )
    place, length = max((response.rfind(tags.end), len(tags.end)) for tags in read)
    return response[place + length :] if place >= 0 else response
