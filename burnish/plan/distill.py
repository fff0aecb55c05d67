"""What a student's engine takes beside what every trained model does: its teacher's output
projection, and the logits of two models where those of one were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from burnish.config.distill import DistillConfig
from burnish.plan.activations import Peaks
from burnish.plan.model_state import SIZES, Item
from burnish.plan.passes import Pass
from burnish.plan.role_base import Items, resolve_model
from burnish.plan.shapes import ModelShape, shape_of

MORE_BUFFERS = {"forward_kl": 3, "reverse_kl": 3, "jsd": 4}
"""[chunk, vocab] fp32 buffers at the head's worst moment, beside those of plain log-probs. Counted
on ``models/distill.py`` (``tests/models/test_distilled_logprobs.py``)."""


def _teacher(config: DistillConfig) -> ModelShape:
    return shape_of(resolve_model(config.teacher.model, config.model))


def teacher_head(config: Any) -> Items:
    """The teacher's output projection, which stays. Nothing in other jobs."""
    if not isinstance(config, DistillConfig):
        return ()
    text = _teacher(config).text.to_dict()
    rows, width = int(text["vocab_size"]), int(text["hidden_size"])
    size = SIZES[config.teacher.dtype or config.precision.dtype]
    how = f"the teacher's output projection: {rows} x {width} x {size} B"
    return (Item("parameters", float(rows * width * size), how),)


def with_teacher(config: Any, peaks: Peaks, work: Pass) -> Peaks:
    """The peaks of a student's pass, from those of the same pass without a teacher."""
    if not isinstance(config, DistillConfig) or not work.train:
        return peaks
    text = _teacher(config).text.to_dict()
    rows = min(work.chunk_tokens, work.actions)
    more = MORE_BUFFERS[config.loss.kind] * 4.0 * rows * int(text["vocab_size"])
    size = SIZES[config.teacher.dtype or config.precision.dtype]
    states = float(sum(r.length for r in work.rows) * int(text["hidden_size"]) * size)
    extra = {stage: states + (more if stage in ("forward", "head") else 0) for stage in peaks.total}
    return replace(
        peaks,
        total={stage: peak + extra[stage] for stage, peak in peaks.total.items()},
        other={stage: peak + extra[stage] for stage, peak in peaks.other.items()},
        output=peaks.output + more,
    )
