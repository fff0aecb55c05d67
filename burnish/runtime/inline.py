"""One process: builds engines, each timed on the run's timeline, and connects them without copies.

A runtime answers one question, "give me an engine for this role"; a loop never asks where it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.rollout import LocalEngine
from burnish.models.load import end_turn_token, load_causal_lm, resolve_device
from burnish.models.value_head import load_scalar_model
from burnish.observe.timeline import Timeline, timed
from burnish.rollout.local import LocalRolloutEngine
from burnish.sync.inproc import InprocSync
from burnish.train.base import HasLogprobs
from burnish.train.torch import EngineSpec, FrozenBase, TorchTrainEngine

POLICY_SPANS = {"logprobs": "logprobs", "forward_backward": "train", "optim_step": "optim"}
CRITIC_SPANS = {"values": "values", "forward_backward": "critic", "optim_step": "critic"}


class InlineRuntime:
    """Engines in this process, on one device."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        precision: PrecisionConfig,
        device: str,
        timeline: Timeline,
    ) -> None:
        self.tokenizer, self.precision, self.timeline = tokenizer, precision, timeline
        self.device = resolve_device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # Products of half operands add up in fp32, partial sums too.
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def language_model(
        self, spec: EngineSpec, spans: Mapping[str, str] = POLICY_SPANS
    ) -> TorchTrainEngine:
        """A train engine over a causal LM (policy, reference)."""
        model = load_causal_lm(spec.model, dtype=self._load_dtype(spec), device=self.device)
        self._add_end_token(model)
        engine = TorchTrainEngine(model, self._with_precision(spec), tokenizer=self.tokenizer)
        return timed(engine, self.timeline, spans)

    def scalar_model(
        self, spec: EngineSpec, *, seed: int, spans: Mapping[str, str] = CRITIC_SPANS
    ) -> TorchTrainEngine:
        """A train engine over a scalar model (critic, reward); a language model gets a new head."""
        model = load_scalar_model(
            spec.model,
            dtype=self._load_dtype(spec),
            device=self.device,
            seed=seed,
            new_head=True,
        )
        engine = TorchTrainEngine(model, self._with_precision(spec), tokenizer=self.tokenizer)
        return timed(engine, self.timeline, spans)

    def frozen_base(self, policy: TorchTrainEngine) -> HasLogprobs:
        """The reference model inside a LoRA policy."""
        return timed(FrozenBase(policy), self.timeline, {"logprobs": "reference"})

    def rollout(self, policy: TorchTrainEngine, config: LocalEngine) -> LocalRolloutEngine:
        """A rollout engine for ``policy``: over its own weights, or over a copy in another
        dtype."""
        wanted = self.precision.sampler_dtype
        model = policy.model
        if wanted != self.precision.dtype:
            base = policy.spec.model.model_copy(update={"lora": None})
            model = load_causal_lm(base, dtype=wanted, device=self.device)
            model.requires_grad_(False)
            self._add_end_token(model)
        return LocalRolloutEngine(model, self.tokenizer, config)  # type: ignore[arg-type]

    def standalone_rollout(self, model: ModelConfig, config: LocalEngine) -> LocalRolloutEngine:
        """A rollout engine without a trainer (evaluation of a finished model)."""
        network = load_causal_lm(model, dtype=self.precision.sampler_dtype, device=self.device)
        self._add_end_token(network)
        return LocalRolloutEngine(network, self.tokenizer, config)

    def _load_dtype(self, spec: EngineSpec) -> Dtype:
        """fp32 where all weights are trained: they become the masters, unrounded."""
        whole = spec.trainable and spec.model.lora is None
        return "fp32" if whole else self.precision.dtype

    def _with_precision(self, spec: EngineSpec) -> EngineSpec:
        return replace(spec, precision=self.precision)

    def _add_end_token(self, model: PreTrainedModel) -> None:
        """Make the chat template's end of turn an end token of the model, here and in its
        exports."""
        turn, config = end_turn_token(self.tokenizer), model.generation_config
        if turn is None or config is None:
            return
        have = config.eos_token_id
        ends = {have} if isinstance(have, int) else set(have or [])
        ends |= {turn, int(self.tokenizer.eos_token_id)}
        config.eos_token_id = sorted(ends) if len(ends) > 1 else turn

    def sync(self, policy: TorchTrainEngine, rollout: LocalRolloutEngine) -> InprocSync:
        """What hands the policy's weights to the rollout engine."""
        return timed(InprocSync(policy, rollout), self.timeline, {"push": "sync"})
