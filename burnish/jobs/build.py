"""From a recipe to the parts of its loop: data, engines (made by a runtime), losses, rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from burnish.algorithms.kl import AdaptiveKl, FixedKl, KlController
from burnish.config import (
    EvaluateConfig,
    GenerateConfig,
    JobConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from burnish.config.algorithm import GaeAdvantage, KlConfig
from burnish.config.data import PreferenceDataConfig, PromptDataConfig, SFTDataConfig
from burnish.config.jobs import SupervisedJob
from burnish.config.model import CriticConfig, ModelConfig
from burnish.config.rewards import ShapingConfig
from burnish.config.rollout import EvalConfig, SamplingConfig
from burnish.config.steps import PairsDataConfig, StepsDataConfig
from burnish.data.generation_prompts import GenerationPrompts
from burnish.data.preference import PreferenceStream, load_pairs
from burnish.data.prompts import PromptStream, load_prompts
from burnish.data.sft import SFTStream, load_rows
from burnish.data.steps import StepsStream, load_solutions
from burnish.jobs.degenerate import SignalWatch, pair_signal, warn_without_labels
from burnish.jobs.distill import Teacher, make_teacher
from burnish.jobs.evaluate import Evaluator
from burnish.jobs.generate import Generation
from burnish.jobs.objectives import (
    policy_objective,
    process_objective,
    reward_model_objective,
    sft_objective,
    value_objective,
    with_expert_balance,
)
from burnish.jobs.ptx import Ptx, ptx_objective
from burnish.jobs.reward_model import export_metadata, measure_pairs, measure_steps
from burnish.jobs.rl import RL
from burnish.jobs.sft import measure_sft
from burnish.jobs.supervised import Supervised
from burnish.models.dropout import noise_of
from burnish.models.load import ModelError, describe, hf_config, num_positions
from burnish.observe.samples import write_samples
from burnish.observe.timeline import timed
from burnish.rewards.base import NoRewards, Reward, RewardSet
from burnish.rewards.build import build_rewards
from burnish.rewards.model import load_model_reward
from burnish.rewards.reachable import check_servers
from burnish.rollout.base import RolloutEngine, Sampling
from burnish.rollout.runner import Runner
from burnish.runtime.base import Runtime
from burnish.train.base import HasLogprobs, Loss, Role, TrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Group, Prompt, Stats

log = logging.getLogger("burnish")

Functions = Mapping[str, Callable[..., Any]]
Data = TypeVar(
    "Data", PromptDataConfig, SFTDataConfig, PreferenceDataConfig, PairsDataConfig, StepsDataConfig
)
WeightedRewards = Sequence[tuple[Reward, float]]


def build_rl(
    config: RLConfig, runtime: Runtime, functions: Functions, run_dir: Path
) -> tuple[RL, Evaluator | None]:
    """The parts of an RL run and its evaluator. Data and rewards first: their mistakes are the
    quickest to find."""
    new_tokens = config.rollout.generate_max_len
    data = within_positions(config.data, config.model, new_tokens=new_tokens)
    prompts = PromptStream(data, runtime.tokenizer, seed=config.seed)
    held_out = _held_out(config.eval, config, runtime.tokenizer, new_tokens)
    ptx = _ptx(config, runtime)
    scores = _rewards(config, runtime, functions)
    tell_noise(config.model, "policy")
    policy = runtime.language_model(_rl_spec(config, "policy"))
    longest = max(data.prompt_max_len + new_tokens, _longest(config.eval, new_tokens))
    rollout = runtime.rollout(policy, config.rollout.engine, max_len=longest)
    kl = _kl_controller(config.algorithm.kl)
    critic, value_loss = _critic(config, runtime)
    max_len = config.rollout.generate_max_len
    rewards = _reward_set(
        scores, config, max_len, shaping=config.shaping, running=_running(config, scores)
    )
    warn_without_labels(held_out, rewards)
    limit = config.observe.samples_per_step
    parts = RL(
        config=config,
        prompts=prompts,
        runner=Runner(
            timed(rollout, runtime.timeline, {"generate": "rollout"}),
            timed(rewards, runtime.timeline, {"score": "reward"}),
            _sampling(config.rollout),
            num_samples=config.rollout.n_samples_per_prompt,
            seed=config.seed,
            dynamic=config.rollout.dynamic_sampling,
        ),
        policy=policy,
        policy_loss=with_expert_balance(
            policy_objective(config.algorithm, max_len=max_len, kl_coef=lambda: kl.coef),
            config.train.moe_aux_loss_coef,
        ),
        kl=kl,
        sync=runtime.sync(policy, rollout, config.sync),
        keep_samples=lambda step, groups, advantages: _keep(
            run_dir, step, groups, advantages=advantages, limit=limit
        ),
        reference=_reference(config, runtime, policy),
        teacher=_teacher(config, runtime),
        critic=critic,
        value_loss=value_loss,
        ptx=ptx,
        signal=SignalWatch(config.train.max_steps_without_signal),
    )
    if config.eval is None:
        return parts, None
    sampling = _eval_sampling(config.eval, config.rollout)
    eval_rollout = timed(rollout, runtime.timeline, {"generate": "eval"})
    return parts, _evaluator(config.eval, eval_rollout, scores, sampling, held_out, config, run_dir)


def _critic(config: RLConfig, runtime: Runtime) -> tuple[TrainEngine | None, Loss | None]:
    if not isinstance(config.algorithm.advantage, GaeAdvantage):
        return None, None
    own = config.critic or CriticConfig()
    spec = replace(_rl_spec(config, "critic"), model=own.model or config.model, lr=own.lr)
    if own.model is not None:
        tell_noise(own.model, "critic")
    critic = runtime.scalar_model(spec, seed=config.seed)
    return critic, value_objective(value_clip=own.value_clip)


def _running(config: RLConfig, scores: WeightedRewards) -> dict[str, Literal["mean_std", "std"]]:
    pairs = zip(config.rewards, scores, strict=True)
    return {reward.name: e.running_norm for e, (reward, _) in pairs if e.running_norm is not None}


def _ptx(config: RLConfig, runtime: Runtime) -> Ptx | None:
    if config.ptx is None:
        return None
    data = within_positions(config.ptx.data, config.model, field="ptx.data")
    stream = SFTStream(data, runtime.tokenizer, seed=config.seed)
    return Ptx(
        timed(stream, runtime.timeline, {"next": "data"}),
        config.ptx.batch_size,
        ptx_objective(config.ptx.ptx_coef),
    )


def build_evaluation(
    config: EvaluateConfig, runtime: Runtime, functions: Functions, run_dir: Path
) -> Evaluator:
    """The evaluator of an ``evaluate`` job."""
    assert config.eval.generate_max_len is not None
    held_out = _held_out(config.eval, config, runtime.tokenizer, config.eval.generate_max_len)
    scores = _rewards(config, runtime, functions)
    longest = _longest(config.eval, config.eval.generate_max_len)
    engine = runtime.standalone_rollout(config.model, config.engine, max_len=longest)
    plain = SamplingConfig(generate_max_len=config.eval.generate_max_len)
    sampling = _eval_sampling(config.eval, plain)
    timeline = runtime.timeline
    rollout = timed(engine, timeline, {"generate": "rollout"})  # the phase in the memory plan
    evaluator = _evaluator(config.eval, rollout, scores, sampling, held_out, config, run_dir)
    warn_without_labels(held_out, evaluator.runner.rewards)
    evaluator.runner.rewards = timed(evaluator.runner.rewards, timeline, {"score": "reward"})
    return evaluator


def build_generation(config: GenerateConfig, runtime: Runtime, functions: Functions) -> Generation:
    """The parts of a ``generate`` job. Data and rewards first, as for rl."""
    new_tokens = config.rollout.generate_max_len
    data = within_positions(config.data, config.model, new_tokens=new_tokens)
    generation_prompts = GenerationPrompts(
        data,
        runtime.tokenizer,
        limit=config.num_prompts,
        condition=config.condition,
        one_form=not config.output.lower().endswith(".jsonl"),
    )
    rewards = _reward_set(_rewards(config, runtime, functions), config, new_tokens)
    first = generation_prompts.take(0, config.rollout.rollout_batch_size)
    warn_without_labels([generation_prompt.prompt for generation_prompt in first], rewards)
    longest = data.prompt_max_len + new_tokens
    engine = runtime.standalone_rollout(config.model, config.rollout.engine, max_len=longest)
    runner = Runner(
        timed(engine, runtime.timeline, {"generate": "rollout"}),
        timed(rewards, runtime.timeline, {"score": "reward"}),
        _sampling(config.rollout),
        num_samples=config.rollout.n_samples_per_prompt,
        seed=config.seed,
    )
    return Generation(config, generation_prompts, runner, runtime.tokenizer)


def build_supervised(
    config: SFTConfig | RewardModelConfig, runtime: Runtime
) -> tuple[Supervised, int]:
    """The parts of an SFT or reward-model run, and its number of optimizer steps."""
    sft = isinstance(config, SFTConfig)
    stream, eval_batch = _supervised_data(config, runtime.tokenizer)
    total = config.steps_for(len(stream))
    spec = supervised_spec(config, "policy" if sft else "reward", total)
    spans = {"forward_backward": "train", "optim_step": "optim"}
    if sft:
        engine = runtime.language_model(spec, {**spans, "logprobs": "eval"})
    else:
        engine = runtime.scalar_model(spec, seed=config.seed, spans={**spans, "values": "eval"})
    parts = Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        engine=engine,
        loss=with_expert_balance(_supervised_loss(config), config.train.moe_aux_loss_coef),
        batch_size_at=partial(config.batch_size_at, num_rows=len(stream)),
        measure=_measure(config),
        eval_batch=eval_batch,
        signal=SignalWatch(config.train.max_steps_without_signal),
        look=None if _single_rows(config) else pair_signal,
        export_metadata=export_metadata(config),
    )
    return parts, total


def _single_rows(config: SFTConfig | RewardModelConfig) -> bool:
    return isinstance(config, SFTConfig) or config.process


def _supervised_loss(config: SFTConfig | RewardModelConfig) -> Loss:
    if isinstance(config, SFTConfig):
        return sft_objective()
    if config.process:
        return process_objective()
    return reward_model_objective(config.loss or "bradley_terry", center_coef=config.center_coef)


def _measure(
    config: SFTConfig | RewardModelConfig,
) -> Callable[[TrainEngine, Batch], Stats]:
    if isinstance(config, SFTConfig):
        return measure_sft
    return measure_steps if config.process else measure_pairs


def tell_noise(model: ModelConfig, role: Role) -> None:
    """Log that the dropout and router noise of the model's own config are off, if there is any."""
    found = hf_config(model)
    noise = {} if found is None else noise_of(found)
    if noise:
        log.info(
            "the %s %s: %s of its config off in training passes, so that ratios and distances "
            "compare log-probs of the same function",
            *(role, describe(model), ", ".join(f"{k}={v:g}" for k, v in noise.items())),
        )


def supervised_spec(config: SupervisedJob, role: Role, total_steps: int) -> EngineSpec:
    """Return the spec of the model that a supervised job trains."""
    return EngineSpec(
        role=role,
        train=config.train,
        model=config.model,
        micro_batch_size=config.batch_plan().micro_train_batch_size,
        total_steps=total_steps,
        with_entropy=False,
        seed=config.seed,
    )


def within_positions(
    data: Data, model: ModelConfig, *, new_tokens: int = 0, field: str = "data"
) -> Data:
    """``data`` with its length limit lowered to what the model has positions for, so that
    ``overlong`` decides about a longer row, and not the middle of a run. ``field``: what the recipe
    calls it."""
    limit = num_positions(model)
    name = "prompt_max_len" if isinstance(data, PromptDataConfig) else "max_len"
    wanted = data.prompt_max_len if isinstance(data, PromptDataConfig) else data.max_len
    if limit is None or wanted + new_tokens <= limit:
        return data
    if limit <= new_tokens:
        raise ModelError(
            f"generate_max_len={new_tokens} leaves no room for a prompt: {describe(model)} reads "
            f"rows of up to {limit} tokens"
        )
    log.warning(
        "%s.%s lowered to %d: %s reads rows of up to %d tokens",
        *(field, name, limit - new_tokens, describe(model), limit),
    )
    return data.model_copy(update={name: limit - new_tokens})


def _rl_spec(config: RLConfig, role: Role) -> EngineSpec:
    plan = config.batch_plan()
    updates = plan.optimizer_steps_per_rollout
    assert updates is not None
    train = config.train
    if role != "policy":
        train = train.model_copy(update={"moe_aux_loss_coef": 0.0})
    return EngineSpec(
        role=role,
        train=train,
        model=config.model,
        micro_batch_size=plan.micro_train_batch_size,
        total_steps=config.max_steps * updates,
        temperature=config.rollout.temperature,
        with_entropy=role == "policy",
        trainable=role != "reference",
        seed=config.seed,
        dropout=False,
    )


def _reference(config: RLConfig, runtime: Runtime, policy: TrainEngine) -> HasLogprobs | None:
    if not config.algorithm.kl.init_kl_coef:
        return None
    own = config.reference.model if config.reference is not None else None
    if own is None and config.model.lora is not None:
        return runtime.frozen_base(policy)
    spec = replace(_rl_spec(config, "reference"), model=own or config.model)
    return runtime.language_model(spec, {"logprobs": "reference"})


def _teacher(config: RLConfig, runtime: Runtime) -> Teacher | None:
    if config.teacher is None:
        return None
    spec = _rl_spec(config, "teacher")
    return make_teacher(config.teacher, config.model, spec, runtime)


def _reward_set(
    scores: WeightedRewards,
    config: RLConfig | GenerateConfig,
    max_len: int,
    *,
    shaping: ShapingConfig | None = None,
    running: dict[str, Literal["mean_std", "std"]] | None = None,
) -> RewardSet:
    if not scores:
        return NoRewards()
    return RewardSet(
        scores,
        on_failure=config.on_reward_failure,
        shaping=shaping or ShapingConfig(),
        generate_max_len=max_len,
        running=running,
    )


def _rewards(
    config: RLConfig | EvaluateConfig | GenerateConfig, runtime: Runtime, functions: Functions
) -> WeightedRewards:
    def make_engine(spec: EngineSpec) -> TrainEngine:
        if isinstance(config, RLConfig):  # in shards where the policy is
            train = spec.train.model_copy(update={"engine": config.train.engine})
            spec = replace(spec, train=train)
        return runtime.scalar_model(spec, seed=0, spans={})

    check_servers(config.rewards)
    return build_rewards(
        config.rewards,
        functions=functions,
        model_reward=lambda entry: load_model_reward(entry, runtime.tokenizer, make_engine),
        tokenizer=runtime.tokenizer,
    )


def _evaluator(  # house: ok called twice, with everything an evaluation consists of
    config: EvalConfig,
    engine: RolloutEngine,
    scores: WeightedRewards,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    job: RLConfig | EvaluateConfig,
    run_dir: Path,
) -> Evaluator:
    rewards = RewardSet(
        scores,
        on_failure=job.on_reward_failure,
        shaping=ShapingConfig(),
        generate_max_len=sampling.max_tokens,
    )
    runner = Runner(
        engine, rewards, sampling, num_samples=config.n_samples_per_prompt, seed=job.seed
    )
    return Evaluator(
        config,
        prompts,
        runner,
        lambda step, groups: _keep(run_dir, step, groups, advantages=None, limit=_ALL),
    )


_ALL = 1 << 30


def _held_out(
    config: EvalConfig | None, job: JobConfig, tokenizer: PreTrainedTokenizerBase, new_tokens: int
) -> Sequence[Prompt]:
    if config is None:
        return ()
    new_tokens = config.generate_max_len or new_tokens
    data = within_positions(config.data, job.model, new_tokens=new_tokens, field="eval.data")
    return load_prompts(data, tokenizer, limit=config.num_prompts)


def _longest(config: EvalConfig | None, new_tokens: int) -> int:
    """Most tokens of an evaluation's prompt with its response; 0 without evaluation."""
    if config is None:
        return 0
    return config.data.prompt_max_len + (config.generate_max_len or new_tokens)


def _supervised_data(
    config: SFTConfig | RewardModelConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[SFTStream | PreferenceStream | StepsStream, Batch | None]:
    """The training stream and all held-out rows."""
    if isinstance(config, SFTConfig):
        data = within_positions(config.data, config.model)
        rows = held_out_data(config.eval_data, config.model)
        held_out = load_rows(rows, tokenizer) if rows is not None else None
        return SFTStream(data, tokenizer, seed=config.seed), held_out
    other = config.eval_data
    if isinstance(config.data, StepsDataConfig):
        steps = within_positions(config.data, config.model)
        held = held_out_data(other if isinstance(other, StepsDataConfig) else None, config.model)
        solutions = load_solutions(held, tokenizer) if held is not None else None
        return StepsStream(steps, tokenizer, seed=config.seed), solutions
    own = within_positions(config.data, config.model)
    kept = held_out_data(other if isinstance(other, PairsDataConfig) else None, config.model)
    pairs = load_pairs(kept, tokenizer) if kept is not None else None
    return PreferenceStream(own, tokenizer, seed=config.seed), pairs


def held_out_data(data: Data | None, *models: ModelConfig) -> Data | None:
    """``eval_data`` within the positions of all ``models``."""
    for model in models:
        data = None if data is None else within_positions(data, model, field="eval_data")
    return data


def _kl_controller(config: KlConfig) -> KlController:
    if config.kl_target is None:
        return FixedKl(config.init_kl_coef)
    return AdaptiveKl(config.init_kl_coef, target=config.kl_target, horizon=config.kl_horizon)


def _sampling(config: SamplingConfig) -> Sampling:
    return Sampling(
        max_tokens=config.generate_max_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
    )


def _eval_sampling(config: EvalConfig, rollout: SamplingConfig) -> Sampling:
    """The rollout's stops with the evaluation's temperature and length, and nothing cut off."""
    return replace(
        _sampling(rollout),
        temperature=config.temperature,
        max_tokens=config.generate_max_len or rollout.generate_max_len,
        stop=rollout.stop if config.stop is None else config.stop,
        stop_token_ids=rollout.stop_token_ids
        if config.stop_token_ids is None
        else config.stop_token_ids,
        top_p=1.0,
        top_k=0,
    )


def _keep(
    run_dir: Path,
    step: int,
    groups: Sequence[Group],
    *,
    advantages: dict[str, float] | None,
    limit: int,
) -> None:
    split = "eval" if advantages is None else "train"
    write_samples(run_dir, step, groups, advantages, limit=limit, split=split)
