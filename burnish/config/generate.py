"""Config of batch inference (job generate): sampling, and the choice of responses for the
output."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from burnish.config.base import Node, PathText, named_kind
from burnish.config.episodes import episode_rules, episodes_lines
from burnish.config.inference import RowsJob
from burnish.config.rewards import FailurePolicy, Scoring, running_norm_rules, weigh_nothing
from burnish.config.roles import RolloutRole, RowLengths, SectionLimits, sampled_lengths
from burnish.config.rollout import PromptsRollout
from burnish.data.prompts.config import GenerationDataConfig
from burnish.rewards.kinds import RewardConfig


class GenerateRollout(PromptsRollout):
    """Sampling of responses in steps."""

    rollout_batch_size: int = Field(256, ge=1)
    """PROMPTS per step (P). Steps are sampled, scored and saved atomically: a killed run loses only
    its current step, and a resumed one has the same steps and responses."""

    def rules(self) -> Iterator[str]:
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            yield (
                "temperature=0 gives the same response every time; use n_samples_per_prompt=1 or a "
                "temperature above 0"
            )


class _Mode(Node):
    """Facts of every kind. ``data/selection.py`` selects the rows."""

    sums: ClassVar[Mapping[str, str]] = {}
    """Name of a sum over the rows -> the column that is added up."""


class AllSamples(_Mode):
    """One row for every response: ``prompt``, ``response``."""

    keep_truncated: ClassVar[bool] = True

    kind: Literal["all"] = "all"


class _Chosen(_Mode):
    """Keys of all kinds except ``all``."""

    keep_truncated: bool = False
    """Also use responses, and episodes, that a token limit cut. A job that trains on them learns no
    end (column ``finish_reason``)."""


class BestOfN(_Chosen):
    """One row for each prompt with its highest-reward response: ``prompt``, ``response``. SFT
    data."""

    sums: ClassVar[Mapping[str, str]] = {"kept_reward": "reward"}

    kind: Literal["best_of_n"]
    min_reward: float | None = None
    """Drop a prompt if its best reward is lower (rejection sampling). None: no bound."""


class BestWorstPairs(_Chosen):
    """One row for each prompt with its best and worst responses: ``prompt``, ``chosen``,
    ``rejected``, ``margin``. Data for ``preference`` and ``rm``. Prompts with equal rewards are
    dropped."""

    sums: ClassVar[Mapping[str, str]] = {"margin": "margin"}

    kind: Literal["pairs"]
    min_margin: float = Field(0.0, ge=0)
    """Drop a prompt if its two rewards differ by less. 0: no bound."""


class RewardConditioned(_Chosen):
    """One row for every response, with its reward in the prompt (``condition.template``):
    ``prompt``, ``response``. SFT data for a policy conditioned on a reward."""

    kind: Literal["conditioned"]


GenerateMode = Annotated[
    Annotated[
        AllSamples | BestOfN | BestWorstPairs | RewardConditioned, Field(discriminator="kind")
    ],
    named_kind(),
]


class ConditionConfig(Node):
    """Statement of a reward in the prompt."""

    template: str
    """Python format string with ``{prompt}`` (text, or content of the last user message) and
    ``{reward}``, e.g. ``"Quality: {reward:.1f}\\n{prompt}"``."""
    wanted_reward: float | None = None
    """Reward in every prompt while sampling, for a policy trained on ``conditioned`` rows. None:
    unchanged prompts."""

    def rules(self) -> Iterator[str]:
        example = "write it as e.g. 'Quality: {reward:.1f}\\n{prompt}'"
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self.template) if name]
            if not {"prompt", "reward"} - set(names):
                self.template.format(prompt="", reward=0.5)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            yield f"template {self.template!r} cannot be filled in: {error}; {example}"
            return
        for name in ("prompt", "reward"):
            if name not in names:
                yield f"template {self.template!r} has no {{{name}}}; {example}"


class GenerateConfig(RowsJob):
    """``burnish generate``: sample responses to a file of prompts, and write all, or those chosen
    by reward, as rows for the next job.

    Modes other than ``all`` need a reward with a weight; ``best_of_n`` and ``pairs`` also
    ``n_samples_per_prompt`` of 2 or more. ``data.overlong: truncate_left`` is refused."""

    job: Literal["generate"] = "generate"
    """Job of the recipe."""
    data: GenerationDataConfig
    """Prompts. Read once, in order."""
    num_prompts: int | None = Field(None, ge=1)
    """Use only the first this many prompts. None: all."""
    rollout: GenerateRollout = GenerateRollout()
    """Sampling of responses."""
    rewards: tuple[RewardConfig, ...] = ()
    """Rewards of the responses. Empty: responses are not scored."""
    mode: GenerateMode = AllSamples()
    """Responses that become rows: a kind, or a mapping."""
    condition: ConditionConfig | None = None
    """Reward in the prompts. None: none."""
    output: PathText = "{run_dir}/generated.jsonl"
    """Output file, ``.jsonl`` or ``.parquet``, written at the end; must not exist. ``{run_dir}`` is
    replaced. ``prompt`` is the model's input (text or messages, system prompt and templates
    included), ready for the next job."""
    with_tokens: bool = True
    """Also write token ids of prompts and responses, for sft, preference and rm to train on exactly
    these. Text does not determine the tokenization."""

    @property
    def scoring(self) -> Scoring:
        in_episodes = self.rollout.episodes is not None
        return Scoring(self.rewards, in_episodes, self.on_reward_failure)

    def section_limits(self, name: str) -> SectionLimits:
        return SectionLimits((self.model,), self.row_lengths.rest, self.num_prompts)

    @property
    def row_lengths(self) -> RowLengths:
        rollout = self.rollout
        return sampled_lengths(self.data, rollout.generate_max_len, rollout.episodes)

    @property
    def rows_per_step(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    def rollout_role(self) -> RolloutRole:
        return replace(
            self.rollout_on(self.rollout.engine, key="rollout.engine", lengths=self.row_lengths),
            prompts=self.rollout.rollout_batch_size,
            samples_per_prompt=self.rollout.n_samples_per_prompt,
            episodes=self.rollout.episodes,
            temperature=self.rollout.temperature,
        )

    def launch_table(self, num_rows: int | None = None) -> list[tuple[str, str, str]]:
        rollout = self.rollout
        return self.form_lines() + episodes_lines(
            rollout.episodes, turn_tokens=rollout.generate_max_len, at_once=self.rows_per_step
        )

    def rules(self) -> Iterator[str]:
        kind, n = self.mode.kind, self.rollout.n_samples_per_prompt
        if kind != "all" and not self.rewards:
            purpose = "states rewards in prompts" if kind == "conditioned" else "chooses by reward"
            yield f"mode={kind} {purpose}, but the recipe has none; add an entry to rewards"
        if kind in ("best_of_n", "pairs") and n == 1:
            yield (
                f"mode={kind} chooses among the samples of one prompt, but "
                "rollout.n_samples_per_prompt=1; use 2 or more (8 is usual)"
            )
        yield from running_norm_rules(self.rewards)
        if kind != "all" and weigh_nothing(self.rewards):
            purpose = "states the reward" if kind == "conditioned" else "chooses by reward"
            yield (
                f"mode={kind} {purpose}, but every entry of rewards has weight 0, so all rewards "
                "are equal; set a weight above 0"
            )
        if not self.rewards and self.on_reward_failure != FailurePolicy():
            yield "on_reward_failure has no effect without rewards; remove it"
        yield from super().rules()
        yield from episode_rules(self.rollout.episodes, self.data, self.rewards)
        if self.rollout.episodes is not None and kind in ("pairs", "conditioned"):
            yield (
                f"mode={kind} writes one response per prompt, and rollout.episodes makes "
                "conversations; use mode all or best_of_n"
            )
        if kind == "conditioned" and self.condition is None:
            yield (
                "mode=conditioned states each reward in its prompt, but condition.template is "
                "not set; set it, e.g. 'Quality: {reward:.1f}\\n{prompt}'"
            )
        unused = self.condition is not None and self.condition.wanted_reward is None
        if unused and kind != "conditioned":
            yield (
                f"condition has no effect with mode={kind} and without condition.wanted_reward; "
                "remove it, or set one of the two"
            )
