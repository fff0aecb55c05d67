"""Parts of requests that an episode cannot answer as they are, and their treatment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from burnish.agents.calls import CallError, Message, ModelCall, invalid


@dataclass(frozen=True)
class Accepted:
    """The choices of a recipe (``episodes.server_tools``, ``late_system`` and ``train_calls``)."""

    server_tools: Literal["refuse", "drop"] = "refuse"
    """Tools that the model's provider would run, such as a web search."""
    late_system: Literal["refuse", "user"] = "refuse"
    """System messages behind other messages. refuse: leave them to the chat template, which may
    refuse them."""
    train_calls: Literal["all", "main"] = "all"
    """Calls that are trained. main: without those that have no tools, or name another model."""

    def left_out(self, call: ModelCall, models: Collection[str]) -> str | None:
        """Return the reason for which a call is not trained, as the name of a count; None if it is.
        ``models``: the names of the policy."""
        if self.train_calls == "all":
            return None
        if not call.tools:
            return "untrained_without_tools"
        return None if call.model in models else "untrained_other_model"

    def apply(self, call: ModelCall, counts: Counter[str]) -> ModelCall:
        """Return the call as it is answered, and count what was changed. Raises CallError (400) for
        tools of the server that are refused."""
        if call.server_tools and self.server_tools == "refuse":
            raise refused_tools(call, "or set episodes.server_tools: drop")
        counts.update(f"dropped_{kind}" for kind in call.server_tools.values())
        if self.late_system == "refuse":
            return call
        messages = with_late_system_as_user(call.messages)
        if messages == call.messages:
            return call
        counts["late_system"] += 1
        return replace(call, messages=messages)


def refused_tools(call: ModelCall, way_out: str = "") -> CallError:
    """Return the error (400) for tools of the server. ``way_out``: what helps, in addition to
    switching them off in the client."""
    path, kind = next(iter(call.server_tools.items()))
    text = f"{path} is {kind!r}, a tool that the server would run, and it has none; switch it off "
    return invalid(path, f"{text}in the client{', ' * bool(way_out)}{way_out}")


def with_late_system_as_user(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation whose system messages behind other messages are the user's. Each is
    one message with the user's messages next to it.

    >>> messages = with_late_system_as_user(
    ...     [
    ...         {"role": "system", "content": "a"},
    ...         {"role": "user", "content": "b"},
    ...         {"role": "system", "content": "c"},
    ...     ]
    ... )
    >>> messages[1:]
    ({'role': 'user', 'content': 'b\\n\\nc'},)
    """
    result: list[Message] = []
    joins = False
    for message in messages:
        first = all(earlier["role"] == "system" for earlier in result)
        is_late = message["role"] == "system" and not first
        is_user = is_late or message["role"] == "user"
        if is_user and result and result[-1]["role"] == "user" and (is_late or joins):
            before: dict[str, Any] = dict(result[-1])
            result[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
        else:
            result.append({"role": "user", "content": message["content"]} if is_late else message)
            joins = False
        joins = is_user and (joins or is_late)
    return tuple(result)
