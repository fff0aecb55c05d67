"""One process: builds the parts of a job from its config and runs its loop.

``run`` is the Python API and what the command line calls. Engines are built, timed and connected here and
nowhere else, so a loop never asks where it runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from burnish.algorithms.kl import AdaptiveKl, FixedKl, KlController
from burnish.config import (
    EvaluateConfig,
    JobConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    dump_yaml,
)
from burnish.config.algorithm import GaeAdvantage, KlConfig
from burnish.config.model import CriticConfig, ModelConfig
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.config.rollout import EvalConfig, LocalEngine, SamplingConfig
from burnish.data.preference import PreferenceStream, load_pairs
from burnish.data.prompts import PromptStream, load_prompts
from burnish.data.sft import SFTStream, load_rows
from burnish.loops.evaluate import Evaluator
from burnish.loops.objectives import (
    policy_objective,
    reward_model_objective,
    sft_objective,
    value_objective,
)
from burnish.loops.reward_model import measure_pairs
from burnish.loops.rl import RL, Reference, RLState, rl_step
from burnish.loops.session import RunError, Session, prepare_run_dir
from burnish.loops.sft import measure_sft
from burnish.loops.supervised import Supervised, SupervisedState, supervised_eval, supervised_step
from burnish.models.load import load_causal_lm, load_tokenizer, resolve_device
from burnish.models.value_head import load_scalar_model
from burnish.observe.metrics import MetricsLog
from burnish.observe.report import build_report
from burnish.observe.samples import write_samples
from burnish.observe.timeline import Timeline, timed
from burnish.rewards.base import RewardSet
from burnish.rewards.build import build_rewards
from burnish.rewards.model import load_model_reward
from burnish.rollout.base import Sampling
from burnish.rollout.local import LocalRolloutEngine
from burnish.rollout.runner import Runner
from burnish.sync.inproc import InprocSync
from burnish.train.base import Role
from burnish.train.torch import EngineSpec, TorchTrainEngine
from burnish.types import Group

Functions = Callable[..., Any] | Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class RunResult:
    """Where a run is and how it ended."""

    run_dir: Path
    metrics: dict[str, float]
    """The last value of every metric."""


def run(
    config: JobConfig, *, resume: Path | str | None = None, rewards: Functions | None = None
) -> RunResult:
    """Run a job to its end.

    ``rewards``: a callable, or several by the names of the recipe's function rewards. ``resume``: the folder of
    a run to go on with. Raises RunError, DataError, ModelError, RewardError or CheckpointError with what to do,
    and Interrupted after a signal (the run is saved then).
    """
    folder = Path(resume) if resume is not None else None
    functions = {"": rewards} if callable(rewards) else dict(rewards or {})
    _seed_everything(config.seed)
    if isinstance(config, RLConfig):
        return _run_rl(config, folder, functions)
    if isinstance(config, EvaluateConfig):
        return _run_evaluate(config, functions)
    assert isinstance(config, (SFTConfig, RewardModelConfig))
    return _run_supervised(config, folder)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


# ---- reinforcement learning --------------------------------------------------------------------


def _run_rl(config: RLConfig, resume: Path | None, functions: dict[str, Any]) -> RunResult:
    run_dir = prepare_run_dir(config, resume)
    metric = "eval/pass@1" if config.eval is not None else "reward/mean"
    with Session(config, run_dir, total_steps=config.max_steps, best_metric=metric) as session:
        parts, evaluator = build_rl(config, session, functions)
        try:
            metrics = session.run(
                RLState(parts),
                step=lambda step: rl_step(parts, step),
                evaluate=evaluator.evaluate if evaluator is not None else None,
                eval_every=config.eval.every_n_steps if config.eval is not None else 0,
            )
        finally:
            parts.runner.rewards.close()
    build_report(run_dir)
    return RunResult(run_dir, metrics)


def build_rl(
    config: RLConfig, session: Session, functions: dict[str, Any]
) -> tuple[RL, Evaluator | None]:
    """The parts of an RL run, timed on the session's timeline, and its evaluator."""
    timeline = session.timeline
    tokenizer = load_tokenizer(config.model)
    prompts = PromptStream(config.data, tokenizer, seed=config.seed)
    held_out = (
        load_prompts(config.eval.data, tokenizer, limit=config.eval.num_prompts)
        if config.eval is not None
        else None
    )
    scores = build_rewards(
        config.rewards,
        functions=functions,
        model_reward=lambda c: load_model_reward(
            c, tokenizer, dtype=config.precision.dtype, device=config.train.engine.device
        ),
    )
    policy = _policy_engine(config, tokenizer)
    rollout = _rollout_engine(config, policy, tokenizer)
    kl = _kl_controller(config.algorithm.kl)
    sync = InprocSync(policy, rollout)
    timed_policy = timed(policy, timeline, {"logprobs": "logprobs", "forward_backward": "train", "optim_step": "optim"})
    timed_rollout = timed(rollout, timeline, {"generate": "rollout"})
    rewards = timed(
        RewardSet(
            scores,
            on_failure=config.on_reward_failure,
            shaping=config.shaping,
            generate_max_len=config.rollout.generate_max_len,
        ),
        timeline,
        {"score": "reward"},
    )
    uses_critic = isinstance(config.algorithm.advantage, GaeAdvantage)
    critic_config = config.critic or CriticConfig()
    critic = _critic_engine(config, critic_config, tokenizer) if uses_critic else None
    parts = RL(
        config=config,
        prompts=prompts,
        runner=Runner(
            timed_rollout,
            rewards,
            _sampling(config.rollout),
            num_samples=config.rollout.n_samples_per_prompt,
            seed=config.seed,
        ),
        policy=timed_policy,
        policy_loss=policy_objective(
            config.algorithm,
            max_len=config.rollout.generate_max_len,
            kl_coef=lambda: kl.coef,
        ),
        kl=kl,
        sync=timed(sync, timeline, {"push": "sync"}),
        keep_samples=lambda step, groups, advantages: _keep(session, step, groups, advantages),
        reference=_reference(config, policy, timeline),
        critic=critic and timed(critic, timeline, {"values": "values", "forward_backward": "critic", "optim_step": "critic"}),
        value_loss=value_objective(value_clip=critic_config.value_clip) if uses_critic else None,
    )
    if config.eval is None or held_out is None:
        return parts, None
    eval_engine = timed(rollout, timeline, {"generate": "eval"})
    rewards_plain = RewardSet(
        scores,
        on_failure=config.on_reward_failure,
        shaping=ShapingConfig(),
        generate_max_len=config.rollout.generate_max_len,
    )
    evaluator = Evaluator(
        config.eval,
        held_out,
        Runner(
            eval_engine,
            rewards_plain,
            _eval_sampling(config.eval, config.rollout),
            num_samples=config.eval.n_samples_per_prompt,
            seed=config.seed,
        ),
        lambda step, groups: _keep(session, step, groups, None),
    )
    return parts, evaluator


def _policy_engine(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> TorchTrainEngine:
    device = resolve_device(config.train.engine.device)
    model = load_causal_lm(config.model, dtype=config.precision.dtype, device=device)
    return TorchTrainEngine(model, _spec(config, "policy"), tokenizer=tokenizer)


def _critic_engine(
    config: RLConfig, critic: CriticConfig, tokenizer: PreTrainedTokenizerBase
) -> TorchTrainEngine:
    source = critic.model or config.model
    model = load_scalar_model(
        source,
        dtype=config.precision.dtype,
        device=resolve_device(config.train.engine.device),
        seed=config.seed,
        new_head=True,
    )
    spec = replace(_spec(config, "critic"), model=source, lr=critic.lr)
    return TorchTrainEngine(model, spec, tokenizer=tokenizer)


def _spec(config: RLConfig, role: Role) -> EngineSpec:
    plan = config.batch_plan()
    updates = plan.optimizer_steps_per_rollout
    assert updates is not None
    return EngineSpec(
        role=role,
        train=config.train,
        model=config.model,
        micro_batch_size=plan.micro_train_batch_size,
        total_steps=config.max_steps * updates,
        temperature=config.rollout.temperature,
        with_entropy=role == "policy",
    )


def _rollout_engine(
    config: RLConfig, policy: TorchTrainEngine, tokenizer: PreTrainedTokenizerBase
) -> LocalRolloutEngine:
    wanted = config.precision.rollout_dtype or config.precision.dtype
    model = policy.model
    if wanted != config.precision.dtype:
        base = config.model.model_copy(update={"lora": None})
        model = load_causal_lm(base, dtype=wanted, device=policy.device)
        model.requires_grad_(False)
    return LocalRolloutEngine(model, tokenizer, config.rollout.engine)  # type: ignore[arg-type]


def _reference(config: RLConfig, policy: TorchTrainEngine, timeline: Timeline) -> Reference | None:
    if not config.algorithm.kl.init_kl_coef:
        return None
    names = {"logprobs": "reference"}
    own = config.reference.model if config.reference is not None else None
    if own is None and config.model.lora is not None:
        return Reference(timed(policy, timeline, names), policy.reference)
    source = own or config.model
    model = load_causal_lm(source, dtype=config.precision.dtype, device=policy.device)
    spec = replace(_spec(config, "reference"), model=source, trainable=False)
    engine = TorchTrainEngine(model, spec)
    return Reference(timed(engine, timeline, names), engine.reference)


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
        top_p=1.0,
        top_k=0,
    )


def _keep(
    session: Session, step: int, groups: Sequence[Group], advantages: dict[str, float] | None
) -> None:
    write_samples(
        session.run_dir,
        step,
        groups,
        advantages,
        limit=session.config.observe.samples_per_step,
        split="eval" if advantages is None else "train",
    )


# ---- supervised jobs ---------------------------------------------------------------------------


def _run_supervised(config: SFTConfig | RewardModelConfig, resume: Path | None) -> RunResult:
    run_dir = prepare_run_dir(config, resume)
    tokenizer = load_tokenizer(config.model)
    stream, eval_batch = _supervised_data(config, tokenizer)
    plan = config.batch_plan()
    by_epochs = max(1, len(stream) * config.max_epochs // plan.train_batch_size)
    total = min(by_epochs, config.max_steps or by_epochs)
    with Session(config, run_dir, total_steps=total, best_metric="eval/loss") as session:
        engine = _supervised_engine(config, tokenizer, total_steps=total)
        names = {"forward_backward": "train", "optim_step": "optim", "logprobs": "eval", "values": "eval"}
        sft = isinstance(config, SFTConfig)
        parts = Supervised(
            stream=timed(stream, session.timeline, {"next": "data"}),
            engine=timed(engine, session.timeline, names),
            loss=sft_objective() if sft else reward_model_objective(),
            batch_size=plan.train_batch_size,
            measure=measure_sft if sft else measure_pairs,
            eval_batch=eval_batch,
        )
        metrics = session.run(
            SupervisedState(parts, engine.role),
            step=lambda step: supervised_step(parts, step),
            evaluate=(lambda step: supervised_eval(parts, step)) if eval_batch is not None else None,
            eval_every=config.eval_every_n_steps,
        )
    build_report(run_dir)
    return RunResult(run_dir, metrics)


def _supervised_data(config: SFTConfig | RewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    if isinstance(config, SFTConfig):
        held_out = load_rows(config.eval_data, tokenizer) if config.eval_data else None
        return SFTStream(config.data, tokenizer, seed=config.seed), held_out
    pairs = load_pairs(config.eval_data, tokenizer) if config.eval_data else None
    return PreferenceStream(config.data, tokenizer, seed=config.seed), pairs


def _supervised_engine(
    config: SFTConfig | RewardModelConfig, tokenizer: PreTrainedTokenizerBase, *, total_steps: int
) -> TorchTrainEngine:
    device = resolve_device(config.train.engine.device)
    dtype = config.precision.dtype
    sft = isinstance(config, SFTConfig)
    spec = EngineSpec(
        role="policy" if sft else "reward",
        train=config.train,
        model=config.model,
        micro_batch_size=config.batch_plan().micro_train_batch_size,
        total_steps=total_steps,
        with_entropy=False,
    )
    if sft:
        model = load_causal_lm(config.model, dtype=dtype, device=device)
        return TorchTrainEngine(model, spec, tokenizer=tokenizer)
    scalar = load_scalar_model(config.model, dtype=dtype, device=device, seed=config.seed, new_head=True)
    return TorchTrainEngine(scalar, spec, tokenizer=tokenizer)


# ---- evaluation --------------------------------------------------------------------------------


def _run_evaluate(config: EvaluateConfig, functions: dict[str, Any]) -> RunResult:
    run_dir = prepare_run_dir(config, None)
    (run_dir / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.eval.data, tokenizer, limit=config.eval.num_prompts)
    device = resolve_device("auto")
    dtype = config.precision.rollout_dtype or config.precision.dtype
    model = load_causal_lm(config.model, dtype=dtype, device=device)
    assert config.eval.generate_max_len is not None
    rewards = RewardSet(
        build_rewards(
            config.rewards,
            functions=functions,
            model_reward=lambda c: load_model_reward(c, tokenizer, dtype=config.precision.dtype, device="auto"),
        ),
        on_failure=FailurePolicy(),
        shaping=ShapingConfig(),
        generate_max_len=config.eval.generate_max_len,
    )
    sampling = Sampling(
        max_tokens=config.eval.generate_max_len,
        temperature=config.eval.temperature,
        stop=config.eval.stop or (),
    )
    engine = LocalRolloutEngine(model, tokenizer, config.engine)
    runner = Runner(
        engine, rewards, sampling, num_samples=config.eval.n_samples_per_prompt, seed=config.seed
    )

    def keep(step: int, groups: Sequence[Group]) -> None:
        write_samples(run_dir, step, groups, None, limit=1_000_000, split="eval")

    try:
        metrics = Evaluator(config.eval, prompts, runner, keep).evaluate(0)
    finally:
        rewards.close()
    log = MetricsLog(run_dir)
    log.log(0, metrics)
    log.close()
    build_report(run_dir)
    return RunResult(run_dir, metrics)
