"""How each model family runs: on packed rows, on padded rows, or not at all.

Packed and shared-prefix rows are right only if every layer mixes tokens through the attention
interface of HuggingFace and leaves the mask to it. A config does not say so: layers with a state
(linear attention, Mamba), convolutions, and attention outside the interface let one row read its
neighbor. :func:`model_support` therefore runs an experiment (``family_check.py``) on a small random
copy of the model, before any weight is loaded, and keeps the answer by the copy's config and the
versions of the libraries.

The answer picks the way: packed rows if they are exact; else padded rows through the model's own
attention; else a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PretrainedConfig
from transformers.integrations import deepspeed

from burnish.models.family import ModelSupport, Result, keep, key_of, recall
from burnish.models.family_check import check_family, failure_text
from burnish.models.shrink import POSITIONS, shrink


def model_support(
    config: PretrainedConfig, *, trust: bool = False, use_disk: bool = True
) -> ModelSupport:
    """Return how models with this HuggingFace ``config`` run.

    The first call for a family takes up to three seconds; later ones read the answer from memory or
    from the cache folder. ``trust``: run the model's own code, if its config names some.
    ``use_disk=False``: neither read nor write the cache folder.
    """
    try:
        tiny = below_rope_border(shrink(config))
    except Exception as error:  # a config that nothing can be built from: the answer says so
        return ModelSupport(
            config.model_type,
            "eager",
            refusal=f"no small copy of the model can be made to check it ({failure_text(error)})",
        )

    def run() -> ModelSupport:
        return check_family(tiny, trust=trust)

    return cached_result(ModelSupport, tiny, run, use_disk=use_disk, trust=trust)


def cached_result(
    kind: type[Result],
    tiny: PretrainedConfig,
    run: Callable[[], Result],
    *,
    use_disk: bool = True,
    trust: bool = False,
) -> Result:
    """Return the result of ``run`` for a shrunk config, from the cache if it is there. ``kind``: a
    dataclass that JSON can hold."""
    key = key_of(kind, tiny.model_type, [_content(tiny), str(trust).encode()])
    found = _IN_MEMORY.get(key)
    if isinstance(found, kind):
        return found
    use_disk = use_disk and not _is_remote(tiny)
    result = recall(kind, key) if use_disk else None
    if result is None:
        with _plain_torch():
            result = run()
        if use_disk and not result.refusal:  # a refusal may come from this moment's memory
            keep(key, result)
    _IN_MEMORY[key] = result
    return result


_IN_MEMORY: dict[str, object] = {}


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Inside, models are whole and real, whatever the caller is doing: building one on the meta
    device, of fake tensors, or in shards (DeepSpeed's ZeRO-3)."""
    shards = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
            yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = shards


def row_limit(config: PretrainedConfig) -> int | None:
    """Return the longest row, in tokens, that the model can read; None if its config has no limit.

    A rotary embedding that depends on the longest row of a batch (``longrope``, dynamic NTK) limits
    rows to the length up to which it does not: beyond that, a row's log-probs would depend on its
    neighbors in the micro-batch.
    """
    text = config.get_text_config()
    fields = text.to_dict()
    limits = [fields.get(name) for name in ("max_position_embeddings", "n_positions")]
    found = [int(limit) for limit in limits if isinstance(limit, int) and limit > 0]
    return min([*found[:1], *rope_borders(config)], default=None)


def rope_borders(config: PretrainedConfig) -> list[int]:
    """Return the row lengths beyond which rotary embeddings depend on the longest row of a
    batch."""
    fields = config.get_text_config().to_dict()
    borders = []
    for rope in _ropes(fields):
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "longrope":
            named = rope.get("original_max_position_embeddings")
            named = named or fields.get("original_max_position_embeddings")
            borders.append(named or fields.get("max_position_embeddings"))
        elif kind == "dynamic":
            borders.append(fields.get("max_position_embeddings"))
    return [int(border) for border in borders if border]


def _ropes(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters of each rotary embedding: one set, or one for each layer type."""
    found = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in found.values()):
        return [value for value in found.values() if isinstance(value, dict)]
    return [found]


def below_rope_border(tiny: PretrainedConfig) -> PretrainedConfig:
    """Return the shrunk config with every border of :func:`rope_borders` beyond its positions: rows
    that cross one are refused by :func:`row_limit`."""
    if not rope_borders(tiny):
        return tiny
    fields = tiny.to_dict()
    limit = max(POSITIONS, fields.get("max_position_embeddings") or 0)
    if "max_position_embeddings" in fields:
        fields["max_position_embeddings"] = limit
    for rope in _ropes(fields):
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = limit
    if "original_max_position_embeddings" in fields:
        fields["original_max_position_embeddings"] = limit
    return type(tiny).from_dict(fields)


def _content(tiny: PretrainedConfig) -> bytes:
    fields = tiny.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        fields.pop(name, None)
    return json.dumps(fields, sort_keys=True, default=str).encode()


def runs_own_code(model: object) -> bool:
    """Return whether the code of a model or config came with it, and was trusted when it was
    loaded."""
    return type(model).__module__.startswith("transformers_modules")


def _is_remote(tiny: PretrainedConfig) -> bool:
    """Return whether the model's code comes with it: it may change under the same config."""
    return bool(tiny.to_dict().get("auto_map"))
