"""The experiment behind ``support.py``: run a small random model in every layout and compare it
with transformers' own forward of each single row.

Two kinds of evidence, in fp32 on the CPU:

* bitwise invariances at unchanged shapes: changing a token of one row changes no output of another
  row, and no earlier output of its own row (mixtures of experts: within 1e-5, because routing
  changes the shapes of matmuls);
* log-probs of every layout, compared with the reference.

Half precision would hide violations of the first: a state that leaks between rows changes log-probs
by less than the rounding of bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import ModelOutput

from burnish.models.attention import (
    NO_MASK,
    UnsupportedAttention,
    plan_segments,
)
from burnish.models.family import PACKED, ModelSupport
from burnish.models.logit_scaling import logit_scaling
from burnish.models.logprobs import Head
from burnish.models.segments import Segment
from burnish.models.shrink import build
from burnish.oom import is_out_of_memory

LENGTHS = (13, 9, 11, 16)
"""Row lengths of the experiment in tokens; longer than the shrunk windows."""
PROMPT = 6
"""Length in tokens of the prompt that the rows share in the shared-prefix layout."""
TOLERANCE = 1e-4
"""Nats. Correct layouts differ by rounding, up to 2e-5; a wrong one by 5e-3 and more."""
MIXTURE_TOLERANCE = 1e-5
LARGE = (1.0, 50.0)
"""Factors that scale the last hidden state in the comparison of the head. A softcap only shows at
large logits."""


Rows = list[list[int]]
LogProbs = Callable[[Rows], list[Tensor]]
"""Rows -> log-probs [T, V] of each row, fp32."""


@torch.no_grad()
def check_family(tiny: PretrainedConfig, *, trust: bool = False) -> ModelSupport:
    """Return how the family of the shrunk config ``tiny`` runs.

    ``trust`` allows running the model's own code, as in :func:`build`.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return _check(tiny, trust)
    finally:
        transformers_logging.set_verbosity(level)


def _check(tiny: PretrainedConfig, trust: bool) -> ModelSupport:
    name = tiny.model_type
    try:
        family = _Family(build(tiny, trust=trust))
        rows = _rows(family.vocabulary)
        default = family.one_by_one(rows, family.native[0])
        reference = family.one_by_one(rows, "eager")
    except Exception as error:  # any failure of a model is a result of the experiment
        return ModelSupport(name, "eager", refusal=_cannot("be computed at all", error))
    gap = largest_difference(default, reference)
    if not gap <= TOLERANCE:
        problem = (
            f"its log-probs depend on the implementation of its attention: {family.native[0]} and "
            f"eager differ by {gap:.1e} nats; use another model"
        )
        return ModelSupport(name, "eager", refusal=problem)
    if problem := family.problem_of_head() or family.problem_of_backward():
        return ModelSupport(name, "eager", refusal=problem)
    differences, reason = _packed_layouts(family, rows, reference)
    if not reason:
        return ModelSupport(name, PACKED, differences)
    for implementation in family.native:
        padded, problem = _native_layout(family, implementation, rows, reference)
        if not problem:
            return ModelSupport(name, implementation, padded, reason=reason)
    return ModelSupport(
        name,
        "eager",
        refusal=f"{problem}; use another model",
    )


def _packed_layouts(
    family: _Family, rows: Rows, reference: list[Tensor]
) -> tuple[dict[str, float], str]:
    """Return (differences by layout, why packed rows are not exact or "")."""
    differences: dict[str, float] = {}
    try:
        family.use(PACKED)
    except Exception as error:  # see _check
        return {}, _cannot("take attention over packed rows", error)
    layouts: dict[str, LogProbs] = {
        "padded": family.padded,
        "packed": family.packed,
        "shared_prefix": family.shared_prefix,
    }
    for layout, logprobs in layouts.items():
        difference, problem = _problem(layout, logprobs, rows, reference, family.is_mixture)
        if problem:
            return {}, problem
        differences[layout] = difference
    return differences, ""


def _native_layout(
    family: _Family, implementation: str, rows: Rows, reference: list[Tensor]
) -> tuple[dict[str, float], str]:
    try:
        family.use(implementation)
    except Exception as error:  # see _check
        return {}, _cannot(f"use transformers' {implementation} attention", error)
    difference, problem = _problem("padded", family.padded, rows, reference, family.is_mixture)
    return {"padded": difference}, problem


def _problem(  # house: ok the five parts of one comparison
    layout: str, logprobs: LogProbs, rows: Rows, reference: list[Tensor], is_mixture: bool
) -> tuple[float, str]:
    """Return (largest difference from the reference, problem or "")."""
    name = layout.replace("_", "-") + " rows"
    try:
        computed = logprobs(rows)
        leak, early = _leaks(logprobs, rows, computed)
    except Exception as error:  # see _check
        return 0.0, _cannot(f"compute {name}", error)
    allowed = MIXTURE_TOLERANCE if is_mixture else 0.0
    difference = largest_difference(computed, reference)
    if not early <= allowed:
        return difference, f"in {name} a later token changes earlier outputs by {early:.1e} nats"
    if not leak <= allowed:
        return difference, f"in {name} one row changes another by {leak:.1e} nats"
    if not difference <= TOLERANCE:
        return difference, f"log-probs of {name} differ from single rows by {difference:.1e} nats"
    return difference, ""


def _leaks(logprobs: LogProbs, rows: Rows, before: list[Tensor]) -> tuple[float, float]:
    """Return (largest change of other rows, largest change of earlier tokens).

    Two changes are tried: one inner token of the second row, and its last token.
    """
    leak = early = 0.0
    for place in (PROMPT + 1, LENGTHS[1] - 1):
        changed = [list(row) for row in rows]
        changed[1][place] = changed[1][place] % 3 + 1  # another token, of any vocabulary
        after = logprobs(changed)
        others = [i for i in range(len(rows)) if i != 1]
        leak = max(
            leak, largest_difference([after[i] for i in others], [before[i] for i in others])
        )
        early = max(early, largest_difference([after[1][:place]], [before[1][:place]]))
    return leak, early


def largest_difference(tensors: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return the largest absolute difference between paired tensors; NaN if there is a NaN."""
    gaps = [(a - b).abs().max() for a, b in zip(tensors, reference, strict=True)]
    return float(torch.stack(gaps).max())  # (Python's max would skip a NaN)


def _rows(vocabulary: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    top = min(vocabulary, 90)  # special tokens of the small copy have larger ids
    ids = torch.randint(1, top, (len(LENGTHS), max(LENGTHS)), generator=generator)
    ids[:, :PROMPT] = ids[0, :PROMPT]
    return [row[:length].tolist() for row, length in zip(ids, LENGTHS, strict=True)]


@dataclass(frozen=True)
class _Place:
    """Packed rows: token ids, positions, segments, and the indices of each row's tokens."""

    ids: list[int]
    positions: list[int]
    segments: list[Segment]
    index: list[list[int]]


class _Family:
    """A small model that computes log-probs in each layout."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        implementation = str(model.config._attn_implementation)
        self.native = list(dict.fromkeys([implementation, "eager"]))
        """Attention implementations of transformers for padded rows, in order of preference."""
        names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
        self.is_mixture = any("expert" in name or "moe" in name for name in names)

    def use(self, implementation: str) -> None:
        """Switch the attention of every layer."""
        self.model.set_attn_implementation(implementation)

    def one_by_one(self, rows: Rows, implementation: str) -> list[Tensor]:
        """Return log-probs of transformers' forward of each single row. With eager attention, they
        are the reference."""
        self.use(implementation)
        return [self._logits(torch.tensor([row]))[0].log_softmax(-1) for row in rows]

    def _logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits.float()

    def problem_of_head(self) -> str:
        """Return why the logits differ from those of :class:`Head`; "" if they agree."""
        try:
            worst = max(self._head_difference(factor) for factor in LARGE)
        except Exception as error:  # see _check
            return _cannot("be computed as a body and an output projection", error)
        if not worst <= TOLERANCE:
            return (
                "its logits are not the output projection of its last hidden state, scaled and "
                f"capped as its config says (they differ by {worst:.1e} of the largest); use "
                "another model"
            )
        return ""

    def problem_of_backward(self) -> str:
        """Return why gradients fail in evaluation mode (without dropout); "" if they work."""
        ids = torch.arange(1, 7)[None] % self.vocabulary
        weight = self.model.get_input_embeddings().weight
        try:
            with torch.enable_grad():
                hidden = self._hidden(input_ids=ids)
                (gradient,) = torch.autograd.grad(hidden.float().square().sum(), [weight])
        except Exception as error:  # see _check
            return _cannot("be trained", error)
        return "" if bool(gradient.isfinite().all()) else "its gradients are not finite"

    def _head_difference(self, factor: float) -> float:
        """Return the relative difference of the logits if the last hidden state is scaled by
        ``factor``."""
        hidden_states: list[Tensor] = []

        def scale(module: Any, _inputs: Any, output: Any) -> Any:
            if not isinstance(output, ModelOutput) or "last_hidden_state" not in output:
                raise ValueError(f"{type(module).__name__} returns no hidden states")
            output["last_hidden_state"] = output["last_hidden_state"] * factor
            hidden_states.append(output["last_hidden_state"])
            return output

        handle = self.model.get_decoder().register_forward_hook(scale)
        try:
            logits = self._logits(torch.arange(1, 9)[None] % self.vocabulary)[0]
        finally:
            handle.remove()
        expected = self._head().logits(hidden_states[-1][0])
        return float((logits - expected).abs().max() / logits.abs().max().clamp(min=1.0))

    def _head(self) -> Head:
        projection = self.model.get_output_embeddings()
        scaling = logit_scaling(self.model.config)
        return Head(projection.weight, projection.bias, scaling=scaling)

    def padded(self, rows: Rows) -> list[Tensor]:
        """Compute the rows as one batch padded on the right."""
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        hidden = self._hidden(input_ids=ids)
        logprobs = self._head().logits(hidden.flatten(0, 1)).log_softmax(-1).unflatten(0, ids.shape)
        return [row_logprobs[: len(row)] for row_logprobs, row in zip(logprobs, rows, strict=True)]

    def packed(self, rows: Rows) -> list[Tensor]:
        """Compute the rows concatenated in one packed row."""
        ids: list[int] = []
        positions: list[int] = []
        segments, index = [], []
        for row in rows:
            segments.append(Segment(len(ids), len(row)))
            index.append(list(range(len(ids), len(ids) + len(row))))
            ids += row
            positions += list(range(len(row)))
        return self._in_one_row(_Place(ids, positions, segments, index))

    def shared_prefix(self, rows: Rows) -> list[Tensor]:
        """Compute one packed row: the prompt once, followed by every row's response."""
        prompt = list(range(PROMPT))
        ids, positions = rows[0][:PROMPT], list(prompt)
        segments, index = [], []
        for number, row in enumerate(rows):
            begin = 0 if number == 0 else len(ids)
            count = len(row) - PROMPT
            index.append(prompt + list(range(len(ids), len(ids) + count)))
            ids = ids + row[PROMPT:]
            positions += list(range(PROMPT, len(row)))
            if number == 0:
                segments.append(Segment(0, len(row)))
            else:
                segments.append(Segment(begin, count, 0, PROMPT))
        return self._in_one_row(_Place(ids, positions, segments, index))

    def _in_one_row(self, place: _Place) -> list[Tensor]:
        positions = torch.tensor(place.positions)
        hidden = self._hidden(
            input_ids=torch.tensor([place.ids]),
            position_ids=positions[None],
            attention_mask=NO_MASK,
            plan=plan_segments(place.segments, positions),
        )[0]
        logprobs = self._head().logits(hidden).log_softmax(-1)
        return [logprobs[index] for index in place.index]

    def _hidden(self, **inputs: Any) -> Tensor:
        out = self.model.get_decoder()(use_cache=False, **inputs)
        hidden: Tensor = out.last_hidden_state
        return hidden


def _cannot(action: str, error: Exception) -> str:
    text = failure_text(error)
    return str(error) if isinstance(error, UnsupportedAttention) else f"it cannot {action} ({text})"


def failure_text(error: Exception, *, width: int = 160) -> str:
    """Return the type and message of a model's failure in one line.

    Re-raises ``error`` if it is an out-of-memory error, which is not the model's fault.
    """
    if is_out_of_memory(error):
        raise error
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:width]}" if text else type(error).__name__
