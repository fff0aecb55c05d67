"""Runtime in one process: builds engines, times each on the run's timeline, and connects them
without copies.

A runtime returns an engine for a role. Training loops do not depend on the place of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.cluster import ClusterConfig
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.roles import samples_with_policy
from burnish.config.sync import LinkSync, SyncConfig
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.environments.process import start_process
from burnish.environments.worker_set import EnvironmentWorker
from burnish.models.end_tokens import add_end_tokens
from burnish.models.gpu import set_up_gpu
from burnish.models.load import describe, load_causal_lm, resolve_device
from burnish.models.lora_layers import merged_weights
from burnish.observe.memory import ProcessPeaks
from burnish.observe.timeline import Timeline, timed
from burnish.rollout.base import RolloutEngine, Sampling, make_rollout_engine
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.rollout.weights import check_logprobs, probe_requests
from burnish.runtime.base import SYNC_SPANS
from burnish.runtime.phases import Phases
from burnish.sync.inproc import InprocWeightSync
from burnish.train.base import CRITIC_SPANS, POLICY_SPANS, HasLogprobs, TrainEngine
from burnish.train.engine import BaseTrainEngine
from burnish.train.engines import load_engine
from burnish.train.spec import EngineSpec


class InlineRuntime:
    """Engines in this process, on one device."""

    loop_ranks = SINGLE

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        precision: PrecisionConfig,
        device: str,
        timeline: Timeline,
        ranks: RankGroup = SINGLE,
        cluster: ClusterConfig | None = None,
    ) -> None:
        """``cluster``: source of the roles that are offloaded between phases. None: none."""
        self.tokenizer, self.precision, self.timeline = tokenizer, precision, timeline
        self.ranks, self.phases = ranks, Phases(cluster)
        self.device = resolve_device(device)
        self.attention: dict[str, str] = {}
        self._connected: list[RolloutEngine] = []
        """Engines that are clients of servers."""
        set_up_gpu(self.device)

    def language_model(
        self, spec: EngineSpec, spans: Mapping[str, str] = POLICY_SPANS
    ) -> BaseTrainEngine:
        return self._engine(spec, spans, scalar=False, seed=spec.seed)

    def scalar_model(
        self, spec: EngineSpec, *, seed: int, spans: Mapping[str, str] = CRITIC_SPANS
    ) -> BaseTrainEngine:
        return self._engine(spec, spans, scalar=True, seed=seed)

    def rollout(
        self, policy: TrainEngine, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RolloutEngine:
        """Return a rollout engine for ``policy``, for rows of up to ``max_len`` tokens (None: the
        model's limit). It uses the policy's own weights, a copy (``own_weights``, another dtype, or
        sharded weights), or vLLM, also on servers, which gets them at the first sync."""
        dtype = self.precision.sampler_dtype
        trainer = cast(BaseTrainEngine, policy)
        model: Any = trainer.model
        if config.uses_transformers and not samples_with_policy(
            trainer.spec.role.train.engine, config, self.precision
        ):
            base = trainer.spec.role.model.model_copy(
                update={"lora": None, "attn_implementation": "auto"}
            )
            model = load_causal_lm(base, dtype=dtype, device=self.device)
            model.requires_grad_(False)
            add_end_tokens(model, self.tokenizer)
        name = describe(trainer.spec.role.model)
        return self.phases.rollout(self._rollout(model, config, name=name, max_len=max_len))

    def standalone_rollout(
        self,
        model: ModelConfig,
        config: RolloutEngineConfig,
        *,
        max_len: int | None = None,
        ready: bool = True,
    ) -> RolloutEngine:
        """Return a rollout engine without a trainer (evaluation of a finished model). ``ready``:
        it has the model's own weights. Otherwise vLLM reads none if the model can be built without
        them, and cannot sample until weights are loaded."""
        device = self.device if config.uses_transformers else "cpu"
        empty = not config.uses_transformers and not ready
        dtype = self.precision.sampler_dtype
        model = model.model_copy(update={"attn_implementation": "auto"})
        network = load_causal_lm(model, dtype=dtype, device=device, empty=empty)
        add_end_tokens(network, self.tokenizer)
        engine = self._rollout(network, config, name=describe(model), max_len=max_len)
        if ready and not config.uses_transformers:
            engine.load_weights(0, merged_weights(network))
            _check_weights(engine, network, dtype)
        return engine

    def _rollout(
        self, network: Any, config: RolloutEngineConfig, *, name: str, max_len: int | None
    ) -> RolloutEngine:
        dtype = self.precision.sampler_dtype
        engine = make_rollout_engine(
            network, self.tokenizer, config, name=name, dtype=dtype, max_len=max_len
        )
        if config.on_servers:
            self._connected.append(engine)
        return engine

    def _engine(
        self, spec: EngineSpec, spans: Mapping[str, str], *, scalar: bool, seed: int
    ) -> BaseTrainEngine:
        engine = load_engine(
            spec,
            scalar=scalar,
            seed=seed,
            tokenizer=self.tokenizer,
            ranks=self.ranks,
            device=self.device,
        )
        if self.device.type == "cuda":  # memory of the model before it was sharded
            torch.cuda.empty_cache()
        self.attention[spec.role.name] = engine.attention.sentence
        named = timed(engine, self.timeline, self.phases.spans(spec.role.engine_role, spans))
        return self.phases.train_engine(named, spec.role.engine_role)

    def sync(
        self, policy: TrainEngine, rollout: RolloutEngine, config: SyncConfig = LinkSync()
    ) -> InprocWeightSync:
        weight_sync = timed(
            InprocWeightSync(cast(BaseTrainEngine, policy), rollout), self.timeline, SYNC_SPANS
        )
        return self.phases.sync(weight_sync)

    async def start_worker(self, python: str | None) -> EnvironmentWorker:
        """Start a process for user code on this machine."""
        return await start_process(python)

    def release(self, engine: HasLogprobs) -> None:
        """Drop the reference to it. Its memory is freed with the last one."""
        self.phases.release(engine)

    def peaks(self) -> list[ProcessPeaks]:
        """Return the peaks of this process, if its timeline measures them."""
        peaks = self.timeline.peaks
        return [] if peaks is None else [ProcessPeaks("all", 0, peaks.collect())]

    def close(self) -> None:
        """Close the connections to servers, also after an error in the construction of a job. No
        process was started."""
        for engine in self._connected:
            engine.close()


@torch.no_grad()
def _check_weights(engine: RolloutEngine, network: PreTrainedModel, dtype: Dtype) -> None:
    """Raise StaleWeightsError if the log-probs of ``engine`` are not those of ``network``, whose
    weights it has."""
    limit = engine.max_len
    assert limit is not None, "the limit of the model"
    requests = probe_requests(network.config.vocab_size, max_len=limit, num_samples=1)
    sampling = Sampling(requests[0].max_tokens or 1, 0.0)
    (completion,) = engine.generate(requests, sampling)
    prompt, response = list(requests[0].prompt_ids), list(completion.token_ids)
    row = torch.tensor([[*prompt, *response]], device=network.device)
    logits = network(row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
    check_logprobs([completion], [expected], temperature=0.0, dtypes=(dtype, dtype))
