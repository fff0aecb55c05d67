"""Mixtures of experts in vLLM: use the layers' own weights, and verify that they are used.

vLLM stores the experts of a layer in two tensors: ``w13_weight`` [E, 2 I, H] (gate, then up) and
``w2_weight`` [E, H, I]. This module does not import vllm (``engine.py`` does); its objects are
passed as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def use_plain_experts(experts: Any) -> None:
    """Patch ``experts``, vLLM's class of experts on CPU, to compute with the weights of its layers.

    Without the patch it packs a copy at start and drops the weights, so new ones cannot be loaded.
    """

    def keep(self: Any, layer: Any) -> None:
        self._use_zentorch = False

    def apply(self: Any, output: Tensor, hidden_states: Tensor, *args: Any, **named: Any) -> None:
        arguments = dict(zip(_NAMES, args, strict=False)) | named
        if (
            arguments["activation"].value not in _ACTIVATIONS
            or arguments["apply_router_weight_on_input"]
        ):
            raise NotImplementedError(f"experts with {arguments['activation']} on CPU")
        output.copy_(
            mixture(
                hidden_states,
                (arguments["w1"], arguments["w2"]),
                arguments["topk_weights"],
                arguments["topk_ids"],
                activation=arguments["activation"].value,
            )
        )

    experts.process_weights_after_loading = keep
    experts.apply = apply


_NAMES = ("w1", "w2", "topk_weights", "topk_ids", "activation")
"""Positional arguments of vLLM's ``apply`` after the output and the hidden states."""


def mixture(
    x: Tensor, weights: tuple[Tensor, Tensor], scores: Tensor, ids: Tensor, *, activation: str
) -> Tensor:
    """Return the mixture [T, H] of experts ``ids`` [T, k] with weights ``scores`` [T, k] for tokens
    ``x`` [T, H]: sum over k of scores * w2 (act(gate x) * up x). ``weights``: w13 and w2."""
    w13, w2 = weights
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w13[expert]).chunk(2, dim=-1)
        output = F.linear(_ACTIVATIONS[activation](gate) * up, w2[expert])
        out.index_add_(0, token, output * scores[token, place, None].to(output.dtype))
    return out


@torch.no_grad()
def experts_not_used(name: str, layer: Any) -> list[str]:
    """Return problems in how vLLM's expert layer ``layer`` uses its weights; empty if there are
    none.

    The output must change if the weights change, which is not the case for a kernel with a packed
    copy. It must also be the mixture of the weights in the layout in which they are loaded; a
    kernel may expect another layout.
    """
    w13, w2 = layer.w13_weight, layer.w2_weight
    try:
        before = _run(layer)
        for weight, leaf in ((w13, "w13_weight"), (w2, "w2_weight")):
            weight.data.neg_()
            try:
                same = torch.equal(_run(layer), before)
            finally:
                weight.data.neg_()
            if same and bool(weight.any()):
                return [f"the experts {name} compute with a copy of {leaf}"]
    except Exception as error:  # vLLM's, if a kernel cannot be called separately
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [f"it cannot be verified that the experts {name} use their weights: {reason}"]
    activation = layer.activation.value
    if activation not in _ACTIVATIONS or "w13_bias" in layer._parameters:
        return []
    expected = mixture(*_inputs(layer)[:1], (w13, w2), *_inputs(layer)[1:], activation=activation)
    largest = float(expected.abs().max())
    # tolerance: bf16 sums of a few hundred terms in another order
    if not torch.allclose(before, expected, rtol=0.05, atol=0.05 * largest):
        return [f"the experts {name} do not compute the mixture of the loaded weights"]
    return []


def _inputs(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [E, H], scores [E, k] and experts [E, k]: every expert has a token."""
    weight = layer.w13_weight
    count, top = weight.shape[0], min(int(layer.top_k), weight.shape[0])
    x = torch.linspace(-1, 1, count * weight.shape[2], device=weight.device, dtype=torch.float32)
    ids = torch.arange(count, device=weight.device)[:, None] + torch.arange(
        top, device=weight.device
    )
    scores = torch.full((count, top), 1.0 / top, device=weight.device, dtype=torch.float32)
    return x.view(count, -1).sin().to(weight.dtype), scores, (ids % count).to(torch.int32)


def _run(layer: Any) -> Tensor:
    """Return the output of the layer's kernel for :func:`_inputs`."""
    x, scores, ids = _inputs(layer)
    method = layer.quant_method
    if method.is_monolithic:  # does its own routing, from logits
        logits = torch.full((x.shape[0], x.shape[0]), -9.0, device=x.device, dtype=x.dtype)
        output = method.apply_monolithic(layer, x, logits.scatter(1, ids.long(), 1.0))
    else:
        output = method.apply(layer, x, scores, ids, None, None)
    out: Tensor = output[0] if isinstance(output, tuple) else output
    return out.clone()
