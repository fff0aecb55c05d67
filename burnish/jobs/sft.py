"""Supervised fine-tuning: cross-entropy on demonstrations. The loop is ``supervised.py``'s."""

from __future__ import annotations

from burnish.tensors import masked_sum
from burnish.train.base import TrainEngine
from burnish.types import Batch, Stats


def measure_sft(engine: TrainEngine, batch: Batch) -> Stats:
    """Mean negative log-likelihood per trained token, in nats."""
    logprobs, mask = engine.logprobs(batch), batch.action_mask
    return Stats(means={"loss": (-masked_sum(logprobs, mask), mask.sum())})
