"""Components that several jobs build from their recipes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from burnish.config.job import TrainingJob
from burnish.config.model import ModelConfig
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.config.rollout import SamplingConfig
from burnish.config.train_engines import TrainEngineConfig
from burnish.driver.base import Functions
from burnish.models.dropout import noise_of
from burnish.models.load import describe, hf_config
from burnish.rewards.base import Reward
from burnish.rewards.build import build_rewards, check_rewards
from burnish.rewards.kinds import RewardConfig
from burnish.rewards.model.reward import load_model_reward
from burnish.rewards.reward_set import NoRewards, RewardSet
from burnish.rollout.base import Sampling
from burnish.runtime.base import Runtime
from burnish.train.base import Role, TrainEngine
from burnish.train.spec import EngineSpec

log = logging.getLogger("burnish")

WeightedRewards = Sequence[tuple[Reward, float]]


def engine_specs(
    config: TrainingJob, *, total_steps: int, temperature: float = 1.0
) -> dict[str, EngineSpec]:
    """Return the spec of every train engine of a job, by role name. Reward models of ``rl`` are
    excluded, because they have their own pass size. ``temperature``: sampling temperature of the
    rows."""
    micro = config.batch_plan().micro_train_batch_size
    return {
        role.name: EngineSpec(
            role,
            micro_batch_size=micro,
            total_steps=total_steps,
            temperature=temperature,
            seed=config.seed,
        )
        for role in config.resolve().train_roles
        if role.rows_per_pass is None
    }


def log_disabled_noise(model: ModelConfig, role: Role) -> None:
    """Log any dropout and router noise in the model's own config that is disabled for training."""
    model_config = hf_config(model)
    noise = {} if model_config is None else noise_of(model_config)
    if noise:
        log.info(
            "%s %s: training passes ignore %s of the model's config, so that probability ratios "
            "and KL compare log-probs of the same function",
            *(role, describe(model), ", ".join(f"{k}={v:g}" for k, v in noise.items())),
        )


def sampling_of(config: SamplingConfig) -> Sampling:
    """Return the engine's sampling parameters from the recipe."""
    return Sampling(
        max_tokens=config.generate_max_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
    )


def weighted_rewards(
    entries: Sequence[RewardConfig],
    runtime: Runtime,
    functions: Functions,
    *,
    engine: TrainEngineConfig | None = None,
    offload: bool = False,
) -> WeightedRewards:
    """Return the rewards of a recipe with their weights. ``engine``: train engine for reward
    models, instead of the one in their own specs. ``rl`` passes the policy's engine, so that reward
    models are sharded like the policy. ``offload``: move reward models to host memory between
    phases."""

    def make_engine(spec: EngineSpec) -> TrainEngine:
        role = replace(spec.role, precision=runtime.precision, offload=offload)
        if engine is not None:
            role = replace(role, train=role.train.model_copy(update={"engine": engine}))
        spec = replace(spec, role=role)
        return runtime.scalar_model(spec, seed=0, spans={})

    check_rewards(entries)
    return build_rewards(
        entries,
        functions=functions,
        model_reward=lambda entry: load_model_reward(entry, runtime.tokenizer, make_engine),
        tokenizer=runtime.tokenizer,
    )


def reward_set(
    scores: WeightedRewards,
    *,
    on_failure: FailurePolicy,
    max_len: int,
    shaping: ShapingConfig | None = None,
    running: dict[str, Literal["mean_std", "std"]] | None = None,
) -> RewardSet:
    """Return the reward set that scores responses of up to ``max_len`` tokens."""
    if not scores:
        return NoRewards()
    return RewardSet(
        scores,
        on_failure=on_failure,
        shaping=shaping or ShapingConfig(),
        generate_max_len=max_len,
        running=running,
    )
