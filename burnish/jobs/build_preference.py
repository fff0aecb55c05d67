"""From a recipe for ``preference`` to the parts of its loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from burnish.config import PreferenceConfig
from burnish.config.algorithm import KtoLoss
from burnish.config.data import PreferenceDataConfig
from burnish.data.preference import PreferenceStream, load_pairs
from burnish.data.unpaired import SplitPairsStream, UnpairedStream, load_unpaired
from burnish.jobs.build import (
    held_out_data,
    supervised_spec,
    tell_noise,
    within_positions,
)
from burnish.jobs.degenerate import SignalWatch, label_signal, pair_signal
from burnish.jobs.objectives import with_expert_balance
from burnish.jobs.preference import (
    Prepare,
    measure_preferences,
    preference_objective,
    preparation,
)
from burnish.jobs.reference_cache import compute as compute_cache
from burnish.jobs.reference_cache import load as load_cache
from burnish.jobs.reference_cache import save as save_cache
from burnish.jobs.run_dir import REFERENCE_FILE
from burnish.jobs.supervised import Supervised
from burnish.observe.timeline import timed
from burnish.runtime.base import Runtime
from burnish.train.base import HasLogprobs, TrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch

log = logging.getLogger("burnish")


def build_preference(
    config: PreferenceConfig, runtime: Runtime, run_dir: Path
) -> tuple[Supervised, int]:
    """The parts of a preference run, and its number of optimizer steps."""
    kto = isinstance(config.loss, KtoLoss)
    data = within_positions(config.data, config.model)
    other = held_out_data(config.eval_data, config.model)
    held_out = None
    if other is not None:
        held_out = (load_unpaired if kto else load_pairs)(other, runtime.tokenizer)
    kind = PreferenceStream if not kto else UnpairedStream if data.label_key else SplitPairsStream
    stream = kind(data, runtime.tokenizer, seed=config.seed)
    total = config.steps_for(len(stream))
    spec = replace(supervised_spec(config, "policy", total), dropout=False)
    tell_noise(config.model, "policy")
    rows: list[Batch] = []
    if config.reference is not None and config.reference.precompute:
        rows = [load_pairs(data, runtime.tokenizer)] + ([] if held_out is None else [held_out])
    reference, policy = _preference_engines(config, spec, runtime, run_dir, rows=rows)

    def prepare_within(rows: PreferenceDataConfig) -> Prepare:
        return preparation(config.loss, policy, reference, max_len=rows.max_len)

    loss = preference_objective(config.loss, nll_coef=config.nll_coef)
    parts = Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        engine=policy,
        loss=with_expert_balance(loss, config.train.moe_aux_loss_coef),
        batch_size_at=partial(config.batch_size_at, num_rows=len(stream)),
        measure=measure_preferences(loss, prepare_within(other or data)),
        eval_batch=held_out,
        prepare=prepare_within(data),
        signal=SignalWatch(config.train.max_steps_without_signal),
        look=label_signal if kto else pair_signal,
    )
    return parts, total


def _preference_engines(
    config: PreferenceConfig,
    spec: EngineSpec,
    runtime: Runtime,
    run_dir: Path,
    *,
    rows: Sequence[Batch],
) -> tuple[HasLogprobs | None, TrainEngine]:
    """The reference, or its log-probs of ``rows`` where there are any, and the policy. In this
    order: a reference that is only needed for its log-probs is gone before the policy comes."""
    kto = isinstance(config.loss, KtoLoss)  # estimates its KL in every step; others only evaluate
    spans = {"forward_backward": "train", "optim_step": "optim"}
    spans["logprobs"] = "logprobs" if kto else "eval"
    model = config.model
    own = config.reference.model if config.reference is not None else None
    of, dtype = own or model, config.precision.dtype
    kept_in, begun = run_dir / REFERENCE_FILE, any((run_dir / "checkpoints").glob("step_*"))
    cached = load_cache(kept_in, rows, model=of, dtype=dtype, begun=begun) if rows else None
    reference: HasLogprobs | None = cached
    policy: TrainEngine | None = None
    if cached is not None or not config.needs_reference:
        return reference, runtime.language_model(spec, spans)
    if own is None and model.lora is not None:
        policy = runtime.language_model(spec, spans)
        reference = runtime.frozen_base(policy)
    else:
        train = spec.train.model_copy(update={"moe_aux_loss_coef": 0.0})
        frozen = replace(spec, role="reference", model=of, train=train, trainable=False)
        reference = runtime.language_model(frozen, {"logprobs": "reference"})
    if rows:
        log.info("the reference's log-probs of %d rows", sum(b.num_rows for b in rows))
        cache = compute_cache(reference, rows, 2 * config.batch_plan().train_batch_size)
        save_cache(cache, kept_in, model=of, dtype=dtype)
        runtime.release(reference)
        reference = cache
    return reference, policy or runtime.language_model(spec, spans)
