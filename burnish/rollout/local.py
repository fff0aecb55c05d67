"""The rollout engine in the trainer's process: continuous batching over the policy's own weights.

The prompt of a request is prefilled once, packed with other prompts, and its keys and values are
written to n cache slots. The n samples then decode in one batch with all others. A finished sample
is removed immediately: the last active one moves into its slot. Active slots are therefore always
``0 .. B-1``, and nothing is computed for finished samples. Waiting requests use the freed slots.

Reading order: ``generate`` -> ``_admit`` (prefill) -> ``_decode`` -> ``_retire``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.rollout import LocalEngine
from burnish.models.attention import NO_MASK, KVCache, Segment, decode_plan, plan_segments
from burnish.models.buffers import persistent_buffers, replace_buffers
from burnish.models.family import Decoding
from burnish.models.logit_scaling import logit_scaling
from burnish.models.support import row_limit
from burnish.rollout.base import Completion, Request, Sampling, SamplingError
from burnish.rollout.cpu_linear import fp32_copies, onednn_layers, onednn_linear
from burnish.rollout.cuda_graphs import DecodeGraphs
from burnish.rollout.requests import StopRule, check_requests, end_tokens
from burnish.rollout.row_sampler import RowSampler
from burnish.rollout.sampling import sample_tokens, uniforms_for
from burnish.rollout.weights import WeightNameCheck
from burnish.types import FinishReason


@dataclass
class _Sequence:
    """A sample being decoded."""

    request: Request
    index: int
    uniforms: Tensor  # [maximum new tokens]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Return the current length of prompt and response in tokens."""
        return len(self.request.prompt_ids) + len(self.tokens)


class LocalRolloutEngine:
    """Samples from a HuggingFace causal LM in this process. Implements
    ``rollout.base.RolloutEngine``.

    ``model`` may be the trainer's own module; it then samples from new weights without a copy.
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

        ``decoding`` is the sampling method; ``decoding.make_local_engine`` determines the fastest
        exact one.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.decoding = decoding
        self.version = 0
        self.device = next(model.parameters()).device
        self._body = model.get_decoder()
        self._scaling = logit_scaling(model.config)
        self._no_mask = NO_MASK.to(self.device)  # copied here: a copy in a captured graph fails
        self._end_tokens = end_tokens(model.generation_config, tokenizer)
        self._graphs: DecodeGraphs | None = None
        self._layers = onednn_layers(model)

    # ---- the interface ---------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as they finish.

        Raises ValueError before the first one if a prompt is empty or does not fit, or if a
        ``max_tokens`` is below 1.
        """
        check_requests(requests, sampling, limit=row_limit(self.model.config))
        self.model.eval()
        if self.decoding == "batched":
            yield from self._batched(requests, sampling)
        else:
            yield from self._row_by_row(requests, sampling)

    def _batched(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        run = _Run(self, sampling, deque(self._split(requests)))
        with fp32_copies(self._layers) as layers:
            while run.waiting or run.active:
                # not around the yield, during which the caller's code runs
                with torch.no_grad(), onednn_linear(layers):
                    run.admit() if run.can_admit() else run.decode()
                yield from run.retire()

    def _row_by_row(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        sampler = RowSampler(self.model, use_cache=self.decoding == "cached")
        stop = StopRule(self.tokenizer, sampling, self._end_tokens)
        try:
            yield from sampler.sample(requests, sampling, stop, version=self.version)
        except SamplingError as error:
            raise SamplingError(self.what_is_broken()) from error

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights by name. Merged weights of a LoRA model require a model without adapters.

        Raises ValueError if a name is unknown, a shape differs, or a parameter or persistent
        buffer is missing.
        """
        own: dict[str, Tensor] = dict(self.model.named_parameters())
        own |= dict(persistent_buffers(self.model))
        names = WeightNameCheck({name: tensor.shape for name, tensor in own.items()})
        with torch.no_grad():
            for name, tensor in tensors:
                names.add(name, tensor.shape)
                if isinstance(own[name], nn.Buffer) and own[name].dtype != tensor.dtype:
                    self._take_format(name, tensor)
                else:
                    own[name].copy_(tensor)
        names.complete()
        self.version = version

    def _take_format(self, name: str, tensor: Tensor) -> None:
        """Replace a buffer by the trainer's, in its dtype. A model loaded in half precision may
        have a rounded buffer."""
        replace_buffers(self.model, {name: tensor.detach().to(self.device, copy=True)})
        self._graphs = None  # they read the previous buffer

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free captured graphs and their cache until the next generate. The weights are kept,
        because new ones are copied into them."""
        self._graphs = None

    def wake(self) -> None:
        """Do nothing; memory is allocated again on demand."""

    def close(self) -> None:
        """Free captured graphs and their cache, like :meth:`sleep`."""
        self.sleep()

    # ---- parts -----------------------------------------------------------------------------

    def _split(self, requests: Sequence[Request]) -> Iterator[list[tuple[Request, int]]]:
        """Yield lists of (request, sample index) that fit into the slots and share one prefill."""
        size = self.config.max_batch_size
        for request in requests:
            indices = range(request.n)
            for begin in range(0, request.n, size):
                yield [(request, i) for i in indices[begin : begin + size]]

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return the fp32 logits [B, V] of last hidden states [B, H]."""
        return self._scaling.apply_(self.model.get_output_embeddings()(hidden).float())

    def body(self, input_ids: Tensor, position_ids: Tensor, plan: object) -> Tensor:
        """Return the last hidden states [R, T, H] under a plan."""
        out = self._body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self._no_mask,
            plan=plan,
            use_cache=False,
        )
        return out.last_hidden_state

    def what_is_broken(self) -> str:
        """Return the error message for log-probs that are not finite, with the likely cause."""
        for name, weight in self.model.named_parameters():
            if not bool(weight.isfinite().all()):
                where = f"its weight {name} is not finite"
                break
        else:
            where = f"its weights are finite, so an activation overflows in {weight.dtype}"
        return (
            f"the policy at version {self.version} gives log-probs that are not finite: {where}. "
            "Either training diverged (use a lower train.lr), or the dtype has too little range "
            "(precision.dtype)"
        )

    def graphs_for(self, num_slots: int, capacity: int) -> DecodeGraphs:
        """Return decode graphs over a cache of at least this size, reused between calls."""
        have = self._graphs.cache if self._graphs is not None else None
        if have is None or have.num_slots < num_slots or have.capacity < capacity:
            cache = KVCache(num_slots, capacity)
            self._graphs = DecodeGraphs(self.body, self.head_logits, cache, self.device)
        assert self._graphs is not None
        return self._graphs


class _Run:
    """State of one call of generate: active sequences in slot order, and waiting requests."""

    def __init__(
        self,
        engine: LocalRolloutEngine,
        sampling: Sampling,
        waiting: deque[list[tuple[Request, int]]],
    ) -> None:
        self.engine, self.sampling, self.waiting = engine, sampling, waiting
        self.active: list[_Sequence] = []
        self.max_slots = engine.config.max_batch_size
        total = sum(len(unit) for unit in waiting)
        longest = max((len(unit[0][0].prompt_ids) for unit in waiting), default=1)
        slots = min(self.max_slots, max(total, 1))
        graphs = engine.device.type == "cuda" and engine.config.cuda_graphs
        # Captured graphs need fixed addresses, so allocate all positions. Otherwise start small.
        most = max((unit[0][0].limit(sampling) for unit in waiting), default=1)
        room = most if graphs else min(most, 64)
        self.graphs: DecodeGraphs | None = None
        if graphs:
            self.graphs = engine.graphs_for(DecodeGraphs.padded(slots), longest + room)
            self.cache = self.graphs.cache
        else:
            self.cache = KVCache(slots, longest + room)
        self.tokens = torch.zeros(0, dtype=torch.int64, device=engine.device)  # [B] last token
        self.positions = torch.zeros(0, dtype=torch.int64, device=engine.device)  # [B] its position
        self.stop_rule = StopRule(engine.tokenizer, sampling, engine._end_tokens)

    def can_admit(self) -> bool:
        """Return whether there are free slots for all samples of the next waiting prompt."""
        return bool(self.waiting) and len(self.active) + len(self.waiting[0]) <= self.max_slots

    def admit(self) -> None:
        """Prefill as many waiting prompts as fit, in one packed row, and draw the first token of
        each sample."""
        units: list[list[tuple[Request, int]]] = []
        free, budget = self.max_slots - len(self.active), self.engine.config.max_prefill_tokens
        while self.waiting and len(self.waiting[0]) <= free:
            cost = len(self.waiting[0][0][0].prompt_ids)
            if units and cost > budget:
                break
            units.append(self.waiting.popleft())
            free, budget = free - len(units[-1]), budget - cost
        prompts = [unit[0][0].prompt_ids for unit in units]
        last_hidden = self._prefill(prompts, [len(unit) for unit in units])
        logits = self.engine.head_logits(last_hidden)
        counts = torch.tensor([len(unit) for unit in units], device=logits.device)
        lengths = torch.tensor([len(p) for p in prompts], device=logits.device)
        new = [
            _Sequence(request, i, uniforms_for(request.seed, i, request.limit(self.sampling)))
            for unit in units
            for request, i in unit
        ]
        first = len(self.active)
        self.active += new
        self.positions = torch.cat([self.positions, lengths.repeat_interleave(counts) - 1])
        self.tokens = torch.cat(
            [self.tokens, torch.zeros(len(new), dtype=torch.int64, device=logits.device)]
        )
        self._draw(logits.repeat_interleave(counts, dim=0), first)

    def _prefill(self, prompts: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Tensor:
        """Return the last hidden state [P, H] of each prompt; write keys and values to the next
        free slots."""
        device = self.engine.device
        starts, used = [], 0
        for prompt in prompts:
            starts.append(used)
            used += len(prompt)
        flat = torch.tensor([t for p in prompts for t in p], device=device)
        position = torch.cat([torch.arange(len(p)) for p in prompts])
        slot = len(self.active)
        source, slots = [], []
        for start, prompt, count in zip(starts, prompts, counts, strict=True):
            source.append(torch.arange(start, start + len(prompt)).repeat(count))
            slots.append(torch.arange(slot, slot + count).repeat_interleave(len(prompt)))
            slot += count
        index = torch.cat(source)
        segments = [Segment(s, len(p)) for s, p in zip(starts, prompts, strict=True)]
        plan = replace(
            plan_segments(segments, position.to(device)),
            cache=self.cache,
            cache_source=index.to(device),
            cache_slot=torch.cat(slots).to(device),
            cache_position=position[index].to(device),
        )
        hidden = self.engine.body(flat[None], position[None].to(device), plan)[0]
        ends = torch.tensor(
            [s + len(p) - 1 for s, p in zip(starts, prompts, strict=True)], device=device
        )
        return hidden[ends]

    def decode(self) -> None:
        """Decode one token for every active sequence."""
        length = max(sequence.length for sequence in self.active)
        if self.graphs is not None:
            logits = self.graphs.step(self.tokens, self.positions, length)
        else:
            if length > self.cache.capacity:
                self.cache.grow(length + length // 2)
            plan = decode_plan(self.cache, self.positions, length)
            hidden = self.engine.body(self.tokens[:, None], self.positions[:, None], plan)[:, 0]
            logits = self.engine.head_logits(hidden)
        self._draw(logits, 0)

    def _draw(self, logits: Tensor, first: int) -> None:
        """Sample one token for each sequence from slot ``first`` on; logits [B - first, V]."""
        rows = self.active[first:]
        uniforms = torch.stack([s.uniforms[len(s.tokens)] for s in rows]).to(logits.device)
        tokens, logprobs = sample_tokens(logits, uniforms, self.sampling)
        self.tokens[first:] = tokens
        self.positions[first:] += 1
        # One copy from the device: fp64 holds token ids and fp32 log-probs exactly.
        ids, found = torch.stack([tokens.double(), logprobs.double()]).tolist()
        if not all(map(math.isfinite, found)):
            raise SamplingError(self.engine.what_is_broken())
        for sequence, token, logprob in zip(rows, ids, found, strict=True):
            sequence.tokens.append(int(token))
            sequence.logprobs.append(logprob)

    def retire(self) -> Iterator[Completion]:
        """Yield finished sequences and move active ones into their slots."""
        reasons = [self._finished(sequence) for sequence in self.active]
        gone = [i for i, reason in enumerate(reasons) if reason is not None]
        if not gone:
            return
        for i in gone:
            yield self._completion(self.active[i], reasons[i])
        stay = len(self.active) - len(gone)
        holes = [i for i in gone if i < stay]
        movers = [i for i in range(stay, len(self.active)) if reasons[i] is None]
        order = list(range(stay))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if movers:
            source, target = torch.tensor(movers), torch.tensor(holes)
            length = max(self.active[mover].length for mover in movers) - 1
            device = self.engine.device
            self.cache.move(source.to(device), target.to(device), length)
        index = torch.tensor(order, dtype=torch.int64, device=self.tokens.device)
        self.active = [self.active[i] for i in order]
        self.tokens, self.positions = self.tokens[index], self.positions[index]

    def _finished(self, sequence: _Sequence) -> FinishReason | None:
        return self.stop_rule.finished(sequence.tokens, sequence.request.limit(self.sampling))

    def _completion(self, sequence: _Sequence, reason: FinishReason | None) -> Completion:
        assert reason is not None
        return Completion(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            finish_reason=reason,
            text=str(self.engine.tokenizer.decode(sequence.tokens, skip_special_tokens=True)),
            version=self.engine.version,
        )
