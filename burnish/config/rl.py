"""Recipe of the job ``rl``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from burnish.config.data import (
    held_out_advice,
)
from burnish.config.job import training_rules
from burnish.config.model import lora_advice, random_reference_advice
from burnish.config.ptx import ptx_rules
from burnish.config.rl_fields import RLFields
from burnish.config.rl_rules import cut_sampling, rl_advice, rl_rules, teacher_rules
from burnish.config.rollout import (
    pass_advice,
)
from burnish.config.sync import sync_rules


class RLConfig(RLFields):
    """``burnish rl``: reinforcement learning from rewards (PPO, GRPO and their family).

    Advantages that compare a prompt's samples need ``n_samples_per_prompt`` of 2 or more.
    ``critic`` is refused without gae, and ``reference`` without a KL weight. ``reinforce`` needs
    one optimizer step per rollout. ``correction`` needs ``top_p: 1`` and ``top_k: 0``."""

    job: Literal["rl"] = "rl"
    """Job of the recipe."""

    def rules(self) -> Iterator[str]:
        yield from training_rules(self, self.train)
        yield from rl_rules(self)
        yield from ptx_rules(self.ptx, temperature=self.rollout.temperature)
        yield from teacher_rules(self)
        yield from sync_rules(self.sync, self.cluster.runtime)
        if self.algorithm.policy_loss.kind == "reinforce" and self.several_updates:
            yield (
                "algorithm.policy_loss=reinforce has no ratio, so it is right for one optimizer "
                "step per rollout only; use ppo, or train_batch_size = rollout_batch_size x "
                "n_samples_per_prompt with epochs_per_rollout=1"
            )
        cut = cut_sampling(self)
        if self.algorithm.correction is not None and cut:
            yield (
                f"algorithm.correction weighs tokens by what the sampler's log-probs are, and with "
                f"rollout.{cut} tokens are drawn from another distribution than those; use "
                "top_p=1 and top_k=0, or no correction"
            )
        best = self.checkpoint.best_metric
        if best and best.startswith("eval/") and self.eval is None:
            yield f"checkpoint.best_metric={best} is measured by eval, which is not set"

    def advice(self) -> Iterator[str]:
        yield from rl_advice(self)
        yield from lora_advice(self.model)
        if self.eval is not None:
            yield from held_out_advice(self.data, self.eval.data, "eval.data")
            yield from pass_advice(self.eval, self.rewards)
        trainer, sampler = self.precision.dtype, self.precision.sampler_dtype
        if sampler != trainer:
            yield (
                f"precision.rollout_dtype: the trainer computes in {trainer} and the rollout "
                f"engine in {sampler}: their log-probs differ for the same weights, and the "
                "update takes the difference for a change of the policy; leave rollout_dtype out "
                "to use one format (the gap is measured at every step: train/mismatch_*)"
            )
        own = self.reference is not None and self.reference.model is not None
        if self.algorithm.kl.init_kl_coef and not own and self.model.scratch is not None:
            yield random_reference_advice("algorithm.kl")
        normed = [entry.name or entry.kind for entry in self.rewards if entry.running_norm]
        if normed and self.eval is None and self.checkpoint.best_metric is None:
            yield (
                "checkpoint.best_metric is reward/mean where there is no eval, and running_norm "
                f"measures {', '.join(normed)} in a mean that moves, so the best checkpoint would "
                f"say little; set checkpoint.best_metric=reward/{normed[0]} (the plain score)"
            )
