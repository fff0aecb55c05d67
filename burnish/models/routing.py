"""Record the routing of a mixture of experts during a forward pass: router logits, and the experts
that every token is sent to.

The choice of experts is not a function of the logits alone: families add a bias, restrict the
choice to groups of experts, or look it up by token id. The indices are therefore read where the
experts' module receives them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.models.paths import ModelError

_INDEX_NAMES = ("top_k_index", "router_indices")
"""Parameters of the forward of transformers' experts modules that contain the chosen experts."""
_TOP_K_ROUTERS = {"Llama4Router": 1, "JetMoeTopKGating": 4}
"""Routers that choose the ``top_k`` largest logits of a token and whose experts receive no indices,
by class, with the index of the logits in their output."""
SETTING = "train.moe_aux_loss_coef"


@dataclass(frozen=True)
class Routing:
    """Routing of one forward pass."""

    logits: Tensor
    """[L, M, E]: router logits of L layers for M tokens"""
    chosen: Tensor
    """[L', M, k]: ids of the experts of every token. The first L entries are the layers of
    ``logits``; layers without a trained choice (hash routing) follow"""


class RoutingRecorder:
    """Hooks on the routers and experts of ``body`` that record the passes inside
    :meth:`recording`.

    Raises ModelError if the model has no experts or if it is not known which ones it chooses.
    """

    def __init__(self, body: PreTrainedModel) -> None:
        self._name = type(body).__name__
        self._active = False
        self._waiting: dict[str, Tensor] = {}
        self._routed: list[tuple[Tensor, Tensor]] = []
        self._fixed: list[Tensor] = []
        routers, experts = _routers(body), _experts(body)
        if not experts and not routers:
            raise ModelError(
                f"{SETTING} balances the load of experts, but this {body.config.model_type} model "
                "has none; remove it"
            )
        blocks = {_parent(name) for name, *_ in experts}
        for name, (router, index) in routers.items():
            if type(router).__name__ in _TOP_K_ROUTERS:
                router.register_forward_hook(self._top_k_hook(index))
            elif _parent(name) in blocks:
                router.register_forward_hook(self._router_hook(_parent(name), index))
            else:
                raise ModelError(
                    f"{SETTING}: the experts of this {body.config.model_type} model do not receive "
                    f"the indices of the chosen experts ({name}, a {type(router).__name__}), so "
                    "their loads cannot be counted; remove it"
                )
        for name, module, argument in experts:
            hook = self._experts_hook(_parent(name), *argument)
            module.register_forward_pre_hook(hook, with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the pass inside the ``with`` block. Passes outside, also recomputations in
        backward, are not recorded."""
        self._waiting, self._routed, self._fixed = {}, [], []
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def routing(self) -> Routing:
        """Return the routing of the last recorded pass. Raises ModelError if no layer chooses
        experts by its logits, or if layers differ in their number of experts."""
        routed, fixed = self._routed, self._fixed
        self._waiting, self._routed, self._fixed = {}, [], []
        shapes = {(logits.shape, chosen.shape) for logits, chosen in routed}
        if len(shapes) != 1 or any(chosen.shape != routed[0][1].shape for chosen in fixed):
            reason = (
                "its layers have different numbers of experts"
                if routed
                else "no router of it chooses experts by trained logits"
            )
            raise ModelError(f"{SETTING}: {self._name} cannot be balanced: {reason}; remove it")
        logits, chosen = zip(*routed, strict=True)
        return Routing(torch.stack(logits), torch.stack([*chosen, *fixed]))

    def _router_hook(self, parent: str, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._active:
                logits = output if isinstance(output, Tensor) else output[index]
                self._waiting[parent] = logits.flatten(0, -2)

        return hook

    def _top_k_hook(self, index: int) -> Any:
        def hook(module: Any, _inputs: Any, output: Any) -> None:
            if self._active:
                logits = output[index].flatten(0, -2)
                self._routed.append((logits, logits.topk(module.top_k, dim=-1).indices))

        return hook

    def _experts_hook(self, parent: str, place: int, name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not self._active:
                return
            chosen = named[name] if name in named else inputs[place]
            chosen = chosen.detach().flatten(0, -2)
            logits = self._waiting.pop(parent, None)
            if logits is None:
                self._fixed.append(chosen)
            else:
                self._routed.append((logits, chosen))

        return hook


def _experts(body: nn.Module) -> list[tuple[str, nn.Module, tuple[int, str]]]:
    """Return (name, module, argument) of each module whose forward receives the ids of the chosen
    experts, with the position and name of that argument."""
    experts = []
    for name, module in body.named_modules():
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        experts += [(name, module, (names.index(n), n)) for n in _INDEX_NAMES if n in names]
    return experts


def _routers(body: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Return the routers whose logits transformers records (``output_router_logits``), with the
    index of the logits in their output, by name."""
    named = list(body.named_modules())
    index = {name: _TOP_K_ROUTERS.get(type(module).__name__) for name, module in named}
    if any(place is not None for place in index.values()):
        return {n: (m, place) for n, m in named if (place := index[n]) is not None}
    recorders: list[Any] = []
    for _, module in named:
        recorded = getattr(module, "_can_record_outputs", None)  # house: ok transformers' own
        spec = (recorded or {}).get("router_logits")
        recorders += spec if isinstance(spec, list) else [spec] if spec is not None else []
    return {
        name: (module, recorder.index)
        for name, module in named
        for recorder in recorders
        if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
    }


def _parent(name: str) -> str:
    """Return the name of the block that contains a router or its experts, with or without
    adapters."""
    return name.replace(".base_layer", "").rpartition(".")[0]
