"""``burnish rl --replay RUN``: train again from the recorded groups of a run, without sampling.

No rollout engine, reward or environment is built. The recipe is that of the run; with the same
start weights and settings, the replay reaches the same weights and ``train/*`` metrics in every
bit on CPUs with the same number of threads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.checkpoint import CheckpointError, read_manifest, verify
from burnish.config import RLConfig
from burnish.config.placement import PlacementGroupSpec, placement_groups_for
from burnish.driver.base import Functions, Loop, Metrics
from burnish.driver.errors import RunError
from burnish.driver.records import (
    ROLLOUTS_DIR,
    SIZES,
    RecordedRollout,
    read_rollout,
    rollout_folders,
    sizes_of,
)
from burnish.jobs.rl import RLJob, RLLoop, make_policy, make_ptx, make_rl
from burnish.observe.files import REPLAY_FILE, write_text
from burnish.observe.public_recipe import read_recipe
from burnish.observe.timeline import timed
from burnish.preflight.limits import vocab_size_of
from burnish.rewards.reward_set import NoRewards
from burnish.rollout.runner import Rollout
from burnish.runtime.base import Runtime
from burnish.steps.rl import RL

log = logging.getLogger("burnish")

_MANY_STEPS = 50
"""Steps of a recording that take a while to read: 0.25 s per million tokens."""


# ---- the recording -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """The recorded rollouts of a run."""

    run_dir: Path
    max_steps: int
    """RL steps of the recorded run, which its learning-rate schedule covers."""
    vocab_size: int | None
    """Number of token ids of the model; None: unknown."""

    def rollout(self, step: int) -> RecordedRollout:
        """Return the rollout of a step, after verifying its checksums. Raises RunError."""
        try:
            return read_rollout(self.run_dir, step, vocab_size=self.vocab_size)
        except CheckpointError as error:
            raise RunError(f"--replay {self.run_dir}: {error}; {_before(step)}") from error


def open_recording(run_dir: Path, config: RLConfig) -> Recording:
    """Return the recording of a run, for a replay by ``config``.

    Raises RunError if ``run_dir`` is not a run of the job ``rl``, has no recording, or has no
    complete recording of the steps 1 to ``max_steps`` with the sizes and token ids of ``config``.
    All of these steps are read.
    """
    name = f"--replay {run_dir}"
    saved = run_dir / "config.yaml"
    if not saved.is_file():
        raise RunError(f"{name}: there is no config.yaml, so this is not a run folder")
    recipe = read_recipe(run_dir)[1]
    if recipe.get("job") != "rl":
        raise RunError(
            f"{name}: this is a run of the job {recipe.get('job')!r}; only runs of the job "
            "'rl' can be replayed"
        )
    folders = rollout_folders(run_dir)
    if not folders:
        raise RunError(
            f"{name}: {run_dir / ROLLOUTS_DIR} contains no recorded rollouts; record a run with "
            "observe.record_rollouts=true"
        )
    steps = range(1, config.num_steps + 1)
    missing = next((step for step in steps if step not in folders), None)
    if missing is not None:
        why = "" if max(folders) < missing else f", although step {max(folders)} is there"
        raise RunError(
            f"{name}: the rollout of step {missing} is missing{why}, and max_steps="
            f"{config.max_steps}; a replay needs all steps from 1. {_before(missing)}"
        )
    _check_steps(name, {step: folders[step] for step in steps}, config)
    planned = recipe.get("max_steps")
    steps_of_run = planned if isinstance(planned, int) else 0
    recording = Recording(run_dir, max(config.num_steps, steps_of_run), vocab_size_of(config.model))
    if len(steps) > _MANY_STEPS:
        log.info("%s: reading all %d recorded steps first", name, len(steps))
    for step in steps:  # rather than after hours of training
        recording.rollout(step)
    return recording


def _check_steps(name: str, folders: Mapping[int, Path], config: RLConfig) -> None:
    """Raise RunError for an incomplete or unfitting step. Warn if the settings of the run changed
    between steps."""
    digests: dict[str, int] = {}
    for step, folder in folders.items():
        facts = _facts(name, folder, step)
        digests.setdefault(facts["settings"], step)
        for key, size in sizes_of(config).items():
            if facts[key] != size:
                raise RunError(
                    f"{name}: {key}={size}, but step {step} was recorded with {facts[key]}; use "
                    f"{key}={facts[key]} (train_batch_size and the other keys of train may differ)"
                )
    if len(digests) > 1:
        log.warning(
            "%s: the settings of that run changed before step %s (on a resume); the replay uses "
            "one recipe for all steps, so its weights may differ",
            name,
            ", ".join(str(step) for step in sorted(digests.values())[1:]),
        )


def _facts(name: str, folder: Path, step: int) -> dict[str, Any]:
    """Return the facts in the manifest of a step. Raises RunError if its files are incomplete, if
    it is the recording of another step, or if a fact is missing."""
    if problems := verify(folder, checksums=False):
        raise RunError(f"{name}: {'; '.join(problems)}. {_before(step)}")
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise RunError(
            f"{name}: {folder} contains the rollout of step {manifest.step}. {_before(step)}"
        )
    for key, kind in {"settings": str, **dict.fromkeys(SIZES, int)}.items():
        if not isinstance(manifest.extra.get(key), kind):
            raise RunError(
                f"{name}: the manifest of {folder} does not contain {key}. {_before(step)}"
            )
    return manifest.extra


def _before(step: int) -> str:
    """Return the advice for a recording that ends before ``step``."""
    if step == 1:
        return "Record the run again"
    return f"To replay the steps before it: max_steps={step - 1}"


# ---- the run -------------------------------------------------------------------------------------


class ReplaySource:
    """Recorded rollouts, in the order of their steps. Implements ``RolloutSource``."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.rewards = NoRewards()
        """The recorded groups have their rewards."""
        self.counts: Mapping[str, int] = {}
        """Counts of the prompt stream after the newest step."""

    def next(self, step: int) -> Rollout:
        """Return the recorded rollout of a step."""
        recorded = self.recording.rollout(step)
        self.counts = recorded.counts
        return recorded.rollout

    def update_weights(self) -> Metrics:
        """Do nothing: there is no engine."""
        return {}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Do nothing: there is no engine."""
        yield

    def position(self) -> dict[str, Any]:
        """Return an empty state: the step determines the rollout."""
        return {}

    def plain(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``position``."""
        return dict(position)

    def load(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing: groups are read."""

    def close(self) -> None:
        """Do nothing."""


class ReplayLoop(RLLoop):
    """The loop of a replay."""

    def __init__(self, run: RL) -> None:
        super().__init__(run, None)
        self._skips_evaluation = run.config.eval is not None

    def evaluate(self, number: int) -> Metrics:
        """Do nothing, and log it once if the recipe has an evaluation."""
        if self._skips_evaluation:
            self._skips_evaluation = False
            log.warning("--replay: eval is skipped, because a replay has no rollout engine")
        return {}


class ReplayJob(RLJob):
    """The job ``rl`` with recorded groups."""

    takes_rewards = False

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def placements(self, config: RLConfig) -> list[PlacementGroupSpec]:
        roles = [r.name for r in config.inputs_of_replay().roles() if r.kind != "rollout"]
        return placement_groups_for(config.cluster, roles)

    def build(
        self, config: RLConfig, runtime: Runtime, *, run_dir: Path, functions: Functions
    ) -> Loop:
        entire = config.model_copy(update={"max_steps": self.recording.max_steps})
        ptx = make_ptx(entire, runtime)
        source = timed(ReplaySource(self.recording), runtime.timeline, {"next": "data"})
        policy = make_policy(entire, runtime)
        loop = ReplayLoop(
            make_rl(entire, runtime, run_dir=run_dir, policy=policy, source=source, ptx=ptx)
        )
        loop.total_steps = config.num_steps
        origin = str(self.recording.run_dir.resolve())
        write_text(run_dir / REPLAY_FILE, json.dumps({"run": origin}) + "\n")
        return loop
