"""Digests of the weights that a training run reads from their folders again when it resumes: the
base of adapters, a reference, a teacher, reward models. Each checkpoint contains those of the
run's start (entry ``weights`` of its session), by which a resumed run notices that weights were
replaced. A changed tokenizer is only a warning: the start folder of a full fine-tuning, which
usually contains it, may be replaced.
"""

from __future__ import annotations

import logging
from pathlib import Path

from burnish.checkpoint import CheckpointError, CheckpointStore
from burnish.checkpoint.state import WeightsRecord, saved_weights
from burnish.config.job import TrainingJob
from burnish.config.model import ModelConfig
from burnish.config.roles import TrainRole
from burnish.driver.errors import RunError
from burnish.models.digest import (
    present_tokenizer_digest,
    present_weights_digest,
    weights_changed,
)
from burnish.models.load import describe

log = logging.getLogger("burnish")

TOKENIZER = "tokenizer"
"""Entry of the tokenizer and the chat template, next to those of roles."""


def check_weights_of_run(config: TrainingJob, run_dir: Path) -> None:
    """Raise RunError if the models' folders contain other weights than at the start of the run in
    ``run_dir``. This compares with its newest readable checkpoint, before any model is loaded."""
    folder = run_dir / "checkpoints"
    for checkpoint in reversed(CheckpointStore(folder, keep_last=1, best_mode="max").all()):
        try:
            saved = saved_weights(checkpoint)
        except CheckpointError:  # the restore reports it, and uses an earlier one
            continue
        _compared(config, run_dir, saved)
        return


def weights_record(config: TrainingJob, run_dir: Path, checkpoint: Path | None) -> WeightsRecord:
    """Return the entry ``weights`` for the next checkpoints of a run that continues from
    ``checkpoint``; None: that starts.

    It contains the weights that are in the folders now, and those of the checkpoint that are not
    on this machine. Raises RunError as :func:`check_weights_of_run` does.
    """
    saved = {} if checkpoint is None else saved_weights(checkpoint)
    return saved | _compared(config, run_dir, saved) | _compared_tokenizer(config.model, saved)


def _compared_tokenizer(model: ModelConfig, saved: WeightsRecord) -> WeightsRecord:
    """Return the entry of the tokenizer. Log a warning if its files differ from those in ``saved``,
    unless the recipe names others."""
    digest = present_tokenizer_digest(model)
    if digest is None:
        return {}
    files = (model.tokenizer_path or model.path, model.template_file)
    entry = {"model": ", ".join(str(file) for file in files if file), "digest": digest}
    then = saved.get(TOKENIZER, {})
    if then.get("model") == entry["model"] and weights_changed(then.get("digest"), digest):
        log.warning(
            "the files of the tokenizer or chat template in %s changed since this run was started, "
            "so rows may have other tokens than before; restore the files if this is not intended",
            entry["model"],
        )
    return {TOKENIZER: entry}


def _compared(config: TrainingJob, run_dir: Path, saved: WeightsRecord) -> WeightsRecord:
    """Return the entries of the weights that are in the folders now. Raises RunError if they differ
    from those in ``saved``, unless the recipe names another model for a frozen role, which the run
    logs as a changed setting."""
    now: WeightsRecord = {}
    changed: list[TrainRole] = []
    for role in config.resolve().train_roles:
        model = role.model_read_on_resume
        digest = None if model is None else present_weights_digest(model)
        if model is None or digest is None:
            continue
        entry = {"model": _source(model), "digest": digest}
        then, now[role.name] = saved.get(role.name, {}), entry
        is_of_policy = role.trainable or role.model is config.model
        is_same_model = is_of_policy or then.get("model") == entry["model"]
        if is_same_model and weights_changed(then.get("digest"), digest):
            changed.append(role)
    if changed:
        raise RunError(_changed_message(config, run_dir, changed))
    return now


def _changed_message(config: TrainingJob, run_dir: Path, roles: list[TrainRole]) -> str:
    listed = "; ".join(f"{_title(role, config)} in {_source(role.model)}" for role in roles)
    export = f"burnish export {run_dir} --model {config.trained.kind} --out DIR"
    if config.trained.name in [role.name for role in roles]:
        export += " --base FOLDER_OF_THE_ORIGINAL_BASE"
    return (
        f"the weights or configs of these models changed since the run {run_dir} was started: "
        f"{listed}. "
        "Checkpoints do not contain them, so a resumed run would continue with other models. "
        f"Restore them, or export the trained model ({export}) and start a new run with "
        "model.path=DIR"
    )


def _source(model: ModelConfig) -> str:
    """Return the folder or hub name of a model, with its revision and adapter."""
    adapter = None if model.lora is None else model.lora.path
    parts = {"": describe(model), "revision ": model.revision, "with the adapter ": adapter}
    return ", ".join(f"{label}{part}" for label, part in parts.items() if part)


def _title(role: TrainRole, config: TrainingJob) -> str:
    name = role.name.replace("reward", "reward model")
    if role.trainable:
        return f"the {name} (the frozen base of its adapters)"
    if role.model is config.model:
        return f"the {name} (the policy at the start of the run)"
    return f"the {name}"
