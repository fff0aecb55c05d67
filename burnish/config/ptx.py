"""Pre-training rows mixed into RL updates (PPO-ptx)."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from burnish.config.base import Node
from burnish.config.data import SFTDataConfig


class PtxConfig(Node):
    """PPO-ptx (arXiv 2203.02155): every optimizer step of the policy also learns rows of other
    text, so that it keeps what RL would let it forget."""

    data: SFTDataConfig
    """Rows as the job sft takes them; plain text (``text_key``) is learned whole. Its own stream,
    beside the prompts; saved and resumed with the run."""
    ptx_coef: float = Field(gt=0)
    """Weight of the rows' mean negative log-likelihood per token, added to the policy's loss. (The
    paper's 27.8 stands before a sum over rewards that are not normalised; 0.1 to 1 is a start
    beside whitened advantages.)"""
    batch_size: int = Field(ge=1)
    """Rows per optimizer step, over all micro-batches and ranks. They are cut into micro-batches as
    the samples are."""


def ptx_rules(ptx: PtxConfig | None, *, temperature: float) -> Iterator[str]:
    """One sentence for each setting of a run that does not go with ``ptx``."""
    if ptx is not None and temperature != 1.0:
        yield (
            f"ptx with rollout.temperature={temperature:g}: the policy's log-probs are computed at "
            "that temperature, and a language-model loss is at 1; use temperature=1.0, or no ptx"
        )
