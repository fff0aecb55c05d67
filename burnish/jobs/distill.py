"""Distillation: train a student to match a teacher's distribution over every next token of given
rows.

The loop is in ``supervised.py``. This file contains the loss, the preparation of batches, and the
teacher. The teacher also scores a policy's samples (``algorithm.advantage: on_policy_distill``).

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
from transformers import PreTrainedTokenizerBase

from burnish.algorithms.distill import DIVERGENCES, SLOPES, distill_loss, forward_kl
from burnish.algorithms.reduce import reduce
from burnish.config import DistillConfig
from burnish.config.model import ModelConfig
from burnish.data.sft import SFTStream, load_rows
from burnish.data.sources import DataError
from burnish.jobs.build import (
    engine_specs,
    eval_place,
    held_out_sets,
    within_positions,
)
from burnish.jobs.objectives import with_expert_balance
from burnish.jobs.supervised import Supervised, SupervisedTraining
from burnish.jobs.usable import usable_rows
from burnish.models.teacher import DistillTargetSpec, by_id, shared_vocabulary
from burnish.observe.timeline import timed
from burnish.runtime.base import Runtime
from burnish.tensors import masked_sum
from burnish.train.base import Loss, Outputs, TrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats

UNKNOWN_LOGPROB = -30.0
"""Log-prob in nats (a probability of about 1e-13) assigned to tokens outside the teacher's
vocabulary. The teacher has no log-prob for them, and minus infinity would give no finite
advantage."""


class Teacher:
    """A teacher's engine and the size of the vocabulary that it shares with the student."""

    def __init__(
        self, engine: TrainEngine, vocabulary: int, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """``vocabulary``: number of token ids that both models share. ``tokenizer``: the
        student's tokenizer."""
        self.engine, self.vocabulary, self.tokenizer = engine, vocabulary, tokenizer

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's hidden states. Raises DataError for a token outside
        the teacher's vocabulary."""
        unknown = batch.tokens >= self.vocabulary
        if bool(unknown.any()):
            token = int(batch.tokens[unknown][0])
            text = by_id(self.tokenizer).get(token, "not in the tokenizer")
            raise DataError(
                f"a row contains token {token} ({text!r}), which is not in the teacher's "
                f"vocabulary: teacher and student share {self.vocabulary} tokens; remove such rows "
                "from the data, or use another teacher"
            )
        return replace(batch, teacher_states=self.engine.states(batch))

    def add_teacher_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's log-probs of its action tokens, always over the full
        vocabulary. Tokens outside the teacher's vocabulary get :data:`UNKNOWN_LOGPROB`, and are
        replaced by token 0 in the teacher's input."""
        unknown = batch.tokens >= self.vocabulary
        read = replace(batch, tokens=batch.tokens.masked_fill(unknown, 0), kept_ids=None)
        logprobs = self.engine.logprobs(read)
        logprobs = logprobs.masked_fill(unknown & batch.action_mask, UNKNOWN_LOGPROB)
        return replace(batch, teacher_logprobs=logprobs)


def make_teacher(spec: EngineSpec, student: ModelConfig, runtime: Runtime) -> Teacher:
    """Return the teacher of ``student``. Raises ModelError if the two models assign different
    tokens to the same id."""
    vocabulary = shared_vocabulary(student, spec.model, runtime.tokenizer)
    spans = {"logprobs": "teacher", "states": "teacher"}
    return Teacher(runtime.language_model(spec, spans), vocabulary, runtime.tokenizer)


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


def teacher_stats(batch: Batch) -> dict[str, float]:
    """Return the distance between a policy and its teacher on the policy's samples; empty without a
    teacher. ``train/teacher_kl`` is the mean of log p - log q over action tokens, an estimate of
    KL(policy || teacher) in nats per token. ``train/teacher_logprob`` is the mean log-prob under
    the teacher."""
    if batch.teacher_logprobs is None or batch.old_logprobs is None:
        return {}
    mask, count = batch.action_mask, max(1, int(batch.action_mask.sum()))
    teacher, own = (
        float(masked_sum(x, mask)) / count for x in (batch.teacher_logprobs, batch.old_logprobs)
    )
    return {"train/teacher_kl": own - teacher, "train/teacher_logprob": teacher}


def build_distill(config: DistillConfig, runtime: Runtime, run_dir: Path) -> Supervised:
    """Return the components of a distillation run."""
    data = within_positions(config.data, config.model)
    data = within_positions(data, config.teacher.model)
    others = held_out_sets(config.eval_data, config.eval_sets, config.model, config.teacher.model)
    held_out = {
        name: load_rows(rows, runtime.tokenizer, section=eval_place(name))
        for name, rows in others.items()
    }
    stream = SFTStream(data, runtime.tokenizer, seed=config.seed)
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
