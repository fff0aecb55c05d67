"""The optimizer: fp32 master weights, fp32 gradient sums, AdamW, schedules, clipping, EMA.

Model state per trained parameter: fp32 training 4 (weight) + 4 (gradient) + 8 (moments) = 16
bytes; bf16 2 (weight) + 4 (gradient sum) + 4 (master) + 8 (moments) = 18, and for a moment 2 more
per gradient in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.train import TrainConfig
from burnish.train.base import StepStats


def lr_factor(step: int, config: TrainConfig, total_steps: int) -> float:
    """Learning rate at optimizer step ``step`` (from 0) as a fraction of the peak.

    Warm-up rises linearly over ``ceil(lr_warmup_ratio x total)`` steps and already moves at step
    0; after it the shape runs to ``total_steps``.
    """
    warmup = math.ceil(config.lr_warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    floor = config.min_lr_ratio
    shapes = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": cosine,
        "cosine_with_min_lr": floor + (1 - floor) * cosine,
    }
    return shapes[config.lr_scheduler]


class Optimizer:
    """AdamW over a model's trainable parameters, in fp32 whatever the model's dtype.

    Gradients of fp32 models live in ``parameter.grad``. For half-precision models every
    micro-batch's gradient is added to an fp32 sum as soon as it is complete and its half-precision
    form is freed.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, *, lr: float, total_steps: int
    ) -> None:
        self.config, self.peak_lr, self.total_steps = config, lr, total_steps
        self.names, self.params = zip(
            *[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True
        )
        self.masters: list[Tensor] = [
            p if p.dtype == torch.float32 else p.detach().float() for p in self.params
        ]
        self._half = [i for i, p in enumerate(self.params) if p.dtype != torch.float32]
        for i in self._half:
            self.masters[i].grad = torch.zeros_like(self.masters[i])
            self.params[i].register_post_accumulate_grad_hook(self._add_to_sum(i))
        decay = [m for m, p in zip(self.masters, self.params, strict=True) if p.ndim >= 2]
        plain = [m for m, p in zip(self.masters, self.params, strict=True) if p.ndim < 2]
        groups = [
            {"params": decay, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=lr,
            betas=config.adam_betas,
            eps=config.adam_eps,
            fused=True,
        )
        self.ema = [m.detach().clone() for m in self.masters] if config.ema_decay else None

    def _add_to_sum(self, index: int) -> Any:
        def hook(parameter: Tensor) -> None:
            grad, total = parameter.grad, self.masters[index].grad
            assert grad is not None and total is not None
            total.add_(grad)
            parameter.grad = None

        return hook

    def step(self, version: int) -> StepStats:
        """Clip and step; with a gradient that is not finite nothing moves. Clears the gradient."""
        grads = [m.grad for m in self.masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        lr = self.peak_lr * lr_factor(version, self.config, self.total_steps)
        finite = bool(torch.isfinite(norm))
        if finite:
            if self.config.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self._publish()
        self.zero_grad()
        return StepStats(grad_norm=float(norm), lr=lr, skipped=not finite)

    @torch.no_grad()
    def _publish(self) -> None:
        """Masters into the model's half-precision weights, and into the moving average."""
        if self._half:
            torch._foreach_copy_(
                [self.params[i] for i in self._half], [self.masters[i] for i in self._half]
            )
        if self.ema is not None:
            assert self.config.ema_decay is not None
            torch._foreach_lerp_(self.ema, self.masters, 1.0 - self.config.ema_decay)

    def zero_grad(self) -> None:
        """Forget the gradient. fp32 gradients are freed, half-precision sums are kept and
        zeroed."""
        half = set(self._half)
        for i, master in enumerate(self.masters):
            if i in half:
                assert master.grad is not None
                master.grad.zero_()
            else:
                master.grad = None

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint needs, by kind and parameter name; tensors are not copied."""
        kinds: dict[str, dict[str, Tensor]] = {
            "master": {},
            "exp_avg": {},
            "exp_avg_sq": {},
            "step": {},
        }
        for name, master in zip(self.names, self.masters, strict=True):
            kinds["master"][name] = master.detach()
            for kind, value in self.adamw.state.get(master, {}).items():
                kinds[kind][name] = value
        if self.ema is not None:
            kinds["ema"] = dict(zip(self.names, self.ema, strict=True))
        return kinds

    @torch.no_grad()
    def load_tensors(self, kinds: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take back :meth:`tensors`. Raises ValueError where names or shapes are not this
        model's."""
        have = kinds["master"]
        if set(have) != set(self.names):
            odd = sorted(set(have) ^ set(self.names))[:3]
            raise ValueError(
                f"the checkpoint is of another model: parameters differ, e.g. {', '.join(odd)}"
            )
        self.adamw.state.clear()  # a checkpoint of step 0 has no moments
        for i, (name, master) in enumerate(zip(self.names, self.masters, strict=True)):
            if have[name].shape != master.shape:
                raise ValueError(
                    f"the checkpoint is of another model: {name} is {list(have[name].shape)} there "
                    f"and {list(master.shape)} here"
                )
            master.copy_(have[name])
            if name in kinds.get("exp_avg", {}):
                moments = {k: kinds[k][name].to(master.device) for k in ("exp_avg", "exp_avg_sq")}
                self.adamw.state[master] = {
                    **moments,
                    "step": kinds["step"][name].to(master.device, torch.float32, copy=True),
                }
            if self.ema is not None:  # one switched on since then starts from these weights
                self.ema[i].copy_(kinds.get("ema", have)[name])
        if self._half:
            torch._foreach_copy_(
                [self.params[i] for i in self._half], [self.masters[i] for i in self._half]
            )
