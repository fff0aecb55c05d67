"""From a recipe for ``distill`` to the parts of its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from burnish.algorithms.distill import DIVERGENCES, SLOPES, forward_kl
from burnish.config import DistillConfig
from burnish.data.sft import SFTStream, load_rows
from burnish.jobs.build import (
    held_out_data,
    supervised_spec,
    within_positions,
)
from burnish.jobs.distill import distill_objective, make_teacher, measure_distill
from burnish.jobs.objectives import with_expert_balance
from burnish.jobs.supervised import Supervised
from burnish.models.teacher import DistillTargetSpec
from burnish.observe.timeline import timed
from burnish.runtime.base import Runtime


def build_distill(config: DistillConfig, runtime: Runtime) -> tuple[Supervised, int]:
    """The parts of a distillation, and its number of optimizer steps."""
    data = within_positions(config.data, config.model)
    data = within_positions(data, config.teacher.model)
    other = held_out_data(config.eval_data, config.model, config.teacher.model)
    held_out = load_rows(other, runtime.tokenizer) if other is not None else None
    stream = SFTStream(data, runtime.tokenizer, seed=config.seed)
    total = config.steps_for(len(stream))
    spec = supervised_spec(config, "policy", total)
    teacher = make_teacher(config.teacher, config.model, spec, runtime)
    distill_target = distill_target_spec(config, teacher.vocabulary)
    spans = {"forward_backward": "train", "optim_step": "optim", "measure": "eval"}
    loss = distill_objective(temperature=config.temperature, nll_weight=config.nll_weight)
    size = config.batch_plan().train_batch_size
    parts = Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        engine=runtime.language_model(replace(spec, distill_target=distill_target), spans),
        loss=with_expert_balance(loss, config.train.moe_aux_loss_coef),
        batch_size_at=partial(config.batch_size_at, num_rows=len(stream)),
        measure=measure_distill(loss, teacher, rows_at_once=size),
        eval_batch=held_out,
        prepare=teacher.prepare,
    )
    return parts, total


def distill_target_spec(config: DistillConfig, vocabulary: int) -> DistillTargetSpec:
    """What the student's engine has to know. ``vocabulary``: tokens that both models know."""
    options = config.loss.model_dump(exclude={"kind"})
    kind = config.loss.kind
    return DistillTargetSpec(
        teacher=config.teacher.model,
        dtype=config.teacher.dtype or config.precision.dtype,
        vocabulary=vocabulary,
        divergence=_with(DIVERGENCES[kind], options),
        slope=_with(SLOPES[kind], options),
        kl=forward_kl,
        temperature=config.temperature,
    )


def _with(function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    return partial(function, **options) if options else function
