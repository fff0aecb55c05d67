"""The train engine on one device per rank: plain PyTorch, and the oracle for every other engine.

Reading order: ``forward_backward`` -> ``_outputs`` -> ``train/batching.py`` ->
``models/logprobs.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.train import TrainConfig
from burnish.models.attention import NO_MASK
from burnish.models.half_linear import use_fp32_products
from burnish.models.load import DTYPES, check_compute_dtype, check_weights, describe
from burnish.models.logprobs import Head, token_logprobs
from burnish.models.lora import adapters_off, merged_weights
from burnish.models.tensor_files import tensor_sets
from burnish.train.base import Loss, NonFiniteError, Outputs, Role, StepStats
from burnish.train.batching import Arranged, arrange, read_and_target, split_over_ranks
from burnish.train.diagnose import first_bad_tensor
from burnish.train.optim import Optimizer
from burnish.train.ranks import ALONE, Ranks
from burnish.types import Batch, Stats


@dataclass(frozen=True)
class EngineSpec:
    """What an engine needs to know beside its model."""

    role: Role
    train: TrainConfig
    model: ModelConfig
    """Where the model came from; written into checkpoints so that exports can find the base of a
    LoRA."""
    micro_batch_size: int | None = None
    """Rows (units) per pass; None with a token budget, or to take all at once."""
    total_steps: int = 1
    """Optimizer steps of the whole run, for the schedule."""
    lr: float | None = None
    """Peak learning rate. None: ``train.lr``."""
    temperature: float = 1.0
    """Sampling temperature at which log-probs are computed."""
    with_entropy: bool = True
    """Compute the entropy in forward_backward."""
    trainable: bool = True
    """False: no optimizer (reference and reward models)."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats and loss scaling. The model may come in any format: trained weights in fp32
    become the masters as they are."""


class TorchTrainEngine:
    """One model in one role on one device. Implements :class:`burnish.train.base.TrainEngine`.

    With several ``ranks`` every rank has an engine with the same weights, is called with the same
    whole batches in the same order, computes its own share of the rows and gives the same answers
    as the others; the optimizer step is then the same everywhere.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: EngineSpec,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ranks: Ranks = ALONE,
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
        self.device = device or next(model.parameters()).device
        self._no_mask = NO_MASK.to(self.device)
        self.scalar = spec.role in ("critic", "reward")
        body = model.model if self.scalar else model.get_decoder()  # type: ignore[operator]
        self.body = cast(PreTrainedModel, body)
        if not spec.trainable:
            model.requires_grad_(False)
        elif spec.train.gradient_checkpointing:
            _enable_checkpointing(self.body)
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
        )

    def _check_format(self) -> None:
        """Raise ModelError where the model's weights or activations do not fit its format, or the
        device lacks an operation in it."""
        name = describe(self.spec.model)
        check_weights(self.model.named_parameters(), name)
        check_compute_dtype(self.body, name, backward=self.spec.trainable)

    # ---- computing -------------------------------------------------------------------------

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens, without gradient."""
        return self._no_grad_pass(batch, "logprobs")

    def values(self, batch: Batch) -> Tensor:
        """[M] fp32: values of action states (critic) or scores on last tokens (reward), without
        gradient."""
        return self._no_grad_pass(batch, "values")

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of ``loss`` over ``batch``; returns the sum of the micro-batches'
        stats over all ranks. (Gradients are summed over ranks in :meth:`optim_step`, once.)"""
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        stats = Stats()
        self._since_step.append((batch, loss))
        self.model.train()
        for rows in self._backward_passes(batch):
            scalar, micro_stats = self._micro_loss(batch, rows, loss)
            (scalar * self.optimizer.scaler.scale).backward()
            self._losses.append(scalar.detach())
            stats = stats + micro_stats
        self.model.eval()
        if (
            self.device.type == "cuda"
        ):  # optim_step would wait here anyway; so the time is counted here
            torch.cuda.synchronize(self.device)
        return self.ranks.sum_stats(stats)

    def _backward_passes(self, batch: Batch) -> Iterator[list[int]]:
        """:meth:`_split`, for passes that add to the gradient."""
        yield from self._split(batch)

    def _micro_loss(self, batch: Batch, rows: list[int], loss: Loss) -> tuple[Tensor, Stats]:
        micro = batch.select(rows).to(self.device)
        return loss(self._outputs(micro, with_entropy=self.spec.with_entropy), micro)

    @torch.no_grad()
    def _no_grad_pass(self, batch: Batch, name: str) -> Tensor:
        out, begins = torch.zeros(batch.tokens.numel()), batch.offsets.tolist()
        for rows in self._split(batch):
            micro = batch.select(rows).to(self.device)
            outputs = self._outputs(micro, with_entropy=False)
            result = outputs.logprobs if name == "logprobs" else outputs.values
            assert result is not None
            for row, values in zip(rows, result.cpu().split(micro.lengths.tolist()), strict=True):
                out[begins[row] : begins[row + 1]] = values
        self.ranks.sum_([out])  # exact: an entry is 0 on all ranks but one
        return out

    def _split(self, batch: Batch) -> list[list[int]]:
        """Rows of this rank's micro-batches. Replicas wait for each other in the step only, so a
        pass over no rows is left out."""
        return [rows for rows in self._parts(batch) if rows]

    def _parts(self, batch: Batch) -> list[list[int]]:
        """Rows of this rank's micro-batches, as many as every other rank has; some may be empty."""
        train = self.spec.train
        parts = split_over_ranks(
            batch,
            ranks=self.ranks.size,
            micro_batch_size=self.spec.micro_batch_size,
            max_tokens=train.max_tokens_per_micro_batch,
            layout=train.layout,
        )
        return parts[self.ranks.rank]

    def _outputs(self, batch: Batch, *, with_entropy: bool) -> Outputs:
        arranged = arrange(batch, self.spec.train.layout)
        hidden = self._hidden(arranged)
        if self.scalar:
            return Outputs(values=self._scalar_outputs(batch, arranged, hidden))
        read, target = read_and_target(batch)
        logprobs, entropy = token_logprobs(
            hidden[arranged.place[read]],
            batch.tokens[target],
            self._head(),
            with_entropy=with_entropy,
        )
        return Outputs(
            logprobs=_in_line(logprobs, target, batch),
            entropy=None if entropy is None else _in_line(entropy, target, batch),
        )

    def _scalar_outputs(self, batch: Batch, arranged: Arranged, hidden: Tensor) -> Tensor:
        if self.role == "critic":
            read, target = read_and_target(batch)
        else:
            read = target = batch.offsets[1:].to(self.device) - 1
        head = cast(nn.Linear, self.model.score)
        # In fp32: advantages and margins are differences of these numbers.
        scores = torch.nn.functional.linear(
            hidden[arranged.place[read]].float(),
            head.weight.float(),
            None if head.bias is None else head.bias.float(),
        )
        return _in_line(scores[:, 0], target, batch)

    def _hidden(self, arranged: Arranged) -> Tensor:
        """[R * T, H] last hidden states."""
        extra: dict[str, Any] = {}
        if arranged.plan is not None:
            extra = {"plan": arranged.plan, "attention_mask": self._no_mask}
        out = self.body(
            input_ids=arranged.input_ids,
            position_ids=arranged.position_ids,
            use_cache=False,
            **extra,
        )
        return out.last_hidden_state.flatten(0, 1)

    def _head(self) -> Head:
        projection = self.model.get_output_embeddings()  # type: ignore[operator]
        return Head(
            projection.weight,
            projection.bias,
            temperature=self.spec.temperature,
            chunk_tokens=self.spec.train.logprob_chunk_tokens,
        )

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
        stats = replace(stats, skipped_total=self.skipped_total)
        try:
            self._check_hope(stats)
        finally:
            self._since_step, self._losses = [], []
        return stats

    def _check_hope(self, stats: StepStats) -> None:
        """Raise NonFiniteError where the steps to come would be skipped as well."""
        limit = self.spec.train.max_consecutive_skips
        if stats.at_floor:
            why = (
                f"the gradient of the {self.role} overflows with the loss scale at its floor "
                f"(precision.min_loss_scale={stats.loss_scale:g})"
            )
            hint = (
                f"{self.spec.precision.overrides_for('bf16')}, a lower learning rate, or a smaller "
                "train.max_grad_norm"
            )
        elif stats.skipped and self.consecutive_skips >= limit:
            why = (
                f"{self.consecutive_skips} steps of the {self.role} in a row were skipped because "
                f"the loss or the gradient was not finite (train.max_consecutive_skips={limit})"
            )
            hint = "a lower learning rate, or look at the data and rewards of these rows"
            if self.spec.precision.loss_scale:
                hint += f"; or a loss_scale below {stats.loss_scale:g}, or a dynamic one (0)"
            if self.spec.precision.dtype == "fp16":
                hint += (
                    f"; or, for values beyond 65504, {self.spec.precision.overrides_for('bf16')}"
                )
            self.consecutive_skips = 0  # who goes on from here has as many tries again
        else:
            return
        self._told = self._told or self._first_bad()
        raise NonFiniteError(
            f"{why}. {self._told} Nothing moved in this step (optimizer step "
            f"{self.version + 1}). Try {hint}",
            stats,
        )

    def _first_bad(self) -> str:
        """Where the gradient of the step stops being finite, on the first rank where it does."""
        found = [text for text in self.ranks.gather(self._first_bad_here()) if text is not None]
        if found:
            return found[0]
        return (
            "Computed once more, every micro-batch's gradient is finite: their sum is not "
            f"(precision.grad_accum_dtype={self.spec.precision.grad_accum_dtype}), or dropout "
            "drew other numbers."
        )

    def _first_bad_here(self) -> str | None:
        """This rank's micro-batches once more, watched."""
        micros = ((b, rows, loss) for b, loss in self._since_step for rows in self._split(b))
        self.model.train()
        try:
            for batch, rows, loss in micros:
                bad = first_bad_tensor(self.model, partial(self._scaled_loss, batch, rows, loss))
                if bad is not None:
                    return f"First bad tensor: {bad} (rows {shortened(rows)} of the batch)."
        except Exception as error:  # the stop it explains, and the checkpoint, must still come
            return f"The first bad tensor could not be looked for: {type(error).__name__}: {error}."
        finally:
            self.model.eval()
        return None

    def _scaled_loss(self, batch: Batch, rows: list[int], loss: Loss) -> Tensor:
        assert self.optimizer is not None
        return self.optimizer.scaler.scale * self._micro_loss(batch, rows, loss)[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, full tensor) in the compute dtype, LoRA merged."""
        return merged_weights(self.model)

    # ---- state -----------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Size of what :meth:`save` writes."""
        assert self.optimizer is not None
        return self.optimizer.num_bytes

    def save(self, folder: Path) -> None:
        """Weights (fp32 masters), moments, EMA and version; config and tokenizer for exports.

        Raises ValueError, and writes nothing, where a weight is not finite.
        """
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        self._check_finite(self.optimizer.broken_master())
        folder.mkdir(parents=True, exist_ok=True)
        for kind, tensors in self.optimizer.tensors().items():
            plain = {name: t.contiguous() for name, t in tensors.items()}
            save_file(plain, folder / f"{kind}.safetensors")
        self._write_hf(folder / "hf")
        (folder / "engine.json").write_text(self._description())

    def _check_finite(self, broken: str | None) -> None:
        if broken is not None:
            raise ValueError(
                f"the weights of the {self.role} are not finite, e.g. {broken}, and are not saved; "
                "earlier checkpoints are as they were: go on from them with a lower learning rate"
            )

    def _description(self) -> str:
        """What ``engine.json`` says: all that is saved and is no tensor."""
        assert self.optimizer is not None
        state = {
            "role": self.role,
            "version": self.version,
            "skipped_total": self.skipped_total,
            "consecutive_skips": self.consecutive_skips,
            "loss_scaler": self.optimizer.scaler.state_dict(),
            "model": self.spec.model.model_dump(mode="json"),
        }
        return json.dumps(state, indent=1)

    def _write_hf(self, hf: Path) -> None:
        """Config and tokenizer, for exports."""
        self.body.config.save_pretrained(hf)
        if not self.scalar:  # the tokens that end a response, beside the tokenizer's
            text = self.model.generation_config.to_json_string()  # type: ignore[union-attr, operator]
            (hf / "generation_config.json").write_text(text)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(hf)

    def load(self, folder: Path) -> None:
        """Take back what :meth:`save` wrote. Raises ValueError for a checkpoint of another model
        or role."""
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        if not (folder / "engine.json").is_file():
            raise ValueError(f"{folder.parent} holds no {self.role}")
        state = json.loads((folder / "engine.json").read_text())
        if state["role"] != self.role:
            raise ValueError(
                f"{folder} is the checkpoint of a {state['role']}, not of a {self.role}"
            )
        saved, own = ModelConfig.model_validate(state["model"]), self.spec.model
        if own.lora is not None and _base(saved) != _base(own):
            raise ValueError(
                f"{folder} has adapters for {_base(saved)}, and this recipe's base is {_base(own)}"
            )
        self.optimizer.load_tensors(tensor_sets(folder))
        self.version = int(state["version"])
        self.skipped_total = int(state.get("skipped_total", 0))
        self.consecutive_skips = int(state.get("consecutive_skips", 0))
        if state.get("loss_scaler"):  # empty for a constant scale, and a recipe may have changed
            self.optimizer.scaler.load_state_dict(state["loss_scaler"])


def _base(model: ModelConfig) -> dict[str, Any]:
    """What decides the weights that adapters are added to."""
    return model.model_dump(include={"path", "gguf_file", "revision", "scratch"}, exclude_none=True)


def _enable_checkpointing(body: PreTrainedModel) -> None:
    """Recompute activations in backward; transformers renamed the switch in 5.2x."""
    renamed = getattr(body, "activation_checkpointing_enable", None)  # house: ok two versions
    (renamed or body.gradient_checkpointing_enable)({"use_reentrant": False})


class FrozenBase:
    """A LoRA policy's own reference: the same weights with the adapters off, at no memory."""

    def __init__(self, policy: TorchTrainEngine) -> None:
        self.policy = policy

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens under the base model."""
        with adapters_off(self.policy.model):
            return self.policy.logprobs(batch)


def shortened(rows: list[int]) -> str:
    """Row numbers for a message."""
    return f"{rows}" if len(rows) <= 8 else f"{rows[:8]} and {len(rows) - 8} more"


def _in_line(values: Tensor, index: Tensor, batch: Batch) -> Tensor:
    """[M] with ``values`` [K] at ``index``, 0 elsewhere; differentiable."""
    return values.new_zeros(batch.tokens.numel()).index_put((index,), values)
