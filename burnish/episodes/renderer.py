"""Messages to token ids and back, without ever tokenizing sampled tokens again.

The prompt of the next turn is the previous prompt, the sampled ids, and the ids of only what
follows: the end of the turn and the new messages. ``template.py`` finds that text. See ``history``
in :class:`ChatRenderer` for templates that rewrite earlier turns.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, get_args

from burnish.chat_message import CALLS_IN_TEXT, Message, calls_in_text, with_calls_behind
from burnish.compact import IntArray
from burnish.data.chat import encode_prompt
from burnish.data.decoding import (
    CONTEXT,
    context_of,
    response_decoder,
    response_text,
    text_behind,
    tokenizer_text,
)
from burnish.data.left_out import REFUSED_IN_PROMPTS
from burnish.data.messages import as_messages, as_rendered
from burnish.data.pieces import encode_piece
from burnish.data.sources import DataError
from burnish.episodes.formats import FORMATS, FormatName, response_template
from burnish.episodes.framing import FrameHold, Framing
from burnish.episodes.parsing import CallReading, ParsedMessage, PromptParsers, ResponseParser
from burnish.episodes.probing import assistant, call, reads_rendered_call, user
from burnish.episodes.streaming import (
    MessageStream,
    StopHold,
    TextStream,
    TokenText,
    before_stop,
)
from burnish.episodes.template import ChatTemplate, Marks, RendererError, Tools, literal_parts
from burnish.episodes.token_texts import TokenPart, token_parts
from burnish.reasoning_tags import THINK
from burnish.special_tokens import special_tokens
from burnish.templates import current_date
from burnish.tool_arguments import check_parameters
from burnish.types import Ids
from burnish.vocabulary import num_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

History = Literal["keep", "template"]
"""keep: what was sampled stays in the prompt. template: every turn renders all messages again."""

_PROMPT_END = 48
"""Tokens at the end of a prompt that include its generation prompt."""
_TOKEN_CHARS = 32
"""Characters of a token beyond which a text is certainly too long: many times the usual number."""
_USUAL_TOKEN_CHARS = 3
"""Characters of a token of text, by which the tokens of a text that is too long are estimated."""


class TooLongError(RendererError):
    """A prompt that is certainly too long. It is not tokenized."""

    def __init__(self, num_tokens: int, message: str) -> None:
        """``num_tokens``: its tokens, or an estimate."""
        super().__init__(message)
        self.num_tokens = num_tokens


class TextCodec:
    """Text to token ids and back, without a chat template. Not thread-safe: fast tokenizers are not
    re-entrant."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._with_special_tokens = partial(tokenizer_text, tokenizer)

    @property
    def num_tokens(self) -> int:
        """Return the number of ids that the tokenizer and the model know."""
        return num_tokens(self._tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens, which the text of a response does not show."""
        added = self._tokenizer.added_tokens_decoder.items()
        named = {int(token) for token in self._tokenizer.all_special_ids}
        return frozenset({number for number, token in added if token.special} | named)

    def encode(self, text: str, *, after: Sequence[int] = (), max_tokens: int | None = None) -> Ids:
        """Return the ids of text without the chat template. ``after``: the tokens that it
        continues, if any; then no BOS token is added. ``max_tokens``: more are of no use. Raises
        TooLongError, or RendererError for a token that the model does not have."""
        _check_length(len(text), max_tokens)
        try:
            if after:
                return IntArray(encode_piece(self._tokenizer, text, after=after))
            return IntArray(encode_prompt(self._tokenizer, text)[1])
        except DataError as error:
            raise RendererError(f"the text cannot be read: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        return text_behind(self._tokenizer, (), ids, self._with_special_tokens)

    def response_text(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> str:
        """Return the text of a response, see :func:`burnish.data.decoding.response_text`."""
        return response_text(self._tokenizer, context_of(self._tokenizer, prompt_ids), sampled_ids)

    def text_parts(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], stops: Sequence[str] = ()
    ) -> tuple[TokenPart, ...]:
        """Return the part of each token of :meth:`response_text`, up to the first of ``stops``."""
        text, _ = before_stop(self.response_text(prompt_ids, sampled_ids), stops)
        decode = response_decoder(self._tokenizer)
        return token_parts(self._tokenizer, prompt_ids, sampled_ids, text, decode=decode)

    def stream_text(self, prompt_ids: Sequence[int], stops: Sequence[str] = ()) -> TextStream:
        """Return a reader of a response that is being sampled. What it returns is a beginning of
        what :meth:`response_text` returns, up to the first of ``stops``."""
        text = TokenText(self._tokenizer, prompt_ids, decode=response_decoder(self._tokenizer))
        return TextStream(text, StopHold(stops))


class ChatRenderer(TextCodec):
    """Renders conversations with a tokenizer's chat template and extends prompts turn by turn.

    ``history`` matters for templates that are not append-only: they render earlier turns
    differently when more messages follow (Qwen3 drops earlier reasoning). ``keep`` leaves the
    sampled tokens in the prompt; an episode is one training row. ``template`` renders all messages
    for every turn, as the model card describes; every turn is a training row of its own, and
    :meth:`bridge` cannot be used.

    ``tool_format``: name of a format in ``formats.FORMATS`` or a response template of transformers.
    None: the tokenizer's own ``response_template``, else the format in which the template renders
    tool calls, if it reads such a call back.

    ``today``: date for templates that write one. It is fixed at creation, so that prompts of one
    episode agree across midnight. None: that of the run. ``follows_clock``: every rendering has its
    own date, as on a server.

    Special tokens in tool results, and in other messages after a turn of the policy, become
    ordinary text, so that they cannot end a turn.

    Not thread-safe: fast tokenizers are not re-entrant.

    Raises RendererError if the template is not append-only and ``history`` is None (the message
    contains the first difference), if the template cannot be extended at all, if ``tool_format`` is
    unknown, or if transformers is older than 5.15.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        history: History | None = None,
        tool_format: FormatName | Mapping[str, Any] | None = None,
        today: datetime | None = None,
        follows_clock: bool = False,
    ) -> None:
        if history not in (None, *get_args(History)):
            raise RendererError(
                f"history is {history!r}; use keep (what was sampled stays in the prompt) or "
                "template (every turn renders all messages again)"
            )
        _check_transformers(tokenizer)
        super().__init__(tokenizer)
        self._own_format = tool_format is not None
        self._template = ChatTemplate(
            tokenizer, today=None if follows_clock else today or current_date()
        )
        self.differences, self.rejected = self._template.probe()
        """First difference of every probe conversation in which the template rewrites history, and
        probe conversation -> why the template cannot render it."""
        stop, closing = self._template.end_tokens()
        self.stop_token_ids: frozenset[int] = stop
        """Tokens that end a turn of the policy, at which sampling must stop."""
        self._closing_ids, self._hidden = closing, special_tokens(tokenizer).keys()
        self.history: History = "keep"
        """How the next prompt is made. Always "keep" for append-only templates."""
        if not self.append_only:
            if history is None:
                raise RendererError(
                    "the chat template renders earlier turns differently when more messages "
                    f"follow: {self.differences[0]}. Choose how episodes of several turns are "
                    "made: history: keep (what was sampled stays in the prompt; one training row "
                    "per episode) or history: template (every turn renders all messages again, as "
                    "the model card describes; one training row per turn)"
                )
            self.history = history
        self.reads_tool_calls = True
        """Set if :meth:`parse` finds tool calls."""
        own = vars(tokenizer).get("response_template")
        form = own if tool_format is None and isinstance(own, Mapping) else tool_format
        self._read_with(self._template.call_format() if form is None else form)
        if form is None and not reads_rendered_call(tokenizer, self.parse):
            self._read_with(None)
        if self._own_format and self.history == "template":
            self._check_rendered_calls()

    def _check_rendered_calls(self) -> None:
        """Raise RendererError if the template leaves out the calls that ``tool_format`` reads: each
        turn renders all messages again, so the policy would not see its own."""
        lookup = call("look_up", {"key": "a"}, "probe0000")
        answered = [user("Go."), assistant("", tool_calls=[lookup]), user("On.")]
        try:
            self._template.check(answered, (), REFUSED_IN_PROMPTS)
        except DataError as error:
            raise RendererError(
                f"history: template renders every turn again, and {error}; or use history: keep"
            ) from error

    @property
    def append_only(self) -> bool:
        """True if a bridged prompt has the text of a complete rendering, on all probe
        conversations."""
        return not self.differences

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, max_tokens: int | None = None
    ) -> Ids:
        """Return the prompt ids of a conversation, with the generation prompt. ``max_tokens``: more
        are of no use.

        Raises TooLongError; RendererError if the template rejects or drops a message or a tool
        call, if the last message is the assistant's, or if there are tools whose calls could not be
        parsed.
        """
        try:
            checked = as_messages(list(messages))
            if checked[-1]["role"] == "assistant":
                raise RendererError(
                    "the conversation ends with an assistant message, so there is nothing to "
                    "answer; end it with a user message or a tool result"
                )
            conversation, checked = checked, as_rendered(checked)
            _check_length(_given_text(checked), max_tokens)
            self._template.check(checked, tools, REFUSED_IN_PROMPTS, conversation=conversation)
            marked, marks = self._template.marked(checked, tools)
            text = self._template.text(marked, tools, generate=True, conversation=conversation)
        except DataError as error:
            raise RendererError(f"the conversation cannot be rendered: {error}") from error
        _check_length(len(text), max_tokens)
        if tools and not self.reads_tool_calls:
            raise RendererError(
                "the environment offers tools, but the chat template writes tool calls in no known "
                "format, so calls could not be parsed",
                f"Set tool_format to {', '.join(FORMATS)} or to a response template of "
                "transformers (tokenizer.response_template), and describe that format in the "
                "system prompt if the template does not",
                server_remedy="Start the server with --chat-template FILE, a template that writes "
                "them, or with a model whose tokenizer has a response_template",
            )
        _check_tools(tools)
        names = [str(tool.get("function", tool)["name"]) for tool in tools]
        if names and not self._own_format and not any(name in text for name in names):
            raise RendererError(
                f"the chat template does not render tools, so the policy would not see "
                f"{', '.join(names)}",
                "Set model.chat_template to one that does, or describe the tools in the system "
                "prompt and set tool_format",
                server_remedy="Start the server with --chat-template FILE, a template that does, "
                "or describe the tools in the system prompt and omit them in the request",
            )
        return IntArray(self._encode(text, marks))

    def render_again(
        self, messages: Sequence[Message], tools: Tools = (), *, max_tokens: int | None = None
    ) -> Ids:
        """Return :meth:`render` of a conversation with the policy, for ``history: template``. An
        answer with text behind its calls has them behind its text if the template cannot write, or
        rejects, what was sampled. Raises as :meth:`render`."""
        try:
            return self.render(messages, tools, max_tokens=max_tokens)
        except TooLongError:
            raise
        except RendererError:
            if not any(CALLS_IN_TEXT in message for message in messages):
                raise
            return self.render(with_calls_behind(messages), tools, max_tokens=max_tokens)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
        *,
        earlier: Sequence[Message] = (),
        ended: bool = False,
        max_tokens: int | None = None,
    ) -> Ids:
        """Return the next prompt: ``prompt_ids``, ``sampled_ids``, the rest of the closing tokens,
        and the ids of ``new_messages`` with the generation prompt. ``earlier``: the messages of
        ``prompt_ids``, behind which the template writes the new ones. ``ended``: as in
        :meth:`parse`. ``max_tokens``: more are of no use.

        If ``sampled_ids`` was cut by the length limit, the closing tokens are part of what is
        appended. Tool results without ``tool_call_id`` or ``name`` get those of the calls in
        ``sampled_ids``, in order.

        Raises TooLongError; RendererError with ``history: template``, if ``new_messages`` is empty
        or contains an assistant message, or if the template cannot render it.
        """
        if self.history == "template":
            raise RendererError(
                "with history: template a prompt is not extended; render all messages instead, or "
                "set history: keep"
            )
        try:
            _check_length(_given_text(new_messages), max_tokens)
            answer = partial(self.parse, sampled_ids, tools, prompt_ids=prompt_ids, ended=ended)
            new = _identified(new_messages, answer)
            marked, marks = self._template.marked(new, tools, follow=True)
            before_answer = with_calls_behind(as_messages(list(earlier))) if earlier else ()
            continuation = self._template.continuation(marked, tools, earlier=before_answer)
        except DataError as error:
            raise RendererError(f"the new messages cannot be rendered: {error}") from error
        _check_length(len(continuation.rest), max_tokens)
        before = IntArray(prompt_ids) + IntArray(sampled_ids)
        if not sampled_ids or sampled_ids[-1] not in self._closing_ids:
            tail = self._decode(sampled_ids[-CONTEXT:], prompt_ids, ended=ended)
            missing = self._framing.missing(continuation.before_end, *tail)
            text = missing + continuation.end + continuation.rest
            return before + IntArray(self._encode(text, marks, after=before[-1:]))
        added = self._encode(continuation.end + continuation.rest, marks, after=before[-1:])
        if continuation.end or added[:1] == [sampled_ids[-1]]:
            added = added[1:]  # the sampled end token
        return before + IntArray(added)

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Tools = (),
        *,
        prompt_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        ended: bool = False,
        calls: CallReading = "check",
    ) -> ParsedMessage:
        """Return the assistant message in ``sampled_ids``, up to the first of ``stops``. Raises
        nothing.

        ``prompt_ids``: the prompt it answers. It makes ids of calls unique within the episode, and
        the first token of a response decode as a continuation. ``ended``: True if the last token
        ended the response (``finish_reason`` is ``stop``). A special token is then no part of the
        message: models also end with tokens that their template does not write. ``calls``: see
        ``CallReading``. Without tools, text that looks like a call is content.
        """
        salt = blake2b(array("q", [len(prompt_ids), *prompt_ids, *sampled_ids]).tobytes())
        text, end, stop = self._message_text(sampled_ids, prompt_ids, stops, ended=ended)
        begin, end_of_text = self._framing.span(text)
        parsed = self._parser_of(prompt_ids).parse(
            text[begin:end_of_text],
            tools,
            end=end,
            salt=salt.digest(),
            calls=calls,
        )
        if not begin and self._framing.openings:
            message = dict(parsed.message)
            message["content"] = self._framing.without_opening(message["content"])
            if CALLS_IN_TEXT in message:
                sampled = self._framing.without_opening(message[CALLS_IN_TEXT]["text"])
                message[CALLS_IN_TEXT] = calls_in_text(message, sampled)
            parsed = replace(parsed, message=message)
        return replace(parsed, stop=stop) if stop is not None else parsed

    def message_parts(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        stops: Sequence[str] = (),
        *,
        ended: bool = False,
    ) -> tuple[TokenPart, ...]:
        """Return the part of each token of a message: of the text that :meth:`parse` reads."""
        text, _, _ = self._message_text(sampled_ids, prompt_ids, stops, ended=ended)
        begin, end = self._framing.span(text)
        return token_parts(
            self._tokenizer,
            prompt_ids,
            sampled_ids,
            text[:end],
            begin=begin,
            decode=self._with_special_tokens,
        )

    def stream(
        self, prompt_ids: Sequence[int], *, has_tools: bool = True, stops: Sequence[str] = ()
    ) -> MessageStream:
        """Return a reader of a response that is being sampled. What it returns is a beginning of
        what :meth:`parse` returns, with tools if ``has_tools``."""
        text = TokenText(self._tokenizer, prompt_ids, decode=self._with_special_tokens)
        message = self._parser_of(prompt_ids).stream(with_calls=has_tools)
        opening = FrameHold(Framing(self._framing.openings), strips=True)
        return MessageStream(text, StopHold(stops), FrameHold(self._framing), message, opening)

    def _encode(self, text: str, marks: Marks, *, after: Sequence[int] = ()) -> list[int]:
        """Return the ids of a text with :meth:`ChatTemplate.marked` parts. ``after``: the tokens
        that it continues, if any."""
        ids: list[int] = []
        text = text.encode("utf-8", "replace").decode()  # tokenizers reject lone surrogates
        for part, literal in literal_parts(text, marks):
            try:
                ids += encode_piece(self._tokenizer, part, after=ids[-1:] or after, literal=literal)
            except DataError as error:
                raise RendererError(f"the messages cannot be read: {error}") from error
        return ids

    def _message_text(
        self,
        sampled_ids: Sequence[int],
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        *,
        ended: bool,
    ) -> tuple[str, str, str | None]:
        """Return (text of a response up to the first stop string, without its end token and with
        other special tokens; text of the end token, empty if there is none; that stop string)."""
        text, end = self._decode(sampled_ids, prompt_ids, ended=ended)
        is_written = bool(end) and sampled_ids[-1] in self._closing_ids
        before, stop = before_stop(text if is_written else text + end, stops)
        return (text, end, None) if stop is None else (before, "", stop)

    def _decode(
        self, sampled_ids: Sequence[int], prompt_ids: Sequence[int], *, ended: bool
    ) -> tuple[str, str]:
        """Return (text of a response without its end token, with other special tokens; text of the
        end token, empty if there is none)."""
        ids = list(sampled_ids)
        end = ""
        if ids and (ids[-1] in self._closing_ids or (ended and ids[-1] in self._hidden)):
            end = str(self._tokenizer.convert_ids_to_tokens(ids.pop()))
        before = context_of(self._tokenizer, prompt_ids)
        return text_behind(self._tokenizer, before, ids, self._with_special_tokens), end

    def _parser_of(self, prompt_ids: Sequence[int]) -> ResponseParser:
        if not prompt_ids:
            return self._parsers.usual
        return self._parsers.after(self.decode(prompt_ids[-_PROMPT_END:]))

    def _read_with(self, tool_format: str | Mapping[str, Any] | None) -> None:
        """Read responses with a format of calls. None: calls are content."""
        tags = self._template.tags()
        ends = [str(t) for t in self._tokenizer.convert_ids_to_tokens(sorted(self._closing_ids))]
        if isinstance(tool_format, Mapping):
            make = partial(ResponseParser, self._tokenizer, tool_format, ends=ends)
        elif tool_format is not None and tool_format not in FORMATS:
            raise RendererError(
                f"tool_format is {tool_format!r}; known are {', '.join(FORMATS)}, or give a "
                "response template of transformers"
            )
        else:
            self.reads_tool_calls = tool_format is not None
            form = FORMATS[tool_format] if tool_format else None
            template = response_template(form, reasoning=None if tool_format == "harmony" else tags)
            make = partial(ResponseParser, self._tokenizer, template, tool_format=form)
        self._parsers = PromptParsers(
            make,
            generation_prompt=self._template.generation_prompt,
            tags=tags or THINK,
            keeps_head=isinstance(tool_format, Mapping),
            turn_ends=ends,
        )
        self._framing = self._template.framing(self._parsers.usual.is_delimiter)


def _check_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise RendererError if transformers cannot parse responses with types of arguments."""
    import transformers

    method = getattr(tokenizer, "parse_response", None)  # house: ok not in every version
    if method is None or not {"prefix", "tools"} <= set(inspect.signature(method).parameters):
        raise RendererError(
            f"transformers {transformers.__version__} cannot parse responses with tool calls, "
            "which episodes need; install transformers 5.15 or newer"
        )


def _given_text(messages: Sequence[Message]) -> int:
    """Return the number of characters that every template renders: those of questions and results.
    (Of answers, many drop the reasoning.)"""
    contents = [m.get("content") for m in messages if m.get("role") != "assistant"]
    return sum(len(content) for content in contents if isinstance(content, str))


def _check_length(num_chars: int, max_tokens: int | None) -> None:
    """Raise TooLongError if a text certainly has more tokens."""
    if max_tokens is not None and num_chars > _TOKEN_CHARS * max_tokens:
        raise TooLongError(
            num_chars // _USUAL_TOKEN_CHARS,
            f"the prompt has {num_chars} characters, more than {_TOKEN_CHARS} times the limit of "
            f"{max_tokens} tokens",
        )


def _check_tools(tools: Tools) -> None:
    """Raise RendererError if a tool has no name or its parameters are no JSON schema."""
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise RendererError(
                f"a tool has no name: {str(tool)[:60]}; describe a tool as "
                '{"type": "function", "function": {"name": ..., "description": ..., '
                '"parameters": JSON schema}}'
            )
        try:
            check_parameters(function.get("parameters"))
        except Exception as error:  # also references that cannot be resolved
            raise RendererError(
                f"the parameters of the tool {name!r} are not a JSON schema: "
                f"{str(error).partition(chr(10))[0]}; a `$ref` must refer to `$defs` in the same "
                "parameters"
            ) from error


def _identified(
    messages: Sequence[Message], answer: Callable[[], ParsedMessage]
) -> list[dict[str, Any]]:
    """Return the messages, each tool result with the id and the name of its call in ``answer``."""
    if not messages:
        raise RendererError("there are no new messages, so there is nothing to answer")
    identified = as_messages(list(messages))
    if any(message.get("role") == "assistant" for message in identified):
        raise RendererError(
            "the new messages contain an assistant message, but only the policy writes those; "
            "return user, system or tool messages"
        )
    results = [message for message in identified if message.get("role") == "tool"]
    if all(message.get("tool_call_id") and message.get("name") for message in results):
        return identified
    calls = answer().message.get("tool_calls", [])
    by_id = {call_["id"]: call_ for call_ in calls}
    for number, message in enumerate(results):
        position = calls[number] if number < len(calls) else None
        answered = by_id.get(str(message.get("tool_call_id")), position)
        if answered is None:
            answered = call("tool", {}, f"call{number:05d}")
        message["tool_call_id"] = message.get("tool_call_id") or answered["id"]
        message["name"] = message.get("name") or answered["function"]["name"]
    return identified
