"""New weights on their way into vLLM, and the proof that it samples from them.

This side: :class:`WeightStream` checks and fingerprints the tensors as vLLM reads them, and
compares them with what the workers report. The workers' side: :class:`WorkerExtension`. Nothing
here imports vllm (``vllm.py`` does); its objects arrive as arguments.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from burnish import shm
from burnish.messages import library_text
from burnish.rollout.weights import WeightList, fingerprint


class WeightStream:
    """The tensors of one load as vLLM reads them, checked and fingerprinted on the way. Where one
    is wrong the stream ends, so that vLLM's loader is never left in the middle; :meth:`finish`
    then raises."""

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
    ) -> None:
        self._tensors, self._dtype = tensors, dtype
        self._wanted = WeightList(shapes)
        self._fingerprints: dict[str, int] = {}
        self._error: Exception | None = None
        self._read_to_the_end = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            for name, tensor in self._tensors:
                self._wanted.take(name, tensor)
                tensor = tensor.detach()
                self._fingerprints[name] = fingerprint(tensor, self._dtype)
                yield name, tensor
            self._read_to_the_end = True
        except Exception as error:  # raised again by finish
            self._error = error

    def finish(self) -> None:
        """Raise what went wrong in the stream, or ValueError where weights are missing."""
        if self._error is not None:
            raise self._error
        self._wanted.finish()

    def compare(self, reports: Sequence[dict[str, Any]]) -> list[str]:
        """What is wrong with what the workers say they hold; empty where nothing is."""
        problems = [finding for report in reports for finding in report["findings"]]
        if self._error is None and not self._read_to_the_end and problems:
            return problems
        self.finish()
        expected = self._merged(reports[0]["packed"])
        held = [report["fingerprints"] for report in reports]
        for name in sorted(expected.keys() | held[0].keys()):
            if name not in held[0]:
                problems.append(f"vLLM has no parameter {name}")
                continue
            numbers = [report[name] for report in held]
            split = sum(numbers) % (1 << 64)  # over the workers; a norm is whole on each
            if expected.get(name) not in (split, *(set(numbers) if len(set(numbers)) == 1 else ())):
                problems.append(f"the parameter {name} does not hold what was given")
        return problems

    def _merged(self, packed: Mapping[str, Sequence[str]]) -> dict[str, int]:
        """Fingerprints by vLLM's names, which merges some layers into one (q, k, v)."""
        parts = {part: whole for whole, many in packed.items() for part in many}
        merged: dict[str, int] = {}
        for name, number in self._fingerprints.items():
            renamed = ".".join(parts.get(piece, piece) for piece in name.split("."))
            merged[renamed] = (merged.get(renamed, 0) + number) % (1 << 64)
        return merged


def shared_folder(num_bytes: int) -> Path:
    """A new folder in shared memory, or on disk where that has no room for ``num_bytes`` twice.
    What processes left that were killed in a load is removed first."""
    shared, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    shm.sweep("weights", shared, disk)
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * num_bytes
    return Path(tempfile.mkdtemp(prefix=shm.prefix("weights"), dir=shared if roomy else disk))


def write_weights(stream: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype) -> None:
    """The stream as safetensors files of about 1 GiB."""
    bucket: dict[str, Tensor] = {}
    count = size = 0
    for name, tensor in stream:
        bucket[name] = tensor.to("cpu", dtype).contiguous().clone()
        size += bucket[name].nbytes
        if size > 1 << 30:
            save_file(bucket, folder / f"{count:05d}.safetensors")
            bucket, count, size = {}, count + 1, 0
    save_file(bucket, folder / f"{count:05d}.safetensors")


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """What :func:`write_weights` wrote."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)


# ---- the workers' side ---------------------------------------------------------------------


class WorkerExtension:
    """What every vLLM worker can do besides its own methods (``worker_extension_cls``)."""

    model_runner: Any

    def burnish_shared_name(self) -> str | None:
        """How the names of this engine's shared memory begin, and of the file by which its
        processes met (on CPU)."""
        return os.environ.get("VLLM_DIST_IDENT")

    def burnish_load(self, source: Any, dtype: torch.dtype) -> dict[str, Any]:
        """Load from a stream or a folder of safetensors; report what the model then holds:
        ``fingerprints`` by vLLM's parameter names, ``packed`` (merged layer -> its parts) and
        ``findings``, what is wrong."""
        model = self.model_runner.model
        _full_logprobs(self.model_runner.sampler)
        tensors = iter(read_weights(Path(source)) if isinstance(source, str) else source)
        findings = []
        with torch.no_grad():
            try:
                model.load_weights(tensors)
            except Exception as error:  # becomes a finding, with vLLM's own words
                said = library_text(error)
                findings.append(f"its loader failed: {type(error).__name__}: {said}")
            findings += _not_live(model)
            held = {name: fingerprint(p, dtype) for name, p in model.named_parameters()}
        packed = getattr(model, "packed_modules_mapping", None) or {}  # house: ok vLLM's model
        return {"fingerprints": held, "packed": packed, "findings": findings}


def _full_logprobs(sampler: Any) -> None:
    """Make vLLM's sampler report log-probs before top-k and top-p. (Its own modes are raw: before
    the temperature, and processed: after both.)"""
    draw = sampler.topk_topp_sampler
    if "burnish_inner" in vars(draw):
        return
    inner = draw.burnish_inner = draw.forward

    def forward(logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Tensor | None]:
        if k is None and p is None:
            return inner(logits, generators, k, p)  # type: ignore[no-any-return]
        full = logits.log_softmax(dim=-1, dtype=torch.float32)  # (inner overwrites logits)
        return inner(logits, generators, k, p)[0], full

    draw.forward = forward


@torch.no_grad()
def _not_live(model: Any) -> list[str]:
    """Layers that compute with something else than the parameter they hold (a packed copy made at
    start), and parameters for which that cannot be seen.

    Each linear layer's weight is negated for a moment: its output must be negated with it, which no
    copy does however small the last update was.
    """
    found, seen = [], set()
    for name, layer in model.named_modules():
        method = vars(layer).get("quant_method")
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        if weight.ndim < 2 or isinstance(layer, torch.nn.Embedding):
            seen.add(id(weight))  # norms, and tables of positions, read theirs at every call
        elif method is not None and weight.numel():
            seen.add(id(weight))
            if not _negates(layer, method, weight):
                found.append(f"the layer {name} computes with a copy of its weight")
        if "bias" in layer._parameters:
            seen.add(id(layer.bias))
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            found.append(f"it cannot be seen whether {name} {list(parameter.shape)} is used")
    return found


def _negates(layer: Any, method: Any, weight: Tensor) -> bool:
    """Whether the layer's output turns with the sign of its weight."""
    x = torch.linspace(-1, 1, weight.shape[1], device=weight.device, dtype=weight.dtype)[None]
    before = method.apply(layer, x, None)
    weight.data.neg_()
    try:
        turned = torch.equal(method.apply(layer, x, None), -before)
        return turned and bool(before.any() or not weight.any())
    finally:
        weight.data.neg_()
