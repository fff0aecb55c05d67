"""Python functions as tools, and an environment that runs the calls of the policy.

A tool is a function with type hints and a docstring in Google's format::

    def search(query: str, limit: int = 5) -> str:
        \"\"\"Search the documents.

        Args:
            query: Words to search for.
            limit: Largest number of results.
        \"\"\"

A wrong argument, an exception of the tool and a timeout are not errors of the run: the policy gets
``error: <type>: <message>`` as the result and can correct itself.

Reading order: ToolEnvironment; then ``function_tools.py``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

from burnish.environments.base import EnvironmentSetupError, EpisodeInfraError, ToolError
from burnish.environments.code_tool import (
    CodeTimeoutError,
    check_code_tool,
    code_tool,
    read_sandbox,
)
from burnish.environments.function_tools import CODE_TOOL, Tool, make_tools
from burnish.environments.multi_turn import Message, Start, Step
from burnish.environments.results import as_text, without_addresses
from burnish.errors import BurnishError
from burnish.json_text import json_value
from burnish.sandbox.base import SandboxError

if TYPE_CHECKING:
    from burnish.environments.mcp_servers import McpCalls, McpTool

CODE_TIMEOUT_S = 30.0
"""Time limit of code in an environment whose calls have no limit."""


class ToolEnvironment:
    """An environment in which the policy may call tools until it answers without a call.

    Options of the recipe: ``tools`` (``path/to/file.py:function``, ``package.module:function``, or
    ``python``, the built-in tool that runs code in a sandbox), ``system_prompt``, ``timeout_s``
    (time limit of one call; None: no limit), ``turn_timeout_s`` (time limit of all calls of one
    turn together; None: no limit), ``max_result_chars`` (longer results are cut), ``sandbox`` (of
    the tool ``python``, with the keys of ``SandboxConfig``), ``mcp`` (MCP servers by name, with the
    keys of ``rollout.episodes.mcp``).

    The task's ``prompt`` (text or messages) starts the episode. It ends at the first message
    without tool calls. Subclasses may set :attr:`tools` (functions, names as above, or names of
    their own methods), and override :meth:`reset` to prepare state and :meth:`finish` to give
    rewards::

        class Shop(ToolEnvironment):
            tools = ("add_to_cart",)

            def reset(self, task, seed):
                self.cart = []
                return super().reset(task, seed)

            def add_to_cart(self, item: str) -> str:
                \"\"\"Put an item into the cart.\"\"\"
                self.cart.append(item)
                return f"{len(self.cart)} items"

            def finish(self, message):
                return {"bought": float("milk" in self.cart)}

    Tools may be coroutine functions, which must not block. Others run in a thread of their own; an
    awaitable that they return is awaited. ``results.py`` has the text of each type of result; a
    result without one is an error message. The calls of a turn run one after the other, in their
    order. A call that exceeds a limit is abandoned, and the policy receives an error message: its
    thread cannot be killed. Code that may never end belongs into a process that the tool starts and
    kills. ``turn_timeout_s`` must be less than ``rollout.episodes.step_timeout_s``, which ends the
    episode.

    Raises EnvironmentSetupError if a tool cannot be loaded or described.
    """

    tools: ClassVar[Sequence[str | Callable[..., Any]]] = ()
    """Tools of a subclass."""

    def __init__(  # house: ok the options of a recipe, all named
        self,
        *,
        tools: Sequence[str] = (),
        system_prompt: str | None = None,
        timeout_s: float | None = 30.0,
        turn_timeout_s: float | None = None,
        max_result_chars: int = 20_000,
        sandbox: Mapping[str, Any] | None = None,
        mcp: Mapping[str, Any] | None = None,
    ) -> None:
        self._owner: Any = self
        """Object whose methods are tools."""
        specs = (*type(self).tools, *tools)
        has_method = any(CODE_TOOL in vars(cls) for cls in type(self).__mro__)
        self._runs_code = CODE_TOOL in specs and not has_method
        if self._runs_code:
            run = code_tool(read_sandbox(sandbox), timeout_s or CODE_TIMEOUT_S, max_result_chars)
            specs = tuple(run if spec == CODE_TOOL else spec for spec in specs)
        self._tools: dict[str, Tool | McpTool] = {}
        self._tools.update(make_tools(specs, type(self)))
        self._mcp: McpCalls | None = None
        if mcp:
            self._mcp, mcp_tools = _mcp_calls(mcp)
            for tool in mcp_tools:
                if tool.name in self._tools:
                    other = self._tools[tool.name]
                    raise EnvironmentSetupError(
                        f"two tools have the name {tool.name!r} ({other.origin} and "
                        f"{tool.origin}); the policy could not tell them apart. Set "
                        f"mcp.{tool.server}.prefix, for example to {tool.server + '_'!r}"
                    )
                self._tools[tool.name] = tool
        self._system_prompt = system_prompt
        self._timeout_s = timeout_s
        self._turn_timeout_s = turn_timeout_s
        self._max_chars = max_result_chars
        self._thread: CallThread | None = None

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Raise EnvironmentSetupError if the options are wrong or a tool cannot be described."""
        environment = cls(**options)
        if not environment._tools:
            raise EnvironmentSetupError(
                f"environment {cls.__name__} has no tools; set options.tools to a list such as "
                "[path/to/file.py:function], options.mcp to servers, or `tools` in the class"
            )
        for name, value in (
            ("timeout_s", environment._timeout_s),
            ("turn_timeout_s", environment._turn_timeout_s),
            ("max_result_chars", environment._max_chars),
        ):
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise EnvironmentSetupError(
                    f"environment {cls.__name__}: options.{name} is {value!r}; it must be above 0"
                )
        if environment._runs_code:
            check_code_tool(options.get("sandbox"))

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:
        """Return the task's prompt, after the system prompt if there is one, and the tools."""
        prompt = task["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return Start(messages, [tool.schema for tool in self._tools.values()])

    async def step(self, message: Message) -> Step:
        """Run the calls of the message in order and return their results. Without calls the episode
        ends with the rewards of :meth:`finish`."""
        calls = message.get("tool_calls") or ()
        if not calls:
            rewards: Any = self.finish(message)
            return Step(
                done=True, rewards=await rewards if inspect.isawaitable(rewards) else rewards
            )
        results, counts = [], {"tool_calls": len(calls), "tool_errors": 0, "tool_timeouts": 0}
        restarts = self._mcp.restarts if self._mcp is not None else 0
        clock = asyncio.get_running_loop().time
        end = clock() + self._turn_timeout_s if self._turn_timeout_s is not None else math.inf
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                content = self._shown(await self._run(name, arguments, end))
            except (SandboxError, EpisodeInfraError):  # a failure of the machine, not of the policy
                raise
            except Exception as error:  # an answer to the policy
                content = self._shown(f"error: {_described(error)}")
                counts["tool_errors"] += 1
                counts["tool_timeouts"] += isinstance(error, _CallTimeoutError | CodeTimeoutError)
            results.append(
                {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
            )
        if self._mcp is not None:
            counts["mcp_restarts"] = self._mcp.restarts - restarts
        return Step(results, counts=counts)

    def finish(self, message: Message) -> Mapping[str, float]:
        """Return the rewards of the episode, given the policy's last message. Default: none. It may
        be a coroutine function."""
        return {}

    def close(self) -> None:
        """End the thread of the calls, and the MCP servers of the episode."""
        self._end_thread()
        if self._mcp is not None:
            self._mcp.close()

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.end()
        self._thread = None  # the next call gets another thread

    async def _run(self, name: str, arguments: Any, end: float) -> Any:
        """Return the result of one call. ``end``: time of the loop's clock at which the calls of
        this turn must have ended.

        Raises as the tool does, pydantic.ValidationError, _CallTimeoutError or _UnknownToolError.
        """
        clock = asyncio.get_running_loop().time
        if end <= clock():
            raise self._turn_too_long()
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            raise _UnknownToolError(f"there is no tool {name!r}; the tools are {known}")
        parsed = json_value(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(parsed, Mapping):
            raise TypeError(f"the arguments of {name} must be a JSON object, not {parsed!r:.80}")
        keywords = tool.validated(parsed)
        running: Any
        if isinstance(tool, Tool):
            running = self._started(tool, keywords)
        else:
            assert self._mcp is not None
            await self._mcp.ready(tool, end - clock())
            running = asyncio.ensure_future(self._mcp.call(tool, keywords))
        limits_itself = self._runs_code and name == CODE_TOOL  # without its time in the queue
        timeout_s = None if limits_itself else self._timeout_s
        left_s = end - clock()
        limit = min(left_s, math.inf if timeout_s is None else timeout_s)
        done, _ = await asyncio.wait([running], timeout=None if limit == math.inf else limit)
        if done:
            return running.result()
        running.cancel()
        self._end_thread()
        if limit == left_s:
            raise self._turn_too_long()
        raise _CallTimeoutError(f"the call took longer than {self._timeout_s:g} s")

    def _started(self, tool: Tool, keywords: Mapping[str, Any]) -> asyncio.Future[Any]:
        """Start a call of a function."""
        positional = (self._owner,) if tool.is_method else ()
        call = partial(tool.function, *positional, **keywords)
        if inspect.iscoroutinefunction(tool.function):
            return asyncio.ensure_future(_without_exit(call()))
        return asyncio.ensure_future(self._awaited(call))

    async def _awaited(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call in the thread of the calls. What it returns is awaited if it
        can be: a decorator may hide a coroutine function."""
        result = await self._in_thread(call)
        return await _without_exit(result) if inspect.isawaitable(result) else result

    def _in_thread(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call a function in the thread of the calls. Return the future of its result."""
        if self._thread is None:
            self._thread = CallThread()
        return self._thread.start(function)

    def _turn_too_long(self) -> _CallTimeoutError:
        return _CallTimeoutError(
            f"the calls of this turn took longer than {self._turn_timeout_s:g} s together"
        )

    def _shown(self, result: Any) -> str:
        """Return a result as text, cut to the limit."""
        text = as_text(result)
        if len(text) <= self._max_chars:
            return text
        return f"{text[: self._max_chars]}\n(cut: {len(text)} characters in total)"


class _UnknownToolError(BurnishError, LookupError):
    """The policy called a tool that does not exist."""


class _CallTimeoutError(BurnishError, TimeoutError):
    """A call exceeded its time limit."""


def _mcp_calls(mcp: Mapping[str, Any]) -> tuple[McpCalls, Sequence[McpTool]]:
    """Return the calls of one environment object, and the tools of its servers."""
    try:
        from burnish.environments.mcp_servers import McpCalls, open_servers
    except ImportError as error:
        raise EnvironmentSetupError(
            f"episodes.mcp needs the package mcp, and importing it failed ({error}); install it "
            "with: pip install 'burnish[mcp]'"
        ) from error
    servers = open_servers(mcp)
    return McpCalls(servers), servers.tools


def _described(error: Exception) -> str:
    """Return type and message of an error, in words for the policy."""
    if isinstance(error, ValidationError):
        parts = (
            f"{'.'.join(map(str, detail['loc'])) or 'arguments'}: {detail['msg']}"
            for detail in error.errors(include_url=False, include_context=False)
        )
        return f"ValidationError: {'; '.join(parts)}"
    if isinstance(error, ToolError):
        return str(error)
    timed_out = isinstance(error, _CallTimeoutError | CodeTimeoutError)
    kind = "TimeoutError" if timed_out else type(error).__name__
    return f"{kind.lstrip('_')}: {without_addresses(str(error))}"


async def _without_exit(call: Awaitable[Any]) -> Any:
    """Return the result of a call. exit() in a tool must not end the worker."""
    try:
        return await call
    except Exception:
        raise
    except BaseException as raised:
        raise RuntimeError(f"{type(raised).__name__}: {raised}") from raised


class CallThread:
    """A thread that runs functions one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def serve() -> None:
            while (call := self._calls.get()) is not None:
                call()

        threading.Thread(target=serve, daemon=True, name="tool").start()

    def start(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a call and return the future of its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            result, error = None, None
            try:
                result = function()
            except Exception as raised:
                error = raised
            except BaseException as raised:  # exit() in a tool must not end the worker
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(_finish, future, result, error)

        self._calls.put(run)
        return future

    def end(self) -> None:
        """End the thread after its current call."""
        self._calls.put(None)


def _finish(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # a future refuses it
        future.set_exception(RuntimeError(f"StopIteration: {error}"))
    else:
        future.set_exception(error)
