"""Every job by its name."""

from __future__ import annotations

from burnish.config.distill import DistillConfig
from burnish.config.jobs import (
    EvaluateConfig,
    GenerateConfig,
    JobConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)

JOBS: dict[str, type[JobConfig]] = {
    "sft": SFTConfig,
    "rm": RewardModelConfig,
    "preference": PreferenceConfig,
    "distill": DistillConfig,
    "rl": RLConfig,
    "evaluate": EvaluateConfig,
    "generate": GenerateConfig,
}
