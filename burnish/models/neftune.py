"""Noise on the input embeddings of training passes (NEFTune, arXiv 2310.05914)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EmbeddingNoise:
    """Uniform noise on the output of an embedding, in training passes only.

    A row of L tokens and width d gets noise in alpha / sqrt(L d) x [-1, 1]. Like dropout, it is
    drawn from torch's global generator, whose state a resumed run restores.
    """

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self.row_lengths: Tensor | None = None
        """[R, T] tokens in the row of each position of the next pass; 0 for padding. None: no
        noise."""
        embedding.register_forward_hook(self._add)

    def set_rows(self, flat_index: Tensor, lengths: Tensor, shape: torch.Size) -> None:
        """Set the rows of the next pass. ``flat_index`` [M]: place of each token in the input ids
        of ``shape`` [R, T]; ``lengths`` [M]: tokens of its row."""
        row_lengths = torch.zeros(shape.numel(), dtype=torch.float32)
        row_lengths[flat_index.cpu()] = lengths.float().cpu()
        self.row_lengths = row_lengths.view(shape)

    def _add(self, module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        """Return the output with noise; None leaves it as it is."""
        lengths, self.row_lengths = self.row_lengths, None
        if lengths is None or not module.training or not torch.is_grad_enabled():
            return None
        width = output.shape[-1]
        scale = torch.where(lengths > 0, self.alpha * (lengths * width).clamp(min=1).rsqrt(), 0.0)
        noise = torch.rand(output.shape, device=output.device) * 2 - 1
        return output + (noise * scale.to(output.device)[..., None]).to(output.dtype)
