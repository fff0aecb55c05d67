"""Requests and replies of model clients, in terms of no HTTP API.

A :class:`Dialect` translates one API: JSON body to :class:`ModelCall`, :class:`ModelReply` to JSON
body or server-sent events, :class:`CallError` to the error form of the API. A :class:`Backend`
answers calls: an episode in training, or a served model. Neither knows the other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, Protocol

from burnish.errors import BurnishError
from burnish.types import Ids, Logprobs

Message = Mapping[str, Any]
"""Chat message in the form of chat templates: ``role`` (``system``, ``user``, ``assistant``,
``tool``) and ``content`` (text, never None). Optional: ``reasoning_content``, ``tool_calls`` (a
list of ``{"id", "type": "function", "function": {"name", "arguments": {...}}}``, arguments as a
mapping), ``tool_call_id``, ``name``."""

ToolChoice = Literal["auto", "none", "required"]

ErrorKind = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "rate_limit_error",
    "api_error",
    "context_length_exceeded",
    "episode_closed",
]
"""Kind of a :class:`CallError`. A dialect translates it to the names of its API."""


class CallError(BurnishError):
    """A call that is refused or failed. The dialect renders it in the error form of its API."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: ErrorKind,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """``status``: HTTP status. ``param``: JSON path of the wrong field, such as
        ``messages[0].role``. ``retry_after_s``: seconds after which a retry can succeed; None: a
        retry gives the same error."""
        self.message = str(well_formed(message))
        super().__init__(self.message)
        self.status = status
        self.kind: ErrorKind = kind
        self.param: str | None = well_formed(param)
        self.retry_after_s = retry_after_s


class ContextLengthError(CallError):
    """A prompt that leaves no room for a response. Programs that then shorten their conversation
    recognize this error by the first words of the message, which every API has of its own."""

    def __init__(self, num_tokens: int, limit: int, setting: str) -> None:
        """``num_tokens`` of the prompt, of at most ``limit`` of prompt and response together.
        ``setting``: name of the key or option that sets the limit."""
        self.num_tokens, self.limit, self.setting = num_tokens, limit, setting
        message = (
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {num_tokens} tokens, which leaves no room for a response ({setting})"
        )
        super().__init__(message, status=400, kind="context_length_exceeded", param="messages")


def invalid(param: str | None, message: str) -> CallError:
    """Return the CallError (400) for a wrong field. ``param``: its JSON path."""
    return CallError(message, status=400, kind="invalid_request_error", param=param)


def key_digest(key: str) -> bytes:
    """Return a hash of a client's key. Servers compare hashes, so that no comparison depends on the
    length of a key."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def well_formed(value: Any) -> Any:
    """Return a JSON value as every JSON parser accepts it.

    Lone surrogates become U+FFFD, numbers that are not finite become None. Sampled tool arguments
    can contain both. ``value`` is nested less than Python's recursion limit.

    >>> well_formed({"a": ["\\ud800", float("nan")]}) == {"a": ["\\ufffd", None]}
    True
    """
    if isinstance(value, str):
        return _well_formed_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_well_formed_text(key): well_formed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [well_formed(item) for item in value]
    return value


def _well_formed_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@dataclass(frozen=True)
class ModelCall:
    """One request of a client.

    All values are :func:`well_formed`. Example:
    ``ModelCall("m", ({"role": "user", "content": "2+2?"},), max_tokens=16)``.
    """

    model: str
    messages: tuple[Message, ...] = ()
    """The conversation. Empty if ``prompt`` is set. The last message is not the assistant's."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
    Names are unique."""
    server_tools: Mapping[str, str] = field(default_factory=dict)
    """Tools that the server would run itself: JSON path of the type -> type, such as
    ``web_search``. No server of this project has one."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Names of tools that the client knows in another form: name -> (namespace, name)."""
    prompt: str | tuple[int, ...] | None = None
    """Prompt of a completion without a chat template: text or token ids."""
    more_prompts: tuple[str | tuple[int, ...], ...] = ()
    """Prompts after ``prompt``. The reply has ``n`` responses to each, in order."""
    tool_choice: ToolChoice = "auto"
    """``required``: the response must call a tool. A named function counts as required."""
    max_tokens: int | None = None
    """Maximum sampled tokens, at least 1. None: the client sets no limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the response. They are not part of it."""
    n: int = 1
    """Number of responses."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Number of tokens to sample from, at least 1. None: all."""
    seed: int | None = None
    logprobs: bool = False
    """Return the log-probs of the sampled tokens."""
    return_token_ids: bool = False
    """Return the sampled ids with each response. Not part of a stream."""
    stream: bool = False
    """Return the reply as server-sent events."""
    stream_usage: bool = False
    """End a stream with the numbers of tokens."""
    show_reasoning: bool = True
    """Return the reasoning separately from the content. False: the reply omits it."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables of the chat template (``chat_template_kwargs``)."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> reason, for parameters that change what is sampled and that no backend supports
    (see :func:`check_supported`)."""
    ignored: tuple[str, ...] = ()
    """Parameters that have no effect with any backend, such as ``reasoning_effort``. A backend
    includes them in :attr:`ModelReply.ignored`."""

    @property
    def num_responses(self) -> int:
        """Return the number of responses to all prompts."""
        return self.n * (1 + len(self.more_prompts))

    @property
    def shown_tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the tools that the model sees."""
        return () if self.tool_choice == "none" else self.tools


def check_supported(call: ModelCall) -> None:
    """Raise CallError (400) with all reasons if the call has unsupported parameters."""
    if not call.unsupported:
        return
    reasons = "; ".join(f"{name}: {why}" for name, why in call.unsupported.items())
    raise invalid(next(iter(call.unsupported)), f"unsupported parameters: {reasons}")


@dataclass(frozen=True)
class Choice:
    """One response of the model."""

    message: Message
    """Assistant message. Tool arguments are mappings. Clients receive it :func:`well_formed`, so
    compare messages of later calls with that form."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """``length`` also if there are complete calls before the place where the limit cut."""
    arguments_text: tuple[str, ...] = ()
    """JSON text of the arguments of each tool call, as sampled. APIs whose arguments are text
    return it unchanged if the arguments are well-formed. Parallel to ``tool_calls``, or empty: the
    mappings are serialized."""
    token_ids: Ids = ()
    """Sampled ids, [T]."""
    token_texts: tuple[str, ...] = ()
    """Text that every sampled id adds, [T]. Joined, they are the text of which the message was
    read. Needed for log-probs only."""
    token_bytes: tuple[bytes, ...] = ()
    """Bytes of every sampled id, [T]. Empty: those of the texts."""
    logprobs: Logprobs = ()
    """Log-probs of the sampled ids, [T]."""
    stop_sequence: str | None = None
    """The text of ``ModelCall.stop`` that ended the response. Not part of the content."""


@dataclass(frozen=True)
class ModelReply:
    """The answer to one call."""

    reply_id: str
    """Unique id without a prefix. Dialects add the prefix of their API."""
    created: int
    """Unix time in seconds."""
    model: str
    choices: tuple[Choice, ...]
    """``ModelCall.num_responses`` responses."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were read from a cache, included in ``prompt_tokens``."""
    completion_tokens: int
    """Sampled tokens of all choices."""
    ignored: tuple[str, ...] = ()
    """Parameters of the call without effect, such as ``("temperature",)``."""

    @property
    def start(self) -> ReplyStart:
        """Return the part that is known before anything is sampled, with the cached tokens."""
        return ReplyStart(
            self.reply_id,
            self.created,
            self.model,
            self.prompt_tokens,
            self.cached_tokens,
            self.ignored,
        )


@dataclass(frozen=True)
class ReplyStart:
    """The part of a :class:`ModelReply` that is known before its responses are sampled. The fields
    are those of the reply."""

    reply_id: str
    created: int
    model: str
    prompt_tokens: int
    cached_tokens: int = 0
    """0 while it is unknown."""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Delta:
    """Text of a response that later tokens cannot change.

    The deltas of a response are, in order, prefixes of its reasoning and of its content. Content
    with no delta yet, tool calls and what follows them come with the :class:`ModelReply`.
    """

    index: int
    """Number of the response in ``ModelReply.choices``."""
    reasoning: str = ""
    content: str = ""


class Progress(Protocol):
    """Receiver of the text of a reply while it is sampled. All methods are called in the event
    loop, ``start`` once and before the first delta. A backend may call none of them."""

    def start(self, start: ReplyStart) -> None:
        """Accept the known part of the reply."""
        ...

    def add(self, delta: Delta) -> None:
        """Accept more text of a response."""
        ...


class EventWriter(Protocol):
    """Writer of the server-sent events of one reply. Events end with a blank line."""

    def add(self, delta: Delta) -> Iterator[str]:
        """Yield the events of more text."""
        ...

    def finish(self, reply: ModelReply) -> Iterator[str]:
        """Yield all events that are left. Raises CallError (500) if the added text is not a prefix
        of the reply."""
        ...


class Dialect(Protocol):
    """Translator of one HTTP API. Stateless; knows neither HTTP objects nor tokens."""

    def read(self, body: Any, *, max_messages: int) -> ModelCall:
        """Return the call in ``body``, the parsed JSON of a request.

        Raises CallError (400) with the JSON path of the first wrong field, or if there are more
        than ``max_messages`` messages.
        """
        ...

    def write(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """Return the JSON body of the response."""
        ...

    def writer(self, call: ModelCall, start: ReplyStart) -> EventWriter:
        """Return the writer of the events of a reply."""
        ...

    def error(self, error: CallError) -> dict[str, Any]:
        """Return the JSON body of an error response."""
        ...

    def error_event(self, error: CallError) -> str:
        """Return the event of an error in a stream that has begun. It ends the stream."""
        ...


@dataclass(eq=False)
class Arrival:
    """Place of one call in the order in which the calls of its episode arrived.

    Parallel calls are parsed and sampled side by side. What depends on their order (the number of
    equal prompts before a call, the turns that are left) is decided in the order of arrival, so
    that a resumed run draws the same tokens.
    """

    number: int
    """Number of calls that arrived before it."""
    _before: list[Arrival] = field(repr=False)
    _passed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def turn(self) -> None:
        """Wait until every earlier call has passed."""
        for earlier in self._before:
            await earlier._passed.wait()
        self._before.clear()

    def passed(self) -> None:
        """Let later calls pass. Call it once the engine has the request, and at the latest when the
        call ends."""
        self._passed.set()

    @property
    def has_passed(self) -> bool:
        """Return whether later calls need not wait for this one."""
        return self._passed.is_set()


class Arrivals:
    """The calls of one episode that have arrived."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[Arrival] = []

    def arrive(self) -> Arrival:
        """Return the place of a new call. :meth:`Arrival.passed` must be called for it."""
        self._open = [arrival for arrival in self._open if not arrival.has_passed]
        arrival = Arrival(self._count, list(self._open))
        self._open.append(arrival)
        self._count += 1
        return arrival


class Backend(Protocol):
    """Source of the answers to the calls of one key: an episode in training, or a served model."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that clients may request."""
        ...

    def arrive(self) -> Arrival:
        """Return the place of a call whose request has been received. Calls are ordered by it, even
        if their bodies are parsed side by side. The caller calls ``passed()`` at its end."""
        ...

    async def respond(
        self,
        call: ModelCall,
        *,
        digest: bytes,
        is_retry: bool = False,
        progress: Progress | None = None,
        arrival: Arrival | None = None,
    ) -> ModelReply:
        """Answer a call. Cancelling the task cancels its request to the engine.

        ``digest``: hash of the API and the request body. ``is_retry``: the client says that it sent
        the same request before. ``progress`` receives text while it is sampled, if the backend can
        tell what is final. ``arrival``: the result of :meth:`arrive`; None: it arrives now. Raises
        CallError.
        """
        ...

    async def count_tokens(self, call: ModelCall) -> int:
        """Return the number of prompt tokens of a call. Raises CallError."""
        ...

    def undelivered(self, reply: ModelReply, digest: bytes) -> None:
        """Accept a reply whose client disconnected before the reply was written."""
        ...
