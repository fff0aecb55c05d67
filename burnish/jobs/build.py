"""Components that several jobs build from their recipes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from burnish.config.data import PreferenceDataConfig, PromptDataConfig, SFTDataConfig
from burnish.config.job import TrainingJob
from burnish.config.model import ModelConfig
from burnish.config.rated import RatedDataConfig
from burnish.config.rewards import FailurePolicy, RewardConfig, ShapingConfig
from burnish.config.rollout import SamplingConfig
from burnish.config.steps import PairsDataConfig, StepsDataConfig
from burnish.config.train_engines import TrainEngineConfig
from burnish.jobs.base import Functions
from burnish.models.dropout import noise_of
from burnish.models.load import ModelError, describe, hf_config, num_positions
from burnish.rewards.base import NoRewards, Reward, RewardSet
from burnish.rewards.build import build_rewards
from burnish.rewards.model import load_model_reward
from burnish.rewards.reachable import check_servers
from burnish.rollout.base import Sampling
from burnish.runtime.base import Runtime
from burnish.train.base import Role, TrainEngine
from burnish.train.spec import EngineSpec

log = logging.getLogger("burnish")

Data = TypeVar(
    "Data",
    PromptDataConfig,
    SFTDataConfig,
    PreferenceDataConfig,
    PairsDataConfig,
    StepsDataConfig,
    RatedDataConfig,
)
WeightedRewards = Sequence[tuple[Reward, float]]


def within_positions(
    data: Data, model: ModelConfig, *, new_tokens: int = 0, field: str = "data"
) -> Data:
    """Return ``data`` with its length limit lowered to the number of positions of the model.
    ``overlong`` then handles longer rows at load time instead of an error in the middle of the run.
    ``field``: name of the data section in the recipe, for messages. Raises ModelError if
    ``new_tokens`` leaves no room for a prompt."""
    limit = num_positions(model)
    name = "prompt_max_len" if isinstance(data, PromptDataConfig) else "max_len"
    wanted = data.prompt_max_len if isinstance(data, PromptDataConfig) else data.max_len
    if limit is None or wanted + new_tokens <= limit:
        return data
    if limit <= new_tokens:
        raise ModelError(
            f"responses of up to {new_tokens} tokens (generate_max_len; of episodes, "
            f"episodes.max_tokens) leave no room for a prompt: {describe(model)} supports rows of "
            f"at most {limit} tokens; lower that key, or use a model with more positions"
        )
    log.warning(
        "%s.%s is lowered to %d: %s supports rows of at most %d tokens",
        *(field, name, limit - new_tokens, describe(model), limit),
    )
    return data.model_copy(update={name: limit - new_tokens})


def eval_place(name: str) -> str:
    """Return the place of an evaluation set in the recipe. The name of ``eval_data`` is empty."""
    return f"eval_sets.{name}" if name else "eval_data"


def held_out_sets(
    eval_data: Data | None, eval_sets: Mapping[str, Data], *models: ModelConfig
) -> dict[str, Data]:
    """Return the evaluation sets by name, with their length limits within the positions of all
    ``models``. The name of ``eval_data`` is empty."""
    found = {} if eval_data is None else {"": eval_data}
    found |= eval_sets
    for model in models:
        for name, data in found.items():
            found[name] = within_positions(data, model, field=eval_place(name))
    return found


def engine_specs(
    config: TrainingJob, *, total_steps: int, temperature: float = 1.0
) -> dict[str, EngineSpec]:
    """Return the spec of every train engine of a job, by role name. Reward models of ``rl`` are
    excluded, because they have their own pass size. ``temperature``: sampling temperature of the
    rows."""
    micro = config.batch_plan().micro_train_batch_size
    return {
        role.name: EngineSpec(
            role=role.engine_role,
            train=role.train,
            model=role.model,
            micro_batch_size=micro,
            total_steps=total_steps,
            lr=role.lr,
            temperature=temperature,
            with_entropy=role.with_entropy,
            trainable=role.trainable,
            dtype=None if role.precision == config.precision else role.dtype,
            seed=config.seed,
            dropout=role.dropout,
            offload=role.offload,
            outputs=role.outputs,
            output_names=role.output_names,
        )
        for role in config.resolve().train_roles
        if role.rows_per_pass is None
    }


def log_disabled_noise(model: ModelConfig, role: Role) -> None:
    """Log any dropout and router noise in the model's own config that is disabled for training."""
    found = hf_config(model)
    noise = {} if found is None else noise_of(found)
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
        if engine is not None:
            spec = replace(spec, train=spec.train.model_copy(update={"engine": engine}))
        spec = replace(spec, offload=offload)
        return runtime.scalar_model(spec, seed=0, spans={})

    check_servers(entries)
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
