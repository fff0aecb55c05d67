"""Mapping of weight names from transformers to vLLM.

A trainer sends a model's state under transformers' names. :class:`HubNames` converts it to the
names and shapes of the model's files on the hub, which vLLM's loaders expect. :func:`held_names`
finds the tensor in which vLLM stores each weight: vLLM merges layers (q, k and v), fuses experts
and renames prefixes. This module does not import vllm; its objects are passed as arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

EXPERT = re.compile(
    r"(?P<layer>.*\.experts)\.(?:(?P<expert>\d+)\.)?"
    r"(?P<stem>gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)"
    r"(?:[._](?P<leaf>weight|bias))?"
)
"""Names of the weights of experts: of one, or of all of a layer."""
SECOND_PROJECTION = {"down_proj", "w2"}
_LAYER = re.compile(r"^(.*?\.\d+)\.")


class HubNames:
    """Converts weights of ``model`` to those of its files on the hub.

    For example, fused experts become one weight per expert and projection. For most models the two
    are identical.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        changes = [change for change in conversions if not isinstance(change, PrefixChange)]
        reverse = [change.reverse_transform() for change in changes]
        joins = [
            c for c in reverse if isinstance(c, WeightConverter) and len(c.source_patterns) > 1
        ]
        self._model = model if changes and not joins else None
        model._weight_conversions = changes  # type: ignore[assignment]

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in the hub's files that make up ``tensor``."""
        if self._model is None:
            yield name, tensor
        else:
            yield from revert_weight_conversion(self._model, {name: tensor}).items()


def held_names(model: Any, names: Iterable[str]) -> dict[str, str | None]:
    """Return the name of vLLM's tensor that stores each weight in ``names``.

    None: the model drops the weight. Weights without a matching tensor are omitted. ``model`` is
    vLLM's model in a worker.
    """
    first = {id(tensor): name for name, tensor in reversed(list(state_of(model)))}
    state = {name: first[id(t)] for name, t in state_of(model, repeated=True)}
    mappers = [
        (prefix, mapper)
        for prefix, module in model.named_modules()
        if (mapper := getattr(module, "hf_to_vllm_mapper", None)) is not None  # house: ok vLLM's
    ]
    packed = getattr(model, "packed_modules_mapping", None) or {}  # house: ok vLLM's model
    parts = {part: merged for merged, many in packed.items() for part in many}
    held_by_name: dict[str, str | None] = {}
    for name in names:
        candidates = _candidates(name, mappers, parts)
        if not candidates:
            held_by_name[name] = None
        elif (held := next((c for c in candidates if c in state), None)) is not None:
            held_by_name[name] = state[held]
    return held_by_name


def state_of(model: Any, *, repeated: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then floating-point buffers, of vLLM's model."""
    yield from model.named_parameters(remove_duplicate=not repeated)
    for name, buffer in model.named_buffers(remove_duplicate=not repeated):
        if buffer.is_floating_point():
            yield name, buffer


def _candidates(name: str, mappers: Sequence[tuple[str, Any]], parts: dict[str, str]) -> list[str]:
    """Return the names that vLLM's tensor may have, most likely first; none if a mapper drops the
    weight."""
    names = [name]
    for prefix, mapper in mappers:  # the model's mapper first, then those of its submodules
        start = f"{prefix}." if prefix else ""
        inside = [known.removeprefix(start) for known in names if known.startswith(start)]
        mapped = [mapper.map_name(known) for known in inside]
        if None in mapped:
            return []
        names += [start + known for known in mapped]
    names = list(dict.fromkeys(reversed(names)))
    names += [".".join(parts.get(piece, piece) for piece in known.split(".")) for known in names]
    for known in list(names):
        if match := EXPERT.fullmatch(known):
            which = "w2" if match["stem"] in SECOND_PROJECTION else "w13"
            leaf = f"{which}_{match['leaf'] or 'weight'}"
            names += [f"{match['layer']}.{leaf}", f"{match['layer']}.routed_experts.{leaf}"]
    return names


def layer_of(name: str) -> str:
    """Return the part of a name that identifies its layer ('' outside of layers)."""
    match = _LAYER.match(name)
    return match[1] if match else ""
