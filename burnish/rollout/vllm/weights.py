"""Transfer of new weights to vLLM, and verification that it samples from them.

This side: :class:`WeightStream` checks and fingerprints the tensors as vLLM reads them, and
compares them with what the workers report. The workers' side: :class:`WorkerExtension`. Nothing
here imports vllm (``engine.py`` does); its objects arrive as arguments.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from burnish import shm
from burnish.config.model import Dtype
from burnish.models.buffers import persistent_buffers
from burnish.models.islands import fp32_names
from burnish.models.load import DTYPES
from burnish.models.tensor_files import MAX_TENSORS, GrowingTensorFile
from burnish.rollout.vllm.experts import experts_not_used
from burnish.rollout.vllm.places import (
    HubNames,
    Place,
    held_names,
    layer_of,
    places_of,
    state_of,
)
from burnish.rollout.weights import (
    Fingerprint,
    Shape,
    WeightNameCheck,
    fingerprint,
    read_fingerprints,
)

PROTOCOL = 2
"""Version of the methods of :class:`WorkerExtension` and of the fingerprints. Increase it with a
change of either: a server may have another version of Burnish than its client."""
FILE_BYTES = 1 << 30
"""Size of a file of weights for vLLM's processes. Two never exist at the same time."""


class WeightStream:
    """The tensors of one load as vLLM reads them, with checks and fingerprints. If one is wrong,
    the stream ends early, so that vLLM's loader always returns; :meth:`finish` then raises."""

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        skeleton: PreTrainedModel,
        dtype: torch.dtype,
    ) -> None:
        """``skeleton``: the model without weights. ``dtype``: of vLLM's parameters."""
        self._tensors, self._dtype = tensors, dtype
        self._names = WeightNameCheck(shapes_of(skeleton))
        self._buffers = {name for name, _ in persistent_buffers(skeleton)}
        self._buffers |= fp32_names(skeleton, dtype)
        self._hub = HubNames(skeleton)
        modules = skeleton.named_modules()
        self.transposed = {f"{name}.weight" for name, m in modules if isinstance(m, Conv1D)}
        """Weights that vLLM stores as linear layers of torch do (GPT-2)."""
        self._fingerprints: dict[str, Tensor] = {}
        self._exact: dict[str, Tensor] = {}
        """Fingerprints of buffers and weights that stay in fp32; vLLM may use any format."""
        self._error: Exception | None = None
        self._read_to_the_end = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the hub's files that the tensors consist of, fingerprinted."""
        try:
            for name, tensor in self._tensors:
                self._names.add(name, tensor.shape)
                kept = name in self._buffers
                for part_name, part in self._hub.of(name, tensor.detach()):
                    table = part.T if part_name in self.transposed else part
                    self._fingerprints[part_name] = fingerprint(table, self._dtype)
                    if kept:
                        self._exact[part_name] = fingerprint(table, torch.float32)
                    yield part_name, nn.Buffer(part) if kept else part
            self._read_to_the_end = True
        except Exception as error:  # raised again by finish
            self._error = error

    def finish(self) -> None:
        """Raise the error of the stream, or ValueError if weights are missing."""
        if self._error is not None:
            raise self._error
        self._names.complete()

    def compare(self, reports: Sequence[dict[str, Any]]) -> list[str]:
        """Return the differences between the weights given and those that the workers hold.

        A weight whose place in vLLM's tensors is known is compared value by value. All tensors are
        compared by their values in any order; weights for which no tensor is known (or the other
        way round) as a sum over their layer, so that renaming inside a layer is not a finding.
        """
        problems = [finding for report in reports for finding in report["findings"]]
        if self._error is None and not self._read_to_the_end and problems:
            return problems
        self.finish()
        exact = set(reports[0]["exact"])
        names: dict[str, str | None] = reports[0]["names"]
        plain, precise = map(read_fingerprints, (self._fingerprints, self._exact))
        sent = {n: precise[n] if names.get(n) in exact else f for n, f in plain.items()}
        held = [report["fingerprints"] for report in reports]
        values = {sent_name: number.values for sent_name, number in sent.items()}
        differing = _other_values(values, names, held)
        problems += [f"the parameter {name} has other values than were sent" for name in differing]
        for sent_name in reports[0]["placed"]:
            numbers = [int(report["placed"][sent_name]) for report in reports]
            if names[sent_name] not in differing and sent[sent_name].placed not in _totals(numbers):
                problems.append(
                    f"the parameter {names[sent_name]} has the values of {sent_name} in another "
                    "order than they were sent"
                )
        return problems + _other_layers(values, names, held)


def _other_values(
    sent: Mapping[str, int], names: Mapping[str, str | None], held: Sequence[Mapping[str, int]]
) -> list[str]:
    """Return vLLM's tensors that do not have the values of the weights that they store."""
    expected: dict[str, int] = {}
    for sent_name, number in sent.items():
        if (name := names.get(sent_name)) is not None:
            expected[name] = (expected.get(name, 0) + number) % (1 << 64)
    totals = {name: _totals([report[name] for report in held]) for name in expected}
    return sorted(name for name, number in expected.items() if number not in totals[name])


def _other_layers(
    sent: Mapping[str, int], names: Mapping[str, str | None], held: Sequence[Mapping[str, int]]
) -> list[str]:
    """Return findings about layers in which weights without a known tensor do not add up to tensors
    without a known weight."""
    spare: dict[str, list[str]] = {}
    left: dict[str, list[str]] = {}
    for sent_name in sent.keys() - names.keys():
        spare.setdefault(layer_of(sent_name), []).append(sent_name)
    for name in held[0].keys() - set(names.values()):
        left.setdefault(layer_of(name), []).append(name)
    problems = []
    for layer in sorted(spare.keys() | left.keys()):
        sent_names, unmatched = sorted(spare.get(layer, ())), sorted(left.get(layer, ()))
        if not unmatched:
            problems.append(f"vLLM has no parameter {sent_names[0]}")
            continue
        if not sent_names:
            problems.append(f"vLLM has a parameter {unmatched[0]}, which was not sent")
            continue
        total = sum(sent[name] for name in sent_names) % (1 << 64)
        numbers = [[report[name] for report in held] for name in unmatched]
        # the tensors may be split over the workers, or some of them equal on each
        equal_once = [n[0] if len(set(n)) == 1 else sum(n) for n in numbers]
        if total not in (sum(equal_once) % (1 << 64), sum(map(sum, numbers)) % (1 << 64)):
            problems.append(
                f"the parameters {', '.join(unmatched[:3])} have other values than were sent as "
                f"{', '.join(sent_names[:3])}"
            )
    return problems


def _totals(numbers: Sequence[int]) -> set[int]:
    """Return the fingerprints that a tensor may have: split over the workers, or equal on each."""
    same = {numbers[0]} if len(set(numbers)) == 1 else set()
    return {sum(numbers) % (1 << 64)} | same


def shapes_of(skeleton: PreTrainedModel) -> dict[str, torch.Size]:
    """Return the shapes of all tensors that a trainer sends: parameters and persistent buffers."""
    state = [*skeleton.named_parameters(), *persistent_buffers(skeleton)]
    return {name: tensor.shape for name, tensor in state}


def shared_folder(num_bytes: int) -> Path:
    """Return a new folder in shared memory, or on disk if shared memory has no room for twice
    ``num_bytes``. Remove first the folders of processes that were killed during a load."""
    shared, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    shm.sweep("weights", shared, disk)
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * num_bytes
    return Path(tempfile.mkdtemp(prefix=shm.prefix("weights"), dir=shared if roomy else disk))


def weight_files(
    stream: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype
) -> Iterator[Path]:
    """Write the stream as safetensors files of :data:`FILE_BYTES` or one tensor more, and yield
    each once it is written. The reader may delete it."""
    file: GrowingTensorFile | None = None
    number = 0
    for name, tensor in stream:
        file = file or GrowingTensorFile(folder / f"{number:05d}.safetensors")
        file.add(name, tensor, dtype)
        if file.num_bytes > FILE_BYTES or len(file.infos) == MAX_TENSORS:
            yield file.close()
            file, number = None, number + 1
    if file is not None:
        yield file.close()


def _read(file: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file. They are mapped, so that a loader that narrows them
    reads its shard alone."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no dict)
            yield name, opened.get_tensor(name)


# ---- the workers' side ---------------------------------------------------------------------


class WorkerExtension:
    """Methods that are added to every vLLM worker (``worker_extension_cls``). Arguments and results
    consist of what JSON has, because those of a server arrive over HTTP; only a stream of tensors
    does not."""

    model_runner: Any
    vllm_config: Any
    rank: int
    burnish_given: dict[str, Shape]
    """Shapes of the weights of this load."""
    burnish_kept: set[str]
    """Those in another format than the model's."""
    burnish_findings: list[str]

    def burnish_shared_name(self) -> str | None:
        """Return the prefix of the names of this engine's shared memory and of the file through
        which its processes found each other (on CPU)."""
        return os.environ.get("VLLM_DIST_IDENT")

    def burnish_describe(self) -> dict[str, Any]:
        """Return the settings of this vLLM that decide about samples and weights, and the config of
        its model."""
        return {"protocol": PROTOCOL, **_settings(self.vllm_config, self.model_runner)}

    def burnish_begin(self) -> None:
        """Begin a load, which is one or several calls of :meth:`burnish_load`."""
        _full_logprobs(self.model_runner.sampler)
        self.burnish_given, self.burnish_kept, self.burnish_findings = {}, set(), []

    def burnish_load(self, source: Any, dtype: Dtype) -> None:
        """Load weights from a stream or a file of safetensors. Errors become findings of the
        report."""
        file = isinstance(source, str)

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in _read(source) if file else source:
                self.burnish_given[name] = tuple(tensor.shape)
                if isinstance(tensor, nn.Buffer) or (file and tensor.dtype != DTYPES[dtype]):
                    self.burnish_kept.add(name)
                yield name, tensor

        try:
            with torch.no_grad():
                self.model_runner.model.load_weights(noted())
        except Exception as error:  # becomes a finding, with vLLM's own words
            reason = str(error).splitlines()[0] if str(error) else ""
            self.burnish_findings.append(f"its loader failed: {type(error).__name__}: {reason}")

    @torch.no_grad()
    def burnish_report(self, dtype: Dtype, transposed: str = "") -> dict[str, Any]:
        """Return a report of the loaded model: ``fingerprints`` by vLLM's names, of the values in
        any order, ``placed`` by the given names, of the values at their places, ``names`` (given
        name -> vLLM's), ``exact`` (tensors whose fingerprint is of their fp32 values) and
        ``findings`` (problems). ``transposed``: given weights that vLLM transposes, joined by
        spaces."""
        model, number_format = self.model_runner.model, DTYPES[dtype]
        names = held_names(model, self.burnish_given)
        derived = _derive(model, number_format)
        findings = [*self.burnish_findings, *_not_live(model, derived)]
        buffers = {n for n, _ in model.named_buffers()} - set(names.values())
        state = {n: t for n, t in state_of(model) if n not in buffers | derived}
        of_buffers = {names.get(name) for name in self.burnish_kept}
        exact = {n for n, t in state.items() if n in of_buffers and t.dtype == torch.float32}
        turned = set(transposed.split())
        shapes = {
            name: shape[::-1] if name in turned else shape
            for name, shape in self.burnish_given.items()
        }
        size = int(self.vllm_config.parallel_config.tensor_parallel_size)
        places = places_of(model, names, shapes, rank=int(self.rank), num_workers=size)
        formats = {n: torch.float32 if n in exact else number_format for n in state}
        held, placed = _fingerprints(state, places, formats)
        return {
            "fingerprints": held,
            "placed": placed,
            "names": names,
            "exact": sorted(exact),
            "findings": findings,
        }


def _fingerprints(
    state: Mapping[str, Tensor], places: Mapping[str, Place], formats: Mapping[str, torch.dtype]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return fingerprints of tensors by name, of their values in any order, and of the weights at
    ``places``. Each value is read once."""
    parts = {
        sent_name: fingerprint(place.part, formats[place.held], row=place.row, column=place.column)
        for sent_name, place in places.items()
    }
    covered = dict.fromkeys(state, 0)
    for place in places.values():
        covered[place.held] += place.part.numel()
    others = {n: fingerprint(t, formats[n]) for n, t in state.items() if covered[n] != t.numel()}
    by_part, values = read_fingerprints(parts), read_fingerprints(others)
    totals = {name: values.get(name, Fingerprint(0, 0)).values for name in state}
    for sent_name, place in places.items():
        if place.held not in others:
            totals[place.held] = (totals[place.held] + by_part[sent_name].values) % (1 << 64)
    return totals, {sent_name: number.placed for sent_name, number in by_part.items()}


def _settings(vllm: Any, runner: Any) -> dict[str, Any]:
    """Return the arguments of a ``VllmConfig`` that ``config.vllm_arguments`` refuses, by their
    names, and other facts that ``servers/group.py`` needs."""
    model, cache, scheduler = vllm.model_config, vllm.cache_config, vllm.scheduler_config
    parallel, processors = vllm.parallel_config, vllm.model_config.logits_processors
    return {
        "hf_config": json.loads(model.hf_config.to_json_string(use_diff=False)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": int(model.max_model_len),
        "logprobs_mode": str(model.logprobs_mode),
        "max_logprobs": int(model.max_logprobs),
        "device": str(vllm.device_config.device_type),
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "v1_sampler": "topk_topp_sampler" in vars(runner).get("sampler", nn.Module())._modules,
        "quantization": None if model.quantization is None else str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_offloading_size": cache.kv_offloading_size,
        "speculative_config": vllm.speculative_config is not None,
        "watermark_config": vllm.watermark_config is not None,
        "enable_lora": vllm.lora_config is not None,
        "kv_transfer_config": vllm.kv_transfer_config is not None,
        "logits_processors": [str(name) for name in processors or ()],
        "use_fp64_gumbel": bool(model.use_fp64_gumbel),
        "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
        "data_parallel_size": int(parallel.data_parallel_size),
        "enable_expert_parallel": bool(parallel.enable_expert_parallel),
        "cpu_offload_gb": float(vllm.offload_config.uva.cpu_offload_gb),
    }


def _full_logprobs(sampler: Any) -> None:
    """Make vLLM's sampler report log-probs before min-p, top-k and top-p, and -inf for the tokens
    that these do not keep. Its own modes are ``raw``, before the temperature, and ``processed``,
    after top-k and top-p."""
    draw = sampler.topk_topp_sampler
    if "burnish_inner" in vars(draw):
        return
    inner = draw.burnish_inner = draw.forward
    scale, sample = sampler.apply_temperature, sampler.sample
    totals: list[Tensor] = []  # [B] log of the sum over all tokens, in a step with min-p

    def sample_noting_min_p(logits: Tensor, metadata: Any, *rest: Any, **options: Any) -> Any:
        totals.clear()
        processors = metadata.logitsprocs.argmax_invariant
        uses_min_p = any(vars(processor).get("min_p_count") for processor in processors)

        def scaled(*arguments: Any) -> Tensor:
            scores: Tensor = scale(*arguments)
            if uses_min_p:
                totals.append(scores.logsumexp(-1))
            return scores

        sampler.apply_temperature = scaled
        return sample(logits, metadata, *rest, **options)

    def forward(logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Tensor | None]:
        if k is None and p is None and not totals:
            return inner(logits, generators, k, p)  # type: ignore[no-any-return]
        if totals:  # min-p has set logits to -inf
            full = logits.float() - totals[0][:, None]
        else:
            full = logits.log_softmax(dim=-1, dtype=torch.float32)  # (inner overwrites logits)
        tokens, processed = inner(_without_ties(logits, k), generators, k, p)
        return tokens, full if processed is None else full.masked_fill(processed.isneginf(), -inf)

    draw.forward, sampler.sample = forward, sample_noting_min_p


def _without_ties(logits: Tensor, k: Tensor | None) -> Tensor:
    """Set the logits [B, V] of all but the first ``k`` [B] tokens to -inf. vLLM also keeps the
    tokens whose logits equal the last one, so more than k."""
    if k is None:
        return logits
    vocab = logits.shape[-1]
    bounded = k < vocab
    most = int(torch.where(bounded, k, 0).max())
    if not most:
        return logits
    index = logits.topk(most, dim=-1).indices
    beyond = torch.arange(most, device=k.device) >= k[:, None]
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, index, ~beyond)
    return logits.masked_fill_(~(keep | ~bounded[:, None]), -inf)


def _derive(model: Any, dtype: torch.dtype) -> set[str]:
    """Recompute the products of weights (``W_UV``, ``W_UK_T``) that layers with latent attention
    (DeepSeek) store, as at start. Return their names."""
    derived = set[str]()
    for name, layer in model.named_modules():
        if "kv_b_proj" in layer._modules and "kv_lora_rank" in vars(layer):
            process = getattr(layer, "process_weights_after_loading", None)  # house: ok vLLM's
            if process is not None:
                process(dtype)
                derived |= {f"{name}.{leaf}" for leaf in layer._parameters}
    return derived


@torch.no_grad()
def _not_live(model: Any, derived: Container[str] = ()) -> list[str]:
    """Return findings: layers that compute with a copy of their parameter (packed at start), and
    parameters for which that cannot be verified.

    Each linear layer's weight is negated temporarily. The output must change its sign with it; that
    of a copy does not, however small the last update was.
    """
    names, seen, negated = list[str](), set[int](), dict[str, Tensor]()
    for name, layer in model.named_modules():
        method = vars(layer).get("quant_method")
        if layer._parameters.get("w13_weight") is not None:
            seen |= {id(layer.w13_weight), id(layer.w2_weight)}
            names += experts_not_used(name, layer)
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        if weight.ndim < 2 or isinstance(layer, torch.nn.Embedding):
            seen.add(id(weight))  # norms, and tables of positions, read theirs at every call
        elif method is not None and weight.numel():
            seen.add(id(weight))
            negated[name] = _negates(layer, method, weight)
        if "bias" in layer._parameters:
            seen.add(id(layer.bias))
    live = torch.stack(list(negated.values())).tolist() if negated else []  # the only host read
    for name, is_live in zip(negated, live, strict=True):
        if not is_live:
            names.append(f"the layer {name} computes with a copy of its weight")
    for name, parameter in model.named_parameters():
        if name in derived:
            continue
        if id(parameter) not in seen and parameter.ndim > 1:  # (vectors are read at every call)
            names.append(f"it cannot be verified that {name} {list(parameter.shape)} is used")
    return names


def _negates(layer: Any, method: Any, weight: Tensor) -> Tensor:
    """Return a bool scalar on the device: True if the layer's output changes its sign with its
    weight. A copy gives the same output twice, up to rounding. A GPU may sum a product in another
    order in each call, so the norms of the outputs are compared, not their bits."""
    x = torch.linspace(-1, 1, weight.shape[1], device=weight.device, dtype=weight.dtype)[None]
    before = method.apply(layer, x, None).float().clone()
    weight.data.neg_()
    try:
        after = method.apply(layer, x, None).float()
    finally:
        weight.data.neg_()
    size = before.abs().sum()
    turned = (after + before).abs().sum() <= 0.1 * size
    return turned & ((size > 0) | ~weight.any())
