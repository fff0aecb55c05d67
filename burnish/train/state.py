"""Format of a train engine's checkpoint on disk.

Files: ``master``, ``exp_avg``, ``exp_avg_sq``, ``step`` and optionally ``ema`` ``.safetensors`` by
parameter name, ``buffer.safetensors`` (persistent buffers, in their own dtypes), ``engine.json``
and ``hf/``. Several FSDP2 or tensor-parallel ranks each write their own files
(``master-00001-of-00002.safetensors`` ...). All engines read both forms with
:func:`burnish.models.tensor_files.tensor_sets`, so a run may change its engine, its ZeRO stage and
its number of ranks.

:class:`Shards` maps each rank to the entries of each parameter that it holds. :class:`ShardedState`
saves and loads the tensors of engines with flat shards, one parameter at a time. The second half of
this module reads and writes ``engine.json`` and ``hf/`` for every engine.
"""

from __future__ import annotations

import json
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import ModelConfig
from burnish.distributed.process_group import RankGroup
from burnish.host_copies import HostStream
from burnish.models.buffers import BUFFERS
from burnish.models.composite import copy_processor
from burnish.models.end_tokens import with_end_tokens
from burnish.models.tensor_files import TensorFiles, TensorInfo, tensor_sets, write_tensors
from burnish.small_files import read_small
from burnish.train.spec import EngineSpec

Shape = tuple[int, ...]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """The part of one trained parameter whose fp32 master this rank holds."""

    name: str
    shape: Shape
    """Shape of the full parameter."""
    start: int = 0
    """First entry of the flattened parameter that this rank holds."""
    count: int = 0
    """Number of entries that this rank holds; 0: none."""
    flat: Tensor | None = None
    """Flat fp32 tensor that contains the entries; None if this rank holds none."""
    offset: int = 0
    """Position of the first entry in ``flat``."""

    @property
    def numel(self) -> int:
        """Number of entries of the full parameter."""
        return torch.Size(self.shape).numel()

    def of(self, flat: Tensor) -> Tensor:
        """Return a [count] view of this shard in a tensor with the layout of ``self.flat``."""
        return flat.detach().view(-1)[self.offset : self.offset + self.count]

    def slice_of(self, full: Tensor) -> Tensor:
        """Return the [count] entries of this shard in a full parameter."""
        return full.reshape(-1)[self.start : self.start + self.count]

    def read(self, files: TensorFiles) -> Tensor:
        """Return the [count] entries of this shard in a checkpoint.

        Only the rows that contain them are read.
        """
        if not self.count:
            return torch.empty(0)
        row = self.numel // (self.shape[0] if self.shape else 1)  # entries per row
        begin, end = self.start // row, -(-(self.start + self.count) // row)
        read = files.read(self.name, (begin, end)).reshape(-1)
        return read[self.start - begin * row :][: self.count]


class Shards:
    """All shards of a rank, in the order of the model's parameters. Names are the same on all
    ranks."""

    def __init__(
        self,
        shards: Sequence[Shard],
        flats: Sequence[Tensor],
        ranks: RankGroup,
        *,
        replicated: bool,
    ) -> None:
        self.all, self.flats, self.ranks = tuple(shards), tuple(flats), ranks
        self.replicated = replicated
        """True if every rank holds all entries."""

    @property
    def numel(self) -> int:
        """Number of entries of all parameters."""
        return sum(s.numel for s in self.all)

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Set the masters to ``weights``: full parameters, or this rank's entries of them."""
        for shard in self.all:
            if shard.name in weights and shard.flat is not None:
                weight = weights[shard.name].reshape(-1)
                values = (
                    shard.slice_of(weight)
                    if weight.numel() == shard.numel
                    else weight[: shard.count]
                )
                shard.of(shard.flat).copy_(values)

    def gather(
        self, pick: Callable[[Tensor], Tensor], only: Sequence[Shard] | None = None
    ) -> Iterator[Tensor]:
        """Yield every parameter's full tensor in fp32, one at a time. All ranks take part.

        ``pick`` maps a flat master to the tensor to gather: the master itself, or a moment in the
        same layout. ``only``: some of the shards.
        """
        stream = HostStream()
        for shard in self.all if only is None else only:
            full = torch.zeros(shard.numel)
            if shard.flat is not None:
                part = full[shard.start : shard.start + shard.count]
                stream.fill(part, shard.of(pick(shard.flat)))
                stream.flush()
            if not self.replicated:
                self.ranks.all_reduce_([full])  # exact: an entry is 0 on all ranks but one
            yield full.view(shard.shape)


class ShardedState:
    """Sharded contents of a checkpoint: fp32 masters, moments and the moving average."""

    def __init__(
        self,
        shards: Shards,
        adam: MutableMapping[Tensor, dict[str, Any]],
        ema_decay: float | None,
        *,
        muon: Container[str] = (),
    ) -> None:
        """``adam``: state of a torch optimizer over ``shards.flats``. ``muon``: parameters that
        have a momentum in it instead of Adam's moments."""
        self.shards, self.adam, self.ema_decay = shards, adam, ema_decay
        self._by_adam = [s for s in shards.all if s.name not in muon]
        self._by_muon = [s for s in shards.all if s.name in muon]
        self._parts = {"exp_avg": self._by_adam, "exp_avg_sq": self._by_adam}
        self._parts |= {"momentum": self._by_muon, "step": self._by_adam}
        """Parameters with each kind of state."""
        self.ema: dict[int, Tensor] = {}
        """Moving averages by the id of their flat master."""
        if ema_decay is not None:
            self.ema = {id(flat): flat.detach().clone() for flat in shards.flats}

    @torch.no_grad()
    def follow(self) -> None:
        """Update the moving average after a step."""
        if self.ema_decay is not None:
            for flat in self.shards.flats:
                self.ema[id(flat)].lerp_(flat, 1.0 - self.ema_decay)

    @property
    def num_updates(self) -> float | None:
        """Number of Adam updates so far; None before the first, and if Muon trains everything."""
        return next((float(s["step"]) for s in self.adam.values() if "step" in s), None)

    @property
    def _kinds_held(self) -> list[str]:
        """Kinds of state that exist: none before the first update."""
        held = any(self.adam.values())
        return [kind for kind, parts in self._parts.items() if held and parts]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that :meth:`save` writes, in bytes."""
        entries = self.shards.numel * (1 + bool(self.ema))
        for kind in self._kinds_held:
            parts = self._parts[kind]
            entries += len(parts) if kind == "step" else sum(s.numel for s in parts)
        return 4 * entries

    def save(self, folder: Path, describe: Callable[[], None]) -> None:
        """Write the tensors into ``folder``, then call ``describe``, which writes the other files.

        All ranks take part. The first rank writes, one parameter at a time. Raises OSError on all
        ranks if it cannot write.
        """
        ranks, error = self.shards.ranks, None
        for kind, tensors in self._kinds().items():
            parts = self._parts.get(kind, self.shards.all)
            infos = [
                TensorInfo(s.name, () if kind == "step" else s.shape, torch.float32) for s in parts
            ]
            try:
                if ranks.rank == 0 and error is None:
                    folder.mkdir(parents=True, exist_ok=True)
                    write_tensors(folder / f"{kind}.safetensors", infos, tensors)
            except OSError as failed:
                error = failed
            for _ in tensors:  # the other ranks wait for this one in every parameter
                pass
        try:
            if ranks.rank == 0 and error is None:
                describe()
        except OSError as failed:
            error = failed
        _raise_on_all(ranks, error)

    def _kinds(self) -> dict[str, Iterator[Tensor]]:
        """Return the tensors of a checkpoint, by kind."""
        kinds, updates = {"master": self.shards.gather(lambda flat: flat)}, self.num_updates
        for kind in self._kinds_held:
            parts = self._parts[kind]
            if kind == "step":
                kinds[kind] = (torch.tensor(updates) for _ in parts)
            else:
                kinds[kind] = self.shards.gather(partial(self._moment, kind), parts)
        if self.ema:
            kinds["ema"] = self.shards.gather(lambda flat: self.ema[id(flat)])
        return kinds

    def _moment(self, name: str, flat: Tensor) -> Tensor:
        moment: Tensor = self.adam[flat][name]
        return moment

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore a checkpoint of any engine, saved with any number of ranks. Every rank reads its
        own shards. Raises ValueError, with nothing changed, if the checkpoint is of another model
        or has parameters with different numbers of updates."""
        kinds, shards = tensor_sets(folder), self.shards
        master = kinds["master"]
        check_names(master, {shard.name: shard.shape for shard in shards.all})
        updates = _num_updates(folder, kinds, [s.name for s in self._by_adam])
        read_into(master, shards.all, lambda flat: flat)
        self.adam.clear()  # a checkpoint of step 0 has no moments
        with_momentum = {id(s.flat) for s in self._by_muon}
        for flat in shards.flats:
            if updates is not None and id(flat) not in with_momentum:
                moments = {name: torch.zeros_like(flat) for name in MOMENTS}
                step = torch.tensor(updates, dtype=torch.float32, device=flat.device)
                self.adam[flat] = {"step": step, **moments}
            elif "momentum" in kinds and id(flat) in with_momentum:
                self.adam[flat] = {"momentum": torch.zeros_like(flat)}
        for name in (*(MOMENTS if updates is not None else ()), "momentum"):
            if name in kinds:
                read_into(kinds[name], self._parts[name], partial(self._moment, name))
        if self.ema:  # an EMA enabled after that save starts from these weights
            read_into(kinds.get("ema", master), shards.all, lambda flat: self.ema[id(flat)])


def check_names(files: TensorFiles, shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError if names or shapes in a checkpoint differ from ``shapes``."""
    if odd := sorted(set(files) ^ set(shapes))[:3]:
        raise ValueError(
            f"the checkpoint is of another model: parameter names differ, e.g. {', '.join(odd)}; "
            "set the model section of the run that wrote it"
        )
    for name, shape in shapes.items():
        if files.shape(name) != shape:
            raise ValueError(
                f"the checkpoint is of another model: {name} has shape {list(files.shape(name))} "
                f"in the checkpoint and {list(shape)} in this model; set the model section of the "
                "run that wrote it"
            )


def read_into(
    files: TensorFiles, shards: Iterable[Shard], pick: Callable[[Tensor], Tensor]
) -> None:
    """Read this rank's shards from a checkpoint, one tensor at a time.

    ``pick`` maps a flat master to the tensor to fill: the master itself, or a moment in the same
    layout.
    """
    for shard in shards:
        if shard.flat is not None:
            shard.of(pick(shard.flat)).copy_(shard.read(files))


def _num_updates(
    folder: Path, kinds: Mapping[str, TensorFiles], names: Iterable[str]
) -> float | None:
    """Return the number of Adam updates of the parameters ``names`` in a checkpoint; None before
    the first.

    Raises ValueError if parameters differ in it: flat shards have a single count.
    """
    counted = kinds.get("step", ())
    counts = {float(kinds["step"].read(n)) if n in counted else 0.0 for n in names}
    if len(counts) > 1:
        raise ValueError(
            f"{folder} has parameters with different numbers of updates ({min(counts):g} to "
            f"{max(counts):g}), e.g. because no batch reached an expert, and DeepSpeed counts one "
            "for all; resume with train.engine.kind=torch"
        )
    return (counts.pop() or None) if counts else None


class Described(Protocol):
    """Attributes of a train engine that are needed to write ``hf/``."""

    model: nn.Module
    body: PreTrainedModel
    spec: EngineSpec
    scalar: bool
    tokenizer: PreTrainedTokenizerBase | None


def write_description(
    folder: Path, engine: Described, text: str, buffers: Mapping[str, Tensor]
) -> None:
    """Write persistent ``buffers``, the files that exports need in addition to the weights, and
    ``engine.json``.

    The export files are config, generation config and tokenizer. Buffers are the same on all ranks,
    so one rank writes them. ``engine.json`` contains ``text`` and is written last; it marks the
    checkpoint as complete.
    """
    if buffers:
        try:
            save_file(dict(buffers), folder / BUFFERS)
        except SafetensorError as error:  # raised by the library if the disk is full
            raise OSError(str(error)) from error
    hf = folder / "hf"
    engine.model.config.save_pretrained(hf)  # type: ignore[union-attr, operator]
    copy_processor(engine.model.config, engine.spec.role.model, hf)  # type: ignore[arg-type]
    generation = None  # has further end-of-response tokens, which config.json may lack
    if not engine.scalar:
        generation = cast(GenerationConfig, engine.model.generation_config)
    elif engine.tokenizer is not None:
        generation = with_end_tokens(GenerationConfig(), engine.tokenizer)
    if generation is not None:
        (hf / "generation_config.json").write_text(generation.to_json_string())
    if engine.tokenizer is not None:
        engine.tokenizer.save_pretrained(hf)
    (folder / "engine.json").write_text(text)


def read_description(folder: Path, spec: EngineSpec) -> dict[str, Any]:
    """Return the contents of ``engine.json``. Raises ValueError if the checkpoint is missing, of
    another role, of another optimizer, or of
    adapters for another base."""
    role = spec.role.engine_role
    if not (folder / "engine.json").is_file():
        raise ValueError(f"{folder.parent} contains no {role}; resume with the recipe of that run")
    state: dict[str, Any] = json.loads(read_small(folder / "engine.json"))
    if state["role"] != role:
        raise ValueError(
            f"{folder} is a checkpoint of a {state['role']}, not of a {role}; resume "
            "with the job and the recipe of that run"
        )
    saved_as, optimizer = state.get("optimizer", "adamw"), spec.role.train.optimizer
    if saved_as != optimizer.state_format:
        raise ValueError(
            f"{folder} has the state of optimizer {saved_as}, but the recipe has "
            f"{optimizer.kind}; resume with train.optimizer.kind={saved_as}, or export "
            "the weights and start a new run from them"
        )
    saved = ModelConfig.model_validate(state["model"])
    if spec.role.model.lora is not None and not _same_base(saved, spec):
        model = spec.recipe_model or spec.role.model
        raise ValueError(
            f"{folder} contains adapters for the base {_base(saved)}, but the base of this recipe "
            f"is {_base(model)}; set model to the base of the checkpoint"
        )
    return state


def write_together(ranks: RankGroup, write: Callable[[], None] | None) -> None:
    """Run ``write`` on this rank (None: nothing) and wait for all ranks. Raises OSError on all
    ranks if one failed to write."""
    error: Exception | None = None
    try:
        if write is not None:
            write()
    except SafetensorError as failed:  # raised by the library if the disk is full
        error = OSError(str(failed))
    except Exception as failed:  # the other ranks wait for the result
        error = failed
    _raise_on_all(ranks, error)


def _raise_on_all(ranks: RankGroup, error: Exception | None) -> None:
    """Raise one rank's error on all ranks."""
    texts = ranks.gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise OSError(f"rank {rank} could not write the checkpoint: {text}")


def _same_base(saved: ModelConfig, spec: EngineSpec) -> bool:
    """Return whether ``saved`` is the model of ``spec``, by its name in the recipe or by its
    absolute path.

    The name in the recipe matches wherever the folder is now. Workers may run in another folder
    than the recipe's, in which a saved relative name is meaningless.
    """
    full = _base(spec.role.model.with_absolute_paths())
    base = _base(spec.recipe_model or spec.role.model)
    return _base(saved) in (base, full) or _base(saved.with_absolute_paths()) == full


def _base(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that determine the base weights of adapters."""
    return model.model_dump(include={"path", "gguf_file", "revision", "scratch"}, exclude_none=True)
