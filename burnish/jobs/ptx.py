"""PPO-ptx: a language-model loss on pre-training rows, beside the policy loss of every update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from burnish.data.sft import SFTStream
from burnish.jobs.objectives import sft_objective
from burnish.train.base import Loss, Outputs, TrainEngine
from burnish.types import Batch, Stats


@dataclass(frozen=True)
class Ptx:
    """The rows and their loss."""

    stream: SFTStream
    batch_size: int
    """Rows per optimizer step."""
    loss: Loss

    def forward_backward(self, policy: TrainEngine) -> Stats:
        """Add the gradient of the loss over the next rows to what ``policy`` has accumulated."""
        batch = self.stream.next(self.batch_size).with_global_counts()
        return policy.forward_backward(batch, self.loss)

    def metrics(self) -> dict[str, float]:
        """Position and losses of the stream of rows."""
        return {f"data/ptx_{name}": float(value) for name, value in self.stream.counts.items()}


def ptx_objective(ptx_coef: float) -> Loss:
    """``ptx_coef`` x mean negative log-likelihood per token of the rows (arXiv 2203.02155, equation
    2, whose sign is that of an objective to maximise)."""
    mean_nll = sft_objective()

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        loss, stats = mean_nll(outputs, batch)
        scaled = ptx_coef * loss
        found = Stats(means={"ptx_nll": stats.means["nll"]}, sums={"ptx_loss": scaled.detach()})
        return scaled, found

    return objective
