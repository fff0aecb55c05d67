"""The typed config tree. Start with ``jobs.py``; ``load.py`` reads a recipe file."""

from burnish.config.arithmetic import BatchError, BatchPlan
from burnish.config.jobs import (
    JOBS,
    EvaluateConfig,
    GenerateConfig,
    JobConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from burnish.config.load import ConfigError, dump_yaml, load_config

__all__ = [
    "JOBS",
    "BatchError",
    "BatchPlan",
    "ConfigError",
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
