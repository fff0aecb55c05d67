"""The job ``rl``: build the components of :func:`burnish.steps.rl.rl_step` from a recipe."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from burnish.algorithms.kl import AdaptiveKl, FixedKl, KlController
from burnish.config import RLConfig
from burnish.config.off_policy import records_sampling_mask
from burnish.config.train import CriticConfig
from burnish.data.batches import BatchStream
from burnish.data.prompts.encode import PromptStream
from burnish.driver.base import EvalTimes, Functions, Job, Loop, Metrics, Usable, seed_everything
from burnish.driver.errors import RunError
from burnish.driver.memory_monitor import MemoryMonitor
from burnish.driver.records import Recorder
from burnish.driver.trainer import Trainer
from burnish.episodes.runner import EpisodePool
from burnish.jobs.build import (
    engine_specs,
    log_disabled_noise,
    reward_set,
    sampling_of,
    weighted_rewards,
)
from burnish.jobs.episodes import RunnerOptions, build_episode_pool, closed_on_error, make_runner
from burnish.jobs.evaluate import (
    Evaluator,
    eval_rewards,
    eval_sampling,
    held_out_prompts,
    keep_samples,
    longest_row,
)
from burnish.observe.sample_tokens import TokenTexts
from burnish.observe.timeline import SAMPLER, SCORING, Timeline, timed
from burnish.preflight.limits import limited, vocab_size_of
from burnish.preflight.usable import count_prompts, usable_prompts
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.asynchronous.evaluation_lane import Sampler, ServiceEngine
from burnish.rollout.asynchronous.schedule import ScheduleLimits
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.asynchronous.source import AsyncOptions, AsyncSource
from burnish.rollout.base import RolloutEngine, Sampling, wait_for_engine
from burnish.rollout.runner import GroupFilter, Runner
from burnish.rollout.source import RolloutSource, SyncSource
from burnish.rollout.weights import NUM_SAMPLES, check_logprobs, probe_requests
from burnish.runtime.base import Runtime
from burnish.steps.kept_samples import SampleWriter
from burnish.steps.moving_reference import moving_reference
from burnish.steps.no_signal import NoSignalMonitor, warn_without_labels
from burnish.steps.objectives import (
    policy_objective,
    ptx_objective,
    value_objective,
    with_expert_balance,
)
from burnish.steps.rl import RL, Ptx, RLState, rl_step
from burnish.steps.teacher import make_teacher
from burnish.train.base import FrozenBase, HasLogprobs, Loss, TrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import rows_to_batch

log = logging.getLogger("burnish")

SAMPLER_SPANS = {
    "submit": f"{SAMPLER}/rollout",
    "poll": f"{SAMPLER}/rollout",
    "load_weights": f"{SAMPLER}/load",
}
"""Method of a rollout engine in a thread of its own -> timeline span."""


class RLLoop:
    """The loop of an RL run. Implements ``base.Loop``."""

    def __init__(self, run: RL, evaluator: Evaluator | None) -> None:
        self.run, self.evaluator, self.state = run, evaluator, RLState(run)
        config = run.config
        self.total_steps, self.usable = config.num_steps, Usable()
        self.eval_times = EvalTimes()
        if config.eval is not None:
            self.eval_times = EvalTimes(config.eval.every_n_steps, config.eval.delay_steps)
        self.best_metric = "reward/mean" if evaluator is None else "eval/pass@1"
        self._gap_logged = config.precision.sampler_dtype == config.precision.dtype

    def step(self, number: int) -> Metrics:
        """Run one step. The first step also logs the log-prob gap between trainer and sampler, if
        they use different number formats."""
        if self.run.moving is not None:
            self.run.moving.before_step(number)
        metrics = rl_step(self.run, number)
        if not self._gap_logged and "train/mismatch_abs" in metrics:
            self._gap_logged = True
            precision = self.run.config.precision
            log.warning(
                "precision.rollout_dtype: at step %d, log-probs of the trainer (%s) and of the "
                "rollout engine (%s) differ by %.2g nats per token on average and by at most %.2g; "
                "k3 KL %.2g",
                *(number, precision.dtype, precision.sampler_dtype),
                metrics["train/mismatch_abs"],
                metrics["train/mismatch_max"],
                metrics["train/mismatch_k3"],
            )
        return metrics

    def evaluate(self, number: int) -> Metrics:
        """Measure the held-out prompts, if there are any."""
        if self.evaluator is None:
            return {}
        with self.run.source.evaluating():
            return self.evaluator.evaluate(number)

    def close(self) -> None:
        """Close the source with its rewards and its rollout engine."""
        self.run.signal.log_total()
        self.run.source.close()


def build_rl(
    config: RLConfig, runtime: Runtime, functions: Functions, run_dir: Path
) -> tuple[RL, Evaluator | None]:
    """Return the components of an RL run and its evaluator. Data, environments and rewards are
    built first, because their errors are detected in the least time."""
    episode_pool = build_episode_pool(config.rollout.episodes, config.model, runtime)
    with closed_on_error(episode_pool):
        return _build(config, runtime, functions, run_dir, episode_pool)


def _build(
    config: RLConfig,
    runtime: Runtime,
    functions: Functions,
    run_dir: Path,
    episode_pool: EpisodePool | None,
) -> tuple[RL, Evaluator | None]:
    new_tokens = config.row_lengths.rest
    data = limited(config, config.data)
    in_episodes = episode_pool is not None
    prompts = PromptStream(data, runtime.tokenizer, seed=config.seed, in_episodes=in_episodes)
    held_out = held_out_prompts(config.eval, config, runtime.tokenizer, in_episodes=in_episodes)
    ptx = make_ptx(config, runtime)
    wait_for_engine(config.rollout.engine)
    scores = weighted_rewards(
        config.rewards,
        runtime,
        functions,
        engine=config.train.engine,
        offload="reward" in config.cluster.offload_between_phases,
    )
    policy = make_policy(config, runtime)
    longest = max(data.prompt_max_len + new_tokens, longest_row(config.eval, new_tokens))
    rollout = runtime.rollout(policy, config.rollout.engine, max_len=longest)
    running = {
        reward.name: entry.running_norm
        for entry, (reward, _) in zip(config.rewards, scores, strict=True)
        if entry.running_norm is not None
    }
    rewards = reward_set(
        scores,
        on_failure=config.on_reward_failure,
        max_len=new_tokens,
        shaping=config.shaping,
        running=running,
    )
    warn_without_labels(
        [prompt for held_out_set in held_out.values() for prompt in held_out_set], rewards
    )
    runner = _runner(config, rollout, rewards, episode_pool, runtime.timeline)
    source, eval_engine = _source(config, prompts, runner, rollout, policy=policy, runtime=runtime)
    check_first_weights(config, rollout, eval_engine, policy=policy, runtime=runtime)
    parts = make_rl(config, runtime, run_dir=run_dir, policy=policy, source=source, ptx=ptx)
    parts = replace(parts, record=Recorder(config, run_dir, source, runtime.timeline))
    if config.eval is None:
        return parts, None
    sampling = eval_sampling(config.eval, config.rollout)
    eval_runner = make_runner(
        eval_engine,
        eval_rewards(scores, config.on_reward_failure, sampling),
        sampling,
        episode_pool,
        timeline=runtime.timeline,
        options=RunnerOptions(config.eval.n_samples_per_prompt, config.seed, phase="eval"),
    )
    keep = keep_samples(
        run_dir, TokenTexts(runtime.tokenizer), count=config.observe.samples_with_tokens
    )
    return parts, Evaluator(config.eval, held_out, eval_runner, keep)


def make_policy(config: RLConfig, runtime: Runtime) -> TrainEngine:
    """Return the policy. The random weights of new adapters depend only on the run's seed, not on
    the components that were built before."""
    log_disabled_noise(config.model, "policy")
    seed_everything(config.seed)
    return runtime.language_model(_specs(config)["policy"])


def make_rl(
    config: RLConfig,
    runtime: Runtime,
    *,
    run_dir: Path,
    policy: TrainEngine,
    source: RolloutSource,
    ptx: Ptx | None,
) -> RL:
    """Return the components of a run, with the models that its policy is trained with."""
    specs = _specs(config)
    init, adaptive = config.algorithm.kl.init_kl_coef, config.algorithm.kl.adaptive
    kl: KlController = FixedKl(init)
    if adaptive is not None:
        kl = AdaptiveKl(init, target=adaptive.target, horizon=adaptive.horizon)
    objective = policy_objective(
        config.algorithm,
        max_len=config.row_lengths.rest,
        kl_coef=lambda: kl.coef,
        max_staleness=config.rollout.max_staleness,
    )
    critic, value_loss = _critic(config, specs.get("critic"), runtime)
    reference: HasLogprobs | None = None
    if (spec := specs.get("reference")) is not None:
        reference = runtime.language_model(spec, {"logprobs": "reference", "mix": "reference"})
    elif config.holds_reference:
        reference = FrozenBase(policy)
    teacher = specs.get("teacher")
    writer = SampleWriter(run_dir, config, policy, TokenTexts(runtime.tokenizer))
    return RL(
        config=config,
        source=source,
        policy=policy,
        policy_loss=with_expert_balance(objective, config.train.moe_aux_loss_coef),
        kl=kl,
        keep_samples=timed(writer, runtime.timeline, {"write": "samples"}).write,
        reference=reference,
        moving=moving_reference(config.reference, policy, reference, runtime.loop_ranks),
        teacher=None if teacher is None else make_teacher(teacher, config.model, runtime),
        critic=critic,
        freeze_policy_steps=(config.critic or CriticConfig()).freeze_policy_steps,
        value_loss=value_loss,
        ptx=ptx,
        signal=NoSignalMonitor(config.train.max_steps_without_signal),
    )


def _source(
    config: RLConfig,
    prompts: PromptStream,
    runner: Runner,
    engine: RolloutEngine,
    *,
    policy: TrainEngine,
    runtime: Runtime,
) -> tuple[RolloutSource, Sampler]:
    """Return the source of groups, and the engine for evaluations. The weights are transferred."""
    rollout, timeline = config.rollout, runtime.timeline
    size, sleeps = rollout.rollout_batch_size, rollout.engine.sleeps
    if sleeps and config.cluster.offload_between_phases:  # make room for the first transfer
        engine.sleep(new_weights_follow=True)
    sync = runtime.sync(policy, engine, config.sync)
    asynchronous = rollout.asynchronous
    if asynchronous is None:
        sleeping_engine = engine if sleeps else None
        source = SyncSource(
            prompts, runner, sync, groups_per_step=size, sleeping_engine=sleeping_engine
        )
        return source, runner.engine
    service = RolloutService(timed(engine, timeline, SAMPLER_SPANS))
    options = AsyncOptions(
        ScheduleLimits(
            groups_per_step=size,
            slots=asynchronous.capacity(size),
            max_staleness=asynchronous.max_staleness,
            total_steps=config.num_steps,
            max_refills=runner.max_refills,
        ),
        in_flight=asynchronous.in_flight,
        overlaps=asynchronous.overlaps,
        evaluation="continue" if config.eval is None else config.eval.training_groups,
        vocab_size=vocab_size_of(config.model),
    )
    ahead = AsyncSource(prompts, runner, service, sync, lambda: policy.version, options)
    return timed(ahead, timeline, {"next": "wait"}), ServiceEngine(service)


def _runner(
    config: RLConfig,
    engine: RolloutEngine,
    rewards: RewardSet,
    episode_pool: EpisodePool | None,
    timeline: Timeline,
) -> Runner:
    overlaps = config.rollout.asynchronous is not None  # scored in a thread of its own
    return make_runner(
        engine,
        timed(rewards, timeline, {"measure": f"{SCORING}/reward" if overlaps else "reward"}),
        replace(
            sampling_of(config.rollout),
            sampling_mask=records_sampling_mask(config.algorithm, config.rollout),
        ),
        episode_pool,
        timeline=timeline,
        options=RunnerOptions(
            config.rollout.n_samples_per_prompt,
            config.seed,
            dynamic=_group_filter(config),
        ),
    )


def _group_filter(config: RLConfig) -> GroupFilter | None:
    dynamic = config.rollout.dynamic_sampling
    each = config.algorithm.advantage.normalizes_each or any(
        entry.running_norm is not None and entry.weight for entry in config.rewards
    )
    return None if dynamic is None else GroupFilter(dynamic, each_reward=each)


def _critic(
    config: RLConfig, spec: EngineSpec | None, runtime: Runtime
) -> tuple[TrainEngine | None, Loss | None]:
    if spec is None:
        return None, None
    critic_config = config.critic or CriticConfig()
    if critic_config.model is not None:
        log_disabled_noise(critic_config.model, "critic")
    critic = runtime.scalar_model(spec, seed=config.seed)
    return critic, value_objective(value_clip=critic_config.value_clip)


def make_ptx(config: RLConfig, runtime: Runtime) -> Ptx | None:
    """Return the pre-training rows of a recipe, if there are any."""
    if config.ptx is None:
        return None
    data = limited(config, config.ptx.data, field="ptx.data")
    stream = BatchStream(data, runtime.tokenizer, seed=config.seed, section="ptx.data")
    return Ptx(
        timed(stream, runtime.timeline, {"next": "data"}),
        config.ptx.batch_size,
        ptx_objective(config.ptx.ptx_coef),
    )


def _specs(config: RLConfig) -> dict[str, EngineSpec]:
    updates = config.batch_plan().optimizer_steps_per_rollout
    assert updates is not None
    frozen = 0 if config.critic is None else config.critic.freeze_policy_steps
    specs = engine_specs(
        config, total_steps=config.num_steps * updates, temperature=config.rollout.temperature
    )
    policy_updates = (config.num_steps - frozen) * updates
    return specs | {"policy": replace(specs["policy"], total_steps=policy_updates)}


class RLJob(Job[RLConfig, Loop]):
    """The job ``rl``."""

    config_class = RLConfig
    takes_rewards = True

    def counted(self, config: RLConfig) -> RLConfig:
        """Return a recipe with ``max_epochs`` with its ``max_steps``. Raises DataError if the
        prompts cannot be counted, and RunError if the number of steps does not fit the recipe."""
        if config.max_epochs is None:
            return config
        num = count_prompts(config)
        counted = config.with_steps(num)
        if problems := counted.broken_rules():
            raise RunError("\n".join(problems))
        log.info(
            "max_epochs=%d over %d prompts: max_steps=%d", config.max_epochs, num, counted.num_steps
        )
        return counted

    def driver(self, config: RLConfig, run_dir: Path, memory_monitor: MemoryMonitor) -> Trainer:
        return Trainer(config, run_dir, memory_monitor)

    def build(
        self, config: RLConfig, runtime: Runtime, *, run_dir: Path, functions: Functions
    ) -> Loop:
        loop = RLLoop(*build_rl(config, runtime, functions, run_dir))
        loop.usable = usable_prompts(config)
        return loop


JOB = RLJob()


def check_first_weights(
    config: RLConfig,
    engine: RolloutEngine,
    sampler: Sampler,
    *,
    policy: TrainEngine,
    runtime: Runtime,
) -> None:
    """Raise StaleWeightsError if the log-probs of ``sampler``, the engine with the weights of
    ``policy``, are not those of ``policy``. The local engine computes with transformers and is not
    checked."""
    rollout = config.rollout
    if rollout.engine.uses_transformers:
        return
    size = min(len(runtime.tokenizer), vocab_size_of(config.model) or len(runtime.tokenizer))
    limit = sampler.max_len or config.data.prompt_max_len + config.row_lengths.rest
    ranks = config.cluster.ranks("policy") or 1
    requests = probe_requests(size, max_len=limit, num_samples=max(NUM_SAMPLES, ranks))
    sampling = Sampling(requests[0].max_tokens or 1, rollout.temperature)
    by_request = {c.request_id: c for c in sampler.generate(requests, sampling)}
    completions = [by_request[request.request_id] for request in requests]
    if rollout.engine.sleeps:
        engine.sleep()
    length = len(requests[0].prompt_ids)
    rows = [[*r.prompt_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
    masks = [[i >= length for i in range(len(row))] for row in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[length] * len(rows))
    logprobs = policy.logprobs(batch)[batch.action_mask]
    expected = logprobs.split([len(c.token_ids) for c in completions])
    check_logprobs(
        completions,
        expected,
        temperature=rollout.temperature,
        dtypes=(config.precision.dtype, config.precision.sampler_dtype),
    )
