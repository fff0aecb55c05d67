"""From a recipe for ``preference`` to the parts of its loop."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from burnish.config import PreferenceConfig
from burnish.config.algorithm import KtoLoss
from burnish.data.preference import PreferenceStream, load_pairs
from burnish.data.unpaired import HalvesStream, UnpairedStream, load_judged
from burnish.loops.build import _supervised_spec, _supervised_steps, _within_positions
from burnish.loops.objectives import with_expert_balance
from burnish.loops.preference import measure_preferences, preference_objective, preparation
from burnish.loops.reference_cache import FILE as CACHE_FILE
from burnish.loops.reference_cache import compute as compute_cache
from burnish.loops.reference_cache import load as load_cache
from burnish.loops.reference_cache import save as save_cache
from burnish.loops.supervised import Supervised
from burnish.observe.timeline import timed
from burnish.runtime.base import Runtime
from burnish.train.base import HasLogprobs, TrainEngine
from burnish.train.torch import EngineSpec
from burnish.types import Batch

log = logging.getLogger("burnish")


def build_preference(
    config: PreferenceConfig, runtime: Runtime, run_dir: Path
) -> tuple[Supervised, int]:
    """The parts of a preference run, and its number of optimizer steps."""
    kto = isinstance(config.loss, KtoLoss)
    data = _within_positions(config.data, config.model)
    held_out = None
    if config.eval_data is not None:
        held_out = (load_judged if kto else load_pairs)(config.eval_data, runtime.tokenizer)
    kind = PreferenceStream if not kto else UnpairedStream if data.label_key else HalvesStream
    stream = kind(data, runtime.tokenizer, seed=config.seed)
    total = _supervised_steps(config, len(stream))
    spec = _supervised_spec(config, "policy", total)
    reference, policy = _preference_engines(config, spec, runtime, run_dir, held_out)
    prepare = preparation(config.loss, policy, reference, max_len=data.max_len)
    loss = preference_objective(config.loss, nll_coef=config.nll_coef)
    parts = Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        engine=policy,
        loss=with_expert_balance(loss, config.train.moe_aux_loss_coef),
        batch_size=config.batch_plan().train_batch_size,
        measure=measure_preferences(loss, prepare),
        eval_batch=held_out,
        prepare=prepare,
    )
    return parts, total


def _preference_engines(
    config: PreferenceConfig,
    spec: EngineSpec,
    runtime: Runtime,
    run_dir: Path,
    held_out: Batch | None,
) -> tuple[HasLogprobs | None, TrainEngine]:
    """The reference, or its log-probs, and the policy. In this order: a reference that is only
    needed for its log-probs is gone before the policy comes."""
    spans = {"forward_backward": "train", "optim_step": "optim", "logprobs": "eval"}
    settings, model = config.reference, config.model
    own = settings.model if settings is not None else None
    precompute = settings is not None and settings.precompute
    cached = load_cache(run_dir / CACHE_FILE, own or model) if precompute else None
    reference: HasLogprobs | None = cached
    policy: TrainEngine | None = None
    if cached is not None or not config.needs_reference:
        return reference, runtime.language_model(spec, spans)
    if own is None and model.lora is not None:
        policy = runtime.language_model(spec, spans)
        reference = runtime.frozen_base(policy)
    else:
        train = spec.train.model_copy(update={"moe_aux_loss_coef": 0.0})
        frozen = replace(spec, role="reference", model=own or model, train=train, trainable=False)
        reference = runtime.language_model(frozen, {"logprobs": "reference"})
    if precompute:
        rows = [load_pairs(_within_positions(config.data, model), runtime.tokenizer)]
        batches = rows + ([held_out] if held_out is not None else [])
        log.info("the reference's log-probs of %d rows", sum(b.num_rows for b in batches))
        cache = compute_cache(reference, batches, 2 * config.batch_plan().train_batch_size)
        save_cache(cache, run_dir / CACHE_FILE, own or model)
        runtime.release(reference)
        reference = cache
    return reference, policy or runtime.language_model(spec, spans)
