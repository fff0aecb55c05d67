"""Policies from preferences (DPO and its family). The loop is in ``steps/supervised.py``. This file
contains the loss and the preparation of batches: the reference's log-probs and, for KTO, its
reference point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.algorithms import PREFERENCE_LOSSES
from burnish.algorithms.pair_ratios import (
    Divergence,
    desensitized,
    divergence_scores,
    likelihood_weights,
    of_equal_rank,
)
from burnish.algorithms.preference import mismatched_kl
from burnish.algorithms.reduce import sum_by_row
from burnish.checkpoint.save import CheckpointStore
from burnish.checkpoint.state import load_state
from burnish.config import PreferenceConfig
from burnish.config.eval_section import eval_place
from burnish.config.preference_losses import PreferenceLossConfig
from burnish.data.batches import BatchStream, load_batch
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.preferences.unpaired import SplitPairsStream, load_unpaired, mismatched_pairs
from burnish.driver.run_dir import REFERENCE_FILE
from burnish.jobs.build import engine_specs, log_disabled_noise
from burnish.observe.timeline import timed
from burnish.preflight.limits import held_out_sets, limited
from burnish.preflight.usable import usable_rows
from burnish.runtime.base import Runtime
from burnish.steps.moving_reference import moving_reference
from burnish.steps.no_signal import NoSignalMonitor, label_signal, pair_signal
from burnish.steps.objectives import with_expert_balance
from burnish.steps.reference_cache import compute as compute_cache
from burnish.steps.reference_cache import load as load_cache
from burnish.steps.reference_cache import save as save_cache
from burnish.steps.supervised import Supervised, SupervisedTraining
from burnish.tensors import masked_sum
from burnish.train.base import FrozenBase, HasLogprobs, Loss, Outputs, TrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats

log = logging.getLogger("burnish")

Prepare = Callable[[Batch], Batch]

Terms = Sequence[tuple[PreferenceLossConfig, float]]
"""Losses with their weights."""


@dataclass(frozen=True)
class PairOptions:
    """Options of losses on pairs."""

    nll_coef: float = 0.0
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5
    """Order of the divergence ``alpha``."""
    ld_alpha: float = 1.0
    weight_pairs: bool = False


def preference_objective(
    config: PreferenceLossConfig, *, added: Terms = (), **options: Any
) -> Loss:
    """Return the loss of a recipe, plus the ``added`` ones, as a mean over all pairs (KTO:
    responses) of the step. ``options``: those of :class:`PairOptions`."""
    if not config.is_paired:
        return _kto_objective(config)
    return _pair_objective([(config, 1.0), *added], PairOptions(**options))


def _pair_objective(terms: Terms, options: PairOptions) -> Loss:
    losses_of = [(_pair_loss(config, options), weight) for config, weight in terms]
    beta, by_mean = terms[0][0].beta, terms[0][0].by_mean

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        plain, counts = _sums(outputs.logprobs, batch)
        policy, reference = plain, torch.zeros_like(plain)
        if options.ld_alpha != 1:
            policy = _sums(outputs.logprobs, batch, options.ld_alpha)[0]
        if batch.ref_logprobs is not None:
            reference = _sums(batch.ref_logprobs, batch, options.ld_alpha)[0]
        sides = PairLogprobs(policy, reference, counts, batch.pair_terms)
        losses = torch.stack([weight * loss(sides) for loss, weight in losses_of]).sum(0)
        pair_weights = Stats()
        if options.weight_pairs:
            assert batch.pair_terms is not None, "weights of pairs require collision entropies"
            weights = likelihood_weights(plain / counts, batch.pair_terms.to(plain.device))
            losses = losses * weights
            pair_weights = Stats(means={"pair_weight": (weights.sum(), weights.numel())})
        nll = -(plain / counts)[0::2]
        num_pairs = batch.num_sequences / batch.rows_per_unit
        total = losses + options.nll_coef * nll if options.nll_coef else losses
        loss = total.sum() / num_pairs
        rewards = beta * (policy - reference) / (counts if by_mean else 1)
        stats = _pair_stats(rewards.detach(), plain.detach(), nll.detach()) + pair_weights
        return loss, stats + Stats(sums={"loss": loss.detach()})

    return objective


class PairLogprobs(NamedTuple):
    """Log-probs of the responses of pairs, [N] each; row 2i chosen, 2i + 1 rejected."""

    policy: Tensor
    reference: Tensor
    counts: Tensor
    """Number of tokens of each response."""
    matched: Tensor | None
    """Log-ratios of the same rank (AOT)."""


def _pair_loss(
    config: PreferenceLossConfig, options: PairOptions
) -> Callable[[PairLogprobs], Tensor]:
    """Return the function that computes one loss of every pair, [N / 2]."""
    keywords = config.model_dump(exclude={"kind", "mean_logprobs"})
    function = partial(PREFERENCE_LOSSES[config.kind], **keywords)

    def loss(sides: PairLogprobs) -> Tensor:
        policy, reference, counts, matched = sides
        if config.by_mean:
            policy, reference = policy / counts, reference / counts
        if not config.needs_reference:
            return function(policy[0::2], policy[1::2])
        if config.ranks_pairs:
            assert matched is not None, "AOT requires matched log-ratios"
            matched_ratios = matched.to(policy.device)
            if config.kind == "aot":
                return function(policy[0::2] - policy[1::2], matched_ratios[0::2])
            ratios = policy - reference
            return function(ratios[0::2], ratios[1::2], matched_ratios[0::2], matched_ratios[1::2])
        if options.divergence != "reverse_kl":
            policy = divergence_scores(
                policy - reference, divergence=options.divergence, alpha=options.alpha
            )
            reference = torch.zeros_like(policy)
        return function(policy[0::2], policy[1::2], reference[0::2], reference[1::2])

    return loss


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


def _kto_objective(config: PreferenceLossConfig) -> Loss:
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
    ld_alpha: float = 1.0,
    weigh: TrainEngine | None = None,
) -> Prepare:
    """Return the function that prepares a batch for its update, or held-out rows for measurement.
    It adds the reference's log-probs, for KTO the KL estimate, and for AOT the matched log-ratios.
    ``max_len``: length limit of the batch's data. ``weigh``: the policy, if pairs are weighted by
    its likelihood; its collision entropies are added then."""

    def prepare(batch: Batch) -> Batch:
        if weigh is not None:
            entropies, counts = _sums(weigh.entropies(batch), batch)
            batch = replace(batch, pair_terms=entropies / counts)
        if reference is None:
            return batch
        if not config.is_paired:
            others = mismatched_pairs(batch, max_len=max_len)
            sums = (_sums(x.logprobs(others), others)[0] for x in (policy, reference))
            batch = replace(batch, kl_estimate=float(mismatched_kl(*sums)))
        batch = replace(batch, ref_logprobs=reference.logprobs(batch))
        if config.ranks_pairs:
            batch = replace(
                batch, pair_terms=_matched(config.kind, policy.logprobs(batch), batch, ld_alpha)
            )
        return batch

    return prepare


def _matched(kind: str, logprobs: Tensor, batch: Batch, ld_alpha: float) -> Tensor:
    """Return [N] the log-ratio of the same rank in the entire batch. aot: the reference's gap, for
    the policy's gap of each pair. aot_unpaired: the rejected response's log-ratio for each chosen
    one, and the reverse."""
    both = (_sums(x, batch, ld_alpha)[0].cpu() for x in (logprobs, batch.ref_logprobs))
    policy, reference = both
    if kind == "aot":
        gaps, of_reference = (x[0::2] - x[1::2] for x in (policy, reference))
        return of_equal_rank(gaps, of_reference).repeat_interleave(2)
    chosen, rejected = (policy - reference)[0::2], (policy - reference)[1::2]
    pairs = (of_equal_rank(chosen, rejected), of_equal_rank(rejected, chosen))
    return torch.stack(pairs, 1).flatten()


def measure_preferences(loss: Loss, prepare: Prepare) -> Callable[[TrainEngine, Batch], Stats]:
    """Return a function that measures loss and stats of held-out rows, without gradient."""

    def measure(engine: TrainEngine, batch: Batch) -> Stats:
        return loss(Outputs(logprobs=engine.logprobs(batch)), prepare(batch))[1]

    return measure


def _sums(logprobs: Tensor | None, batch: Batch, ld_alpha: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probs of entire responses and their token counts (at least 1): two [N].
    ``ld_alpha``: weight of tokens after the length of the pair's shorter response."""
    assert logprobs is not None, "the batch has no log-probs of the reference model"
    mask = batch.action_mask.to(logprobs.device)
    rows: dict[str, Any] = {
        "row_ids": batch.row_ids.to(logprobs.device),
        "num_rows": batch.num_rows,
    }
    counts = sum_by_row(torch.ones_like(logprobs), mask, **rows)
    if ld_alpha != 1:
        logprobs = desensitized(logprobs, mask, **rows, ld_alpha=ld_alpha)
    return sum_by_row(logprobs, mask, **rows), counts.clamp(min=1)


def build_preference(config: PreferenceConfig, runtime: Runtime, run_dir: Path) -> Supervised:
    """Return the components of a preference run."""
    kto = not config.loss.is_paired
    data = limited(config, config.data)
    others = held_out_sets(config, config.eval)
    load = load_unpaired if kto else load_batch
    held_out = {
        name: load(rows, runtime.tokenizer, section=eval_place(name))
        for name, rows in others.items()
    }
    open_stream = SplitPairsStream if kto and data.label_key is None else BatchStream
    stream = open_stream(data, runtime.tokenizer, seed=config.seed)
    usable = usable_rows(config, stream.num_rows)
    total = config.steps_for(usable.num_rows)
    batch_size_at = partial(config.batch_size_at, num_rows=usable.num_rows)
    specs = engine_specs(config, total_steps=total)
    log_disabled_noise(config.model, "policy")
    rows: Iterable[Batch] | None = None
    if config.reference is not None and config.reference.precompute:
        held = [(batch, others[name].max_len) for name, batch in held_out.items()]
        if kto:
            rows = KtoBatches(
                open_stream=partial(open_stream, data, runtime.tokenizer, seed=config.seed),
                batch_size_at=batch_size_at,
                total_steps=total,
                max_len=data.max_len,
                held_out=held,
                checkpoint=runtime.loop_ranks.from_first(partial(newest_checkpoint, run_dir)),
            )
        else:
            rows = [load_batch(data, runtime.tokenizer), *(batch for batch, _ in held)]
    reference, policy = _preference_engines(config, specs, runtime, run_dir, rows=rows)

    def prepare_within(rows: PreferenceDataConfig) -> Prepare:
        return preparation(
            config.loss,
            policy,
            reference,
            max_len=rows.max_len,
            ld_alpha=config.ld_alpha,
            weigh=policy if config.weight_pairs else None,
        )

    loss = preference_objective(
        config.loss,
        added=config.added_terms,
        divergence=config.f_divergence.kind,
        alpha=config.f_divergence.alpha,
        nll_coef=config.nll_coef,
        ld_alpha=config.ld_alpha,
        weight_pairs=config.weight_pairs,
    )
    return Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        usable=usable,
        engine=policy,
        loss=with_expert_balance(loss, config.train.moe_aux_loss_coef),
        total_steps=total,
        batch_size_at=batch_size_at,
        measure=measure_preferences(loss, prepare_within(others.get("", data))),
        eval_batches=held_out,
        prepare=prepare_within(data),
        moving=moving_reference(config.reference, policy, reference, runtime.loop_ranks),
        signal=NoSignalMonitor(config.train.max_steps_without_signal),
        signal_of=label_signal if kto else pair_signal,
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
    kto = not config.loss.is_paired
    in_every_step = kto or config.loss.ranks_pairs  # others: only in evaluation
    spans = {"forward_backward": "train", "optim_step": "optim"}
    spans["entropies"] = "logprobs"
    spans["logprobs"] = "logprobs" if in_every_step else "eval"
    policy_spec, reference_spec = specs["policy"], specs.get("reference")
    policy_spec = replace(policy_spec, entropy_order=2) if config.weight_pairs else policy_spec
    of = config.model if reference_spec is None else reference_spec.role.model
    dtype = config.precision.dtype
    kept_in, begun = run_dir / REFERENCE_FILE, any((run_dir / "checkpoints").glob("step_*"))
    cached = None
    if rows is not None:
        cached = load_cache(kept_in, rows, model=of, dtype=dtype, begun=begun, by_batch=kto)
    if runtime.loop_ranks.any(cached is None):  # all ranks compute, or none
        cached = None
    reference: HasLogprobs | None = cached
    policy: TrainEngine | None = None
    if cached is not None or not config.needs_reference:
        return reference, runtime.language_model(policy_spec, spans)
    if reference_spec is None:
        policy = runtime.language_model(policy_spec, spans)
        reference = FrozenBase(policy)
    else:
        reference = runtime.language_model(
            reference_spec, {"logprobs": "reference", "mix": "reference"}
        )
    if rows is not None:
        log.info("computing the log-probs of the reference before the first step")
        at_once = None if kto else 2 * config.batch_plan().train_batch_size
        cache = compute_cache(reference, rows, at_once)
        log.info("computed the reference log-probs of %d rows", len(cache))
        if runtime.loop_ranks.rank == 0:
            save_cache(cache, kept_in, model=of, dtype=dtype)
        runtime.release(reference)
        reference = cache
    return reference, policy or runtime.language_model(policy_spec, spans)


JOB = SupervisedTraining(PreferenceConfig, build_preference)


@dataclass(frozen=True)
class KtoBatches:
    """Batches that a KTO run passes through its reference model: those of its remaining steps, and
    the mismatched rows of each, from which the KL is estimated.

    The order of the data depends only on the seed and on the position in the stream, so the rows of
    all later steps are known before the first one. Each iteration reads the data again."""

    open_stream: Callable[[], BatchStream]
    """Return a new stream of single responses of the training data, at its beginning."""
    batch_size_at: Callable[[int], int]
    """Return the number of rows of an optimizer step; the first step is 1."""
    total_steps: int
    max_len: int
    """Length limit of the training data."""
    held_out: Sequence[tuple[Batch, int]] = ()
    """Batches that are also measured, each with the length limit of its data."""
    checkpoint: Path | None = None
    """Checkpoint from which the run continues. None: from the first step."""

    def __iter__(self) -> Iterator[Batch]:
        for batch, max_len in self.held_out:
            yield batch
            yield mismatched_pairs(batch, max_len=max_len)
        stream, done = self.open_stream(), 0
        if self.checkpoint is not None:
            stream.load_state_dict(load_state(self.checkpoint, "data"))
            done = load_state(self.checkpoint, "session")["step"]
        for step in range(done + 1, self.total_steps + 1):
            batch = stream.next(self.batch_size_at(step))
            yield batch
            yield mismatched_pairs(batch, max_len=self.max_len)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint from which the run in ``run_dir`` would continue; None if there is
    none."""
    store = CheckpointStore(run_dir / "checkpoints", keep_last=1, best_mode="max")
    return store.latest(resumable=True)
