"""Rules between the settings of a recipe for ``rl``: advantages, KL, rewards. Rules of a single
node are in its class."""

from __future__ import annotations

from collections.abc import Iterator

from burnish.config.algorithm import GaeAdvantage, GroupAdvantage, OnPolicyDistillAdvantage
from burnish.config.rewards import ShapingConfig, weigh_nothing
from burnish.config.rl_fields import RLFields

BROADCAST = frozenset({"grpo", "dr_grpo", "opo"})
"""Advantages with one number per response, which cannot include KL on single tokens."""


def rl_rules(config: RLFields) -> Iterator[str]:
    """Yield an error for each broken rule between the fields of an ``RLConfig``."""
    yield from _advantage_rules(config)
    yield from _kl_rules(config)
    yield from _reward_rules(config)


def rl_advice(config: RLFields) -> Iterator[str]:
    """Yield one sentence for each combination of fields that is valid but rarely intended."""
    kind, cut = config.algorithm.advantage.kind, cut_sampling(config)
    if kind == "on_policy_distill" and cut:
        yield (
            f"rollout.{cut} with algorithm.advantage={kind}: tokens are drawn from another "
            "distribution than the one that the teacher is compared with, so what is made small is "
            "not the reverse KL; use top_p=1 and top_k=0"
        )


def cut_sampling(config: RLFields) -> str | None:
    """Return the setting that restricts sampling to a part of the distribution, or None."""
    return "top_p<1" if config.rollout.top_p < 1 else "top_k>0" if config.rollout.top_k else None


def _advantage_rules(config: RLFields) -> Iterator[str]:
    advantage = config.algorithm.advantage
    uses_gae = isinstance(advantage, GaeAdvantage)
    if config.critic is not None and not uses_gae:
        yield (
            f"critic is set, and algorithm.advantage={advantage.kind} uses none; remove critic "
            "or use gae"
        )
    needs_group = isinstance(advantage, GroupAdvantage) or advantage.kind == "reinforce_pp_baseline"
    if needs_group and config.rollout.n_samples_per_prompt < 2:
        yield (
            f"algorithm.advantage={advantage.kind} compares samples of one prompt, and "
            "rollout.n_samples_per_prompt=1 leaves nothing to compare; use 2 or more (8 is "
            "usual)"
        )
    if advantage.kind == "reinforce_pp_baseline" and advantage.gamma != 1.0:
        yield (
            f"algorithm.advantage.gamma={advantage.gamma} with a group baseline: the baseline "
            "is not discounted; use gamma=1"
        )


def _kl_rules(config: RLFields) -> Iterator[str]:
    advantage, kl = config.algorithm.advantage, config.algorithm.kl
    if advantage.kind in BROADCAST and kl.init_kl_coef and kl.placement == "reward":
        yield (
            "algorithm.kl.placement=reward puts KL on every token's reward, and "
            f"advantage={advantage.kind} sees one reward per response; use placement=loss "
            "(estimator k3 is usual), or advantage=rloo"
        )
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    if kl.kl_target is not None and samples >= 5 * kl.kl_horizon:
        yield (
            f"algorithm.kl.kl_horizon={kl.kl_horizon} is too short for {samples} samples per "
            "rollout: the weight could reach 0 in one step; use more than "
            f"{samples // 5} (10000 is usual)"
        )
    if config.reference is not None and not kl.init_kl_coef:
        yield (
            "reference is set and algorithm.kl.init_kl_coef=0 never reads it; remove it or set "
            "a KL weight"
        )


def _reward_rules(config: RLFields) -> Iterator[str]:
    shaping = config.shaping
    penalties = (shaping.length_penalty, shaping.truncation_penalty, shaping.overlong_buffer_len)
    measured_only = config.algorithm.advantage.kind == "on_policy_distill"
    if weigh_nothing(config.rewards) and not any(penalties) and not measured_only:
        yield (
            "every entry of rewards has weight 0, so every response is worth the same and nothing "
            "is learned; give one a weight"
        )
    if shaping.overlong_buffer_len >= config.rollout.generate_max_len:
        yield (
            f"shaping.overlong_buffer_len={shaping.overlong_buffer_len} must be below "
            f"rollout.generate_max_len={config.rollout.generate_max_len}"
        )


def teacher_rules(config: RLFields) -> Iterator[str]:
    """Yield an error for each setting of a recipe for ``rl`` that is inconsistent with the presence
    or absence of a teacher."""
    kind = config.algorithm.advantage.kind
    if not isinstance(config.algorithm.advantage, OnPolicyDistillAdvantage):
        if config.teacher is not None:
            yield (
                f"teacher is set and algorithm.advantage={kind} never reads it; remove it, or use "
                "on_policy_distill"
            )
        if not config.rewards:
            yield f"rewards is empty and algorithm.advantage={kind} learns from them; add one"
        return
    if config.teacher is None:
        yield (
            f"algorithm.advantage={kind} measures every token against a teacher, and there is "
            "none; set teacher.model.path"
        )
    kl = config.algorithm.kl
    if kl.init_kl_coef and kl.placement == "reward":
        yield (
            f"algorithm.kl.placement=reward with advantage={kind}, which learns from no reward; "
            "use placement=loss (estimator k3 is usual)"
        )
    if config.rollout.dynamic_sampling is not None:
        yield (
            f"rollout.dynamic_sampling leaves groups out by their rewards, and advantage={kind} "
            "learns from every token; remove it"
        )
    if config.shaping != ShapingConfig():
        yield (
            f"shaping changes rewards, and with advantage={kind} they are only measured; remove it"
        )
    if config.eval is not None and not config.rewards:
        yield (
            f"eval measures rewards, and the recipe has none (advantage={kind} needs none); add "
            "some, which are then measured in training too, or remove eval"
        )
