"""Rules of a reference model that follows the policy (``reference.moving``)."""

from __future__ import annotations

from collections.abc import Iterator

from burnish.config.cluster import ClusterConfig
from burnish.config.model import PrecisionConfig, ReferenceConfig
from burnish.config.train_engines import DeepSpeedEngine, TrainEngineConfig


def reference_sync_rules(
    reference: ReferenceConfig | None,
    cluster: ClusterConfig,
    engine: TrainEngineConfig,
    *,
    holds_reference: bool,
) -> Iterator[str]:
    """Yield an error for each setting with which the reference cannot follow the policy.
    ``holds_reference``: it is the base of the policy's adapters."""
    if reference is None or reference.moving is None:
        return
    key = "reference.moving"
    if holds_reference:
        yield (
            f"{key} with model.lora: the reference is the base of the adapters, without weights of "
            "its own; set reference.model.path to the base, which loads it a second time"
        )
    if reference.model is not None and reference.model.lora is not None:
        yield (
            f"{key} with reference.model.lora: the policy's merged weights cannot be mixed into "
            "adapters; remove reference.model.lora (burnish export merges adapters)"
        )
    if isinstance(engine, DeepSpeedEngine) and engine.zero_stage == 3:
        yield (
            f"{key} with train.engine.zero_stage=3: DeepSpeed partitions the frozen weights, and "
            "cannot change them; use zero_stage=2, or train.engine.kind=torch with sharding=full"
        )
    offloaded = [r for r in ("policy", "reference") if r in cluster.offload_between_phases]
    if offloaded:
        yield (
            f"{key} needs policy and reference at the same time; remove {' and '.join(offloaded)} "
            "from cluster.offload_between_phases"
        )


def reference_sync_advice(
    reference: ReferenceConfig | None, precision: PrecisionConfig
) -> Iterator[str]:
    """Warn about an update that is mostly rounded away in the format of the reference."""
    smallest = {"bf16": 2.0**-6, "fp16": 2.0**-9}.get(precision.dtype, 0.0)
    moving = None if reference is None else reference.moving
    if moving is not None and moving.mixup_alpha < smallest:
        yield (
            f"reference.moving.mixup_alpha={moving.mixup_alpha:g} with precision.dtype="
            f"{precision.dtype}: the reference has the weights in this format, which rounds small "
            f"changes away; use {smallest:g} or more with a larger every_n_steps, or fp32"
        )
