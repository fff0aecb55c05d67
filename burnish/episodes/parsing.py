"""Read reasoning, content and tool calls from the text of a response.

transformers' response templates do the parsing. This module checks the calls against the tools and
describes every mistake in words for the policy, so that it can answer with a corrected call.
"""

from __future__ import annotations

import re  # house: ok it escapes the tags of reasoning
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from burnish.chat_message import CALLS_IN_TEXT, Message, calls_in_text
from burnish.episodes.formats import ToolFormat
from burnish.episodes.streaming import REASONING, MessageText, without_long_spaces
from burnish.episodes.tool_calls import MAX_CALLS, CallReader, read_call, repeated_key
from burnish.reasoning_tags import REASONING_TAGS, Tags
from burnish.tool_arguments import argument_problem as argument_problem
from burnish.tool_arguments import argument_types

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

_MOST_PARSERS = 16  # for different ends of prompts

CallReading = Literal["check", "read"]
"""check: read tool calls, and describe those that do not match the tools. read: do not compare
them with the tools."""


@dataclass(frozen=True)
class ParsedMessage:
    """An assistant message read from a response.

    Example: ``ParsedMessage({"role": "assistant", "content": "4"}, None)``.
    """

    message: Message
    """``role``, ``content``, and if present ``reasoning_content`` and ``tool_calls``. A call is
    ``{"id", "type": "function", "function": {"name", "arguments": {...}}}``. If content follows the
    first call, ``content_with_calls`` has the text in its order."""
    problem: str | None
    """Description of malformed tool calls, addressed to the policy; None if there are none."""
    stop: str | None = None
    """The stop string that ended the response, which is not in the message."""


class ResponseParser:
    """Reads responses with one response template.

    ``prefix``: text after which responses begin (the end of the prompt). A reasoning block that the
    prompt opens is recognized by it. ``tool_format``: one of ``formats.FORMATS``; None if
    ``template`` is the tokenizer's own or the template reads no calls. ``ends``: if ``template`` is
    the tokenizer's own, the texts of the tokens that end a turn.

    Text is read from left to right. Calls before the first one that is malformed or incomplete are
    calls; that one and everything after it is content.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Mapping[str, Any],
        *,
        tool_format: ToolFormat | None = None,
        prefix: str = "",
        ends: Sequence[str] | None = None,
    ) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._tokenizer = tokenizer
        self._format = tool_format
        self._prefix = prefix
        self._shortens, self._ends = ends is not None, ends or ()
        full = _adapted(template)
        fields = full["fields"]
        others = {name: field for name, field in fields.items() if name != CALLS}
        plain = {**full, "fields": others or {"content": {}}}
        self._templates = {True: full, False: plain}
        """With and without tool calls."""
        self._loaded = {k: load_response_template(v) for k, v in self._templates.items()}
        self._regions = RegionScanner(self._loaded[True], prefix=prefix)
        calls: Mapping[str, Any] = fields.get(CALLS, {})
        self._is_json = calls.get("content") == "json"
        self._repeats = bool(calls.get("repeats"))
        self._has_channels = _has_channels(fields)
        closing = fields.get("reasoning_content", {}).get("close")
        self._reasoning_end = closing if isinstance(closing, str) else ""

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        end: str = "",
        salt: bytes = b"",
        calls: CallReading = "check",
    ) -> ParsedMessage:
        """Return the message in ``text``. Raises nothing.

        ``end``: text of the token that ended the response, which is not in ``text``; empty if the
        token limit ended it. ``salt``: seed of ids for calls that have none. They are 9 characters
        long, as Mistral's templates require, and depend only on ``salt`` and the position.
        ``calls``: see :data:`CallReading`. Without tools, text that looks like a call is content.

        With a template of the tokenizer's own, at most 256 consecutive spaces are kept: patterns of
        published templates need quadratic time.
        """
        if self._shortens:
            text = without_long_spaces(text)
        if not tools:
            return ParsedMessage(_message(self._fields(text, with_calls=False)), None)
        regions, end = self._scanned(text, end)
        spans = [region for region in regions if region.field == CALLS]
        stray = self._stray(text, regions)
        if stray is not None:
            spans = [span for span in spans if span.begin < stray]
        if len(spans) > MAX_CALLS:
            return self._refused(text, len(spans))
        closing = end if stray is None and regions and regions[-1].needs_end else ""
        values, fields, error = self._values(text[:stray] + closing, spans, tools)
        if (num_values := sum(map(len, values))) > MAX_CALLS:  # one list may contain all calls
            return self._refused(text, num_values)
        reader = CallReader(tools if calls == "check" else None, salt, num_values)
        malformed = (
            span.begin
            for span, parsed in zip(spans, values, strict=False)
            if not reader.read(parsed, self._problem(text, span, parsed, has_ended=bool(end)))
        )
        cut = next(malformed, None)
        if cut is None and len(values) < len(spans):
            cut = spans[len(values)].begin
            reader.problems.append(f"the tool call is malformed: {error}")
        if cut is None and stray is not None:
            cut = stray
            marker = self._format.opening if self._format else ""
            reader.problems.append(f"{marker!r} is not followed by a well-formed tool call")
        if cut is not None:
            fields = self._fields(text[:cut], with_calls=True)
        message = _message(fields) if cut is None else _message(fields, text[:cut], text[cut:])
        if reader.calls:
            message[CALLS] = reader.calls
            head = _message(self._fields(text[: spans[0].begin], with_calls=False))
            if message["content"] != head["content"]:
                sampled = "" if self._has_channels else self._with_calls(text)
                message[CALLS_IN_TEXT] = calls_in_text(message, sampled)
        problems = reader.problems or list(self._unread(message["content"], text, regions))
        problem = self._with_example("; ".join(problems)) if problems else None
        return ParsedMessage(message, problem)

    def is_delimiter(self, text: str) -> bool:
        """Return whether a delimiter of a field is in ``text``."""
        fields = self._loaded[True].fields.values()
        patterns = [p for field in fields for p in (field.open_re, field.close_re) if p is not None]
        return any(match[0] for pattern in patterns for match in pattern.finditer(text))

    def _scanned(self, text: str, end: str) -> tuple[list[Region], str]:
        """Return (regions of a response, text of the end token that closes them).

        Patterns of the tokenizer's own template may require an end token. Any other that ended the
        response counts as that one, and so does the end of JSON.
        """
        regions = list(self._regions.scan(text, end))
        is_open = bool(regions) and regions[-1].field == CALLS and not regions[-1].is_closed
        if is_open and (end or self._is_json):
            for other in self._ends:
                closed = list(self._regions.scan(text, other))
                if closed[-1].needs_end:
                    return closed, other
        return regions, end

    def _refused(self, text: str, num_calls: int) -> ParsedMessage:
        """Return a message with too many calls: they are content."""
        problem = f"there are {num_calls} tool calls in one response, and the limit is {MAX_CALLS}"
        message = _message(self._fields(text, with_calls=False))
        return ParsedMessage(message, self._with_example(problem))

    def stream(self, *, with_calls: bool = True) -> MessageText:
        """Return a reader of a response that is being sampled. What it returns is a beginning of
        what :meth:`parse` returns. ``with_calls``: there are tools."""
        return MessageText(
            self._templates[with_calls], prefix=self._prefix, shortens_spaces=self._shortens
        )

    def _parsed(
        self, text: str, *, with_calls: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Mapping[str, Any]:
        # Arguments that are text get the types of the tools' schemas; JSON has types of its own.
        template: Any = self._loaded[with_calls]  # (compiled once)
        fields: Mapping[str, Any] = self._tokenizer.parse_response(
            text,
            template,
            prefix=self._prefix,
            tools=[dict(tool) for tool in tools],
        )
        return fields

    def _fields(self, text: str, *, with_calls: bool) -> Mapping[str, Any]:
        """Return the fields of a message. Text that cannot be parsed is content."""
        try:
            return self._parsed(text, with_calls=with_calls)
        except Exception:
            return {"content": text}

    def _with_calls(self, text: str) -> str:
        """Return the content of a response with its calls as text."""
        return str(_message(self._fields(text, with_calls=False))["content"])

    def _values(
        self, text: str, spans: Sequence[Region], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[list[Any]], Mapping[str, Any], str | None]:
        """Return (values of each call region, fields of the message, reason why the next region
        cannot be parsed). One region may contain several values."""
        heads = [text, *(text[: span.begin] for span in reversed(spans))]
        tools = [] if self._is_json else [_with_types(tool) for tool in tools]
        error: str | None = None
        for count, head in zip(range(len(spans), -1, -1), heads, strict=True):
            try:
                fields = self._parsed(head, with_calls=True, tools=tools)
            except Exception as reason:  # a malformed response is data
                error = error or str(reason)
                continue
            values = fields.get(CALLS) if self._repeats or CALLS not in fields else [fields[CALLS]]
            values = [] if values is None else values
            if self._repeats and len(values) == count:
                return [v if isinstance(v, list) else [v] for v in values], fields, error
            if not count or (not self._repeats and count == len(values) == 1):
                return [v if isinstance(v, list) else [v] for v in values][:count], fields, error
            error = error or "it is empty, or another call is in its place"
        return [], {"content": text}, error

    def _problem(
        self, text: str, span: Region, values: Sequence[Any], *, has_ended: bool
    ) -> str | None:
        """Return why a region is no call, as far as its text shows it. ``values``: those in it.

        The end of a JSON value shows that it is complete. ``has_ended``: the policy ended the
        response.
        """
        form = self._format
        if not span.is_closed and form is not None and form.closing:
            return f"is not closed by {form.closing!r}"
        if not span.is_closed and form is None and not self._is_json and not has_ended:
            return "is not complete"
        body = text[slice(*span.body)]
        if form is not None and (problem := form.body_problem(body)):
            return problem
        call = read_call(values[0]) if values else ""
        arguments = {} if isinstance(call, str) else call[1]
        return repeated_key(body, self._loaded[True].fields[CALLS], arguments)

    def _stray(self, text: str, regions: Sequence[Region]) -> int | None:
        """Return the first place outside of all regions at which a call begins that the format
        does not recognize."""
        if self._format is None or not self._format.opening or self._format.has_channels:
            return None
        begins = [0, *(max(0, region.end) for region in regions)]
        ends = [*(max(0, region.begin) for region in regions), len(text)]
        opening = self._format.opening
        places = (text.find(opening, *gap) for gap in zip(begins, ends, strict=True))
        return next((place for place in places if place >= 0), None)

    def _unread(self, content: str, text: str, regions: Sequence[Region]) -> Iterator[str]:
        """Describe calls in the content of channels and in reasoning, where none are run."""
        if self._format is None or not self._format.opening:
            return
        opening = self._format.opening
        if self._format.has_channels and opening in content:
            yield f"{opening!r} is not followed by a well-formed tool call"
        last = regions[-1] if regions else None
        if last is None or last.field not in REASONING or last.is_closed:
            return
        if opening in text[max(0, last.body[0]) :]:
            yield f"tool calls in reasoning are not run; write {self._reasoning_end!r} first"

    def _with_example(self, problem: str) -> str:
        example = f"\nWrite a tool call as:\n{self._format.example}" if self._format else ""
        return problem + example


def _message(fields: Mapping[str, Any], head: str = "", rest: str = "") -> dict[str, Any]:
    """Return a message without calls. ``head``: text with its fields. ``rest``: text after it,
    which is content."""
    content = str(fields.get("content") or "") + str(fields.get("outside") or "")
    if rest and content == content.rstrip():  # templates may strip it
        content += head[len(head.rstrip()) :]
    content += rest
    message: dict[str, Any] = {"role": "assistant", "content": content.strip()}
    reasoning = next((str(fields[key]) for key in REASONING if fields.get(key)), "")
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def _adapted(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a response template that keeps JSON it cannot parse as text, and in which
    the tags of reasoning open it only at the beginning of a response. Later they are content. A
    template with channels, in which the content has an opening of its own, keeps its places."""
    copy = deepcopy(dict(template))
    fields = copy["fields"]
    has_channels = _has_channels(fields)
    begins = {tags.begin for tags in REASONING_TAGS}
    for name, entry in fields.items():
        if entry.get("content") == "json":
            entry["content_args"] = {**entry.get("content_args", {}), "allow_non_json": True}
        opening = entry.get("open", ())
        literals = [opening] if isinstance(opening, str) else list(opening)
        if name in REASONING and begins & set(literals) and not has_channels:
            del entry["open"]
            entry["open_pattern"] = rf"\A\s*+(?:{'|'.join(map(re.escape, literals))})"
    return copy


def _has_channels(fields: Mapping[str, Any]) -> bool:
    """Return whether the content has an opening of its own."""
    return bool({"open", "open_pattern"} & set(fields.get("content", {})))


def _with_types(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose schema has the types of its arguments and nothing else, because
    transformers reads no references, enums and constants."""
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else tool
    types = argument_types(function.get("parameters"))
    properties = {name: {"type": of} for name, of in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": function.get("name"), "parameters": parameters},
    }


CALLS = "tool_calls"
"""Name of the field with the tool calls, in response templates."""


@dataclass(frozen=True)
class Region:
    """A part of a response that its delimiters assign to a field."""

    field: str
    begin: int
    """Index of the delimiter that opens it. Negative in a prompt that opens it."""
    body: tuple[int, int]
    """Begin and end of the text between the delimiters."""
    end: int
    is_closed: bool
    """False if the response ends before the delimiter that closes it, or if there is none."""
    needs_end: bool
    """True if the delimiter that closes it contains the end token."""


class RegionScanner:
    """Finds the parts of responses that belong to one field of a message.

    transformers' parser returns values. Whether a tool call is complete, and which text belongs to
    a malformed one, needs the places. Both use the patterns of the same response template.

    ``template``: a loaded response template of transformers. ``prefix``: text after which responses
    begin.
    """

    def __init__(self, template: ResponseTemplate, *, prefix: str) -> None:
        self._patterns = {
            name: (field.open_re, field.close_re)
            for name, field in template.fields.items()
            if field.open_re is not None
        }
        self._head = template.truncate_past_last_anchor(prefix) if prefix else ""

    def scan(self, text: str, end: str = "") -> Iterator[Region]:
        """Yield the regions of a response in order. ``end``: text of the token that ended it, which
        may close the last region. Takes linear time if the patterns do."""
        whole, shift, limit = self._head + text + end, len(self._head), len(text)
        place = 0
        ahead: dict[str, Any] = {}
        while (opened := self._next(whole, place, ahead)) is not None:
            name, match = opened
            close_re = self._patterns[name][1]
            closing = None if close_re is None else close_re.search(whole, match.end())
            body_end, after = (len(whole), len(whole)) if closing is None else closing.span()
            yield Region(
                name,
                match.start() - shift,
                (match.end() - shift, min(body_end - shift, limit)),
                min(after - shift, limit),
                closing is not None,
                closing is not None and after - shift > limit,
            )
            if closing is None or after <= match.start():
                return
            place = after

    def _next(self, whole: str, place: int, ahead: dict[str, Any]) -> tuple[str, Any] | None:
        """Return (field, match) of the delimiter that opens the next region: the earliest, of
        several the longest. ``ahead``: the next match of each field, so that none is sought twice.
        """
        for name, (open_re, _) in self._patterns.items():
            is_stale = name not in ahead or (ahead[name] and ahead[name].start() < place)
            if is_stale:
                ahead[name] = open_re.search(whole, place)
        opened = [(name, match) for name, match in ahead.items() if match is not None]
        return min(
            opened,
            key=lambda opener: (opener[1].start(), -opener[1].end(), opener[0]),
            default=None,
        )


@dataclass(frozen=True)
class PromptParsers:
    """Parsers of responses, one for each form of the generation prompt: whether the prompt has
    opened reasoning decides how a response begins. A word of a message, such as ``/no_think``, may
    close the reasoning that other prompts open.

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
