"""Record of a multi-turn episode: messages, rewards, times and status, without tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True)
class Turn:
    """One turn of an episode, for rewards, sample files and metrics."""

    message: Mapping[str, Any]
    """Message of the policy, parsed from the sampled tokens."""
    answer: tuple[Mapping[str, Any], ...]
    """Messages with which the environment answered."""
    prompt: tuple[Mapping[str, Any], ...] | None = None
    """All messages of a call that does not continue the turn before it: an agent edited the
    conversation, or began another one. None: the turn before it with its answer, or the start."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards that the environment gave for this turn."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers of events that the environment counted."""
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


@dataclass(frozen=True)
class Episode:
    """Record of an episode: messages, rewards, times and status. The tokens are in
    :class:`burnish.types.Sample`."""

    status: EpisodeStatus
    start: tuple[Mapping[str, Any], ...]
    """First messages, from the environment's ``reset``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    turns: tuple[Turn, ...] = ()
    seconds: float = 0.0
    """Duration of the episode."""
    error: str = ""
    """Cause of a status that is not the policy's doing."""

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """All messages of the conversation that the last turn belongs to, in order."""
        found = list(self.start)
        for turn in self.turns:
            found = found if turn.prompt is None else list(turn.prompt)
            found += [turn.message, *turn.answer]
        return found
