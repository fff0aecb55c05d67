"""Additional memory of a student's engine in distillation: its teacher's output projection, and the
logits of two models instead of one."""

from __future__ import annotations

from dataclasses import replace

from burnish.config.model import ModelConfig
from burnish.config.roles import TrainRole
from burnish.plan.activations import Peaks
from burnish.plan.model_state import SIZES, Item
from burnish.plan.passes import Pass
from burnish.plan.role_base import Items, resolve_model
from burnish.plan.shapes import shape_of

MORE_BUFFERS = {"forward_kl": 3, "reverse_kl": 3, "jsd": 4}
"""Number of [chunk, vocab] fp32 buffers at the head's peak, in addition to those of plain
log-probs. Counted in ``models/distill.py`` (``tests/models/test_distilled_logprobs.py``)."""


def _sizes(teacher: ModelConfig, role: TrainRole) -> tuple[int, int]:
    """Return (vocabulary, width) of the teacher's output projection."""
    shape = shape_of(resolve_model(teacher, role.model))
    return shape.vocab_size, shape.hidden_size


def teacher_head(role: TrainRole) -> Items:
    """Return the resident memory of the teacher's output projection; empty in other jobs."""
    target = role.distillation
    if target is None:
        return ()
    rows, width = _sizes(target.model, role)
    size = SIZES[target.dtype]
    formula = f"the teacher's output projection: {rows} x {width} x {size} B"
    return (Item("parameters", float(rows * width * size), formula),)


def with_teacher(role: TrainRole, peaks: Peaks, work: Pass) -> Peaks:
    """Return the peaks of a student's pass, computed from those of the same pass without a
    teacher."""
    target = role.distillation
    if target is None or not work.train:
        return peaks
    vocabulary, width = _sizes(target.model, role)
    rows = min(work.chunk_tokens, work.actions)
    more = MORE_BUFFERS[target.divergence] * 4.0 * rows * vocabulary
    states = float(sum(r.length for r in work.rows) * width * SIZES[target.dtype])
    extra = {stage: states + (more if stage in ("forward", "head") else 0) for stage in peaks.total}
    return replace(
        peaks,
        total={stage: peak + extra[stage] for stage, peak in peaks.total.items()},
        other={stage: peak + extra[stage] for stage, peak in peaks.other.items()},
        output=peaks.output + more,
    )
