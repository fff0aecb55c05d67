"""The train engine on one device per rank: plain PyTorch, and the oracle for every other engine.

Reading order: ``forward_backward`` -> ``train/forward.py`` -> ``train/batching.py`` ->
``models/logprobs.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import burnish.train.optim as optim
from burnish.config.train import TorchEngine
from burnish.models.buffers import buffers_now, load_buffers, num_buffer_bytes
from burnish.models.checks import check_compute_dtype, check_weights
from burnish.models.dropout import start_training
from burnish.models.half_linear import use_fp32_products
from burnish.models.load import DTYPES, ModelError, describe
from burnish.models.lora import adapters_off, merged_weights
from burnish.models.tensor_files import TensorShards, tensor_sets, write_shards
from burnish.train.base import Loss, NonFiniteError, Outputs, StepStats
from burnish.train.batching import Layout, fill_rows, split_over_ranks
from burnish.train.diagnose import (
    STAGES,
    BadTensor,
    first_bad_tensor,
    sum_is_bad,
    where_bad,
    why_ruined,
    why_stop,
)
from burnish.train.forward import enable_checkpointing
from burnish.train.oom import MicroBatchBackoff
from burnish.train.optim import Optimizer
from burnish.train.process_group import SINGLE, RankGroup
from burnish.train.sequence_parallel import make_forward, parallel_groups
from burnish.train.spec import EngineSpec
from burnish.train.state import (
    description,
    read_description,
    take_counts,
    write_description,
    write_together,
)
from burnish.train.tensor_parallel import TensorParallelPlan, apply_tensor_parallel
from burnish.types import Batch, FinishedSave, PendingSave, Stats


def parts_of(batch: Batch, spec: EngineSpec, ranks: RankGroup, layout: Layout) -> list[list[int]]:
    """Rows of this rank's micro-batches, as many as every other rank has; some may be empty.
    ``layout``: of the passes."""
    parts = split_over_ranks(
        batch,
        ranks=ranks.size,
        micro_batch_size=spec.micro_batch_size,
        max_tokens=spec.train.max_tokens_per_micro_batch,
        layout=layout,
    )
    return parts[ranks.rank]


class TorchTrainEngine:
    """One model in one role on one device. Implements :class:`burnish.train.base.TrainEngine`.

    With several ``ranks`` every rank has an engine with the same weights, is called with the same
    whole batches in the same order, computes its own share of the rows and gives the same answers
    as the others; the optimizer step is then the same everywhere. Where several ranks compute the
    same rows together (``sequence_parallel_size``), they are a team, and share as one.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: EngineSpec,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ranks: RankGroup = SINGLE,
        device: torch.device | None = None,
    ) -> None:
        """``device``: where to compute; None: where the model is."""
        self.model, self.spec, self.role = model, spec, spec.role
        self.tokenizer, self.ranks = tokenizer, ranks
        self.version = 0
        self.skipped_total = self.consecutive_skips = 0
        self._since_step: list[tuple[Batch, Loss]] = []
        """What the gradient is made of so far, to look for the first bad tensor in."""
        self._losses: list[Tensor] = []
        self._told: str | None = None
        """The first bad tensor, once it was looked for; until a step is taken again."""
        self._ruined = False
        """Whether a step made the weights far too large; until others are loaded."""
        self.device = device or next(model.parameters()).device
        self.model_parallel, self.data_parallel = parallel_groups(
            cast(TorchEngine, spec.train.engine), ranks
        )
        self.forward = make_forward(
            model,
            spec.role,
            spec.train,
            temperature=spec.temperature,
            model_parallel=self.model_parallel,
        )
        self.scalar, self.body = self.forward.scalar, self.forward.body
        self.smaller = MicroBatchBackoff(spec.train, self.forward.layout)
        self.forward.distill_target = spec.load_distill_target(self.device)
        self.tp_plan: TensorParallelPlan | None = None
        if cast(TorchEngine, spec.train.engine).tensor_parallel_size > 1:
            self.tp_plan = apply_tensor_parallel(
                model, self.body, self.model_parallel, self.data_parallel
            )
        if not spec.trainable:
            model.requires_grad_(False)
        elif spec.train.gradient_checkpointing:
            enable_checkpointing(self.body)
        dtype = DTYPES[spec.precision.dtype]
        for parameter in model.parameters():  # what is frozen; the optimizer casts the rest
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        model.eval()
        self._place()
        self.optimizer = self._make_optimizer() if spec.trainable else None
        use_fp32_products(model, dtype)
        self._check_format()

    def _place(self) -> None:
        """Put the model where and how it computes: here it is there already."""

    def _make_optimizer(self, kind: type[Optimizer] = Optimizer) -> Optimizer:
        spec = self.spec
        return kind(
            self.model,
            spec.train,
            lr=spec.lr or spec.train.lr,
            total_steps=spec.total_steps,
            precision=spec.precision,
            tp_plan=self.tp_plan,
        )

    def _check_format(self) -> None:
        """Raise ModelError where the model's weights or activations do not fit its format, or the
        device lacks an operation in it."""
        name = describe(self.spec.model)
        self._check_weights(self.model.named_parameters(), name)
        check_compute_dtype(self.body, name, backward=self.spec.trainable)

    def _check_weights(self, weights: Iterable[tuple[str, Tensor]], name: str) -> None:
        """Raise ModelError on all ranks where one has a weight that is not finite."""
        problem: str | None = None
        try:
            check_weights(weights, name)
        except ModelError as error:
            problem = str(error)
        problems = [text for text in self.ranks.gather(problem) if text is not None]
        if problems:
            raise ModelError(problems[0])

    # ---- computing -------------------------------------------------------------------------

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens, without gradient."""
        return self._no_grad_pass(batch, "logprobs")

    def values(self, batch: Batch) -> Tensor:
        """[M] fp32: values of action states (critic) or scores on last tokens (reward), without
        gradient."""
        return self._no_grad_pass(batch, "values")

    def states(self, batch: Batch) -> Tensor:
        """[M, H] hidden states from which action tokens are predicted, without gradient."""
        assert not self.scalar, f"a {self.role} has values, not a vocabulary"
        return self._no_grad_pass(batch, "states")

    @torch.no_grad()
    def measure(self, batch: Batch, loss: Loss) -> Stats:
        """What ``loss`` measures over ``batch``, over all ranks, without gradient."""
        stats = Stats()
        for rows in self._split(batch):
            stats = stats + self._micro_loss(batch, rows, loss)[1]
        return self.data_parallel.sum_stats(stats)

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of ``loss`` over ``batch``; returns the sum of the micro-batches'
        stats over all ranks. (Gradients are summed over ranks in :meth:`optim_step`, once.)"""
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        self._since_step.append((batch, loss))
        start_training(self.model, dropout=self.spec.dropout)
        stats = self._add(batch, loss)
        while stats is None:
            stats = self._add_all_again()
        self.model.eval()
        if (
            self.device.type == "cuda"
        ):  # optim_step would wait here anyway; so the time is counted here
            torch.cuda.synchronize(self.device)
        return self.data_parallel.sum_stats(stats)

    def _add(self, batch: Batch, loss: Loss) -> Stats | None:
        """Add a batch's gradient. None: a pass ran out of memory, and from now on they are smaller;
        what it added cannot be told from the rest, so all has to be done again."""
        assert self.optimizer is not None
        stats = Stats()
        for rows in self._backward_passes(batch):
            try:
                scalar, micro_stats = self._micro_loss(batch, rows, loss)
                (scalar * self.optimizer.scaler.scale).backward()
            except Exception as error:
                if not self.smaller.try_reduce(error, batch, rows):
                    raise
                return None
            self._losses.append(scalar.detach())
            stats = stats + micro_stats
        return stats

    def _add_all_again(self) -> Stats | None:
        """The gradient since the last step from its beginning; the stats of the last batch."""
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self._losses = []
        if self.device.type == "cuda":  # blocks of the sizes that are not used any more
            torch.cuda.empty_cache()
        stats: Stats | None = None
        for batch, loss in self._since_step:
            stats = self._add(batch, loss)
            if stats is None:
                break
        return stats

    def _backward_passes(self, batch: Batch) -> Iterator[list[int]]:
        """:meth:`_split`, for passes that add to the gradient."""
        for rows in self._split(batch):
            yield from self.smaller.parts(batch, rows)

    def _micro_loss(self, batch: Batch, rows: list[int], loss: Loss) -> tuple[Tensor, Stats]:
        micro = batch.select(rows).to(self.device)
        return loss(self._outputs(micro, with_entropy=self.spec.with_entropy), micro)

    @torch.no_grad()
    def _no_grad_pass(self, batch: Batch, name: str) -> Tensor:
        out = torch.zeros(batch.tokens.numel())
        if name == "states":
            out = self.forward.no_states(batch, DTYPES[self.spec.precision.dtype])
        found: list[tuple[list[int], Tensor]] = []
        for rows in self._split(batch):
            micro = batch.select(rows).to(self.device)
            if name == "states":  # [m, H] each: too large to wait on the device for the others
                fill_rows(out, batch, [(rows, self._states(micro))])
                continue
            result = vars(self._outputs(micro, with_entropy=False))[name]
            assert result is not None
            found.append((rows, result))
        fill_rows(out, batch, found)
        self.data_parallel.all_reduce_([out])  # exact: an entry is 0 on all peers but one
        return out

    def _split(self, batch: Batch) -> list[list[int]]:
        """Rows of this rank's micro-batches. Replicas wait for each other in the step only, so a
        pass over no rows is left out."""
        return [rows for rows in self._parts(batch) if rows]

    def _parts(self, batch: Batch) -> list[list[int]]:
        """As :func:`parts_of`, of this rank among those that compute other rows."""
        return parts_of(batch, self.spec, self.data_parallel, self.forward.layout)

    def _outputs(self, batch: Batch, *, with_entropy: bool) -> Outputs:
        return self.forward(batch, with_entropy=with_entropy)

    def _states(self, batch: Batch) -> Tensor:
        return self.forward.states(batch)

    # ---- stepping --------------------------------------------------------------------------

    def optim_step(self) -> StepStats:
        """Unscale, check, clip, step, schedule. With a loss or gradient that is not finite nothing
        moves and ``skipped`` is set.

        Raises NonFiniteError with the first bad tensor at the floor of the loss scale, and after
        ``max_consecutive_skips`` skipped steps in a row.
        """
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        finite_loss = not self._losses or bool(torch.stack(self._losses).isfinite().all())
        finite_loss = not self.ranks.any(not finite_loss)
        stats = self.optimizer.step(self.version, finite_loss=finite_loss, ranks=self.ranks)
        if stats.skipped:
            self.skipped_total += 1
            # An overflow that a smaller loss scale may cure is the scaler's to judge.
            self.consecutive_skips += not (self.optimizer.scaler.adapts and finite_loss)
        else:
            self.version += 1
            self.consecutive_skips, self._told = 0, None
        retries = sum(self.ranks.gather(self.smaller.taken())) if self.smaller.on else None
        stats = replace(stats, skipped_total=self.skipped_total, oom_retries=retries)
        try:
            self._raise_if_diverged(stats)
        finally:
            self._since_step, self._losses = [], []
        return stats

    def _raise_if_diverged(self, stats: StepStats) -> None:
        """Raise NonFiniteError if the steps to come would be skipped as well, or if this one
        ruined the weights."""
        if not stats.growth <= optim.MAX_GROWTH:
            self._ruined = True
            raise NonFiniteError(why_ruined(stats, self.role), stats)
        reason = why_stop(
            stats,
            role=self.role,
            skips=self.consecutive_skips,
            limit=self.spec.train.max_consecutive_skips,
            precision=self.spec.precision,
        )
        if reason is None:
            return
        why, hint = reason
        if not stats.at_floor:
            self.consecutive_skips = 0  # who goes on from here has as many tries again
        self._told = self._told or self._first_bad()
        raise NonFiniteError(
            f"{why}. {self._told} Nothing moved in this step (optimizer step "
            f"{self.version + 1}). Try {hint}",
            stats,
        )

    def _first_bad(self) -> str:
        """Where the gradient of the step stops being finite, on the first rank where it does."""
        found = [text for text in self.ranks.gather(self._first_bad_here()) if text is not None]
        return found[0] if found else sum_is_bad(self.spec.precision)

    def _first_bad_here(self) -> str | None:
        """This rank's micro-batches once more, watched."""
        since = self._since_step
        micros = ((b, rows, loss) for b, loss in since for rows in self._backward_passes(b))
        start_training(self.model, dropout=self.spec.dropout)
        try:
            for batch, rows, loss in micros:
                compute = partial(self._scaled_loss, batch, rows, loss)
                together = self.model_parallel.size > 1
                bad = first_bad_tensor(self.model, compute, to_the_end=together)
                text = self._first_of_model_parallel(bad, rows)
                if text is not None:
                    return text
        except Exception as error:  # the stop it explains, and the checkpoint, must still come
            return f"The first bad tensor could not be looked for: {type(error).__name__}: {error}."
        finally:
            self.model.eval()
        return None

    def _first_of_model_parallel(self, bad: BadTensor | None, rows: list[int]) -> str | None:
        """What comes first in the order of execution, of all that compute these rows."""
        own = None if bad is None else (STAGES.index(bad.stage), where_bad(bad, rows))
        found = [other for other in self.model_parallel.gather(own) if other is not None]
        return min(found)[1] if found else None

    def _scaled_loss(self, batch: Batch, rows: list[int], loss: Loss) -> Tensor:
        assert self.optimizer is not None
        return self.optimizer.scaler.scale * self._micro_loss(batch, rows, loss)[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, full tensor) in the compute dtype, LoRA merged. The ranks of a
        tensor-parallel team have to take all of them, in step; every one of them has all."""
        for name, tensor in merged_weights(self.model):
            yield name, tensor if self.tp_plan is None else self.tp_plan.unshard(name, tensor)

    # ---- state -----------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Size of what :meth:`save` writes."""
        assert self.optimizer is not None
        return self.optimizer.num_bytes + num_buffer_bytes(self.model)

    def save(self, folder: Path) -> None:
        """Weights (fp32 masters), moments, EMA and version; config and tokenizer for exports.

        Called by all ranks: replicas are equal, so rank 0 writes (of a tensor-parallel team every
        rank its part), and all return when it is done. Raises OSError on all ranks where one
        cannot, and ValueError, with nothing written, where a weight is not finite.
        """
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        self._check_finite(self.optimizer.broken_master())
        write = partial(self._write, folder, self.optimizer)
        if self.tp_plan is not None:
            tensor_shards, part = (
                self.optimizer.tensor_shards(copy=False),
                (self.model_parallel.rank, self.model_parallel.size),
            )
            parts = partial(self._write_parts, folder, tensor_shards, part)
            write_together(self.ranks, parts if self.data_parallel.rank == 0 else None)
            buffers = buffers_now(self.model)
            write = partial(write_description, folder, self, self._description(), buffers)
        write_together(self.ranks, write if self.ranks.rank == 0 else None)

    def save_async(self, folder: Path) -> PendingSave:
        """:meth:`save`, at once: rank 0 writes for all."""
        self.save(folder)
        return FinishedSave()

    def _write_parts(
        self, folder: Path, tensor_shards: TensorShards, part: tuple[int, int]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(folder, tensor_shards, part)

    def _write(self, folder: Path, optimizer: Optimizer) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, tensors in optimizer.tensors().items():
            plain = {name: t.contiguous() for name, t in tensors.items()}
            save_file(plain, folder / f"{kind}.safetensors")
        write_description(folder, self, self._description(), buffers_now(self.model))

    def _check_finite(self, broken: str | None) -> None:
        """Raise ValueError on all ranks where one has a weight that is not finite."""
        if self._ruined:
            raise ValueError(f"the weights of the {self.role} are far too large, and are not saved")
        found = next((name for name in self.ranks.gather(broken) if name is not None), None)
        if found is not None:
            raise ValueError(
                f"the weights of the {self.role} are not finite, e.g. {found}, and are not saved; "
                "earlier checkpoints are as they were: go on from them with a lower learning rate"
            )

    def _description(self) -> str:
        """What ``engine.json`` says."""
        assert self.optimizer is not None
        return description(self, self.spec, self.optimizer.scaler.state_dict())

    def load(self, folder: Path) -> None:
        """Take back what :meth:`save` wrote. Raises ValueError for a checkpoint of another model
        or role."""
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        state = read_description(folder, self.spec)
        self.optimizer.load_tensors(tensor_sets(folder))
        load_buffers(self.model, folder)
        take_counts(self, state)
        self._ruined = False
        if state.get("loss_scaler"):  # empty for a constant scale, and a recipe may have changed
            self.optimizer.scaler.load_state_dict(state["loss_scaler"])


class FrozenBase:
    """A LoRA policy's own reference: the same weights with the adapters off, at no memory."""

    def __init__(self, policy: TorchTrainEngine) -> None:
        self.policy = policy

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens under the base model."""
        with adapters_off(self.policy.model):
            return self.policy.logprobs(batch)
