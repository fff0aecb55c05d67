"""Scaling and soft capping of logits after the output projection, as set in a model's config.

Gemma 2 to 4 cap logits (arXiv 2408.00118); Granite, Falcon-H1 and Cohere scale them. The settings
are read from the config alone. The check in ``models/support.py`` compares the result with the
logits of the model itself, at small and at large hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True)
class LogitScaling:
    """``logits = cap(scale * projection)``, ``cap(x) = softcap * tanh(x / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Scale and cap ``logits`` [..., V] in place."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def backward_(self, grad: Tensor, logits: Tensor | None, *, temperature: float) -> Tensor:
        """Backpropagate ``grad`` [K, V] through capping and scaling, in place.

        ``logits`` [K, V] are the capped logits divided by ``temperature``. The derivative of the
        cap is ``1 - (capped / softcap) ** 2``.
        """
        if self.softcap is not None:
            assert logits is not None, "the derivative of the cap needs the capped logits"
            saturation = logits * (temperature / self.softcap)
            slope = torch.ones_like(logits).addcmul_(saturation, saturation, value=-1)
            grad = grad.mul_(slope)
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


UNSCALED = LogitScaling()

_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def logit_scaling(config: PretrainedConfig) -> LogitScaling:
    """Return the scaling and cap of a model's logits according to its config."""
    fields: Mapping[str, Any] = config.get_text_config().to_dict()
    scale = 1.0
    for name in _FACTORS:
        scale *= float(fields.get(name) or 1.0)
    for name in _DIVISORS:
        scale /= float(fields.get(name) or 1.0)
    if fields.get("dim_model_base"):  # MiniCPM divides the last hidden state
        scale *= float(fields["dim_model_base"]) / float(fields["hidden_size"])
    softcap = next((float(fields[name]) for name in _CAPS if fields.get(name)), None)
    return LogitScaling(scale, softcap)
