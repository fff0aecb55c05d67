"""The teacher of a job: its engine, its outputs in a batch, and their statistics."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from burnish.config.model import ModelConfig
from burnish.data.sources import DataError
from burnish.models.teacher import by_id, shared_vocabulary
from burnish.runtime.base import Runtime
from burnish.tensors import masked_sum
from burnish.train.base import TrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch

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
    vocabulary = shared_vocabulary(student, spec.role.model, runtime.tokenizer)
    spans = {"logprobs": "teacher", "states": "teacher"}
    return Teacher(runtime.language_model(spec, spans), vocabulary, runtime.tokenizer)


def teacher_stats(batch: Batch) -> dict[str, float]:
    """Return the distance between a policy and its teacher on the policy's samples; empty without a
    teacher. ``train/teacher_kl`` is the mean of log p - log q over action tokens, an estimate of
    KL(policy || teacher) in nats per token. ``train/teacher_logprob`` is the mean log-prob under
    the teacher."""
    if batch.teacher_logprobs is None or batch.old_logprobs is None:
        return {}
    mask, count = batch.action_mask, max(1, int(batch.action_mask.sum()))
    teacher, policy = (
        float(masked_sum(x, mask)) / count for x in (batch.teacher_logprobs, batch.old_logprobs)
    )
    return {"train/teacher_kl": policy - teacher, "train/teacher_logprob": teacher}
