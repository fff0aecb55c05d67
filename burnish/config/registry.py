"""Registry of jobs, one line each. The command line and ``burnish.run`` find jobs here.

To add a job: its config class (a file of this folder), its job file (``burnish/jobs/``, with
``JOB``), a line below, a test."""

from __future__ import annotations

from typing import NamedTuple

from burnish.config.distill import DistillConfig
from burnish.config.evaluate import EvaluateConfig
from burnish.config.generate import GenerateConfig
from burnish.config.job import JobConfig
from burnish.config.preference import PreferenceConfig
from burnish.config.reward_model import RewardModelConfig
from burnish.config.rl import RLConfig
from burnish.config.score import ScoreConfig
from burnish.config.sft import SFTConfig


class JobEntry(NamedTuple):
    """One job."""

    config: type[JobConfig]
    module: str
    """Module whose ``JOB`` builds and runs the job. Imported when the job runs."""
    help: str
    """Help text of the job's command."""
    resumable: bool = True
    replayable: bool = False
    """True if the command has ``--replay``."""


REGISTRY: dict[str, JobEntry] = {
    "sft": JobEntry(SFTConfig, "burnish.jobs.sft", "Fine-tune a model on demonstrations."),
    "rm": JobEntry(
        RewardModelConfig,
        "burnish.jobs.reward_model",
        "Train a reward model on pairs, scores, classes or steps.",
    ),
    "preference": JobEntry(
        PreferenceConfig,
        "burnish.jobs.preference",
        "Train on preferences without rollouts: DPO and its family.",
    ),
    "distill": JobEntry(
        DistillConfig,
        "burnish.jobs.distill",
        "Train a student on a teacher's distribution over tokens.",
    ),
    "rl": JobEntry(
        RLConfig,
        "burnish.jobs.rl",
        "Train on rewards of responses: PPO, GRPO and their family.",
        replayable=True,
    ),
    "evaluate": JobEntry(
        EvaluateConfig,
        "burnish.jobs.evaluate",
        "Measure pass@1 and pass@k of a model on held-out prompts.",
        resumable=False,
    ),
    "generate": JobEntry(
        GenerateConfig,
        "burnish.jobs.generate",
        "Sample responses to prompts, as data for the next job.",
    ),
    "score": JobEntry(
        ScoreConfig, "burnish.jobs.score", "Compute the rewards of the responses in a file."
    ),
}

JOBS: dict[str, type[JobConfig]] = {name: entry.config for name, entry in REGISTRY.items()}
"""Config class of each job."""
