"""The typed config tree. Start with ``jobs.py``; ``registry.py`` names all jobs, ``load.py`` reads
a recipe file."""

from burnish.config.arithmetic import BatchError, BatchPlan
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
from burnish.config.load import ConfigError, dump_yaml, load_config
from burnish.config.registry import JOBS

__all__ = [
    "JOBS",
    "BatchError",
    "BatchPlan",
    "ConfigError",
    "DistillConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "JobConfig",
    "PreferenceConfig",
    "RLConfig",
    "RewardModelConfig",
    "SFTConfig",
    "dump_yaml",
    "load_config",
]
