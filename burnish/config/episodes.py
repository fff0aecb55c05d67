"""Config of multi-turn episodes."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from burnish.config.base import Node, PathText, named_kind
from burnish.config.paths import code_problem
from burnish.config.sandbox import BubblewrapSandbox, SandboxConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.rewards.kinds import RewardConfig

FormatName = Literal[
    "hermes",
    "xml",
    "seed",
    "glm",
    "llama3_json",
    "mistral",
    "mistral_args",
    "nemotron",
    "apriel",
    "phi4",
    "granite",
    "harmony",
]
"""hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen2.5, Qwen3).
xml: ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in ``<tool_call>`` (Qwen3-Coder,
Qwen3.5). glm: ``<arg_key>`` and ``<arg_value>`` in ``<tool_call>`` (GLM-4.5). llama3_json: the
response is one JSON object (Llama 3.1). mistral: ``[TOOL_CALLS]`` and a JSON list (v3).
mistral_args: ``[TOOL_CALLS]NAME[ARGS]{...}`` (v11 and later). seed: as xml, in ``<seed:tool_call>``
(Seed-OSS). A JSON list of calls: nemotron in ``<TOOLCALL>`` (Nemotron Nano v2), apriel in
``<tool_calls>`` (Apriel, Hunyuan-A13B), phi4 in ``<|tool_call|>`` with an end (Phi-4-mini), granite
behind ``<|tool_call|>`` (Granite 3). harmony: channels (gpt-oss)."""

TOOLS_FRAC = 0.9
"""Share of a step's time limit that all tool calls of a turn may take together. The rest is for the
transfer of their results."""

_PREFIX = r"[A-Za-z0-9_.-]*"


class McpServerConfig(Node):
    """An MCP server whose tools the policy may call: a program (stdio), or a URL (streamable
    HTTP)."""

    command: tuple[str, ...] = ()
    """Program and arguments. It uses stdin and stdout for the protocol."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program, in addition to HOME, LOGNAME, PATH, SHELL, TERM and
    USER. They are stored with the recipe; use ``pass_env`` for secrets."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables of the run that the program also gets."""
    url: str | None = None
    """URL of the server, such as ``http://127.0.0.1:8000/mcp``."""
    token_env: str | None = None
    """Name of the environment variable with the bearer token for ``url``."""
    tools: tuple[str, ...] | None = None
    """Names of the tools that the policy may call. None: all tools of the server."""
    prefix: str = ""
    """Text before the names of the tools, to distinguish tools of several servers."""
    per_episode: bool = True
    """True: every episode has its own process or session, started at its first call, so that
    episodes share no state. False: the episodes of a worker process share one. Set it only if
    calls have no effect on later calls."""

    def rules(self) -> Iterator[str]:
        if bool(self.command) == (self.url is not None):
            have = "both are" if self.command else "neither is"
            yield f"an MCP server needs either command or url, and {have} set; set one"
            return
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield f"url={self.url!r} must begin with http:// or https://"
        mine, other = ("command", "url") if self.command else ("url", "command")
        for name in ("token_env",) if self.command else ("env", "pass_env"):
            if self.value_of(name):
                yield f"{name} has no effect with {mine}: it belongs to {other}; remove {name}"
        if not re.fullmatch(_PREFIX, self.prefix):
            yield f"prefix={self.prefix!r} may contain only letters, digits, '_', '-' and '.'"
        if self.tools == ():
            yield "tools is empty, so the server is not used; remove the server, or name tools"


Lines = list[tuple[str, str, str]]
"""Lines (name, value, origin) of the launch table."""


class EpisodesConfig(Node, ABC):
    """Multi-turn rollouts.

    One of ``environment``, ``tools`` (or ``mcp``), ``agent`` and ``command`` is set, which selects
    the kind. ``rollout.generate_max_len`` limits one turn."""

    has_agent: ClassVar[bool] = False
    """True if a program of the user calls the policy."""
    selected_by: ClassVar[tuple[str, ...]] = ()
    """Keys of which one is set in a section of this kind."""

    max_turns: int = Field(8, ge=1)
    """Maximum responses of the policy per episode (status max_turns)."""
    max_tokens: int = Field(ge=2)
    """Maximum tokens of an episode's conversation: first messages, responses and observations
    (status max_tokens)."""
    timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds of an episode (status timeout). With an environment or tools, time in which
    sampling for training is paused does not count."""
    max_concurrent: int | None = Field(None, ge=1)
    """Maximum episodes at once. None: all episodes of a rollout."""
    history: Literal["keep", "template"] | None = None
    """Chat templates that rewrite earlier turns (drop reasoning). keep: the next prompt contains
    the sampled tokens unchanged. template: render the conversation again; every turn is a row of
    its own. None: refuse such templates."""
    tool_format: FormatName | None = None
    """Format of tool calls in the policy's responses. None: determined from the chat template."""
    infra_retries: int = Field(1, ge=0)
    """Number of times an episode is played again after its worker process died (infra_error)."""
    max_failed_frac: float = Field(0.5, ge=0, le=1)
    """Maximum share of a rollout's episodes that fail for reasons other than the policy
    (env_error, infra_error, timeout). More stop the run. Failed episodes are not trained on."""

    @property
    def step_limits(self) -> dict[str, Any]:
        """Limits of the calls of an environment by name."""
        return {}

    @property
    def time_limits(self) -> str:
        """The limits in words."""
        return f"{self.timeout_s:g} s per episode"

    @abstractmethod
    def workers_line(self) -> tuple[str, str, str]:
        """Return the line of the launch table about the processes of the user's code."""

    def rules(self) -> Iterator[str]:
        for key, spec in self.user_code:
            if problem := code_problem(spec):
                yield f"{key}: {problem}"


class SteppedEpisodes(EpisodesConfig):
    """Episodes whose environment answers each response, in worker processes."""

    python: PathText | None = None
    """Interpreter of the worker processes. For an environment it needs none of Burnish's packages;
    for tools it needs Burnish. None: the interpreter of this run."""
    workers: int = Field(1, ge=1)
    """Worker processes. Each runs many episodes at once."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Maximum seconds of one call of the environment (status timeout)."""
    on_parse_error: Literal["feedback", "end"] = "feedback"
    """Malformed tool call. feedback: the policy receives the error as a message. end: the episode
    ends (status parse_error)."""

    @property
    def step_limits(self) -> dict[str, Any]:
        return {"step_timeout_s": self.step_timeout_s, "on_parse_error": self.on_parse_error}

    @property
    def time_limits(self) -> str:
        return f"{self.step_timeout_s:g} s per call of the environment, {super().time_limits}"

    def _workers_line(self, source: str) -> tuple[str, str, str]:
        return (
            "environment workers",
            str(self.workers),
            f"processes with {source}{_in(self.python)}",
        )


class EnvironmentEpisodes(SteppedEpisodes):
    """Episodes of an environment."""

    selected_by = ("environment",)

    kind: Literal["environment"] = "environment"
    environment: str
    """Environment class, ``path/to/file.py:Class`` or ``package.module:Class``, with the methods
    ``reset(task, seed)`` and ``step(message)``. ``trl:path/to/file.py:name``: an environment of
    TRL (``environment_factory``)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    @property
    def user_code(self) -> list[tuple[str, str]]:
        return [("environment", self.environment)]

    def workers_line(self) -> tuple[str, str, str]:
        return self._workers_line(self.environment)


class ToolEpisodes(SteppedEpisodes):
    """Episodes in which the policy calls tools; its first response without a call ends one."""

    selected_by = ("tools", "mcp")

    kind: Literal["tools"] = "tools"
    tools: tuple[str, ...] = ()
    """Python functions with type hints and a docstring, ``path/to/file.py:name``. ``python`` is the
    built-in tool that runs code in ``sandbox``, each call in a new process."""
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    """MCP servers by name, whose tools the policy may call (``pip install 'burnish[mcp]'``)."""
    sandbox: SandboxConfig | None = None
    """Sandbox of the tool ``python``. None: bubblewrap with its defaults."""
    tool_timeout_s: float = Field(10.0, gt=0)
    """Maximum seconds of one call of a tool. The calls of a turn run one after the other and may
    take 0.9 x ``step_timeout_s`` together. The policy receives a timeout as an error message."""
    tool_result_chars: int = Field(20_000, ge=1)
    """Maximum characters of a tool's result. Longer ones are cut."""

    @property
    def user_code(self) -> list[tuple[str, str]]:
        return [("tools", tool) for tool in self.tools if tool != "python"]

    @property
    def time_limits(self) -> str:
        return f"{self.tool_timeout_s:g} s per call of a tool, {super().time_limits}"

    def workers_line(self) -> tuple[str, str, str]:
        servers = [f"MCP server {name}" for name in self.mcp]
        return self._workers_line("tools " + ", ".join([*self.tools, *servers]))

    def rules(self) -> Iterator[str]:
        if self.tool_timeout_s > TOOLS_FRAC * self.step_timeout_s:
            yield (
                f"tool_timeout_s={self.tool_timeout_s:g} must be at most {TOOLS_FRAC:g} x "
                f"step_timeout_s={self.step_timeout_s:g}, or a slow tool ends the episode before "
                "the policy receives its timeout as an error message; set step_timeout_s to at "
                f"least {math.ceil(self.tool_timeout_s / TOOLS_FRAC)}, or lower tool_timeout_s"
            )
        if self.sandbox is not None and "python" not in self.tools:
            yield "sandbox is for the tool python, which is not in tools; remove it, or add python"
        yield from (f"{problem}; the built-in tool is python" for problem in super().rules())


AgentSandbox = Annotated[BubblewrapSandbox, named_kind("bubblewrap")]


class ProgramEpisodes(EpisodesConfig):
    """Episodes of a program that calls the policy through a model API."""

    has_agent = True

    sandbox: AgentSandbox | None = None
    """Bubblewrap sandbox of the program, in which only the policy can be reached. Its
    ``output_bytes`` bounds the reward. None: none."""
    server_host: str = "127.0.0.1"
    """Address where the policy answers. Agents on other nodes must reach it."""
    server_port: int = Field(0, ge=0, le=65535)
    """Port of that address. 0: a free one."""
    server_tools: Literal["refuse", "drop"] = "refuse"
    """Tools that a provider runs (``web_search``): refuse the request, or drop them."""
    train_calls: Literal["all", "main"] = "all"
    """Calls that are trained. main: those with tools that name the model ``policy``."""
    late_system: Literal["refuse", "user"] = "refuse"
    """System messages behind others. refuse: if the template does. user: make them the user's."""

    @property
    def _place(self) -> str:
        inside = "" if self.sandbox is None else ", in bubblewrap"
        return f"{inside}; they call the policy at {self.server_host}"

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if self.server_host in ("0.0.0.0", "::"):
            yield (
                f"server_host={self.server_host} is not an address that agents can call; give an "
                "address of this machine that they can reach"
            )
        if self.sandbox is not None and self.sandbox.max_concurrent is not None:
            yield "sandbox.max_concurrent has no effect on agents; use episodes.max_concurrent"


class AgentEpisodes(ProgramEpisodes):
    """Episodes of a Python function."""

    selected_by = ("agent",)

    kind: Literal["agent"] = "agent"
    agent: str
    """Agent function ``async def agent(task, endpoint)``, ``path/to/file.py:name`` or
    ``package.module:name``. It calls the policy at ``endpoint.base_url`` and returns its reward: a
    number, numbers by name, or None. ``openrlhf:path/to/file.py``: an agent file of OpenRLHF. In a
    ``sandbox`` it can read the folder of its file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    python: PathText | None = None
    """Interpreter of the worker processes. It needs none of Burnish's packages. None: the
    interpreter of this run."""
    workers: int = Field(1, ge=1)
    """Worker processes. Each runs many episodes at once. In a sandbox every episode has its own."""

    @property
    def user_code(self) -> list[tuple[str, str]]:
        return [("agent", self.agent)]

    def workers_line(self) -> tuple[str, str, str]:
        if self.sandbox is not None:
            text = f"process that calls {self.agent}{_in(self.python)}{self._place}"
            return "agents", "1 each", text
        text = f"processes with {self.agent}{_in(self.python)}{self._place}"
        return "agent workers", str(self.workers), text

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if self.sandbox is None:
            return
        if self.sandbox.python is not None:
            yield (
                f"sandbox.python={self.sandbox.python!r} has no effect with agent; set "
                "episodes.python"
            )
        if self.workers != 1:
            yield (
                f"workers={self.workers} has no effect with agent and sandbox, which run a process "
                "per episode; remove workers, or set episodes.max_concurrent"
            )
        adapter = self.agent.partition(":")[0]
        if adapter in ("openrlhf", "verifiers"):
            yield (
                f"agent={self.agent!r}: the adapter {adapter} cannot run in a sandbox; remove "
                "sandbox, or write an agent function"
            )


class CommandEpisodes(ProgramEpisodes):
    """Episodes of any program."""

    selected_by = ("command",)

    kind: Literal["command"] = "command"
    command: tuple[str, ...] = Field(min_length=1)
    """Agent program and arguments, started once per episode. Environment variables have the address
    of the policy, and the paths of its task and of its reward (docs/agents.md)."""

    def workers_line(self) -> tuple[str, str, str]:
        return "agents", "1 each", f"process {' '.join(self.command)}{self._place}"


def _in(python: str | None) -> str:
    return "" if python is None else f" in {python}"


AnyEpisodes = EnvironmentEpisodes | ToolEpisodes | AgentEpisodes | CommandEpisodes
_KINDS: dict[str, type[EpisodesConfig]] = {
    cls.model_fields["kind"].default: cls for cls in get_args(AnyEpisodes)
}


def _selected(value: Any) -> Any:
    """Return the mapping ``value`` with the kind that its keys select. Keys of other kinds with
    their defaults, which saved recipes of earlier versions have, are left out. Raises ValueError
    unless exactly one kind is selected."""
    if not isinstance(value, dict):
        return value
    keys = {key: kind for kind, cls in _KINDS.items() for key in cls.selected_by}
    value = {k: None if k in keys and v == "null" else v for k, v in value.items()}  # an override
    kinds = list(dict.fromkeys(kind for key, kind in keys.items() if value.get(key)))
    if len(kinds) > 1 or not (kinds or "kind" in value):
        have = f"{' and '.join(kinds)} are" if kinds else "none is"
        raise ValueError(f"needs exactly one of {', '.join(_KINDS)}, and {have} set; set one")
    kind = kinds[0] if kinds else value["kind"]
    if kind not in list(_KINDS):  # (it may be unhashable)
        return value
    fields = _KINDS[kind].model_fields
    unset = {(key, "None") for key in keys} | {
        (name, str(field.get_default(call_default_factory=True) or None))
        for cls in _KINDS.values()
        for name, field in cls.model_fields.items()
    }
    keys_of_kind = {
        key: content
        for key, content in value.items()
        if key in fields or (key, str(content or None)) not in unset
    }
    return {"kind": kind, **keys_of_kind}


Episodes = Annotated[
    Annotated[AnyEpisodes, Field(discriminator="kind")], BeforeValidator(_selected)
]


def episodes_lines(episodes: AnyEpisodes | None, *, turn_tokens: int | None, at_once: int) -> Lines:
    """Return lines (name, value, origin) of the launch table; empty without episodes.

    ``turn_tokens``: maximum tokens of one turn. ``at_once``: number of episodes of a rollout.
    """
    if episodes is None:
        return []
    tokens = "" if turn_tokens is None else f"; at most {turn_tokens} tokens each"
    return [
        ("turns of an episode", str(episodes.max_turns), f"at most{tokens}"),
        (
            "tokens of a conversation",
            str(episodes.max_tokens),
            "at most: first messages, responses, observations",
        ),
        (
            "concurrent episodes",
            str(min(at_once, episodes.max_concurrent or at_once)),
            f"time limits: {episodes.time_limits}",
        ),
        episodes.workers_line(),
    ]


def episode_rules(
    episodes: AnyEpisodes | None,
    data: PromptDataConfig,
    rewards: Sequence[RewardConfig],
    *,
    key: str = "data",
) -> Iterator[str]:
    """Yield an error for each field of a recipe that is inconsistent with its episodes, or with
    their absence. ``key``: key of ``data`` in the recipe."""
    yield from episode_data_rules(episodes, data, key=key)
    kinds = [reward.kind for reward in rewards]
    if episodes is None:
        if "episode" in kinds:
            yield (
                "rewards has an entry of kind episode, and without episodes no environment gives "
                "such rewards; set episodes, or use another kind"
            )
        return
    if "environment" in kinds:
        yield (
            "rewards has an entry of kind environment, which scores a single response; use kind "
            "episode for the rewards of a multi-turn environment"
        )
    if "episode" in kinds and episodes.kind == "tools":
        yield (
            "rewards has an entry of kind episode, and tools give no rewards; use another kind of "
            "reward, or an environment"
        )


def episode_data_rules(
    episodes: AnyEpisodes | None, data: PromptDataConfig, *, key: str
) -> Iterator[str]:
    """Yield an error for each field of ``data``, whose key is ``key``, that is inconsistent with
    the episodes of a recipe, or with their absence."""
    if episodes is None:
        if not all(source.has_prompts for source in data.sources):
            yield (
                f"{key}.sources has an entry of kind seeds, whose rows have no prompt; set "
                "episodes with an environment that makes tasks from seeds, or use another source"
            )
    elif episodes.max_tokens <= data.prompt_max_len:
        yield (
            f"episodes.max_tokens={episodes.max_tokens} counts the prompt and all turns, and must "
            f"exceed {key}.prompt_max_len={data.prompt_max_len}"
        )
