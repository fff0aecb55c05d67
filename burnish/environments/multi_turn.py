"""The interface of multi-turn environments, which users implement.

An environment only sees chat messages, never tokens. One object plays one episode::

    class GuessNumber:
        def reset(self, task, seed):
            self.secret = random.Random(seed).randint(1, 8)
            return Start([{"role": "user", "content": "Guess a number from 1 to 8."}])

        def step(self, message):
            guess = int(message["content"])
            if guess == self.secret:
                return Step(done=True, rewards={"found": 1.0})
            answer = "higher" if guess < self.secret else "lower"
            return Step([{"role": "user", "content": answer}])

The class is created with the recipe's options as keyword arguments, once per episode, in a worker
process (``worker.py``). Methods may be coroutine functions. ``close()`` is optional. Instead of
:class:`Start` and :class:`Step`, methods may return mappings with the same keys, so that an
environment in another interpreter needs no Burnish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
"""Chat message: ``{"role": "user", "content": "..."}``."""
TASK_NUMBER = "task_number"
"""Column of the rows of ``kind: seeds``, which have no prompt of their own."""


@dataclass(frozen=True)
class Start:
    """Result of ``reset``: the first messages and the tools of an episode."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools: ``{"type": "function", "function": {"name", "description", "parameters"}}``. The inner
    object alone and the forms of Anthropic's API and of MCP are converted to it."""


@dataclass(frozen=True)
class Step:
    """Result of ``step``: the environment's answer to one message of the policy."""

    messages: Sequence[Message] = ()
    """New messages, which the policy reads before its next turn. Required unless ``done``."""
    done: bool = False
    """True if the episode ends with this step."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of this turn by name. The rewards of an episode are the sums over its turns."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers of events, such as failed tool calls. Their sums are logged."""


class MultiTurnEnvironment(Protocol):
    """One episode. Methods may also be coroutine functions."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:
        """Begin the episode.

        ``task``: the data row: ``prompt`` (text or messages), ``label``, and the other columns. All
        members of a group get the same task and seed and must start equally.
        """
        ...

    def step(self, message: Message) -> Step:
        """Answer a message of the policy: ``content``, and ``tool_calls`` if it called tools."""
        ...

    def close(self) -> None:
        """Release the resources of the episode. Optional."""
        ...
