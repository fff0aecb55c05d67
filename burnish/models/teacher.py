"""The teacher of a student: their shared vocabulary, and the teacher's output projection.

Vocabularies are compared token by token, not by size. Models of one family often have the same
tokenizer but matrices of different sizes (padded to a multiple), or a few extra tokens at the end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from burnish.config.model import Dtype, ModelConfig
from burnish.models.auto_class import language_model_class
from burnish.models.distill import DistillTarget, Divergence
from burnish.models.empty import fill_rows
from burnish.models.load import (
    DTYPES,
    ModelError,
    describe,
    hf_config,
    load_causal_lm,
    load_tokenizer,
    without_weights,
)
from burnish.models.logit_scaling import logit_scaling
from burnish.models.logprobs import Head
from burnish.models.scratch import scratch_tokenizer

log = logging.getLogger("burnish")


@dataclass(frozen=True)
class DistillTargetSpec:
    """A picklable description of a :class:`DistillTarget`; :meth:`load` loads it."""

    teacher: ModelConfig
    dtype: Dtype
    """dtype of the teacher's output projection"""
    vocabulary: int
    """Size of the vocabulary that both models share."""
    divergence: Divergence
    slope: Divergence
    kl: Divergence
    temperature: float = 1.0

    def load(self, device: torch.device, *, chunk_tokens: int) -> DistillTarget:
        """Return the distillation target, with the teacher's output projection on ``device``."""
        head = load_head(
            self.teacher,
            rows=self.vocabulary,
            dtype=self.dtype,
            device=device,
            chunk_tokens=chunk_tokens,
        )
        return DistillTarget(head, self.divergence, self.slope, self.kl, self.temperature)


def shared_vocabulary(
    student: ModelConfig, teacher: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return the number of leading token ids that both models share.

    ``tokenizer`` is the student's. Raises ModelError if an id stands for different tokens in the
    two models.
    """
    student_tokens, teacher_tokens = by_id(tokenizer), by_id(load_tokenizer(teacher))
    sizes = vocabulary_size(student), vocabulary_size(teacher)
    for i in sorted(student_tokens.keys() & teacher_tokens.keys()):
        if student_tokens[i] != teacher_tokens[i]:
            raise ModelError(
                f"the teacher {describe(teacher)} ({len(teacher_tokens)} tokens, {sizes[1]} "
                f"logits) has another vocabulary than the student {describe(student)} "
                f"({len(student_tokens)} tokens, {sizes[0]} logits): token {i} is "
                f"{teacher_tokens[i]!r} in the teacher and {student_tokens[i]!r} in the student. "
                "Their distributions cannot be compared; use a teacher of the student's family, or "
                "sample the teacher (burnish generate) and train on its output (burnish sft)"
            )
    shared = min(sizes)
    only_one = student_tokens.keys() ^ teacher_tokens.keys()
    if only_one and min(only_one) < shared:
        first = min(only_one)
        has, lacks = ("student", "teacher") if first in student_tokens else ("teacher", "student")
        log.warning(
            "teacher: token %d (%r) is in the %s's tokenizer and not in the %s's; distributions "
            "are compared over the %d tokens before it",
            *(first, (student_tokens | teacher_tokens)[first], has, lacks, first),
        )
        shared = first
    elif sizes[0] != sizes[1]:
        log.info("teacher: %d logits, student: %d; the first %d are compared", *sizes[::-1], shared)
    if shared == 0:
        raise ModelError(
            f"the teacher {describe(teacher)} shares no token with the student "
            f"{describe(student)}; use a teacher of the student's family"
        )
    return shared


def by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the token of each id."""
    return {int(i): token for token, i in tokenizer.get_vocab().items()}


def vocabulary_size(config: ModelConfig) -> int:
    """Return the number of rows of the model's output projection, from its config alone."""
    if config.scratch is not None:
        return len(scratch_tokenizer(config.scratch.alphabet))
    pretrained_config: Any = hf_config(config)
    if pretrained_config is None and config.path is not None and config.gguf_file is not None:
        pretrained_config = AutoConfig.from_pretrained(
            config.path, gguf_file=config.gguf_file, trust_remote_code=config.trust_remote_code
        )
    if pretrained_config is None:
        raise ModelError(
            f"{describe(config)} has no readable config with the size of its vocabulary; check "
            "model.path"
        )
    return int(pretrained_config.get_text_config().vocab_size)


@torch.no_grad()
def load_head(
    config: ModelConfig, *, rows: int, dtype: Dtype, device: torch.device, chunk_tokens: int
) -> Head:
    """Load the first ``rows`` rows of a model's output projection, without gradients.

    If the weights can be read in parts, only these rows are read. Otherwise the whole model is
    loaded into host memory temporarily.
    """
    empty = without_weights(language_model_class(hf_config(config)), config, dtype)
    model: Any = empty if empty is not None else load_causal_lm(config, dtype=dtype)
    head = model.get_output_embeddings()
    names = {id(p): name for name, p in model.named_parameters()}
    tensors: list[Tensor | None] = []
    for parameter in (head.weight, head.bias):
        if parameter is None:
            tensors.append(None)
            continue
        if empty is None:
            values = parameter[:rows].clone()
        else:
            values = torch.empty(rows, *parameter.shape[1:], dtype=DTYPES[dtype])
            fill_rows({names[id(parameter)]: (values, (0, rows))}, config)
        tensors.append(values.to(device=device, dtype=DTYPES[dtype]))
    weight, bias = tensors
    assert weight is not None
    scaling = logit_scaling(model.config)
    return Head(weight, bias, chunk_tokens=chunk_tokens, scaling=scaling)
