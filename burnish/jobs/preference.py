"""Policies from preferences (DPO and its family). The loop is in ``supervised.py``. This file
contains the loss and the preparation of batches: the reference's log-probs and, for KTO, its
reference point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms import PREFERENCE_LOSSES
from burnish.algorithms.preference import mismatched_kl
from burnish.algorithms.reduce import sum_by_row
from burnish.config import PreferenceConfig
from burnish.config.algorithm import KtoLoss, PreferenceLossConfig
from burnish.config.data import PreferenceDataConfig
from burnish.data.preference import PreferenceStream, load_pairs
from burnish.data.unpaired import SplitPairsStream, UnpairedStream, load_unpaired, mismatched_pairs
from burnish.jobs.build import (
    engine_specs,
    held_out_sets,
    log_disabled_noise,
    within_positions,
)
from burnish.jobs.degenerate import NoSignalMonitor, label_signal, pair_signal
from burnish.jobs.kto_batches import KtoBatches, newest_checkpoint
from burnish.jobs.objectives import with_expert_balance
from burnish.jobs.reference_cache import compute as compute_cache
from burnish.jobs.reference_cache import load as load_cache
from burnish.jobs.reference_cache import save as save_cache
from burnish.jobs.run_dir import REFERENCE_FILE
from burnish.jobs.supervised import Supervised, SupervisedTraining
from burnish.observe.timeline import timed
from burnish.runtime.base import Runtime
from burnish.tensors import masked_sum
from burnish.train.base import HasLogprobs, Loss, Outputs, TrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats

log = logging.getLogger("burnish")

WITHOUT_REFERENCE = frozenset({"simpo", "orpo"})

Prepare = Callable[[Batch], Batch]


def preference_objective(config: PreferenceLossConfig, *, nll_coef: float = 0.0) -> Loss:
    """Return the loss of a recipe, as a mean over all pairs (KTO: responses) of the step."""
    if isinstance(config, KtoLoss):
        return _kto_objective(config)
    return _pair_objective(config, nll_coef)


def _pair_objective(config: PreferenceLossConfig, nll_coef: float) -> Loss:
    options = config.model_dump(exclude={"kind", "mean_logprobs"})
    function = PREFERENCE_LOSSES[config.kind]
    with_reference = config.kind not in WITHOUT_REFERENCE
    by_mean = not with_reference or config.model_dump().get("mean_logprobs", False)

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        policy, counts = _sums(outputs.logprobs, batch)
        measured = policy / counts if by_mean else policy
        reference = torch.zeros_like(policy)
        if with_reference:
            reference = _sums(batch.ref_logprobs, batch)[0]
            reference = reference / counts if by_mean else reference
        sides = [measured[0::2], measured[1::2]]
        if with_reference:
            sides += [reference[0::2], reference[1::2]]
        losses = function(*sides, **options)
        nll = -(policy / counts)[0::2]
        num_pairs = batch.num_sequences / batch.rows_per_unit
        loss = (losses + nll_coef * nll).sum() / num_pairs if nll_coef else losses.sum() / num_pairs
        rewards = (options["beta"] * (measured - reference)).detach()
        stats = _pair_stats(rewards, policy.detach(), nll.detach())
        return loss, stats + Stats(sums={"loss": loss.detach()})

    return objective


def _pair_stats(rewards: Tensor, sums: Tensor, nll: Tensor) -> Stats:
    """Return the policy's implicit rewards and log-probs of chosen and rejected responses."""
    gap, count = rewards[0::2] - rewards[1::2], nll.numel()
    return Stats(
        means={
            "accuracy": ((gap > 0).float().sum(), count),
            "reward_margin": (gap.sum(), count),
            "reward_chosen": (rewards[0::2].sum(), count),
            "reward_rejected": (rewards[1::2].sum(), count),
            "logprob_chosen": (sums[0::2].sum(), count),
            "logprob_rejected": (sums[1::2].sum(), count),
            "nll": (nll.sum(), count),
        }
    )


def _kto_objective(config: KtoLoss) -> Loss:
    options = config.model_dump(exclude={"kind"})

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert batch.labels is not None
        policy, reference = (_sums(x, batch)[0] for x in (outputs.logprobs, batch.ref_logprobs))
        liked = batch.labels.to(policy.device)
        losses = PREFERENCE_LOSSES["kto"](policy, reference, liked, kl=batch.kl_estimate, **options)
        loss = losses.sum() / batch.num_sequences
        rewards = (config.beta * (policy - reference)).detach()
        stats = Stats(
            means={
                "reward_desirable": (masked_sum(rewards, liked), liked.sum()),
                "reward_undesirable": (masked_sum(rewards, ~liked), (~liked).sum()),
                "accuracy": (((rewards > 0) == liked).float().sum(), liked.numel()),
                "kl_estimate": (batch.kl_estimate * liked.numel(), liked.numel()),
            },
            sums={"loss": loss.detach()},
        )
        return loss, stats

    return objective


def preparation(
    config: PreferenceLossConfig,
    policy: HasLogprobs,
    reference: HasLogprobs | None,
    *,
    max_len: int,
) -> Prepare:
    """Return the function that prepares a batch for its update, or held-out rows for measurement.
    It adds the reference's log-probs and, for KTO, the KL estimate. ``max_len``: length limit of
    the batch's data."""

    def prepare(batch: Batch) -> Batch:
        if reference is None:
            return batch
        if isinstance(config, KtoLoss):
            others = mismatched_pairs(batch, max_len=max_len)
            sums = (_sums(x.logprobs(others), others)[0] for x in (policy, reference))
            batch = replace(batch, kl_estimate=float(mismatched_kl(*sums)))
        return replace(batch, ref_logprobs=reference.logprobs(batch))

    return prepare


def measure_preferences(loss: Loss, prepare: Prepare) -> Callable[[TrainEngine, Batch], Stats]:
    """Return a function that measures loss and stats of held-out rows, without gradient."""

    def measure(engine: TrainEngine, batch: Batch) -> Stats:
        return loss(Outputs(logprobs=engine.logprobs(batch)), prepare(batch))[1]

    return measure


def _sums(logprobs: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the log-probs of entire responses and their token counts (at least 1): two [N]."""
    assert logprobs is not None, "the batch has no log-probs of the reference model"
    mask = batch.action_mask.to(logprobs.device)
    rows: dict[str, Any] = {
        "row_ids": batch.row_ids.to(logprobs.device),
        "num_rows": batch.num_rows,
    }
    counts = sum_by_row(torch.ones_like(logprobs), mask, **rows)
    return sum_by_row(logprobs, mask, **rows), counts.clamp(min=1)


def build_preference(config: PreferenceConfig, runtime: Runtime, run_dir: Path) -> Supervised:
    """Return the components of a preference run."""
    kto = isinstance(config.loss, KtoLoss)
    data = within_positions(config.data, config.model)
    others = held_out_sets(config.eval_data, config.eval_sets, config.model)
    load = load_unpaired if kto else load_pairs
    held_out = {name: load(rows, runtime.tokenizer) for name, rows in others.items()}
    kind = PreferenceStream if not kto else UnpairedStream if data.label_key else SplitPairsStream
    stream = kind(data, runtime.tokenizer, seed=config.seed)
    total = config.steps_for(stream.num_rows)
    specs = engine_specs(config, total_steps=total)
    log_disabled_noise(config.model, "policy")
    rows: Iterable[Batch] | None = None
    if config.reference is not None and config.reference.precompute:
        held = [(batch, others[name].max_len) for name, batch in held_out.items()]
        if kto:
            rows = KtoBatches(
                open_stream=partial(kind, data, runtime.tokenizer, seed=config.seed),
                batch_size_at=partial(config.batch_size_at, num_rows=stream.num_rows),
                total_steps=total,
                max_len=data.max_len,
                held_out=held,
                checkpoint=runtime.loop_ranks.from_first(partial(newest_checkpoint, run_dir)),
            )
        else:
            rows = [load_pairs(data, runtime.tokenizer), *(batch for batch, _ in held)]
    reference, policy = _preference_engines(config, specs, runtime, run_dir, rows=rows)

    def prepare_within(rows: PreferenceDataConfig) -> Prepare:
        return preparation(config.loss, policy, reference, max_len=rows.max_len)

    loss = preference_objective(config.loss, nll_coef=config.nll_coef)
    return Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        engine=policy,
        loss=with_expert_balance(loss, config.train.moe_aux_loss_coef),
        total_steps=total,
        batch_size_at=partial(config.batch_size_at, num_rows=stream.num_rows),
        measure=measure_preferences(loss, prepare_within(others.get("", data))),
        eval_batches=held_out,
        prepare=prepare_within(data),
        signal=NoSignalMonitor(config.train.max_steps_without_signal),
        look=label_signal if kto else pair_signal,
    )


def _preference_engines(
    config: PreferenceConfig,
    specs: Mapping[str, EngineSpec],
    runtime: Runtime,
    run_dir: Path,
    *,
    rows: Iterable[Batch] | None,
) -> tuple[HasLogprobs | None, TrainEngine]:
    """Return the reference and the policy. If ``rows`` is not None, the reference is a cache of its
    log-probs of them. A separate reference model is released before the policy is created if only
    its log-probs are needed."""
    kto = isinstance(config.loss, KtoLoss)  # needs log-probs in every step; others in evaluation
    spans = {"forward_backward": "train", "optim_step": "optim"}
    spans["logprobs"] = "logprobs" if kto else "eval"
    separate = specs.get("reference")
    of, dtype = config.model if separate is None else separate.model, config.precision.dtype
    kept_in, begun = run_dir / REFERENCE_FILE, any((run_dir / "checkpoints").glob("step_*"))
    cached = None
    if rows is not None:
        cached = load_cache(kept_in, rows, model=of, dtype=dtype, begun=begun, by_batch=kto)
    if runtime.loop_ranks.any(cached is None):  # all ranks compute, or none
        cached = None
    reference: HasLogprobs | None = cached
    policy: TrainEngine | None = None
    if cached is not None or not config.needs_reference:
        return reference, runtime.language_model(specs["policy"], spans)
    if separate is None:
        policy = runtime.language_model(specs["policy"], spans)
        reference = runtime.frozen_base(policy)
    else:
        reference = runtime.language_model(separate, {"logprobs": "reference"})
    if rows is not None:
        log.info("computing the log-probs of the reference before the first step")
        at_once = None if kto else 2 * config.batch_plan().train_batch_size
        cache = compute_cache(reference, rows, at_once)
        log.info("computed the reference log-probs of %d rows", len(cache))
        if runtime.loop_ranks.rank == 0:
            save_cache(cache, kept_in, model=of, dtype=dtype)
        runtime.release(reference)
        reference = cache
    return reference, policy or runtime.language_model(specs["policy"], spans)


JOB = SupervisedTraining(PreferenceConfig, build_preference)
