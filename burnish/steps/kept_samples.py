"""Samples of a step for inspection, the first of them with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa

from burnish.batches import groups_to_batch
from burnish.config import RLConfig
from burnish.observe.sample_tokens import TokenTexts, token_table
from burnish.observe.samples import DROPPED, first_groups, write_samples
from burnish.rollout.runner import Rollout, numbered
from burnish.steps.rl import advantage_by_sample
from burnish.train.base import TrainEngine
from burnish.types import Batch, Group

_DROPPED_SAMPLES = 16
"""Samples per step of groups that are not trained, in complete groups."""


@dataclass(frozen=True)
class SampleWriter:
    """Writes the first samples of each RL step, and of the groups that it does not train."""

    run_dir: Path
    config: RLConfig
    policy: TrainEngine
    texts: TokenTexts

    def write(self, step: int, rollout: Rollout, batch: Batch) -> None:
        """Write the samples of a step to its file. ``batch``: all of its rows, with the models'
        outputs from before the update."""
        observe, groups = self.config.observe, rollout.groups
        write_samples(
            self.run_dir,
            step,
            groups,
            advantage_by_sample(groups, batch),
            limit=observe.samples_per_step,
            tokens=self._tokens(groups, batch),
        )
        write_samples(
            self.run_dir,
            step,
            numbered(lost.group for lost in rollout.dropped),
            None,
            limit=min(_DROPPED_SAMPLES, observe.samples_per_step),
            split=DROPPED,
            dropped={lost.group.prompt.id: lost.reason for lost in rollout.dropped},
        )

    def _tokens(self, groups: Sequence[Group], batch: Batch) -> pa.Table | None:
        """Return the tokens of the first samples. Their log-probs and entropies take one pass of
        the policy over their rows, which changes nothing that trains."""
        observe = self.config.observe
        groups = first_groups(groups, observe.samples_per_step)
        samples = [s for group in groups for s in group.samples][: observe.samples_with_tokens]
        if not samples:
            return None
        rows = (batch.row_samples()[0] < len(samples)).nonzero()[:, 0]
        part = batch.select(rows.tolist())
        logprobs, entropies = self.policy.logprobs_and_entropies(part).unbind(1)
        if self.config.needs_old_logprobs and part.old_logprobs is not None:
            logprobs = part.old_logprobs
        return token_table(
            samples, part, self.texts, trainer_logprobs=logprobs, entropies=entropies
        )


def sampled_tokens(
    groups: Sequence[Group], texts: TokenTexts, *, limit: int, count: int
) -> pa.Table | None:
    """Return the tokens of the first ``count`` samples that ``write_samples`` writes with
    ``limit``, as they were sampled; None if there are none."""
    all_samples = ((g.prompt, s) for g in first_groups(groups, limit) for s in g.samples)
    first = list(islice(all_samples, count))
    if not first:
        return None
    batch = groups_to_batch([Group(0, prompt, (sample,)) for prompt, sample in first])
    return token_table([sample for _, sample in first], batch, texts)
