"""Losses on pairs of responses, one preferred over the other: [N] in, [N] out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid

from burnish.tensors import at_least_fp32


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of the preference [N]: L = -log sigmoid(chosen - rejected - margin).

    ``chosen``, ``rejected`` [N]: scores of a reward model; ``margins`` [N]: by how much the chosen
    one should win (None: 0). ln 2 where both score the same. Sources: Bradley and Terry 1952; arXiv
    2203.02155 (equation 1); margins: arXiv 2307.09288 (equation 2).
    """
    difference = at_least_fp32(chosen) - at_least_fp32(rejected)
    return -logsigmoid(difference if margins is None else difference - margins)


PREFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {"bradley_terry": bradley_terry}
"""By name: f(chosen [N], rejected [N], ...) -> [N]."""
