"""Config of sampling, rollouts and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from burnish.config.base import Node, OlderKeys, switched_by
from burnish.config.episodes import Episodes
from burnish.config.eval_section import EvalSection, with_sets
from burnish.config.held_out import held_out_advice
from burnish.config.rewards import passes_unweighted
from burnish.data.prompts.config import PromptDataConfig
from burnish.rewards.kinds import RewardConfig
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.rollout.local.config import LocalEngine

StopText = Annotated[str, Field(min_length=1)]  # an empty string is a substring of every response
TokenId = Annotated[int, Field(ge=0)]


class SamplingConfig(Node):
    """Options for sampling one response."""

    generate_max_len: int = Field(256, ge=1)
    """Maximum new tokens per response."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature. 0: greedy (refused for samples that train the policy)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this share of the probability of those that min_p
    and top_k leave. 1: all."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most probable tokens. 0: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens whose probability is at least min_p times the largest one (arXiv
    2407.01082). 0: all."""
    stop: tuple[StopText, ...] = ()
    """Strings that end a response. The response includes them. They are searched in the text
    without special tokens (but with tags of reasoning), unless one names a special token."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Token ids that end a response, in addition to the end token."""


class DynamicSampling(Node):
    """Replace groups without a learning signal with groups of new prompts in the same step (DAPO,
    arXiv 2503.14476): all scores equal up to rounding (after ``shaping.reward_clip``, before
    penalties; with ``normalize_each`` or a ``running_norm``: every reward with a weight equal,
    whatever the sums; with ``per_turn``: those of every turn, too), or out of bounds.
    ``reward/mean``, ``reward/<name>`` and ``reward/equal_groups_frac`` cover all sampled groups;
    ``reward/trained_mean`` and ``reward/std`` the trained ones."""

    above: float | None = None
    """Drop groups whose mean score (plain weighted sum) is not above this. None: no bound."""
    below: float | None = None
    """Drop groups whose mean score is not below this. None: no bound."""
    max_refills: int = Field(10, ge=1)
    """Maximum rounds of new prompts per step; a round samples one group per missing group. After
    the last round the newest dropped groups fill the step, with a warning."""

    def rules(self) -> Iterator[str]:
        if self.above is not None and self.below is not None and self.above >= self.below:
            yield (
                f"above={self.above:g} is not less than below={self.below:g}, so no score would "
                "be kept; swap them"
            )


class PromptsRollout(SamplingConfig):
    """Options for sampling n responses to each prompt."""

    n_samples_per_prompt: int = Field(1, ge=1)
    """Samples per prompt (n)."""
    engine: RolloutEngineConfig = LocalEngine()
    """Rollout engine."""
    episodes: Episodes | None = None
    """Multi-turn episodes. None: one response per prompt."""


InFlight = Literal["recompute", "finish", "continue"]


class AsynchronousRollout(Node):
    """Options for sampling while the policy is trained.

    The age of a group is the number of RL steps between the oldest weights that sampled one of its
    tokens and the weights that are trained on it."""

    max_staleness: int = Field(ge=0)
    """Maximum age of a group. It is never exceeded, and no group is dropped for its age. 0: the
    results of a synchronous run."""
    run_ahead: int = Field(1, ge=0)
    """Rollouts started ahead of the one that the next step needs, at most ``max_staleness``. Sets
    the mean age; ``max_staleness`` only bounds it."""
    oversample: float = Field(1.0, ge=1)
    """Start this many times the groups that a step needs and train on those that finish first; the
    others are for the next steps."""
    in_flight: InFlight = "recompute"
    """Responses in progress when new weights arrive. recompute: compute their keys and values again
    with the new weights and continue. finish: end them with the old weights; new ones wait.
    continue: keep the old keys and values and continue with the new weights."""
    partial: bool = False
    """Pause sampling while the policy is trained: unfinished responses are continued in the next
    step. Needs no second copy of the weights."""

    @property
    def overlaps(self) -> bool:
        """Return whether responses are sampled while the policy is trained."""
        return bool(self.max_staleness) and not self.partial

    @property
    def rollouts_ahead(self) -> int:
        """Return ``run_ahead``, bounded by ``max_staleness``."""
        return min(self.run_ahead, self.max_staleness)

    def capacity(self, groups: int) -> int:
        """Return the maximum number of groups that are started and not yet trained, for steps of
        ``groups`` groups."""
        return self.rollouts_ahead * groups + math.ceil(self.oversample * groups)

    def rules(self) -> Iterator[str]:
        most = self.max_staleness
        if self.is_own("run_ahead") and self.run_ahead > most:
            yield (
                f"run_ahead={self.run_ahead} is above max_staleness={most}: a group that is "
                "started further ahead would be too old; lower run_ahead or raise max_staleness"
            )
        elif self.rollouts_ahead + self.oversample > most + 1:
            yield (
                f"oversample={self.oversample:g} with run_ahead={self.rollouts_ahead} starts "
                f"{self.rollouts_ahead + self.oversample:g} rollouts at a time, and "
                f"max_staleness={most} allows {most + 1}; lower oversample or run_ahead, or raise "
                "max_staleness"
            )
        if self.partial and not most:
            yield (
                "partial continues responses under newer weights, which max_staleness=0 does not "
                "allow; set max_staleness=1 or more"
            )
        if self.partial and self.in_flight == "finish":
            yield (
                "partial continues unfinished responses with the new weights, but with "
                "in_flight=finish they would end with the old ones; remove in_flight, or remove "
                "partial"
            )


class RolloutConfig(PromptsRollout):
    """One rollout: P prompts with n samples each fill the buffer for one RL step."""

    older_keys = (
        OlderKeys(
            "asynchronous",
            "max_staleness",
            switched_by("max_staleness"),
            {
                "run_ahead": ("run_ahead", 1),
                "oversample": ("oversample", 1.0),
                "in_flight": ("in_flight", "recompute"),
                "partial": ("partial", False),
            },
        ),
    )

    rollout_batch_size: int = Field(ge=1)
    """PROMPTS per rollout (P); the buffer holds P x n samples."""
    sampling_mask: bool | None = None
    """With top_p, top_k or min_p: record the kept tokens, and compute all log-probs over these.
    None: only if needed, by ``algorithm.correction`` or ``old_policy: sampler``. Needs ``top_k``.
    4 bytes x top_k per token in host memory."""
    dynamic_sampling: DynamicSampling | None = None
    """Replacement of groups without a learning signal (``{}``: defaults). None: train on every
    group."""
    asynchronous: AsynchronousRollout | None = None
    """Sample while the policy is trained (``{max_staleness: 1}`` is a usual start). None: sample,
    then train."""

    @property
    def max_staleness(self) -> int:
        """Maximum age of a group; 0 in a synchronous run."""
        return 0 if self.asynchronous is None else self.asynchronous.max_staleness

    def rules(self) -> Iterator[str]:
        if self.asynchronous is not None and self.engine.sleeps:
            yield (
                "engine.sleep_between_rollouts frees memory between rollouts, and with "
                "asynchronous the engine samples all the time; remove one of them"
            )
        if self.temperature == 0:
            yield (
                "temperature=0 gives n equal responses and no exploration; use a value above 0 "
                "(1.0 is usual)"
            )
        if self.dynamic_sampling is not None and self.n_samples_per_prompt == 1:
            yield (
                "dynamic_sampling drops groups of equal scores, and with n_samples_per_prompt=1 "
                "every group is one; use 2 or more (16 is usual)"
            )


_EVAL_METRICS = ("reward", "response_len", "prompts", "failed_frac")


class EvalConfig(EvalSection[PromptDataConfig]):
    """Held-out evaluation: pass@1 and pass@k. All sets are measured with the same options."""

    num_prompts: int | None = Field(None, ge=1)
    """Number of prompts of each set, from the start of its data. None: all."""
    n_samples_per_prompt: int = Field(1, ge=1)
    """Samples per prompt."""
    pass_k: tuple[int, ...] = (1,)
    """Values of k of pass@k (unbiased estimator, arXiv 2107.03374), at most
    n_samples_per_prompt."""
    pass_threshold: float = 1.0
    """Minimum reward to pass: the unweighted score if only one reward has a nonzero weight and that
    is positive, else the weighted sum."""
    temperature: float = Field(0.0, ge=0)
    """Softmax temperature. 0: greedy."""
    generate_max_len: int | None = Field(None, ge=1)
    """Maximum new tokens. None: as in rollout."""
    stop: tuple[StopText, ...] | None = None
    """Strings that end a response. None: as in rollout."""
    stop_token_ids: tuple[TokenId, ...] | None = None
    """Token ids that end a response. None: as in rollout."""
    training_groups: Literal["continue", "wait"] = "continue"
    """Asynchronous runs: groups for training share the engine during an evaluation, or wait until
    it is done. Both measure exactly the weights of the step."""

    @property
    def prompt_max_len(self) -> int:
        """Maximum prompt tokens of all sets."""
        return max(data.prompt_max_len for data in self.sections.values())

    def metric_names(self, rewards: Sequence[str]) -> frozenset[str]:
        """Return the names after ``eval/`` of the metrics of an evaluation. ``rewards``: names of
        the rewards."""
        parts = [f"reward/{name}" for name in rewards] if len(rewards) > 1 else []
        passes = (f"pass@{k}" for k in (1, *self.pass_k))
        return with_sets({*passes, *parts, *_EVAL_METRICS}, self.sets)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        for k in self.pass_k:
            if not 1 <= k <= self.n_samples_per_prompt:
                yield (
                    f"pass_k contains {k}, but k must be in "
                    f"1..n_samples_per_prompt={self.n_samples_per_prompt}"
                )
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            yield (
                "temperature=0 gives the same response every time; use n_samples_per_prompt=1 or "
                "a temperature above 0"
            )


def eval_advice(
    config: EvalConfig, data: PromptDataConfig, rewards: Sequence[RewardConfig]
) -> Iterator[str]:
    """Yield one sentence for each setting of an evaluation during training that is rarely intended.
    ``data``: training prompts."""
    yield from held_out_advice(data, config)
    yield from pass_advice(config, rewards)


def pass_advice(config: EvalConfig, rewards: Sequence[RewardConfig]) -> Iterator[str]:
    """Yield one sentence if the sum of the positive weights is below the threshold, unless a single
    reward counts unweighted. No response can then pass, unless a score is above 1 or negative."""
    weights = [entry.weight for entry in rewards if entry.weight]
    most = sum(weight for weight in weights if weight > 0)
    if weights and not passes_unweighted(weights) and most < config.pass_threshold - 1e-9:
        yield (
            f"eval.pass_threshold={config.pass_threshold:g} is above the sum of the positive "
            f"weights ({most:g}): if scores are from 0 to 1, no response passes and eval/pass@1 "
            f"stays 0; set eval.pass_threshold={most:g} or less"
        )
