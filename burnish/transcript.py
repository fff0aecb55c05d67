"""Record of a multi-turn episode: messages, rewards, times and status, without tokens."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "aborted"]
"""End of one response. ``length``: a token limit cut it."""

EpisodeStatus = Literal[
    "done",
    "max_turns",
    "max_turn_tokens",
    "max_tokens",
    "prompt_too_long",
    "parse_error",
    "timeout",
    "cancelled",
    "env_error",
    "infra_error",
]
"""End of an episode. ``done``: the environment ended it. ``max_*``, ``prompt_too_long`` and
``parse_error``: a limit, or malformed tool calls; these are scored. The others are not the policy's
doing; such episodes are not trained on."""

CUT: tuple[EpisodeStatus, ...] = ("max_tokens", "max_turn_tokens")
"""Statuses of episodes that reached a token limit."""


def plain(value: Any) -> Any:
    """Return a copy of a value that shares no container with it: dicts, lists and tuples of text
    and numbers of Python's own types. Sets become sorted lists. Other objects stay as they are.

    >>> plain({"a": Counter("xx"), "b": ({1},)})
    {'a': {'x': 2}, 'b': ([1],)}
    """
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Set):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, np.generic | np.ndarray):
        return value.copy()
    if isinstance(value, str):  # a member of an enum, or another subclass
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else value


def _detach(record: object, *names: str) -> None:
    """Replace fields of a new frozen dataclass by detached copies."""
    values = vars(record)
    for name in names:
        values[name] = plain(values[name])


@dataclass(frozen=True)
class Turn:
    """One turn of an episode, for rewards, sample files and metrics. Its messages and numbers are
    copies: later changes of the objects that it was made from do not reach it."""

    message: Mapping[str, Any]
    """Message of the policy, parsed from the sampled tokens."""
    answer: tuple[Mapping[str, Any], ...]
    """Messages with which the environment answered."""
    prompt: tuple[Mapping[str, Any], ...] | None = None
    """All messages of a call that does not continue the turn before it: an agent edited the
    conversation, or began another one. None: the turn before it with its answer, or the start."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Tools of such a call. None: those of the turn before it, or of the episode."""
    is_text: bool = False
    """True if the policy read the contents of the messages, joined, without the chat template."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards that the environment gave for this turn."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers of events that the environment counted."""
    finish_reason: FinishReason = "stop"
    """End of this response. The limit that ended the episode may be another one."""
    problem: str = ""
    """Description of malformed tool calls. Empty: none."""
    num_tokens: int = 0
    """Sampled tokens."""
    num_prompt_tokens: int = 0
    """Tokens that the policy read."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values the engine had cached."""
    engine_s: float = 0.0
    """Seconds until the response was sampled, waiting included."""
    environment_s: float = 0.0
    """Seconds of parsing and of the environment's step."""

    def __post_init__(self) -> None:
        _detach(self, "message", "answer", "prompt", "tools", "rewards", "counts")


@dataclass(frozen=True)
class Episode:
    """Record of an episode: messages, rewards, times and status. The tokens are in
    :class:`burnish.types.Sample`."""

    status: EpisodeStatus
    start: tuple[Mapping[str, Any], ...]
    """First messages, from the environment's ``reset``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools of the first turn, and of all turns without tools of their own."""
    turns: tuple[Turn, ...] = ()
    seconds: float = 0.0
    """Duration of the episode."""
    error: str = ""
    """Failure of the environment or the agent. It followed a limit if the status is one."""
    untrained: tuple[Turn, ...] = ()
    """An agent's calls that ``episodes.train_calls`` leaves out. They are in no row."""

    def __post_init__(self) -> None:
        _detach(self, "start", "tools")

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """All messages of the conversation that the last turn belongs to, in order."""
        if not self.turns:
            return list(self.start)
        last = self.turns[-1]
        return [*self.messages_before(len(self.turns) - 1), last.message, *last.answer]

    def messages_before(self, number: int) -> list[Mapping[str, Any]]:
        """Return the messages that turn ``number`` responds to."""
        messages = list(self.start)
        for turn in self.turns[:number]:
            messages = messages if turn.prompt is None else list(turn.prompt)
            messages += [turn.message, *turn.answer]
        prompt = self.turns[number].prompt
        return messages if prompt is None else list(prompt)

    def tools_of(self, number: int) -> tuple[Mapping[str, Any], ...]:
        """Return the tools that the policy saw in turn ``number``."""
        seen = (turn.tools for turn in reversed(self.turns[: number + 1]))
        return next((tools for tools in seen if tools is not None), self.tools)

    def text_before(self, number: int) -> str | None:
        """Return the text that turn ``number`` continues, if it had no chat template; else None."""
        if not self.turns[number].is_text:
            return None
        return "".join(str(message["content"]) for message in self.messages_before(number))
