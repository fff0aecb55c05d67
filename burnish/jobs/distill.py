"""Distillation: train a student to match a teacher's distribution over every next token of given
rows.

The loop is in ``steps/supervised.py``. This file contains the loss and the preparation of batches.
The teacher is in ``steps/teacher.py``: it also scores a policy's samples (``algorithm.advantage:
on_policy_distill``).

Teacher and student are separate engines, possibly on different workers. The teacher sends its last
hidden states, and the student's engine holds a copy of the teacher's output projection. The student
can therefore compute both distributions over the vocabulary together with the loss, one chunk of
tokens at a time (``models/distill.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from burnish.algorithms.distill import DIVERGENCES, SLOPES, distill_loss, forward_kl
from burnish.algorithms.reduce import reduce
from burnish.config import DistillConfig
from burnish.config.eval_section import eval_place
from burnish.data.batches import BatchStream, load_batch
from burnish.jobs.build import engine_specs
from burnish.models.teacher import DistillTargetSpec
from burnish.observe.timeline import timed
from burnish.preflight.limits import held_out_sets, limited
from burnish.preflight.usable import usable_rows
from burnish.runtime.base import Runtime
from burnish.steps.objectives import with_expert_balance
from burnish.steps.supervised import Supervised, SupervisedTraining
from burnish.steps.teacher import Teacher, make_teacher
from burnish.tensors import masked_sum
from burnish.train.base import Loss, Outputs, TrainEngine
from burnish.types import Batch, Stats


def distill_objective(*, temperature: float, nll_weight: float) -> Loss:
    """Return the divergence mixed with the negative log-likelihood, as a mean over all action
    tokens of the step."""

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None and outputs.divergence is not None
        assert outputs.teacher_kl is not None and outputs.agreement is not None
        per_token = distill_loss(
            outputs.divergence, outputs.logprobs, temperature=temperature, nll_weight=nll_weight
        )
        loss = reduce(
            per_token,
            batch.action_mask,
            aggregation="token_mean",
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            row_ids=batch.row_ids,
        )
        measured = {
            "divergence": outputs.divergence,
            "teacher_kl": outputs.teacher_kl,
            "nll": -outputs.logprobs,
            "agreement": outputs.agreement,
        }
        mask, count = batch.action_mask, batch.action_mask.sum()
        means = {name: (masked_sum(v.detach(), mask), count) for name, v in measured.items()}
        return loss, Stats(means=means, sums={"loss": loss.detach()})

    return objective


def measure_distill(
    loss: Loss, teacher: Teacher, *, rows_at_once: int
) -> Callable[[TrainEngine, Batch], Stats]:
    """Return a function that measures loss and stats of held-out rows. It processes
    ``rows_at_once`` rows at a time, which limits the memory of the teacher's states."""

    def measure(engine: TrainEngine, batch: Batch) -> Stats:
        stats = Stats()
        for begin in range(0, batch.num_rows, rows_at_once):
            rows = range(begin, min(begin + rows_at_once, batch.num_rows))
            stats = stats + engine.measure(teacher.prepare(batch.select(rows)), loss)
        return stats

    return measure


def build_distill(config: DistillConfig, runtime: Runtime, run_dir: Path) -> Supervised:
    """Return the components of a distillation run."""
    data = limited(config, config.data)
    others = held_out_sets(config, config.eval)
    held_out = {
        name: load_batch(rows, runtime.tokenizer, section=eval_place(name))
        for name, rows in others.items()
    }
    stream = BatchStream(data, runtime.tokenizer, seed=config.seed)
    usable = usable_rows(config, stream.num_rows)
    total = config.steps_for(usable.num_rows)
    specs = engine_specs(config, total_steps=total)
    teacher = make_teacher(specs["teacher"], config.model, runtime)
    distill_target = distill_target_spec(config, teacher.vocabulary)
    student = replace(specs["policy"], distill_target=distill_target)
    spans = {"forward_backward": "train", "optim_step": "optim", "measure": "eval"}
    loss = distill_objective(temperature=config.temperature, nll_weight=config.nll_weight)
    size = config.batch_plan().train_batch_size
    return Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        usable=usable,
        engine=runtime.language_model(student, spans),
        loss=with_expert_balance(loss, config.train.moe_aux_loss_coef),
        total_steps=total,
        batch_size_at=partial(config.batch_size_at, num_rows=usable.num_rows),
        measure=measure_distill(loss, teacher, rows_at_once=size),
        eval_batches=held_out,
        prepare=teacher.prepare,
    )


def distill_target_spec(config: DistillConfig, vocabulary: int) -> DistillTargetSpec:
    """Return the spec of the distillation target for the student's engine. ``vocabulary``: number
    of tokens that both models share."""
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


JOB = SupervisedTraining(DistillConfig, build_distill)
