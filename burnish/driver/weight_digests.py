"""Digests of the weights that a training run reads from their folders again when it resumes: the
base of adapters, a reference, a teacher, reward models. Each checkpoint contains those of the
run's start (entry ``weights`` of its session), by which a resumed run notices that weights were
replaced. The config of a trained model is compared too, since weights mean something else with
another one. A changed tokenizer is only a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from burnish.checkpoint import CheckpointError, CheckpointStore
from burnish.checkpoint.state import WeightsRecord, saved_weights
from burnish.config.job import TrainingJob
from burnish.config.model import ModelConfig
from burnish.config.roles import TrainRole
from burnish.driver.errors import RunError
from burnish.models.digest import (
    present_config_digest,
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
    return saved | _compared(config, run_dir, saved) | _compared_tokenizers(config, saved)


def _compared_tokenizers(config: TrainingJob, saved: WeightsRecord) -> WeightsRecord:
    """Return the entries of the tokenizers of the policy and of reward models, which have their
    own. Log a warning if files differ from those in ``saved``, unless the recipe names others."""
    scorers = [role for role in config.resolve().train_roles if role.kind == "reward"]
    models = {TOKENIZER: config.model}
    models |= {f"{r.name} {TOKENIZER}": r.model for r in scorers if r.model is not config.model}
    now: WeightsRecord = {}
    for name, model in models.items():
        digest = present_tokenizer_digest(model)
        if digest is None:
            continue
        files = (model.tokenizer_path or model.path, model.template_file)
        entry = {"model": ", ".join(str(file) for file in files if file), "digest": digest}
        then, now[name] = saved.get(name, {}), entry
        if then.get("model") == entry["model"] and weights_changed(then.get("digest"), digest):
            log.warning(
                "the files of the tokenizer or chat template in %s changed since this run was "
                "started, so rows may have other tokens than before; restore the files if this is "
                "not intended",
                entry["model"],
            )
    return now


def _compared(config: TrainingJob, run_dir: Path, saved: WeightsRecord) -> WeightsRecord:
    """Return the entries of the weights that are in the folders now. Raises RunError if they differ
    from those in ``saved``, unless the recipe names another model for a frozen role, which the run
    logs as a changed setting."""
    now: WeightsRecord = {}
    changed: dict[str, str] = {}
    """Name of the entry -> its title and place, for the message."""
    for role in config.resolve().train_roles:
        is_of_policy = role.trainable or role.model is config.model
        for name, title, model, digest in _digests(role, config):
            now[name] = {"model": _source(model), "digest": digest}
            then = saved.get(name, {})
            is_same_model = is_of_policy or then.get("model") == now[name]["model"]
            if is_same_model and weights_changed(then.get("digest"), digest):
                changed[name] = f"{title} in {_source(model)}"
    if changed:
        raise RunError(_changed_message(config, run_dir, changed))
    return now


def _digests(role: TrainRole, config: TrainingJob) -> Iterator[tuple[str, str, ModelConfig, str]]:
    """Yield (name, title, model, digest) of what a role reads again and is on this machine: the
    weights that checkpoints do not contain, and the config of a trained model."""
    model = role.model_read_on_resume
    digest = None if model is None else present_weights_digest(model)
    if model is not None and digest is not None:
        yield role.name, _title(role, config), model, digest
    if role.trainable and (digest := present_config_digest(role.model)) is not None:
        yield f"{role.name} config", f"the config of the {role.name}", role.model, digest


def _changed_message(config: TrainingJob, run_dir: Path, changed: Mapping[str, str]) -> str:
    export = f"burnish export {run_dir} --model {config.trained.kind} --out DIR"
    if config.trained.name in changed:
        export += " --base FOLDER_OF_THE_ORIGINAL_BASE"
    return (
        f"the weights or configs of these models changed since the run {run_dir} was started: "
        f"{'; '.join(changed.values())}. "
        "They are read from there again, so a resumed run would continue with other models. "
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
