"""Config of multi-turn episodes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from burnish.config.base import Node, PathText
from burnish.config.data import PromptDataConfig, SeedSource
from burnish.config.rewards import RewardConfig

FormatName = Literal["hermes", "xml", "glm", "llama3_json", "mistral", "mistral_args", "harmony"]
"""hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen2.5, Qwen3).
xml: ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in ``<tool_call>`` (Qwen3-Coder,
Qwen3.5). glm: ``<arg_key>`` and ``<arg_value>`` in ``<tool_call>`` (GLM-4.5). llama3_json: the
response is one JSON object (Llama 3.1). mistral: ``[TOOL_CALLS]`` and a JSON list (v3).
mistral_args: ``[TOOL_CALLS]NAME[ARGS]{...}`` (v11 and later). harmony: channels (gpt-oss)."""

TOOLS_FRAC = 0.9
"""Share of a step's time limit that all tool calls of a turn may take together. The rest is for the
transfer of their results."""


class EpisodesConfig(Node):
    """Multi-turn rollouts: the policy responds, an environment or tools answer, and so on.

    Exactly one of ``environment`` and ``tools`` is set. ``rollout.generate_max_len`` limits one
    turn."""

    environment: str | None = None
    """Environment class, ``path/to/file.py:Class`` or ``package.module:Class``, with the methods
    ``reset(task, seed)`` and ``step(message)``. None: ``tools``."""
    tools: tuple[str, ...] = ()
    """Python functions with type hints and a docstring, ``path/to/file.py:name``. The policy may
    call them; its first response without a call ends the episode."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment class."""
    python: PathText | None = None
    """Interpreter of the environment's worker processes. It needs none of Burnish's packages; for
    ``tools`` it needs Burnish. None: the interpreter of this run."""
    workers: int = Field(1, ge=1)
    """Worker processes. Each runs many episodes at once."""
    max_turns: int = Field(8, ge=1)
    """Maximum responses of the policy per episode (status max_turns)."""
    max_tokens: int = Field(ge=2)
    """Maximum tokens of an episode's conversation: first messages, responses and observations
    (status max_tokens)."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Maximum seconds of one call of the environment (status timeout)."""
    timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds of an episode (status timeout)."""
    tool_timeout_s: float = Field(10.0, gt=0)
    """Maximum seconds of one call of a tool. The calls of a turn run one after the other and may
    take 0.9 x ``step_timeout_s`` together. The policy receives a timeout as an error message."""
    max_concurrent: int | None = Field(None, ge=1)
    """Maximum episodes at once. None: all episodes of a rollout."""
    history: Literal["keep", "template"] | None = None
    """Chat templates that rewrite earlier turns (drop reasoning). keep: the next prompt contains
    the sampled tokens unchanged. template: render the conversation again; every turn is a row of
    its own. None: refuse such templates."""
    tool_format: FormatName | None = None
    """Format of tool calls in the policy's responses. None: determined from the chat template."""
    on_parse_error: Literal["feedback", "end"] = "feedback"
    """Malformed tool call. feedback: the policy receives the error as a message. end: the episode
    ends (status parse_error)."""
    infra_retries: int = Field(1, ge=0)
    """Number of times an episode is played again after its worker process died (infra_error)."""
    max_failed_frac: float = Field(0.5, ge=0, le=1)
    """Maximum share of a rollout's episodes that fail for reasons other than the policy
    (env_error, infra_error, timeout). More stop the run. Failed episodes are not trained on."""

    def rules(self) -> Iterator[str]:
        if (self.environment is None) == (not self.tools):
            have = "both are" if self.tools else "neither is"
            yield f"episodes needs one of environment and tools, and {have} set; set one"
        if self.tools and self.options:
            yield "options are arguments of environment, which is not set; remove options"
        if self.is_own("tool_timeout_s") and not self.tools:
            yield "tool_timeout_s limits calls of tools, which are not set; remove it"
        if self.tools and self.tool_timeout_s > TOOLS_FRAC * self.step_timeout_s:
            yield (
                f"tool_timeout_s={self.tool_timeout_s:g} must be at most {TOOLS_FRAC:g} x "
                f"step_timeout_s={self.step_timeout_s:g}, or a slow tool ends the episode before "
                "the policy receives its timeout as an error message; set step_timeout_s to at "
                f"least {math.ceil(self.tool_timeout_s / TOOLS_FRAC)}, or lower tool_timeout_s"
            )
        if self.environment is not None and ":" not in self.environment:
            yield (
                f"environment={self.environment!r} is not of the form path/to/file.py:Class or "
                "package.module:Class"
            )


def episodes_lines(
    episodes: EpisodesConfig | None, *, turn_tokens: int | None, at_once: int
) -> list[tuple[str, str, str]]:
    """Return lines (name, value, origin) of the launch table; empty without episodes.

    ``turn_tokens``: maximum tokens of one turn. ``at_once``: number of episodes of a rollout.
    """
    if episodes is None:
        return []
    tokens = "" if turn_tokens is None else f"; at most {turn_tokens} tokens each"
    source = episodes.environment or "tools " + ", ".join(episodes.tools)
    python = "" if episodes.python is None else f" in {episodes.python}"
    times = f"{episodes.step_timeout_s:g} s per call of the environment"
    if episodes.tools:
        times = f"{episodes.tool_timeout_s:g} s per call of a tool, {times}"
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
            f"time limits: {times}, {episodes.timeout_s:g} s per episode",
        ),
        ("environment workers", str(episodes.workers), f"processes with {source}{python}"),
    ]


def episode_rules(
    episodes: EpisodesConfig | None, data: PromptDataConfig, rewards: Sequence[RewardConfig]
) -> Iterator[str]:
    """Yield an error for each field of a recipe that is inconsistent with its episodes, or with
    their absence."""
    kinds = [reward.kind for reward in rewards]
    if episodes is None:
        if "episode" in kinds:
            yield (
                "rewards has an entry of kind episode, and without episodes no environment gives "
                "such rewards; set episodes, or use another kind"
            )
        if any(isinstance(source, SeedSource) for source in data.sources):
            yield (
                "data.sources has an entry of kind seeds, whose rows have no prompt; set episodes "
                "with an environment that makes tasks from seeds, or use another source"
            )
        return
    if "environment" in kinds:
        yield (
            "rewards has an entry of kind environment, which scores a single response; use kind "
            "episode for the rewards of a multi-turn environment"
        )
    if "episode" in kinds and episodes.tools:
        yield (
            "rewards has an entry of kind episode, and tools give no rewards; use another kind of "
            "reward, or an environment"
        )
    if episodes.max_tokens <= data.prompt_max_len:
        yield (
            f"episodes.max_tokens={episodes.max_tokens} counts the prompt and all turns, and must "
            f"exceed data.prompt_max_len={data.prompt_max_len}"
        )
