"""Supervised fine-tuning: cross-entropy on demonstrations.

The loop is in ``steps/supervised.py``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from burnish.config import SFTConfig
from burnish.config.eval_section import eval_place
from burnish.data.batches import BatchStream, load_batch
from burnish.jobs.build import engine_specs
from burnish.observe.timeline import timed
from burnish.preflight.limits import held_out_sets, limited
from burnish.preflight.usable import usable_rows
from burnish.runtime.base import Runtime
from burnish.steps.no_signal import NoSignalMonitor
from burnish.steps.objectives import sft_objective, with_expert_balance
from burnish.steps.supervised import Supervised, SupervisedTraining
from burnish.tensors import masked_sum
from burnish.train.base import TrainEngine
from burnish.types import Batch, Stats


def build_sft(config: SFTConfig, runtime: Runtime, run_dir: Path) -> Supervised:
    """Return the components of an SFT run."""
    data = limited(config, config.data)
    others = held_out_sets(config, config.eval)
    held_out = {
        name: load_batch(rows, runtime.tokenizer, section=eval_place(name))
        for name, rows in others.items()
    }
    stream = BatchStream(data, runtime.tokenizer, seed=config.seed)
    usable = usable_rows(config, stream.num_rows)
    total = config.steps_for(usable.num_rows)
    spans = {"forward_backward": "train", "optim_step": "optim", "logprobs": "eval"}
    spec = engine_specs(config, total_steps=total)["policy"]
    spec = replace(spec, neftune_noise_alpha=config.neftune_noise_alpha)
    return Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        usable=usable,
        engine=runtime.language_model(spec, spans),
        loss=with_expert_balance(sft_objective(config.loss), config.train.moe_aux_loss_coef),
        total_steps=total,
        batch_size_at=partial(config.batch_size_at, num_rows=usable.num_rows),
        measure=measure_sft,
        eval_batches=held_out,
        signal=NoSignalMonitor(config.train.max_steps_without_signal),
    )


def measure_sft(engine: TrainEngine, batch: Batch) -> Stats:
    """Measure the mean negative log-likelihood per trained token, in nats."""
    logprobs, mask = engine.logprobs(batch), batch.action_mask
    return Stats(means={"loss": (-masked_sum(logprobs, mask), mask.sum())})


JOB = SupervisedTraining(SFTConfig, build_sft)
