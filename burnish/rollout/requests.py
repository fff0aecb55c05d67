"""Requests of all rollout engines: which are valid, which are open, when their samples end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from transformers import GenerationConfig, PreTrainedTokenizerBase

from burnish.byte_tokens import REPLACEMENT, TailTokens
from burnish.compact import FloatArray, IntArray, IntLists
from burnish.data.decoding import hidden_tokens, removes_spaces, report_unread, response_decoder
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan
from burnish.special_tokens import end_token_ids
from burnish.transcript import FinishReason


def check_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    limit: int | None,
    holder: str = "the model has",
) -> None:
    """Raise ValueError if a prompt is empty, if ``max_tokens`` is below 1, if prompt plus response
    exceed ``limit`` positions, if a request of a conversation has ``n`` != 1, or if a stop string
    is in no response or in all.

    ``holder`` starts the clause about the limit in the message.
    """
    for string in sampling.stop:
        if not string or any("\ud800" <= character <= "\udfff" for character in string):
            raise ValueError(
                f"stop string {string!r} is empty or has half of a surrogate pair, which no text "
                "contains; remove it"
            )
    for request in requests:
        if request.conversation is not None and request.n != 1:
            raise ValueError(
                f"request {request.request_id} of conversation {request.conversation} has "
                f"n={request.n}: a conversation continues with one response; use n=1"
            )
        room = request.limit(sampling)
        if room < 1:
            raise ValueError(
                f"request {request.request_id}: max_tokens={room}: a response has at least "
                "one token; use 1 or more"
            )
        if not request.prompt_ids:
            raise ValueError(
                f"request {request.request_id} has an empty prompt; give at least one token"
            )
        need = len(request.prompt_ids) + room
        if limit is not None and need > limit:
            raise ValueError(
                f"request {request.request_id}: prompt of {len(request.prompt_ids)} tokens + "
                f"generate_max_len {room} = {need}, but {holder} positions for {limit}; "
                "shorten one of them"
            )


class OpenRequests:
    """Requests that were submitted and have samples to finish."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # request id -> samples that are not finished
        self._conversations: dict[str, str] = {}  # request id -> conversation
        self._talks: set[str] = set()  # the values of _conversations

    def __bool__(self) -> bool:
        return bool(self._left)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._left

    @property
    def ids(self) -> Collection[str]:
        """Return the ids of the open requests."""
        return self._left.keys()

    def add(self, requests: Sequence[Request]) -> None:
        """Open ``requests``. Raises ValueError, and opens none, if an id or a conversation is
        already open or given twice."""
        ids, talks = set[str](), set[str]()
        for request in requests:
            if request.request_id in self._left or request.request_id in ids:
                raise ValueError(
                    f"request {request.request_id} is already open; every open request needs an id "
                    "of its own"
                )
            ids.add(request.request_id)
            if request.conversation is None:
                continue
            if request.conversation in self._talks or request.conversation in talks:
                raise ValueError(
                    f"request {request.request_id}: conversation {request.conversation} already "
                    "has an open request; submit the next one after its completion"
                )
            talks.add(request.conversation)
        for request in requests:
            if request.n > 0:
                self._left[request.request_id] = request.n
            if request.n > 0 and request.conversation is not None:
                self._conversations[request.request_id] = request.conversation
                self._talks.add(request.conversation)

    def finish(self, request_id: str) -> None:
        """Count one finished sample; the last one closes the request."""
        self._left[request_id] -= 1
        if not self._left[request_id]:
            self.drop([request_id])

    def drop(self, request_ids: Iterable[str]) -> set[str]:
        """Close requests and return the ids of those that were open."""
        dropped = {name for name in request_ids if name in self._left}
        for name in dropped:
            del self._left[name]
            if name in self._conversations:
                self._talks.remove(self._conversations.pop(name))
        return dropped


def end_tokens(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the token ids that end a response of a model with this generation config."""
    return end_token_ids(tokenizer, None if config is None else config.eos_token_id)


class StopRule:
    """Stop conditions of responses: an end or stop token, a stop string, or the length limit.

    Stop tokens and stop strings remain in the response. Stop strings are searched in the text of a
    completion, which lacks special tokens (:mod:`burnish.data.decoding`), unless one of them names
    such a token. A response ends with the first token with which its text has a stop string.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, ends: Iterable[int]
    ) -> None:
        self.tokenizer, self.strings = tokenizer, sampling.stop
        self.tokens = set(ends) | set(sampling.stop_token_ids)
        report_unread(tokenizer)
        self.text_of = response_decoder(tokenizer)
        hidden = hidden_tokens(tokenizer) if sampling.stop else {}
        named = any(text in string for text in hidden.values() if text for string in sampling.stop)
        self._hidden: Collection[int] = () if named else hidden.keys()
        # Every token has at least one byte, so a stop string spans at most this many tokens.
        size = max((len(s.encode()) for s in sampling.stop), default=0)
        if sampling.stop and removes_spaces(tokenizer):
            size *= 3  # each character can lose a space on either side
        # The first token, of up to four of a character, is not searched; the last one may change
        # the text before it.
        self.num_searched = None if any(REPLACEMENT in s for s in sampling.stop) else size + 4

    def begin(self) -> StopCheck:
        """Return the check of one response, which reads all of its tokens in order."""
        return StopCheck(self)

    def has_text(self, token: int) -> bool:
        """Return whether ``token`` adds to the text in which stop strings are searched. Ids beyond
        the vocabulary, which padded embeddings can sample, do not."""
        return token not in self._hidden and bool(self.tokenizer.convert_ids_to_tokens(token))


class StopCheck:
    """The stop conditions of one response, read token by token."""

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._tail = TailTokens(rule.tokenizer, rule.num_searched) if rule.strings else None
        self._length = 0

    def add(self, token: int, limit: int) -> FinishReason | None:
        """Return why the response ends with ``token``, its next one; None if it continues."""
        rule = self._rule
        self._length += 1
        if token in rule.tokens:
            return "stop"
        if self._tail is not None and rule.has_text(token):
            self._tail.add(token)
            if self._has_stop_string(self._tail):
                return "stop"
        return "length" if self._length >= limit else None

    def _has_stop_string(self, tail: TailTokens) -> bool:
        decode, strings, ids = self._rule.tokenizer.decode, self._rule.strings, tail.ids
        text = str(decode(ids))
        if not any(string in text for string in strings):
            return False
        if tail.is_cut:  # the first token has another text there
            text = text[len(str(decode(ids[:1]))) :]
        return any(string in text for string in strings)


@dataclass(eq=False)
class LiveSample:
    """One sample of a request, while it is sampled."""

    request: Request
    index: int
    sampling: Sampling
    stop: StopRule
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Sequence[int]] = field(default_factory=list)
    """Ids that top-k and top-p kept for each token. Empty: not recorded."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from a cache."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of the first token that it sampled), in order."""
    reason: FinishReason | None = None
    """Why the sample is finished; None: it is not."""
    _check: StopCheck = field(init=False)

    def __post_init__(self) -> None:
        self._check = self.stop.begin()

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the ids of the prompt and of the tokens so far."""
        return (*self.request.prompt_ids, *self.tokens)

    @property
    def length(self) -> int:
        """Return the current length of prompt and response in tokens."""
        return len(self.request.prompt_ids) + len(self.tokens)

    def add(
        self, token: int, logprob: float, version: int, *, kept_ids: Sequence[int] | None = None
    ) -> None:
        """Append a token sampled from ``version`` of the weights, and set ``reason`` if it ends the
        sample. ``kept_ids``: the ids that top-k and top-p kept, if they are recorded."""
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if kept_ids is not None:
            self.kept.append(kept_ids)
        self.reason = self._check.add(token, self.request.limit(self.sampling))
        if self.reason is None and self.request.on_tokens is not None:
            self.request.on_tokens(self.tokens)

    def completion(self) -> Completion:
        """Return the finished sample."""
        assert self.reason is not None
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=IntArray(self.tokens),
            logprobs=FloatArray(self.logprobs),
            finish_reason=self.reason,
            text=self.stop.text_of(self.tokens),
            spans=version_spans(self.marks, len(self.tokens)),
            cached_tokens=self.cached_tokens,
            kept_ids=IntLists(self.kept),
        )


def version_spans(marks: Sequence[tuple[int, int]], length: int) -> tuple[VersionSpan, ...]:
    """Return the spans of ``length`` tokens. ``marks``: (version, index of its first token)."""
    ends = [begin for _, begin in marks[1:]] + [length]
    return tuple(
        VersionSpan(version, begin, end) for (version, begin), end in zip(marks, ends, strict=True)
    )
