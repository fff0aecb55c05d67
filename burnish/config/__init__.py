"""Typed config tree: one file per job. Start with ``job.py`` and ``sft.py``. ``registry.py`` lists
all jobs, and ``load.py`` reads a recipe file."""

from burnish.config.arithmetic import BatchError, BatchPlan
from burnish.config.distill import DistillConfig
from burnish.config.evaluate import EvaluateConfig
from burnish.config.generate import GenerateConfig
from burnish.config.job import JobConfig
from burnish.config.load import ConfigError, dump_yaml, load_config
from burnish.config.preference import PreferenceConfig
from burnish.config.registry import JOBS
from burnish.config.reward_model import RewardModelConfig
from burnish.config.rl import RLConfig
from burnish.config.sft import SFTConfig

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
