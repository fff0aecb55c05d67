"""The text of a response while it is sampled: only what later tokens cannot change.

:class:`TokenText` turns tokens into text, :class:`MessageText` text into reasoning and content.
Together, what they return is a beginning of what ``ChatRenderer.parse`` returns for all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from burnish.byte_tokens import REPLACEMENT, byte_tokens
from burnish.data.decoding import Decode, begins_text, context_of, removes_spaces, window_of
from burnish.episodes.framing import FrameHold
from burnish.model_text import Pattern

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with the reasoning, in response templates."""
_SPACES = Pattern(r"(\s{256})\s+")


def without_long_spaces(text: str) -> str:
    """Return ``text`` with at most 256 of consecutive spaces."""
    return _SPACES.sub(r"\1", text)


def before_stop(text: str, stops: Iterable[str]) -> tuple[str, str | None]:
    """Return ``text`` up to the first stop string in it, and that stop string; None if there is
    none. Of two at one place, the shorter one.

    >>> before_stop("one two", ["two", "e"])
    ('on', 'e')
    """
    matches = [(place, len(stop), stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not matches:
        return text, None
    place, _, stop = min(matches)
    return text[:place], stop


class StopHold:
    """Text up to the first of ``stops``, or up to an end that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._has_ended = False

    def feed(self, text: str) -> str:
        """Return the text that no stop string can remove any more."""
        if self._has_ended:
            return ""
        text = self._held + text
        self._has_ended = any(stop in text for stop in self._stops)
        end = min((_place(text, stop) for stop in self._stops), default=len(text))
        self._held = text[end:]
        return text[:end]


def _place(text: str, stop: str) -> int:
    """Return the index at which ``stop`` is in ``text``, or may be once it continues.

    >>> _place("to be", "be or"), _place("to be or", "be or"), _place("to", "be or")
    (3, 3, 2)
    """
    index = text.find(stop)
    if index >= 0:
        return index
    longest = min(len(stop) - 1, len(text))
    lengths = (k for k in range(longest, 0, -1) if text.endswith(stop[:k]))
    return len(text) - next(lengths, 0)


class TokenText:
    """Text of sampled tokens as a continuation of their prompt.

    ``prompt_ids``: the end of the prompt. ``decode``: decodes tokens as the text. A character of
    which only some bytes were sampled is held back until it is complete. So is a run of byte tokens
    (``<0x..>``) until another token follows, because one wrong byte changes the text of the entire
    run. Decoders that remove spaces before punctuation give no text at all.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        *,
        decode: Decode,
    ) -> None:
        self._tokenizer, self._decode = tokenizer, decode
        self._bytes = byte_tokens(tokenizer)
        self._window = context_of(tokenizer, window_of(tokenizer, prompt_ids))
        """Tokens of which the text was returned, as far as others depend on it."""
        self._byte_run: list[int] = []
        """Byte tokens after the window, and tokens without text."""
        self._seen = self._decode(self._window)
        """Text of the window that was returned."""
        ends_whole = not self._seen.endswith(REPLACEMENT) and not any(
            token in self._bytes for token in self._window
        )
        self._is_off = removes_spaces(tokenizer) or not ends_whole

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that more tokens make certain."""
        ends = [
            i + 1
            for i, token in enumerate(tokens)
            if begins_text(self._tokenizer, token, self._decode)
        ]
        text = ""
        for begin, end in pairwise([0, *ends]):
            text += self._feed(tokens[begin:end])
            self._window, self._seen = [], ""
        return text + self._feed(tokens[ends[-1] if ends else 0 :])

    def _feed(self, tokens: Sequence[int]) -> str:
        length = len(tokens)
        while length and self._continues_run(tokens[length - 1]):
            length -= 1
        if self._is_off or not length:
            self._byte_run += tokens
            return ""
        ids = [*self._window, *self._byte_run, *tokens[:length]]
        self._byte_run = list(tokens[length:])
        text = _certain(self._decode(ids))
        if not text.startswith(self._seen):  # decoded alone, tokens have another text
            self._is_off = True
            return ""
        new_text = text[len(self._seen) :]
        self._window = context_of(self._tokenizer, ids)
        self._seen = _certain(self._decode(self._window))
        return new_text

    def _continues_run(self, token: int) -> bool:
        """Return whether ``token`` is a byte, or has no text, so that bytes around it are a run."""
        return token in self._bytes or (bool(self._bytes) and not self._decode([token]))


def _certain(text: str) -> str:
    """Return text without its last character if that represents an incomplete one."""
    return text.removesuffix(REPLACEMENT)


class MessageText:
    """Reasoning and content of a response.

    Reasoning is returned once it is closed. Content is returned up to the first tool call, or up to
    reasoning that follows content; whatever comes later is left to the parser of the complete
    response. So is white space at the end, which that parser strips.

    ``template``: response template of transformers. ``prefix``: text after which responses begin.
    ``shortens_spaces``: at most 256 consecutive spaces are read.
    """

    def __init__(
        self, template: Mapping[str, Any], *, prefix: str, shortens_spaces: bool = False
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._shortens = shortens_spaces

        self._parser = ResponseParser(dict(template), prefix=prefix)
        self._fields: Mapping[str, Any] = template["fields"]
        self._content = _Content(self._fields.get("content", {}))
        self._held = ""
        """White space that was not given to the parser."""
        self._reasoning: tuple[str, str] | None = None
        """(Field, text) of the reasoning so far."""
        self._is_done = False
        self._first = self._read(self._parser.initial_events)
        """The part that the prompt opened and closed."""

    def feed(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, content) that more text makes certain."""
        text = self._held + text
        end = len(text.rstrip())
        certain, self._held = text[:end], text[end:]
        if self._is_done or not certain:
            return "", ""
        try:
            events = self._parser.feed(without_long_spaces(certain) if self._shortens else certain)
        except Exception:  # a malformed call: the parser of the complete response describes it
            self._is_done = True
            return "", ""
        (reasoning, content), self._first = self._first, ("", "")
        more_reasoning, more_content = self._read(events)
        return reasoning + more_reasoning, content + more_content

    def _read(self, events: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
        reasoning, content = "", ""
        for event in events:
            kind, name = event["type"], event["field"]
            if kind == "region_open":
                self._is_done = not self._may_open(name)
            if self._is_done:
                break
            if kind == "region_close" and name in REASONING:
                reasoning += self._closed_reasoning(name, str(event["value"]))
            elif kind == "region_chunk" and name == "content":
                content += self._content.add(event["text"])
        return reasoning, content

    def _may_open(self, name: str) -> bool:
        """Return whether text can still be certain after a field begins."""
        if name == "content":
            return self._content.begin()
        if name in REASONING:
            return not self._content.has_text
        return name == "outside"  # it follows the content, wherever it was written

    def _closed_reasoning(self, name: str, value: str) -> str:
        if self._reasoning is None:
            self._reasoning = name, value
            return value
        before, joined = self._reasoning, self._fields[name].get("join")
        if before[0] != name or joined is None:
            self._is_done = True
            return ""
        self._reasoning = name, f"{before[1]}{joined}{value}"
        return f"{joined}{value}"


@dataclass(frozen=True)
class TextStream:
    """Content of a response without a chat template, from its tokens."""

    text: TokenText
    hold: StopHold

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Return ("", the content that more tokens make certain)."""
        return "", self.hold.feed(self.text.feed(tokens))


@dataclass(frozen=True)
class MessageStream:
    """Reasoning and content of a response, from its tokens."""

    text: TokenText
    hold: StopHold
    frame: FrameHold
    message: MessageText
    content: FrameHold
    """The content behind a block of reasoning, whose opening follows the block."""

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Return the (reasoning, content) that more tokens make certain."""
        text = self.frame.feed(self.hold.feed(self.text.feed(tokens)))
        reasoning, content = self.message.feed(text)
        if content and not self.frame.has_opening:
            content = self.content.feed(content)
        return reasoning, content


class _Content:
    """The content of a response, in one or more parts. ``field``: its field of the template."""

    def __init__(self, field: Mapping[str, Any]) -> None:
        self._strips = bool(field.get("content_args", {}).get("strip", True))
        self._join: str | None = field.get("join")
        self._is_text = field.get("content", "text") == "text"
        self._is_list = bool(field.get("repeats", False)) and self._join is None
        self._before = ""
        """Text between the returned content and what follows."""
        self._spaces = ""
        """White space at the end of the current part."""
        self._is_fresh = True
        self.has_text = False
        """True once content was returned."""

    def begin(self) -> bool:
        """Begin a part. Return False if its text cannot be certain."""
        if self.has_text and self._join is not None:
            self._before += ("" if self._strips else self._spaces) + self._join
        self._spaces, self._is_fresh = "", True
        replaces = self.has_text and self._join is None
        return self._is_text and not self._is_list and not replaces

    def add(self, text: str) -> str:
        """Return the content that more text makes certain."""
        text = self._spaces + text
        if not self.has_text or (self._is_fresh and self._strips):
            text = text.lstrip()
        stripped = text.rstrip()
        self._spaces = text[len(stripped) :]
        if not stripped:
            return ""
        before, self._before = self._before, ""
        self._is_fresh, self.has_text = False, True
        return before + stripped
