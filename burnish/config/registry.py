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
    "sft": JobEntry(SFTConfig, "burnish.jobs.sft", "Supervised fine-tuning on demonstrations."),
    "rm": JobEntry(
        RewardModelConfig,
        "burnish.jobs.reward_model",
        "A reward model from preference pairs, scores, classes or step labels.",
    ),
    "preference": JobEntry(
        PreferenceConfig,
        "burnish.jobs.preference",
        "A policy from preferences, without rollouts: DPO and its family.",
    ),
    "distill": JobEntry(
        DistillConfig,
        "burnish.jobs.distill",
        "A student from a teacher's distribution over every token of given rows.",
    ),
    "rl": JobEntry(
        RLConfig,
        "burnish.jobs.rl",
        "Reinforcement learning from rewards: PPO, GRPO and their family.",
        replayable=True,
    ),
    "evaluate": JobEntry(
        EvaluateConfig,
        "burnish.jobs.evaluate",
        "pass@1 and pass@k of a model on held-out prompts.",
        resumable=False,
    ),
    "generate": JobEntry(
        GenerateConfig,
        "burnish.jobs.generate",
        "Answers to a file of prompts: all, the best, or pairs; data for the next job.",
    ),
    "score": JobEntry(
        ScoreConfig, "burnish.jobs.score", "Rewards of the responses in a file, as rows of a file."
    ),
}

JOBS: dict[str, type[JobConfig]] = {name: entry.config for name, entry in REGISTRY.items()}
"""Config class of each job."""
