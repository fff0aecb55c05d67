"""Build the components of multi-turn episodes from a recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from burnish import agents
from burnish.agents.accepted import Accepted
from burnish.agents.commands import CommandAgents
from burnish.agents.episodes import AgentProgram
from burnish.agents.functions import FunctionAgents
from burnish.agents.sandboxed import SandboxedCommands, SandboxedFunctions
from burnish.agents.server import EpisodeServer
from burnish.config.base import absolute_program
from burnish.config.episodes import (
    TOOLS_FRAC,
    AgentEpisodes,
    AnyEpisodes,
    CommandEpisodes,
    EnvironmentEpisodes,
    McpServerConfig,
    ToolEpisodes,
)
from burnish.config.model import ModelConfig
from burnish.environments.pool import (
    EnvironmentPool,
    EnvironmentSpec,
    absolute_argument,
    absolute_path,
)
from burnish.environments.process import start_process
from burnish.episodes.loop import EnvironmentProgram, EpisodeProgram
from burnish.episodes.renderer import ChatRenderer
from burnish.episodes.runner import EpisodePool, EpisodeRunner
from burnish.loop_thread import LoopThread
from burnish.models.load import ModelError, describe, num_positions
from burnish.observe.timeline import Timeline, timed
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.asynchronous.evaluation_lane import Sampler
from burnish.rollout.base import Sampling
from burnish.rollout.runner import GroupFilter, Runner
from burnish.runtime.base import Runtime

TOOL_ENVIRONMENT = "burnish.environments.tools:ToolEnvironment"
TRL_ENVIRONMENT = "burnish.environments.trl:TrlEnvironment"
AGENT_ADAPTERS = {"openrlhf": "path", "verifiers": "env"}
"""Prefix of ``episodes.agent`` -> option that gets the rest. The adapter is the file of that name
in burnish/agents/, loaded by path, so that it runs under any interpreter."""


def build_episode_pool(
    config: AnyEpisodes | None,
    model: ModelConfig,
    runtime: Runtime,
) -> EpisodePool | None:
    """Return the pool that runs the episodes of a recipe, with started worker processes; None for
    single-turn recipes.

    Call it before any model is loaded: raises EnvironmentSetupError if the environment, its tools
    or its interpreter cannot be used, SandboxError if the sandbox cannot be used, and RendererError
    if the chat template cannot be extended or cannot render the tools.
    """
    if config is None:
        return None
    limit = num_positions(model)
    if limit is not None and config.max_tokens > limit:
        raise ModelError(
            f"episodes.max_tokens={config.max_tokens}: {describe(model)} reads rows of up to "
            f"{limit} tokens; lower max_tokens"
        )
    renderer = ChatRenderer(
        runtime.tokenizer, history=config.history, tool_format=config.tool_format
    )
    program = _program(config, model, runtime)
    loop = LoopThread("episodes")
    try:
        loop.run(program.start)
        if isinstance(config, ToolEpisodes) and isinstance(program, EnvironmentProgram):
            loop.run(_check_tools, program.environments, renderer, config.step_timeout_s)
    except BaseException:
        loop.run(program.close)
        loop.close()
        raise
    return EpisodePool(config, program, renderer, loop)


def _program(config: AnyEpisodes, model: ModelConfig, runtime: Runtime) -> EpisodeProgram:
    """Return the program that runs the episodes of a recipe, not started."""
    if isinstance(config, EnvironmentEpisodes | ToolEpisodes):
        spec = environment_spec(config).with_absolute_paths()  # workers of a cluster run elsewhere
        start = runtime.start_worker
        return EnvironmentProgram(EnvironmentPool(spec, workers=config.workers, start_worker=start))
    sandbox = config.sandbox
    server = EpisodeServer(config.server_host, config.server_port, unix_socket=sandbox is not None)
    program = partial(
        AgentProgram,
        server,
        accepted=Accepted(config.server_tools, config.late_system, config.train_calls),
    )
    if isinstance(config, CommandEpisodes):
        if sandbox is None:
            return program(CommandAgents(config.command))
        return program(SandboxedCommands(config.command, sandbox, server))
    agent = agent_spec(config, model).with_absolute_paths()
    if sandbox is not None:
        return program(SandboxedFunctions(agent, sandbox, server))
    start = start_process if server.is_local else runtime.start_worker
    functions = FunctionAgents(agent, workers=config.workers, start_worker=start)
    return program(functions)


async def _check_tools(pool: EnvironmentPool, renderer: ChatRenderer, timeout_s: float) -> None:
    """Render a first prompt with the recipe's tools."""
    episode = await pool.open({"prompt": "Hello", "label": None}, 0, timeout_s=timeout_s)
    try:
        renderer.render(episode.start.messages, episode.start.tools)
    finally:
        await episode.close()


@contextmanager
def closed_on_error(episode_pool: EpisodePool | None) -> Iterator[None]:
    """End the environments' processes if the ``with`` block raises."""
    try:
        yield
    except BaseException:
        if episode_pool is not None:
            episode_pool.close()
        raise


def environment_spec(config: EnvironmentEpisodes | ToolEpisodes) -> EnvironmentSpec:
    """Return the environment that a recipe describes: a class, or the one that calls tools."""
    if isinstance(config, EnvironmentEpisodes):
        adapter, _, name = config.environment.partition(":")
        if adapter == "trl":
            arguments = {"factory": absolute_path(name), **config.options}
            return EnvironmentSpec(TRL_ENVIRONMENT, arguments, config.python)
        return EnvironmentSpec(config.environment, config.options, config.python)
    options: dict[str, Any] = {
        "tools": [absolute_path(tool) for tool in config.tools],
        "timeout_s": config.tool_timeout_s,
        "turn_timeout_s": TOOLS_FRAC * config.step_timeout_s,
        "max_result_chars": config.tool_result_chars,
    }
    if config.sandbox is not None:
        options["sandbox"] = config.sandbox.with_absolute_paths().model_dump(mode="json")
    if config.mcp:
        options["mcp"] = {name: _mcp_options(server) for name, server in config.mcp.items()}
    return EnvironmentSpec(TOOL_ENVIRONMENT, options, config.python)


def _mcp_options(server: McpServerConfig) -> dict[str, Any]:
    """Return an MCP server as JSON, with absolute paths of this machine in its command."""
    command = [*map(absolute_program, server.command[:1])]
    command += [absolute_argument(argument) for argument in server.command[1:]]
    return {**server.model_dump(mode="json"), "command": command}


def agent_spec(config: AgentEpisodes, model: ModelConfig) -> EnvironmentSpec:
    """Return the agent function that a recipe describes, or the adapter for its agent file."""
    adapter, _, rest = config.agent.partition(":")
    if adapter not in AGENT_ADAPTERS:
        return EnvironmentSpec(config.agent, config.options, config.python, role="agent")
    file = Path(agents.__file__).with_name(f"{adapter}.py")
    options: dict[str, Any] = {AGENT_ADAPTERS[adapter]: rest}
    if adapter == "openrlhf":
        placed = model.with_absolute_paths()
        tokenizer = placed.tokenizer_override or placed.path
        options = {"path": os.path.abspath(rest), "tokenizer": tokenizer}
        options["max_length"] = config.max_tokens
    return EnvironmentSpec(
        f"{file}:agent", {**options, **config.options}, config.python, role="agent"
    )


@dataclass(frozen=True)
class RunnerOptions:
    """Options of a runner other than its components."""

    num_samples: int
    """Samples per prompt."""
    seed: int
    phase: str = "rollout"
    """Name of the sampling in the timeline and in the memory plan."""
    dynamic: GroupFilter | None = None


def make_runner(
    engine: Sampler,
    rewards: RewardSet,
    sampling: Sampling,
    episode_pool: EpisodePool | None,
    *,
    timeline: Timeline,
    options: RunnerOptions,
) -> Runner:
    """Return the runner of a recipe: one response per prompt, or episodes. Its sampling is
    timed."""
    engine = timed(engine, timeline, {"generate": options.phase})
    per_prompt = {"num_samples": options.num_samples, "seed": options.seed}
    if episode_pool is None:
        return Runner(engine, rewards, sampling, **per_prompt, dynamic=options.dynamic)
    episode_pool = timed(episode_pool, timeline, {"run": options.phase})
    ends = {*sampling.stop_token_ids, *episode_pool.renderer.stop_token_ids}
    sampling = replace(sampling, stop_token_ids=tuple(sorted(ends)))
    return EpisodeRunner(
        engine, rewards, sampling, episode_pool, **per_prompt, dynamic=options.dynamic
    )
