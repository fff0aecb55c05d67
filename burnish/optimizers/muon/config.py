"""Config of Muon, and the parameters that it trains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from burnish.optimizers.config import AdamOptimizer, StepBuffer, StepWork, WeightShape


class Muon(AdamOptimizer):
    """Muon (Jordan et al. 2024; arXiv 2502.16982): momentum, orthogonalized by Newton-Schulz
    iterations, for the matrices of the layers. AdamW trains the rest: embeddings, output
    projection, value head, norms, biases."""

    kind: Literal["muon"] = "muon"
    matrix_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the matrices. None: that of the role, which AdamW uses."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Format of the Newton-Schulz iterations. fp32 is slower, and equal on any number of ranks up
    to fp32 rounding."""
    lr_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the learning rate of a matrix. match_rms_adamw: 0.2 x sqrt(max(rows, columns)), for
    learning rates of AdamW. original: sqrt(max(1, rows / columns)), for rates of about 0.02."""
    adamw_params: tuple[str, ...] = ()
    """Parts of parameter names, such as ``c_attn``, that AdamW trains too."""

    state_format: ClassVar[str] = "muon"

    def trains(self, weight: WeightShape) -> bool:
        """Return whether Muon trains a parameter: a matrix of a decoder layer, or a stack of the
        matrices of experts, whose name has no part in ``adamw_params``."""
        if weight.is_table or not weight.in_layer:
            return False
        experts = len(weight.shape) == 3 and "experts" in weight.name
        matrix = len(weight.shape) == 2 and weight.name.endswith("weight")
        return (matrix or experts) and not any(part in weight.name for part in self.adamw_params)

    def weight_bytes(self, weight: WeightShape) -> float:
        """One fp32 momentum, or the two moments of AdamW."""
        return (4.0 if self.trains(weight) else 8.0) * weight.numel

    def step_buffer(
        self,
        local: Sequence[WeightShape],
        full: Sequence[WeightShape],
        *,
        ranks: int,
        whole_stacks: bool,
    ) -> StepBuffer | None:
        """The Newton-Schulz iterations of the largest matrix, which one rank computes."""
        skip = 0 if whole_stacks else -2
        sizes = (math.prod(weight.shape[skip:]) for weight in full if self.trains(weight))
        largest = max(sizes, default=0)
        entry_bytes = 20.0 if self.ns_dtype == "fp32" else 12.0
        purpose = "Newton-Schulz of the largest matrix"
        return StepBuffer(purpose, largest, entry_bytes) if largest else None

    def step_work(self, weights: Iterable[WeightShape]) -> StepWork | None:
        """4 m^2 n + 2 m^3 floating-point operations per Newton-Schulz iteration of an [m, n] matrix
        with m <= n."""
        flops = 0.0
        for weight in weights:
            if not self.trains(weight):
                continue
            shape, is_adapter = weight.shape, "lora_" in weight.name
            halves = 2 if "gate_up_proj" in weight.name and not is_adapter else 1  # two in one
            m, n = sorted((shape[-2] // halves, shape[-1]))
            flops += halves * math.prod(shape[:-2]) * (4.0 * m * m * n + 2.0 * m**3)
        return StepWork("Newton-Schulz", self.ns_steps * flops, self.ns_dtype == "bf16")
