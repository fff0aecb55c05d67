"""Records of the groups of an RL run: all their data, for a replay, and their ids, as a log.

    run_dir/rollouts/step_000012/   with observe.record_rollouts: the rollout of step 12 as
                                    groups.json, groups.safetensors and manifest.json
    run_dir/groups.jsonl            asynchronous runs: one line per step, the prompts that are
                                    trained with their ages, and those that were lost

Both are written before the step is trained. A folder of a step is renamed into place once it is
complete, so a kill at any point leaves the steps 1 to n. ``jobs/replay.py`` trains from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from burnish.checkpoint import CheckpointError, load_state, save_state, verify, write_manifest
from burnish.checkpoint.manifest import fsync, sync_tree
from burnish.checkpoint.state import UNFITTING
from burnish.config import RLConfig
from burnish.driver.errors import RunError
from burnish.observe.files import write_text
from burnish.observe.timeline import Timeline
from burnish.rollout.runner import Rollout
from burnish.rollout.sample_state import samples_from_plain, samples_to_plain
from burnish.rollout.source import RolloutSource
from burnish.types import Group, Prompt, Stats

ROLLOUTS_DIR = "rollouts"
GROUPS_FILE = "groups.jsonl"

SIZES = ("rollout.rollout_batch_size", "rollout.n_samples_per_prompt")
"""Keys of the sizes of a rollout."""

_STATE = "groups"
_STEP = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class RecordedRollout:
    """The rollout of one step, with the counts of the prompt stream after it."""

    rollout: Rollout
    counts: Mapping[str, int]


class Recorder:
    """Writes the records that a recipe wants, as ``RL.record``."""

    def __init__(
        self, config: RLConfig, run_dir: Path, source: RolloutSource, timeline: Timeline
    ) -> None:
        self.run_dir, self.source, self.timeline = run_dir, source, timeline
        self._logs_groups = config.rollout.asynchronous is not None
        self._facts = facts_of(config) if config.observe.record_rollouts else None

    def __call__(self, step: int, rollout: Rollout) -> None:
        """Write the records of a step. Raises CheckpointError if a rollout cannot be written."""
        if self._logs_groups:
            log_groups(self.run_dir, step, rollout)
        if self._facts is not None:
            with self.timeline.span("record"):
                recorded = RecordedRollout(rollout, self.source.counts)
                write_rollout(self.run_dir, step, recorded, self._facts)


# ---- rollouts ------------------------------------------------------------------------------------


def write_rollout(
    run_dir: Path, step: int, recorded: RecordedRollout, facts: Mapping[str, Any]
) -> Path:
    """Write the rollout of a step to ``rollouts/step_000012/``, atomically, and return the folder.

    ``facts``: JSON values for its manifest (:func:`facts_of`). Raises CheckpointError if a file
    cannot be written.
    """
    final = run_dir / ROLLOUTS_DIR / f"step_{step:06d}"
    scratch = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    save_state(scratch, _STATE, _to_plain(recorded))
    try:
        write_manifest(scratch, step=step, extra=facts)
        sync_tree(scratch)
        os.rename(scratch, final)
        fsync(final.parent)
    except OSError as error:
        raise CheckpointError(
            f"{final} could not be written ({error}); free space on the disk, or resume with "
            "observe.record_rollouts=false"
        ) from error
    return final


def read_rollout(run_dir: Path, step: int, *, vocab_size: int | None = None) -> RecordedRollout:
    """Return what :func:`write_rollout` wrote. Raises CheckpointError if it is missing, corrupted,
    without any token to train, or has token ids not below ``vocab_size`` (None: unknown)."""
    folder = run_dir / ROLLOUTS_DIR / f"step_{step:06d}"
    if problems := verify(folder):
        raise CheckpointError(
            f"{'; '.join(problems)}. Replay the steps before it, or record the run again"
        )
    plain = load_state(folder, _STATE)
    try:
        return _from_plain(plain, vocab_size)
    except UNFITTING as error:
        raise CheckpointError(
            f"{folder / f'{_STATE}.safetensors'} does not contain a rollout of this model "
            f"({type(error).__name__}: {error}). Replay the steps before it, or record the run "
            "again"
        ) from error


def rollout_folders(run_dir: Path) -> dict[int, Path]:
    """Return step -> folder of each recorded rollout, oldest step first."""
    matches = ((_STEP.fullmatch(p.name), p) for p in (run_dir / ROLLOUTS_DIR).glob("step_*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def facts_of(config: RLConfig) -> dict[str, Any]:
    """Return the facts that a replay checks: the sizes of a rollout, and a digest of the settings
    that can change the training."""
    settings = config.model_dump(mode="json", exclude={"run_dir", "observe", "checkpoint"})
    return {
        **sizes_of(config),
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
    }


def sizes_of(config: RLConfig) -> dict[str, int]:
    """Return the sizes of a rollout by their keys."""
    rollout = config.rollout
    return dict(zip(SIZES, (rollout.rollout_batch_size, rollout.n_samples_per_prompt), strict=True))


def _to_plain(recorded: RecordedRollout) -> dict[str, Any]:
    """Return a rollout as a mapping for ``save_state``. A prompt's label is stored as text, and its
    other columns and messages are left out: only rewards and environments read them."""
    rollout, stats = recorded.rollout, recorded.rollout.stats.plain()
    return {
        "prompts": [
            {
                "id": group.prompt.id,
                "token_ids": list(group.prompt.token_ids),
                "text": group.prompt.text,
                "label": None if group.prompt.label is None else str(group.prompt.label),
                "source": group.prompt.source,
                "samples": len(group.samples),
            }
            for group in rollout.groups
        ],
        "samples": samples_to_plain([s for group in rollout.groups for s in group.samples]),
        "means": {name: list(mean) for name, mean in stats.means.items()},
        "maxima": stats.maxima,
        "sums": stats.sums,
        "ages": rollout.ages,
        "lost": rollout.lost,
        "counts": recorded.counts,
    }


def _from_plain(plain: Mapping[str, Any], vocab_size: int | None) -> RecordedRollout:
    samples = iter(samples_from_plain(plain["samples"], vocab_size=vocab_size))
    if not plain["samples"]["action_mask"].any():
        raise ValueError("no token of any row is an action token, so there is nothing to train")
    groups = []
    for number, plain_prompt in enumerate(plain["prompts"]):
        fields = {k: v for k, v in plain_prompt.items() if k not in ("token_ids", "samples")}
        prompt = Prompt(**fields, token_ids=tuple(plain_prompt["token_ids"]))
        members = tuple(islice(samples, plain_prompt["samples"]))
        if len(members) != plain_prompt["samples"]:
            raise ValueError(
                f"prompt {number} has {len(members)} of {plain_prompt['samples']} samples"
            )
        groups.append(Group(number, prompt, members))
    if next(samples, None) is not None:
        raise ValueError("it has more samples than its prompts count")
    means = {name: (float(num), float(den)) for name, (num, den) in plain["means"].items()}
    stats = Stats(means, _of(float | int, plain["maxima"]), _of(float | int, plain["sums"]))
    ages = None if plain["ages"] is None else _of(int, plain["ages"])
    rollout = Rollout(tuple(groups), stats, ages=ages, lost=_of(str, plain["lost"]))
    return RecordedRollout(rollout, _of(int, plain["counts"]))


def _of(kind: Any, mapping: Any) -> Any:
    """Return ``mapping``. Raises TypeError if it is not a mapping to values of ``kind``."""
    if not isinstance(mapping, dict) or not all(isinstance(v, kind) for v in mapping.values()):
        raise TypeError(f"{mapping!r:.80} is not a mapping to values of {kind}")
    return mapping


# ---- the log of groups ---------------------------------------------------------------------------


def log_groups(run_dir: Path, step: int, rollout: Rollout) -> None:
    """Append the line of a step to ``groups.jsonl``::

        {"step": 12, "trained": {"rows:7@0": 1}, "lost": {"rows:9@0": "filtered"}}

    ``trained`` maps the prompt ids of the batch, in its order, to the ages of their groups in RL
    steps. ``lost`` maps those of the groups that were lost since the step before to ``filtered`` or
    ``failed``.
    """
    assert rollout.ages is not None
    trained: dict[str, int] = {}
    for group in rollout.groups:
        ages = [0]  # of the tokens that the policy sampled; that of a group is the oldest
        for row in (row for sample in group.samples for row in sample.rows):
            versions = np.unique(np.asarray(row.versions)[np.asarray(row.action_mask)])
            ages += [rollout.ages[version] for version in versions.tolist()]
        trained[group.prompt.id] = max(ages)
    line = {"step": step, "trained": trained, "lost": dict(rollout.lost)}
    with (run_dir / GROUPS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_group_log(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of ``groups.jsonl``, without a last line that a kill has truncated. Empty if
    the run has none. Raises RunError for another line that is invalid."""
    path = run_dir / GROUPS_FILE
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
                raise TypeError("it is not a JSON object with an integer 'step'")
        except (ValueError, TypeError, RecursionError) as error:
            raise RunError(
                f"{path} has an invalid line, {line:.80!r} ({error}); remove that line, or move "
                "the file away"
            ) from error
        entries.append(entry)
    return entries


# ---- resuming ------------------------------------------------------------------------------------


def drop_records_after(run_dir: Path, step: int) -> None:
    """Remove the records of later steps (for resuming from the checkpoint of ``step``)."""
    for at, folder in reversed(rollout_folders(run_dir).items()):
        if at > step:
            shutil.rmtree(folder)
    for scratch in (run_dir / ROLLOUTS_DIR).glob(".step_*.tmp"):
        shutil.rmtree(scratch)
    path = run_dir / GROUPS_FILE
    if path.is_file():
        lines = [line for line in read_group_log(run_dir) if line["step"] <= step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
