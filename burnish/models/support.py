"""Determine how each model family runs: on packed rows, on padded rows, or not at all.

Packed and shared-prefix rows are correct only if every layer mixes tokens exclusively through
HuggingFace's attention interface and applies no mask itself. A config does not state this. Layers
with a state (linear attention, Mamba), convolutions, and attention outside the interface leak
information between rows. :func:`model_support` therefore runs an experiment (``family_check.py``)
on a small random copy of the model before any weights are loaded. Results are cached by the copy's
config and the library versions.

If packed rows are exact, they are used. Otherwise rows are padded and use the model's own
attention. If that fails too, the model is refused.
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

    The first call for a family takes up to three seconds; later calls read the result from memory
    or from the cache folder. ``trust`` allows running the model's own code, if its config refers to
    some. With ``use_disk=False`` the cache folder is neither read nor written.
    """
    try:
        tiny = below_rope_border(shrink(config))
    except Exception as error:  # a config that cannot be shrunk: reported as a refusal
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
    """Return the result of ``run`` for a shrunk config, from the cache if present.

    ``kind`` is the result's type, a JSON-serializable dataclass. Refusals are not written to disk.
    The random state of torch does not change, whether or not the result is cached.
    """
    key = key_of(kind, tiny.model_type, [_content(tiny), str(trust).encode()])
    cached = _IN_MEMORY.get(key)
    if isinstance(cached, kind):
        return cached
    # The code of a model's own repository may change without its config.
    use_disk = use_disk and not tiny.to_dict().get("auto_map")
    result = recall(kind, key) if use_disk else None
    if result is None:
        with plain_torch(), torch.random.fork_rng(devices=[]):  # a cached result draws nothing
            result = run()
        if use_disk and not result.refusal:  # a refusal may be due to a temporary lack of memory
            keep(key, result)
    _IN_MEMORY[key] = result
    return result


_IN_MEMORY: dict[str, object] = {}


@contextmanager
def plain_torch() -> Iterator[None]:
    """Build unsharded models of real tensors on the CPU inside the ``with`` block.

    This overrides the caller's context: the meta device, fake tensors, or DeepSpeed's ZeRO-3.
    """
    shards = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
            yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = shards


def row_limit(config: PretrainedConfig) -> int | None:
    """Return the longest row, in tokens, that the model supports; None if its config has no limit.

    Some rotary embeddings (``longrope``, dynamic NTK) depend on the longest row of a batch beyond
    a certain length. Rows are limited to that length; otherwise a row's log-probs would depend on
    other rows of its micro-batch.
    """
    text = config.get_text_config()
    fields = text.to_dict()
    limits = [fields.get(name) for name in ("max_position_embeddings", "n_positions")]
    positive = [int(limit) for limit in limits if isinstance(limit, int) and limit > 0]
    return min([*positive[:1], *rope_borders(config)], default=None)


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
    """Return the parameters of each rotary embedding: one set, or one per layer type."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return [value for value in parameters.values() if isinstance(value, dict)]
    return [parameters]


def below_rope_border(tiny: PretrainedConfig) -> PretrainedConfig:
    """Raise every length of :func:`rope_borders` in a shrunk config to at least its positions.

    Longer rows need no check, because :func:`row_limit` excludes them.
    """
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
    """Return whether a model or config runs code from its own repository, trusted on load."""
    return type(model).__module__.startswith("transformers_modules")
