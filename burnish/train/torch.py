"""The train engine on one device: plain PyTorch, and the oracle for every other engine.

Reading order: ``forward_backward`` -> ``_outputs`` -> ``train/batching.py`` ->
``models/logprobs.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import ModelConfig
from burnish.config.train import TrainConfig
from burnish.models.attention import NO_MASK
from burnish.models.logprobs import Head, token_logprobs
from burnish.models.lora import adapters_off, merged_weights
from burnish.train.base import Loss, Outputs, Role, StepStats
from burnish.train.batching import Arranged, arrange, read_and_target, split_rows
from burnish.train.optim import Optimizer
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


class TorchTrainEngine:
    """One model in one role on one device. Implements :class:`burnish.train.base.TrainEngine`."""

    def __init__(
        self,
        model: nn.Module,
        spec: EngineSpec,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.model, self.spec, self.role = model, spec, spec.role
        self.tokenizer = tokenizer
        self.version = 0
        self.device = next(model.parameters()).device
        self._no_mask = NO_MASK.to(self.device)
        self.scalar = spec.role in ("critic", "reward")
        body = model.model if self.scalar else model.get_decoder()  # type: ignore[operator]
        self.body = cast(PreTrainedModel, body)
        self.optimizer: Optimizer | None = None
        if spec.trainable:
            lr = spec.lr or spec.train.lr
            self.optimizer = Optimizer(model, spec.train, lr=lr, total_steps=spec.total_steps)
            if spec.train.gradient_checkpointing:
                _enable_checkpointing(self.body)
        else:
            model.requires_grad_(False)
        model.eval()

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
        stats."""
        stats = Stats()
        self.model.train()
        for rows in self._split(batch):
            micro = batch.select(rows).to(self.device)
            scalar, micro_stats = loss(
                self._outputs(micro, with_entropy=self.spec.with_entropy), micro
            )
            scalar.backward()
            stats = stats + micro_stats
        self.model.eval()
        if (
            self.device.type == "cuda"
        ):  # optim_step would wait here anyway; so the time is counted here
            torch.cuda.synchronize(self.device)
        return stats

    @torch.no_grad()
    def _no_grad_pass(self, batch: Batch, name: str) -> Tensor:
        out, begins = torch.zeros(batch.tokens.numel()), batch.offsets.tolist()
        for rows in self._split(batch):
            micro = batch.select(rows).to(self.device)
            outputs = self._outputs(micro, with_entropy=False)
            result = outputs.logprobs if name == "logprobs" else outputs.values
            assert result is not None
            index = [torch.arange(begins[r], begins[r + 1]) for r in rows]
            out[torch.cat(index)] = result.cpu()
        return out

    def _split(self, batch: Batch) -> Iterator[list[int]]:
        train = self.spec.train
        return split_rows(
            batch,
            micro_batch_size=self.spec.micro_batch_size,
            max_tokens=train.max_tokens_per_micro_batch,
            layout=train.layout,
        )

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
        """Clip, step, schedule. With a gradient that is not finite nothing moves and ``skipped``
        is set."""
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        stats = self.optimizer.step(self.version)
        if not stats.skipped:
            self.version += 1
        return stats

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, full tensor) in the compute dtype, LoRA merged."""
        return merged_weights(self.model)

    # ---- state -----------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Size of what :meth:`save` writes."""
        assert self.optimizer is not None
        return sum(t.nbytes for kind in self.optimizer.tensors().values() for t in kind.values())

    def save(self, folder: Path) -> None:
        """Weights (fp32 masters), moments, EMA and version; config and tokenizer for exports."""
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        folder.mkdir(parents=True, exist_ok=True)
        for kind, tensors in self.optimizer.tensors().items():
            plain = {name: t.contiguous() for name, t in tensors.items()}
            save_file(plain, folder / f"{kind}.safetensors")
        state = {
            "role": self.role,
            "version": self.version,
            "model": self.spec.model.model_dump(mode="json"),
        }
        (folder / "engine.json").write_text(json.dumps(state, indent=1))
        hf = folder / "hf"
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
        kinds: dict[str, Mapping[str, Tensor]] = {
            file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))
        }
        self.optimizer.load_tensors(kinds)
        self.version = int(state["version"])


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


def _in_line(values: Tensor, index: Tensor, batch: Batch) -> Tensor:
    """[M] with ``values`` [K] at ``index``, 0 elsewhere; differentiable."""
    return values.new_zeros(batch.tokens.numel()).index_put((index,), values)
