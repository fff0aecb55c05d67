"""Environments of TRL (``environment_factory``) as they are.

The factory makes an object whose public methods are tools. ``reset(**row)`` prepares it and may
return text, which is appended to the last message of the prompt, or replaces the number of a task
(``kind: seeds``). ``get_reward()``, if present, gives the reward. TRL's functions for ``tools=``
need no adapter: they are ``episodes.tools``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from burnish.environments.base import EnvironmentSetupError
from burnish.environments.function_tools import make_tools
from burnish.environments.importing import LoadError, load_object
from burnish.environments.multi_turn import TASK_NUMBER, Message, Start, Step
from burnish.environments.pool import plain_text
from burnish.environments.tools import ToolEnvironment

_NO_TOOLS = ("reset", "get_reward")


class TrlEnvironment(ToolEnvironment):
    """One episode of a TRL environment.

    Options: ``factory`` (``path/to/file.py:name`` or ``package.module:name``), and those of
    :class:`~burnish.environments.tools.ToolEnvironment`. The reward is named ``reward``. A sync
    ``get_reward`` is called after every turn, so that an episode that a limit ends is scored, too;
    an async one (a judge, for example) is called once, at the end.

    Raises EnvironmentSetupError if the factory fails or its object has no method ``reset``.
    """

    def __init__(self, *, factory: str, **options: Any) -> None:
        super().__init__(**options)
        try:
            self._environment = load_object(factory)()
        except LoadError as error:
            raise EnvironmentSetupError(f"environment trl:{error}") from error
        except Exception as error:
            raise EnvironmentSetupError(
                f"environment trl:{factory}: calling it raised {type(error).__name__}: {error}"
            ) from error
        kind = type(self._environment)
        methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
        if "reset" not in methods:
            raise EnvironmentSetupError(
                f"environment trl:{factory}: {kind.__name__} has no method reset; an environment "
                "of TRL needs one"
            )
        public = [name for name in methods if name[0] != "_" and name not in _NO_TOOLS]
        self._tools |= make_tools(public, kind)
        self._owner = self._environment
        self._get_reward = vars(kind).get("get_reward") or inspect.getattr_static(
            kind, "get_reward", None
        )
        self._reported_reward = 0.0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Start:  # type: ignore[override]
        """Reset the environment with the columns of the data row that it accepts. Return the
        prompt."""
        row = {"prompt": task["prompt"], **task}
        parameters = inspect.signature(self._environment.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        text = await self._called(partial(self._environment.reset, **row))
        start = super().reset(task, seed)
        messages = list(start.messages)
        if text is not None and task.get(TASK_NUMBER) is not None:  # the row has no prompt
            messages[-1] = {**messages[-1], "content": plain_text(text, "reset")}
        elif text is not None:
            parts = (plain_text(part, "reset") for part in (messages[-1]["content"], text))
            messages[-1] = {**messages[-1], "content": "".join(parts)}
        return Start(messages, start.tools)

    async def step(self, message: Message) -> Step:
        """Run the calls of a message. The rewards are what ``get_reward`` gained."""
        step = await super().step(message)
        if self._get_reward is None:
            return step
        reward = self._reported_reward
        if step.done or not inspect.iscoroutinefunction(self._get_reward):
            reward = await self._called(self._environment.get_reward)
        gained, self._reported_reward = float(reward) - self._reported_reward, float(reward)
        return Step(step.messages, step.done, {"reward": gained}, step.counts)

    async def _called(self, method: Callable[[], Any]) -> Any:
        """Return the result of a method. One that is no coroutine function runs in the thread of
        the tools, so that it does not block other episodes."""
        if inspect.iscoroutinefunction(method):
            return await method()
        result = await self._in_thread(method)
        return await result if inspect.isawaitable(result) else result
