"""The rollout engine in the trainer's process: continuous batching over the policy's own weights.

``running_batch.py`` schedules and decodes; ``model.py`` runs the model. Models whose
attention cannot use plans are sampled one row at a time (``row_sampler.py``).

``make_engine`` selects how a model is sampled, by an experiment like that of ``models/support.py``:
the fastest method is used whose greedy tokens and log-probs equal those of transformers' forward of
the full row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from burnish.config.model import Dtype
from burnish.models.buffers import persistent_buffers, replace_buffers
from burnish.models.compiled_layers import check_compile
from burnish.models.family import PACKED, Decoding, DecodingSupport, words
from burnish.models.family_check import TOLERANCE, failure_text, largest_difference
from burnish.models.load import DTYPES, ModelError
from burnish.models.nf4 import Nf4Layer
from burnish.models.shrink import build, shrink
from burnish.models.support import (
    below_rope_border,
    cached_result,
    model_support,
    row_limit,
    runs_own_code,
)
from burnish.rollout.base import Completion, Request, Sampling, generate
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.model import LocalModel
from burnish.rollout.local.row_sampler import RowQueue
from burnish.rollout.local.running_batch import RunningBatch
from burnish.rollout.requests import OpenRequests, StopRule, check_requests, end_tokens
from burnish.rollout.weights import WeightNameCheck

log = logging.getLogger("burnish")

_NEW_TOKENS = 12
_PROMPTS = ((5, 17, 3, 60, 41, 8, 29), (9, 2, 71, 33, 12, 50, 6, 24, 80, 15, 37))
"""Prompts of the experiment that selects the decoding."""


class LocalRolloutEngine:
    """Samples from a HuggingFace causal LM in this process. Implements
    ``rollout.base.RolloutEngine``.

    ``model`` may be the trainer's own module; it then samples from new weights without a copy. The
    trainer and the engine must not compute with a shared module at the same time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: LocalEngine,
        *,
        decoding: Decoding = "batched",
    ) -> None:
        """Create an engine for ``model``.

        ``decoding`` is the sampling method; :func:`make_engine` determines the fastest exact one.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.decoding = decoding
        self.network = LocalModel(model, config)
        self.max_len = row_limit(model.config)
        """Maximum length of prompt and response in tokens. None: unlimited."""
        self.device = self.network.device
        self.batch: RunningBatch | RowQueue = (
            RunningBatch(self.network)
            if decoding == "batched"
            else RowQueue(self.network, use_cache=decoding == "cached")
        )
        self._version = 0
        self._problem: str | None = None
        """Reason not to sample; None: ready to sample."""
        self._open = OpenRequests()
        self._end_tokens = end_tokens(model.generation_config, tokenizer)

    # ---- the interface ---------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights. Setting it declares that the weights have changed."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self.weights_changed(version)

    @property
    def keeps_cache_on_update(self) -> bool:
        """Return whether there are caches to keep. Row by row there are none: each poll samples a
        response from its first to its last token, so none is in progress when weights change."""
        return self.decoding == "batched"

    def weights_changed(self, version: int, *, keep_cache: bool = False) -> None:
        """Declare that the weights of a shared module have changed in place. ``keep_cache`` is that
        of :meth:`load_weights`."""
        self._version = version
        if keep_cache:
            self.network.weights_changed()
        else:
            self._forget()

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Queue ``requests``.

        Raises ValueError, before any is queued, if a prompt is empty or does not fit, if a
        ``max_tokens`` is below 1, or if an id or a conversation is already open. Raises
        RuntimeError after a failed load of weights.
        """
        check_requests(requests, sampling, limit=self.max_len)
        self._check_ready()
        self._open.add(requests)
        stop = StopRule(self.tokenizer, sampling, self._end_tokens)
        for request in requests:
            self.batch.add(request, sampling, stop)

    def poll(self) -> list[Completion]:
        """Prefill waiting prompts or decode one token for every active sample (with CUDA graphs: up
        to eight; row by row: finish one sample). Return what finished. Raises RuntimeError after a
        failed load of weights; the requests stay open."""
        self._check_ready()
        done = self.batch.step(self.version)
        for completion in done:
            self._open.finish(completion.request_id)
        return done

    def cancel(self, request_ids: Iterable[str]) -> None:
        self.batch.cancel(self._open.drop(request_ids))

    def release(self, conversations: Iterable[str]) -> None:
        self.batch.release(conversations)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return generate(self, requests, sampling)

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        """Copy weights by name. Merged weights of a LoRA model require a model without adapters.

        With ``keep_cache``, responses in progress and kept conversations continue with the keys and
        values of the previous weights; otherwise these are computed again, or dropped.

        Raises ValueError if a name is unknown, a shape differs, or a parameter or persistent
        buffer is missing. After an error the engine cannot sample until a load succeeds, unless
        nothing was written.
        """
        parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        parameters |= dict(persistent_buffers(self.model))
        names = WeightNameCheck({name: tensor.shape for name, tensor in parameters.items()})
        with torch.no_grad():
            for name, tensor in tensors:
                names.add(name, tensor.shape)
                self._problem = f"its load of the weights of version {version} failed"
                target = parameters[name]
                if isinstance(target, nn.Buffer) and target.dtype != tensor.dtype:
                    # rounded until the first load, because the model was loaded in half precision
                    replace_buffers(self.model, {name: tensor.detach().to(self.device, copy=True)})
                    self._forget(everything=True)  # captured graphs read the previous buffer
                else:
                    target.copy_(tensor)
        names.complete()
        self._problem = None
        self.weights_changed(version, keep_cache=keep_cache)

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free the cache and captured graphs until the next poll; open requests are prefilled again
        then. The weights are kept, because new ones are copied into them."""
        self._forget(everything=True)

    def wake(self) -> None:
        """Do nothing; memory is allocated again on demand."""

    def close(self) -> None:
        """Drop open requests, and free captured graphs and their cache."""
        self.cancel(list(self._open.ids))
        self.sleep()

    # ---- parts -----------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._problem is not None:
            raise RuntimeError(
                f"the local engine cannot sample: {self._problem}, so some may be those of version "
                f"{self.version}; load all weights again"
            )

    def _forget(self, *, everything: bool = False) -> None:
        """Drop what was computed from the weights. Captured graphs read the weights in place, so
        they are only freed with ``everything``."""
        self.batch.restart()
        if everything:
            self.network.free()
        else:
            self.network.weights_changed()


def make_engine(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: LocalEngine,
    *,
    name: str,
    dtype: Dtype | None = None,
    max_len: int | None = None,
) -> LocalRolloutEngine:
    """Return a local engine that samples from ``network``, in its format and up to its limit, with
    the fastest exact method. Raises ModelError if no method is exact. See ``rollout/base.py``."""
    support = decoding_support(network.config, trust=runs_own_code(network))
    if support.decoding is None:
        raise ModelError(f"{name}: {support.sentence()}; use rollout.engine.kind=vllm")
    if support.decoding != "batched":
        log.warning("%s: %s; rollout.engine.kind=vllm may be faster", name, support.sentence())
    if config.compile == "layers":
        _check_compile(network, support, name)
    return LocalRolloutEngine(network, tokenizer, config, decoding=support.decoding)


def _check_compile(network: PreTrainedModel, support: DecodingSupport, name: str) -> None:
    """Raise ModelError if the layers of recorded decode steps cannot be compiled."""
    key, weight = "rollout.engine.compile", network.get_output_embeddings().weight
    problem = ""
    if support.decoding != "batched":
        problem = support.sentence()
    elif weight.device.type != "cuda":
        problem = f"decode steps are recorded on a GPU, and the model is on {weight.device.type}"
    elif any(isinstance(module, Nf4Layer) for module in network.modules()):
        problem = "its 4-bit weights are unpacked by code that is not compiled"
    if problem:
        raise ModelError(f"{name}: {key}=layers: {problem}; use {key}=off")
    dtype = next(name for name, each in DTYPES.items() if each == weight.dtype)
    check_compile(network.config, weight.device, dtype, key=key)


def decoding_support(
    config: PretrainedConfig, *, trust: bool = False, use_disk: bool = True
) -> DecodingSupport:
    """Return how the local engine samples from models with this config.

    Takes up to three seconds the first time. Caching and keywords are those of ``model_support``.
    """
    tiny = below_rope_border(shrink(config))

    @torch.no_grad()
    def run() -> DecodingSupport:
        support = model_support(tiny, trust=trust, use_disk=use_disk)
        if support.refusal:
            return DecodingSupport(None, reason=support.refusal)
        model = build(tiny, trust=trust)
        model.generation_config = GenerationConfig()
        model.set_attn_implementation("eager")
        size = int(tiny.get_text_config().vocab_size)
        prompts = [tuple(token % size for token in prompt) for prompt in _PROMPTS]
        expected = [_greedy(model, prompt) for prompt in prompts]
        model.set_attn_implementation(support.attention)
        ways: tuple[Decoding, ...] = ("batched", "cached", "recomputed")
        reason = "" if support.attention == PACKED else support.reason
        for decoding in ways if support.attention == PACKED else ways[1:]:
            try:
                decoded = _engine_greedy(model, decoding, prompts)
            except Exception as error:  # any failure of a model is a result of the experiment
                reason = f"sampling {words(decoding)} failed ({failure_text(error)})"
                continue
            if [tokens for tokens, _ in decoded] != [tokens for tokens, _ in expected]:
                reason = f"greedy tokens sampled {words(decoding)} differ from transformers'"
                continue
            difference = largest_difference([b for _, b in decoded], [b for _, b in expected])
            if difference <= TOLERANCE:
                return DecodingSupport(decoding, difference, reason)
            reason = f"log-probs sampled {words(decoding)} differ by {difference:.1e} nats"
        return DecodingSupport(None, reason=reason)

    return cached_result(DecodingSupport, tiny, run, use_disk=use_disk, trust=trust)


def _greedy(model: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens and their log-probs, with a forward of the full row for each."""
    row, logprobs = list(prompt), []
    for _ in range(_NEW_TOKENS):
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].float()
        row.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[row[-1]]))
    return row[len(prompt) :], torch.tensor(logprobs)


def _engine_greedy(
    model: PreTrainedModel, decoding: Decoding, prompts: Sequence[tuple[int, ...]]
) -> list[tuple[list[int], torch.Tensor]]:
    """Return greedy tokens and their log-probs for each prompt, sampled by the local engine."""
    tokenizer: Any = _NoTokenizer()
    engine = LocalRolloutEngine(model, tokenizer, LocalEngine(), decoding=decoding)
    requests = [Request(str(i), prompt) for i, prompt in enumerate(prompts)]
    sampling = Sampling(max_tokens=_NEW_TOKENS, temperature=0.0)
    completions = {int(c.request_id): c for c in engine.generate(requests, sampling)}
    return [
        (list(completions[i].token_ids), torch.tensor(completions[i].logprobs))
        for i in range(len(requests))
    ]


class _NoTokenizer:
    """A stand-in for a tokenizer, without texts and end tokens."""

    eos_token_id = None
    chat_template = None

    def decode(self, _ids: list[int], **_: Any) -> str:
        return ""
