"""Pre-training rows mixed into RL updates (PPO-ptx)."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from burnish.config.base import Node
from burnish.data.demonstrations.config import SFTDataConfig


class PtxConfig(Node):
    """PPO-ptx (arXiv 2203.02155): also train the policy on rows of other text in every optimizer
    step, to limit forgetting."""

    data: SFTDataConfig
    """Rows as in sft, with the loss on all of a plain text (``text_key``). Drawn separately from
    the prompts; saved and resumed with the run."""
    ptx_coef: float = Field(gt=0)
    """Weight of the rows' mean negative log-likelihood per token in the policy's loss. The paper's
    27.8 is for a sum over unnormalized rewards; for whitened advantages start with 0.1 to 1."""
    batch_size: int = Field(ge=1)
    """Rows per optimizer step, over all micro-batches and ranks; split like the samples."""


def ptx_rules(ptx: PtxConfig | None, *, temperature: float) -> Iterator[str]:
    """Yield an error for each setting of a run that is inconsistent with ``ptx``."""
    if ptx is not None and temperature != 1.0:
        yield (
            f"ptx with rollout.temperature={temperature:g}: the policy's log-probs are computed "
            "at that temperature, but a language-model loss needs 1; use temperature=1.0, or "
            "remove ptx"
        )
