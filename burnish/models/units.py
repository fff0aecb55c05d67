"""Modules of a model whose weights are gathered together when it is sharded (FSDP2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class GatheredModule:
    """A module that is gathered as one."""

    name: str
    kind: Literal["layer", "embedding"]
    module: nn.Module


def gathered_modules(body: PreTrainedModel, *, tied: bool) -> list[GatheredModule]:
    """Return the modules that are gathered one by one: the decoder layers, and the embedding if
    nothing else reads its weight (``tied``: something does). What is left (final norm, output
    projection or value head, and a tied embedding) belongs to the root."""
    modules = [GatheredModule(name, "layer", module) for name, module in layers_of(body)]
    if not tied:
        modules.append(GatheredModule("embedding", "embedding", body.get_input_embeddings()))
    return modules


def layers_of(body: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the decoder layers: what transformers says must stay on one device.
    FSDP2 replaces the class of a sharded layer by a subclass."""
    names = set(body._no_split_modules or ())
    return [
        (name, m)
        for name, m in body.named_modules()
        if any(kind.__name__ in names for kind in type(m).__mro__)
    ]
