"""Typed config tree: one file per job. Start with ``job.py`` and ``sft.py``. ``registry.py`` lists
all jobs, and ``load.py`` reads a recipe file.

Kinds in other packages, such as optimizers, import ``burnish.config.base``, and configs here import
those kinds. The names below therefore load when first used."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "BatchError": "arithmetic",
    "BatchPlan": "arithmetic",
    "ConfigError": "load",
    "DistillConfig": "distill",
    "EvaluateConfig": "evaluate",
    "GenerateConfig": "generate",
    "JOBS": "registry",
    "JobConfig": "job",
    "PreferenceConfig": "preference",
    "RLConfig": "rl",
    "RewardModelConfig": "reward_model",
    "SFTConfig": "sft",
    "dump_yaml": "load",
    "load_config": "load",
}

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


def __getattr__(name: str) -> Any:
    """Import a name from its module at first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'burnish.config' has no attribute {name!r}")
    value = pkgutil.resolve_name(f"burnish.config.{_HOMES[name]}:{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
