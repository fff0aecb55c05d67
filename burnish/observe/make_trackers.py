"""Create the trackers of a run from the recipe's ``observe``. Heavy imports are in functions."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from burnish.config.job import JobConfig
from burnish.config.observe import TrackersConfig
from burnish.observe.errors import TrackerError
from burnish.observe.public_recipe import public_recipe, recipe_secrets

if TYPE_CHECKING:
    from burnish.observe.tracker import Trackers

_GRACE_S = 5.0
"""Extra time for a tracker that enforces its own time limit, so that it can report the timeout."""
_TENSORBOARD_TIMEOUT_S = 30.0
_MLFLOW_TIMEOUT_S = 60.0
_TRACKIO_TIMEOUT_S = 30.0


def check_trackers(config: JobConfig) -> None:
    """Raise TrackerError if a tracker of the recipe cannot be used on this machine.

    Imports nothing if the recipe has no trackers, and never torch.
    """
    for observe in config.nodes_of(TrackersConfig):
        spec = find_spec("tensorboard") if observe.tensorboard else None
        # A folder of this name has a spec without an origin.
        if observe.tensorboard and (spec is None or spec.origin is None):
            raise TrackerError(
                "observe.tensorboard=true needs the package tensorboard, which is not installed; "
                "pip install 'burnish[tensorboard]', or leave observe.tensorboard out "
                "(metrics.jsonl is always written)"
            )
        if observe.wandb is not None:
            from burnish.observe.wandb import check_wandb

            check_wandb(observe.wandb)
        if observe.mlflow is not None:
            from burnish.observe.mlflow import check_mlflow

            check_mlflow()
        if observe.trackio is not None:
            from burnish.observe.trackio import check_trackio

            check_trackio(observe.trackio)


def open_trackers(config: JobConfig, run_dir: Path) -> Trackers:
    """Create the trackers of a run without starting them.

    Raises TrackerError like :func:`check_trackers`.
    """
    from burnish.observe.tracker import SampleRate, TrackerLimits, TrackerQueue, Trackers

    queues = []
    for observe in config.nodes_of(TrackersConfig):
        if observe.tensorboard:
            from burnish.observe.tensorboard import TensorBoardTracker

            limits = TrackerLimits(_TENSORBOARD_TIMEOUT_S)
            queues.append(TrackerQueue(TensorBoardTracker(run_dir), run_dir, limits))
        if observe.wandb is not None:
            from burnish.observe.wandb import WandbTracker, wandb_mode

            if wandb_mode(observe.wandb) != "disabled":
                rate = SampleRate(observe.wandb.sample_rows, observe.wandb.samples_every_n_steps)
                limits = TrackerLimits(observe.wandb.timeout_s + _GRACE_S, rate)
                wandb = WandbTracker(
                    observe.wandb, run_dir, public_recipe(config), hidden=recipe_secrets(config)
                )
                queues.append(TrackerQueue(wandb, run_dir, limits))
        if observe.mlflow is not None:
            from burnish.observe.mlflow import MlflowTracker

            limits = TrackerLimits(_MLFLOW_TIMEOUT_S)
            text = yaml.safe_dump(public_recipe(config), sort_keys=False, allow_unicode=True)
            mlflow = MlflowTracker(observe.mlflow, run_dir, text)
            queues.append(TrackerQueue(mlflow, run_dir, limits))
        if observe.trackio is not None:
            from burnish.observe.trackio import TrackioTracker

            limits = TrackerLimits(_TRACKIO_TIMEOUT_S)
            trackio = TrackioTracker(observe.trackio, run_dir, public_recipe(config))
            queues.append(TrackerQueue(trackio, run_dir, limits))
    return Trackers(queues)
