"""Rules of ``model.attn_implementation``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from burnish.config.roles import Role, RolloutRole, TrainRole
from burnish.config.train import TrainConfig


def attention_rules(roles: Sequence[Role], train: TrainConfig) -> Iterator[str]:
    """Yield an error for each setting that contradicts the attention of a model."""
    trained = [role for role in roles if isinstance(role, TrainRole)]
    for role in trained:
        implementation = role.model.attn_implementation
        if implementation == "auto":
            continue
        key = f"attn_implementation={implementation} of the {role.name}"
        if implementation == "flash_attention_2" and role.precision.dtype == "fp32":
            yield (
                f"{key} with precision.dtype=fp32, which FlashAttention does not compute; use "
                "precision.dtype=bf16, or attn_implementation=auto"
            )
        if train.is_own("layout") and train.layout != "padded":
            yield (
                f"{key} computes padded rows, but train.layout={train.layout}; remove "
                "train.layout, or use attn_implementation=auto"
            )
        if role.sequence_parallel > 1:
            yield (
                f"{key} with train.engine.sequence_parallel_size={role.sequence_parallel}: ranks "
                "can only share attention over packed rows; use attn_implementation=auto"
            )
    shares = any(isinstance(role, RolloutRole) and role.shares_weights for role in roles)
    policy = next((role for role in trained if role.kind == "policy"), None)
    if shares and policy is not None and policy.model.attn_implementation != "auto":
        yield (
            f"model.attn_implementation={policy.model.attn_implementation}: the local rollout "
            "engine samples with the policy's own modules, and needs their packed attention; set "
            "rollout.engine.own_weights=true, or use rollout.engine.kind=vllm"
        )
