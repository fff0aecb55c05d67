"""PPO-ptx: a language-model loss on pre-training rows, added to the policy loss of every update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from burnish.data.batches import BatchStream
from burnish.steps.objectives import sft_objective
from burnish.train.base import Loss, Outputs, TrainEngine
from burnish.types import Batch, Stats


@dataclass(frozen=True)
class Ptx:
    """Pre-training rows and their loss."""

    stream: BatchStream
    batch_size: int
    """Rows per optimizer step."""
    loss: Loss

    def forward_backward(self, policy: TrainEngine) -> Stats:
        """Add the gradient of the loss on the next rows to the gradient accumulated in
        ``policy``."""
        batch = self.stream.next(self.batch_size).with_global_counts()
        return policy.forward_backward(batch, self.loss)

    def metrics(self) -> dict[str, float]:
        """Return the row counts (seen, dropped, truncated, ...) of the stream."""
        return {f"data/ptx_{name}": float(value) for name, value in self.stream.counts.items()}


def ptx_objective(ptx_coef: float) -> Loss:
    """Return ``ptx_coef`` x the mean negative log-likelihood per token of the rows (arXiv
    2203.02155, equation 2, with the opposite sign, because the paper maximizes its objective)."""
    mean_nll = sft_objective()

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        loss, stats = mean_nll(outputs, batch)
        scaled = ptx_coef * loss
        ptx_stats = Stats(means={"ptx_nll": stats.means["nll"]}, sums={"ptx_loss": scaled.detach()})
        return scaled, ptx_stats

    return objective
