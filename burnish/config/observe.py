"""Config of a run's records: reports, samples, and trackers of its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from burnish.config.base import Node

_NOT_IN_PROJECTS = "/\\#?%:"
_MAX_PROJECT_CHARS, _MAX_TAG_CHARS, _MAX_NAME_CHARS = 128, 64, 128
"""Limits of Weights & Biases."""


class WandbConfig(Node):
    """Weights & Biases. The API key is never in a recipe: set WANDB_API_KEY, or run ``wandb login``
    once."""

    project: str | None = Field(None, min_length=1, max_length=_MAX_PROJECT_CHARS)
    """Project of the run. None: environment variable WANDB_PROJECT, else ``burnish``."""
    name: str | None = Field(None, min_length=1, max_length=_MAX_NAME_CHARS)
    """Name of the run. None: that of the run folder."""
    entity: str | None = Field(None, min_length=1)
    """User or team of the project. None: WANDB_ENTITY, else the account's default."""
    group: str | None = Field(None, min_length=1, max_length=_MAX_NAME_CHARS)
    """Group of the run, e.g. the seeds of an experiment."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """online: upload during the run. offline: write to the run folder; ``wandb sync
    RUN_DIR/wandb`` uploads later. None: WANDB_MODE, else online."""
    sample_rows: int = Field(16, ge=0, le=1000)
    """Samples per table, for training and held-out prompts each, at most ``samples_per_step``. 0:
    no tables."""
    samples_every_n_steps: int = Field(10, ge=1)
    """Minimum steps between two tables of the same kind."""
    timeout_s: float = Field(60.0, gt=0)
    """Timeout of each wait for the server, at the start (then the run is recorded offline) and at
    the end."""

    def rules(self) -> Iterator[str]:
        characters = sorted(set(self.project or "") & set(_NOT_IN_PROJECTS))
        if characters:
            yield (
                f"project={self.project} contains {' '.join(characters)}, which Weights & Biases "
                f"does not allow in a project name (none of {_NOT_IN_PROJECTS}); choose another "
                "name"
                + (", and set entity for the part before the slash" if "/" in characters else "")
            )
        for tag in self.tags:
            if not 1 <= len(tag) <= _MAX_TAG_CHARS:
                yield (
                    f"tags contains one of {len(tag)} characters ({tag[:20]!r}); Weights & "
                    f"Biases allows 1 to {_MAX_TAG_CHARS}"
                )


class MlflowConfig(Node):
    """MLflow, through its own client. Credentials are its environment variables."""

    tracking_uri: str | None = Field(None, min_length=1)
    """Server (http://host:5000) or store. None: MLFLOW_TRACKING_URI, else MLflow's local
    database, which needs the package mlflow."""
    experiment: str = Field("burnish", min_length=1)
    """Experiment of the run; created if it is missing."""
    name: str | None = Field(None, min_length=1)
    """Name of the run. None: that of the run folder."""

    def rules(self) -> Iterator[str]:
        if "@" in urlsplit(self.tracking_uri or "").netloc:
            yield (
                "tracking_uri contains a user name or password; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, and remove them from the URI"
            )


class TrackioConfig(Node):
    """Trackio, in its database on this machine (``TRACKIO_DIR``)."""

    project: str = Field("burnish", min_length=1)
    """Project of the run."""
    name: str | None = Field(None, min_length=1)
    """Name of the run. None: that of the run folder."""

    def rules(self) -> Iterator[str]:
        if characters := sorted(set(re.findall(r"[^A-Za-z0-9_-]", self.project))):
            yield (
                f"project={self.project} contains {' '.join(characters)}, which Trackio leaves out "
                "of the name of its database, so that projects would be mixed; use letters, "
                "digits, - and _"
            )


class TrackersConfig(Node):
    """Trackers of a run's metrics, besides metrics.jsonl. Failing or hanging trackers do not stop
    the run."""

    tensorboard: bool = False
    """Also write TensorBoard event files under ``tensorboard/``."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases (``pip install 'burnish[wandb]'``)."""
    mlflow: MlflowConfig | None = None
    """Also log to MLflow (``pip install 'burnish[mlflow]'``)."""
    trackio: TrackioConfig | None = None
    """Also log to Trackio (``pip install 'burnish[trackio]'``)."""


class ObserveConfig(TrackersConfig):
    """Records of a run (metrics.jsonl is always written)."""

    samples_per_step: int = Field(64, ge=0)
    """Samples kept per step in ``samples/``. 0: none."""
    samples_with_tokens: int = Field(8, ge=0)
    """The first of them also with log-probs, entropy and advantage of each token. 0: none."""
    record_rollouts: bool = False
    """RL: write every trained group, with tokens and rewards, to ``rollouts/``, for ``burnish rl
    --replay``."""
    log_every_n_steps: int = Field(1, ge=1)
    """Steps between two lines of progress."""
