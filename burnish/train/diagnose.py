"""Search for the first non-finite tensor of a pass, so that a run that must stop can name the
module.

``first_bad_tensor`` checks tensors in order of computation: weights, inputs and outputs of every
module, the loss, gradients at the outputs and inputs of every module, and each parameter's
gradient. It repeats the pass with a check after every module. It is meant for a run that ends
anyway, not for a training step.

Operations between modules (residual sums, attention, log-probs) are detected at the next module.
Values inside a module that never leave it are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from burnish.config.model import PrecisionConfig
from burnish.train.base import Role, StepStats

Stage = Literal["weight", "forward", "loss", "backward", "gradient"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""Stages in the order in which they are checked."""


@dataclass(frozen=True)
class BadTensor:
    """A tensor with entries that are not finite."""

    stage: Stage
    module: str
    """Qualified name, e.g. ``model.layers.3.mlp.down_proj``. For weight and gradient, the full name
    of the parameter or buffer. Empty for the loss."""
    shape: tuple[int, ...]
    num_bad: int
    num_entries: int
    largest: float
    """Largest finite absolute value; 0.0 if no entry is finite."""
    side: Literal["input", "output"] = "output"
    """Side of the module in the stages forward and backward.

    A bad input, or a bad gradient at the output, was produced between modules. A bad output, or a
    bad gradient at the input, was produced by the module itself.
    """

    def __str__(self) -> str:
        """Return a description in one plain sentence."""
        if self.stage == "loss":
            return "loss: the scaled loss is not finite, although all module outputs are finite"
        if self.num_bad == self.num_entries:
            count = f"{self.num_entries} entries, none of which is finite"
        else:
            count = (
                f"{self.num_bad} of {self.num_entries} entries that are not finite; "
                f"the largest finite absolute value is {self.largest:.2g}"
            )
        module = self.module or "the full model"
        origin = ""
        if self.stage == "weight":
            subject = self.module
        elif self.stage == "gradient":
            subject = f"the gradient of {self.module}"
        elif self.stage == "forward":
            subject = f"the {self.side} of {module}"
            if self.side == "input":
                origin = "the operations between this module and the previous ones produced it"
        elif self.side == "input":
            subject = f"the gradient that {module} computes for its input"
            origin = "the gradient at its output is finite, so this module's backward produced it"
        else:
            subject = f"the gradient at the output of {module}"
            origin = "the backward of the operations that read this output produced it"
        described = f"{self.stage}: {subject} {list(self.shape)} has {count}"
        return f"{described}; {origin}" if origin else described


def stop_reason(
    stats: StepStats, *, role: Role, skips: int, limit: int, precision: PrecisionConfig
) -> tuple[str, str] | None:
    """Return (reason, suggestion) if later steps would be skipped as the step of ``stats`` was,
    else None.

    ``skips``: consecutive skipped steps that a smaller loss scale would not have fixed. ``limit``:
    ``train.max_consecutive_skips``.
    """
    if stats.at_floor:
        return (
            f"the gradient of the {role} overflows although the loss scale is at its minimum "
            f"(precision.fp16.min_loss_scale={stats.loss_scale:g})",
            f"{precision.overrides_for('bf16')}, a lower learning rate, or a smaller "
            "train.max_grad_norm",
        )
    if not stats.skipped or skips < limit:
        return None
    hint = "a lower learning rate, or check the data and rewards of these rows"
    if precision.fp16.loss_scale:
        hint += f"; or a loss_scale below {stats.loss_scale:g}, or 0 for a dynamic one"
    if precision.dtype == "fp16":
        largest = torch.finfo(torch.float16).max
        hint += f"; or, for values above {largest:g}, {precision.overrides_for('bf16')}"
    return (
        f"{skips} consecutive steps of the {role} were skipped because the loss or the gradient "
        f"was not finite (train.max_consecutive_skips={limit})",
        hint,
    )


def divergence_message(stats: StepStats, role: Role) -> str:
    """Return the message for weights that are far larger than at the start of training."""
    return (
        f"the weights of the {role} are {stats.growth:.3g} times as large as at the start, so "
        f"training diverged: the learning rate of the last step was {stats.lr:g}, and AdamW "
        "changes every weight by about that much. Resume from an earlier checkpoint, or start a "
        "new run, with a lower train.lr (1e-6 to 1e-4 is usual for pretrained models)"
    )


def bad_tensor_message(bad: BadTensor, rows: Sequence[int]) -> str:
    """Return the message for a bad tensor in a micro-batch of these rows."""
    shown = f"{list(rows)}" if len(rows) <= 8 else f"{list(rows[:8])} and {len(rows) - 8} more"
    return f"First bad tensor: {bad} (rows {shown} of the batch)."


def bad_sum_message(precision: PrecisionConfig) -> str:
    """Return the message for a bad gradient if no micro-batch has a bad tensor."""
    return (
        "In a repeated pass the gradient of every micro-batch is finite. Either their sum is not "
        f"(precision.grad_accum_dtype={precision.grad_accum_dtype}), or dropout used other masks."
    )


def first_bad_tensor(
    model: nn.Module,
    compute: Callable[[], Tensor],
    *,
    units: Sequence[nn.Module] = (),
    to_the_end: bool = False,
) -> BadTensor | None:
    """Run ``compute`` and its gradient; return the first non-finite tensor in order of execution,
    or None.

    ``compute`` is a forward pass of ``model`` that returns the scaled scalar loss.

    ``to_the_end``: complete the pass even after a bad tensor. Required if ranks hold shards of one
    model, because the other ranks wait for this one in every module.

    Without ``units`` nothing is accumulated: ``parameter.grad`` is unchanged. The hooks are
    removed, even if ``compute`` raises. With dropout the repeated pass draws other masks, and may
    be finite although the first was not.

    ``units``: the FSDP2 modules of a model whose parameters are sharded over ranks. Every rank then
    calls this at the same time. The pass always runs to completion, because the other ranks wait
    for this one. The gradient is left in ``parameter.grad``.
    """
    checker = _FiniteChecker(stops=not (units or to_the_end))
    try:
        for name, parameter in model.named_parameters():
            checker.check(_own_part(parameter.detach()), "weight", name)
        for name, buffer in model.named_buffers():  # (stored attention masks contain -inf)
            checker.check(buffer, "weight", name, allow_minus_inf=True)
        # an inner module's hook runs before that of its parent: the innermost one is reported
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(_input_hook(name, checker), with_kwargs=True)
            checker.handles += [before, module.register_forward_hook(_output_hook(name, checker))]
        _hook_gathered(model, units, checker)
        loss = compute()
        checker.check(loss.detach(), "loss", "")
        checker.in_forward = False  # gradient checkpointing reruns modules: not checked
        if units:
            loss.backward()  # (autograd.grad would bypass FSDP2)
        else:
            _backward(model, loss, checker)
    except _Found:
        pass
    finally:
        checker.remove_hooks()
    return checker.found


class _Found(Exception):
    """Ends the pass at the first bad tensor."""


class _FiniteChecker:
    """The bad tensor, if found, and the hooks to remove at the end."""

    def __init__(self, *, stops: bool) -> None:
        self.found: BadTensor | None = None
        self.stops = stops
        self.in_forward = True
        self.handles: list[RemovableHandle] = []

    def check(
        self,
        tensor: Tensor | None,
        stage: Stage,
        module: str,
        side: Literal["input", "output"] = "output",
        *,
        allow_minus_inf: bool = False,
    ) -> None:
        """Record the first tensor that is not finite, and raise _Found if that ends the pass."""
        if tensor is None or self.found is not None or not tensor.is_floating_point():
            return  # (None: a gradient that is not needed)
        finite = torch.isfinite(tensor)
        if allow_minus_inf:
            finite |= tensor == -torch.inf
        if bool(finite.all()):
            return
        sizes = tensor[finite].abs()
        self.found = BadTensor(
            stage=stage,
            module=module,
            shape=tuple(tensor.shape),
            num_bad=tensor.numel() - sizes.numel(),
            num_entries=tensor.numel(),
            largest=float(sizes.max()) if sizes.numel() else 0.0,
            side=side,
        )
        if self.stops:
            raise _Found

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()


def _own_part(tensor: Tensor) -> Tensor:
    """Return a sharded tensor's rows on this rank; other tensors unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _hook_gathered(model: nn.Module, units: Sequence[nn.Module], checker: _FiniteChecker) -> None:
    """Check the gradients of the parameters that a unit gathers, before they are summed over
    ranks."""

    def hook(unit: nn.Module, args: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and _own_part(parameter) is parameter:
                check = partial(checker.check, stage="gradient", module=name)
                checker.handles.append(parameter.register_hook(lambda grad, c=check: c(grad)))

    for unit in units:
        checker.handles.append(unit.register_forward_pre_hook(hook))


def _input_hook(name: str, checker: _FiniteChecker) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not checker.in_forward:
            return None
        return _own_views(args, name, checker), {
            key: _own_views(value, name, checker) for key, value in kwargs.items()
        }

    return hook


def _own_views(value: Any, name: str, checker: _FiniteChecker) -> Any:
    """Return ``value`` with each activation replaced by a view that only this module reads.

    The gradient of a view belongs to this module alone. (Query, key and value projections read the
    same tensor.) Tensors without gradient (masks with -inf, token ids) are not checked.
    """
    if type(value) is tuple:
        return tuple(_own_views(item, name, checker) for item in value)
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad):
        return value
    checker.check(value.detach(), "forward", name, "input")
    view = value.view_as(value)
    if view.requires_grad:  # (not inside a no_grad)
        view.register_hook(lambda grad: checker.check(grad, "backward", name, "input"))
    return view


def _output_hook(name: str, checker: _FiniteChecker) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not checker.in_forward:
            return
        for tensor in _tensors(output):
            checker.check(tensor.detach(), "forward", name)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: checker.check(grad, "backward", name))

    return hook


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists and mappings (a ModelOutput is one)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _backward(model: nn.Module, loss: Tensor, checker: _FiniteChecker) -> None:
    """Compute the gradient of ``loss`` under the hooks. Each parameter's gradient is dropped once
    it is checked."""
    if not loss.requires_grad:
        return

    def hook(grad: Tensor, name: str) -> Tensor:
        checker.check(grad, "gradient", name)
        return grad.new_zeros(()).expand_as(grad)  # one entry of memory instead of all

    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in params.items():
        checker.handles.append(parameter.register_hook(partial(hook, name=name)))
    torch.autograd.grad(loss, list(params.values()), allow_unused=True)
