"""Digests by which a resumed run notices that its inputs changed: the data files of a training run,
the user's code, and the weights that are read from their folders again.

run_dir/data_digests.json    section and source -> digest of the bytes of its files
run_dir/code_digests.json    file of the user -> its contents at each start, with digest and time
session of a checkpoint      the entry ``weights`` has the weights of the run's start

Changed rows and weights are refused. Changed code (rewards, environments, tools, agents, commands)
is allowed, since a run may be resumed to correct it, but never silent.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from burnish.checkpoint import CheckpointError, CheckpointStore
from burnish.checkpoint.state import WeightsRecord, saved_weights
from burnish.config.episodes import CommandEpisodes, McpServerConfig
from burnish.config.job import JobConfig, TrainingJob
from burnish.config.model import ModelConfig
from burnish.config.older import present_path
from burnish.config.paths import code_file
from burnish.config.roles import TrainRole
from burnish.data.config import DataConfig
from burnish.data.files import content_digest
from burnish.driver.errors import RunError
from burnish.models.digest import (
    present_config_digest,
    present_tokenizer_digest,
    present_weights_digest,
    weights_changed,
)
from burnish.models.load import describe
from burnish.observe.files import write_text
from burnish.small_files import read_small

log = logging.getLogger("burnish")

DIGESTS_FILE = "data_digests.json"
CODE_FILE = "code_digests.json"
TOKENIZER = "tokenizer"
"""Entry of the tokenizer and the chat template, next to those of roles."""


# ---- data files ----------------------------------------------------------------------------------


def check_same_rows(config: TrainingJob, run_dir: Path, *, resumed: bool, force: bool) -> None:
    """Write the digests of the data files of a run. Raises RunError if a resumed run would read
    other bytes than before, unless ``force`` is set. Sections with ``validate: off`` are not
    compared."""
    now: dict[str, str] = {}
    for section, data in config.paths_of(DataConfig):
        for source in data.sources if data.validate != "off" else ():
            if source.files:
                digest = hashlib.sha256()
                for path in source.files:
                    digest.update(content_digest(path))
                now[f"{section} ({source.source_name})"] = digest.hexdigest()
    file = run_dir / DIGESTS_FILE
    if resumed and file.is_file():
        then = {}
        for name, digest_then in _saved_digests(file).items():
            section = name.partition(" ")[0]  # its name may be that of an older version
            then[present_path(section, type(config)) + name.removeprefix(section)] = digest_then
        changed = [source for source in then if source in now and then[source] != now[source]]
        change = f"the rows of {', '.join(changed)} changed since the run {run_dir} was started"
        if changed and not force:
            raise RunError(
                f"{change}, so a resumed run would train or evaluate other rows than it counted; "
                "restore the files, start a new run, or continue with the new rows with --force "
                "(burnish.run: force=True)"
            )
        if changed:
            log.warning("%s; the run continues with the new rows (--force)", change)
    write_text(file, json.dumps(now, indent=1) + "\n")


def _saved_digests(file: Path) -> dict[str, Any]:
    """Return the digests of an earlier start. Raises RunError."""
    try:
        saved = json.loads(read_small(file))
        if not isinstance(saved, dict):
            raise TypeError("it is not a JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(
            f"{file} cannot be read ({error}), so changes would not be noticed; remove "
            "it to resume without this comparison"
        ) from error
    return saved


# ---- the user's code -----------------------------------------------------------------------------


def record_user_code(config: JobConfig, run_dir: Path, *, resumed: bool) -> list[Path]:
    """Write the digests of the files of the user's code. Return the files that changed since the
    last start of a resumed run, after a warning. Files that they import are not compared. Raises
    RunError."""
    file = run_dir / CODE_FILE
    history = _saved_digests(file) if resumed and file.is_file() else {}
    since, changed = datetime.now().isoformat(timespec="seconds"), dict[Path, str]()
    for path, keys in _user_files(config).items():
        digest = _file_digest(path)
        contents = history.setdefault(str(path), [])
        if not isinstance(contents, list) or not all(isinstance(c, dict) for c in contents):
            raise RunError(f"{file} is corrupt: {path} has no list of contents; remove the file")
        if contents and contents[-1].get("sha256") == digest:
            continue
        if contents:
            changed[path] = f"{path} ({', '.join(keys)})"
        contents.append({"sha256": digest, "since": since})
    if changed:
        log.warning(
            "code of this run changed since it was started, and the steps from here on use the new "
            "code: %s; restore it if this is not intended (%s in the run folder has the digests)",
            "; ".join(changed.values()),
            CODE_FILE,
        )
    if history:
        write_text(file, json.dumps(history, indent=1) + "\n")
    return list(changed)


def _user_files(config: JobConfig) -> dict[Path, list[str]]:
    """Return the existing files of the user's code, with the keys that name them."""
    named: list[tuple[str, Path]] = []
    for key, spec in config.all_user_code():
        file = code_file(spec)
        named += [(key, path) for path in ([Path(file)] if file else _module_files(spec))]
    commands = [(key, node.command) for key, node in config.paths_of(CommandEpisodes)]
    commands += [(key, node.command or ()) for key, node in config.paths_of(McpServerConfig)]
    for key, command in commands:
        named += [(f"{key}.command", Path(word)) for word in command if Path(word).suffix]
    files: dict[Path, list[str]] = {}
    for key, path in named:
        if path.is_file():
            files.setdefault(path, []).append(key)
    return files


def _module_files(spec: str) -> Iterator[Path]:
    """Yield the places where the module of ``package.module:name`` may be, without importing its
    package."""
    top, *rest = spec.rpartition(":")[0].split(".")
    try:
        package = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return  # the call reports it
    if package is None:
        return
    if not rest and package.origin is not None:
        yield Path(package.origin)
    for folder in package.submodule_search_locations or ():
        path = Path(folder, *rest)
        yield path.with_suffix(".py") if rest else path / "__init__.py"
        yield path / "__init__.py"


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(
            f"the file {path} of the recipe's code cannot be read ({error.strerror}); make it "
            "readable for this user"
        ) from error


# ---- weights -------------------------------------------------------------------------------------


def check_weights_of_run(config: TrainingJob, run_dir: Path) -> None:
    """Raise RunError if the models' folders contain other weights than at the start of the run in
    ``run_dir``, or none. This compares with its newest readable checkpoint, before any model is
    loaded."""
    _check_weights_exist(config, run_dir)
    folder = run_dir / "checkpoints"
    for checkpoint in reversed(CheckpointStore(folder, keep_last=1, best_mode="max").all()):
        try:
            saved = saved_weights(checkpoint)
        except CheckpointError:  # the restore reports it, and uses an earlier one
            continue
        _compared(config, run_dir, saved)
        return


def _check_weights_exist(config: TrainingJob, run_dir: Path) -> None:
    """Raise RunError if a folder on this machine has no weights of a trained model, into which the
    checkpoint is loaded. Folders that a frozen role reads are left to the loader."""
    roles = config.resolve().train_roles
    again = [role.model_read_on_resume for role in roles]
    read_again = {folder for model in again if model for folder in _weight_folders(model)}
    has_checkpoint = any(run_dir.glob("checkpoints/*/manifest.json"))
    for role in roles if has_checkpoint else ():
        for folder in _weight_folders(role.model) if role.trainable else ():
            if folder in read_again or not folder.is_dir() or any(folder.glob("*.safetensors")):
                continue
            fix = "restore the files (their values do not matter)"
            if role.kind == "policy":
                lora = " --lora adapter" if role.model.lora else ""
                fix += (
                    f", or write those of the checkpoint (burnish export {run_dir}{lora} --out "
                    f"DIR) and move DIR/*.safetensors* to {folder}"
                )
            raise RunError(
                f"{folder} has no weights. A resumed run loads the {role.kind} with them before it "
                f"loads the checkpoint, which has newer ones; {fix}"
            )


def _weight_folders(model: ModelConfig) -> Iterator[Path]:
    """Yield the folders with safetensors weights that a model names: its own, and its adapter's."""
    if model.path is not None and model.gguf_file is None:
        yield Path(model.path)
    if model.lora is not None and model.lora.path is not None:
        yield Path(model.lora.path)


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
    own. Only log a warning if files differ from those in ``saved``, unless the recipe names
    others."""
    scorers = [role for role in config.resolve().train_roles if role.kind == "reward"]
    models = {TOKENIZER: config.model}
    models |= {f"{r.name} {TOKENIZER}": r.model for r in scorers if r.model is not config.model}
    now: WeightsRecord = {}
    for name, model in models.items():
        digest = present_tokenizer_digest(model)
        if digest is None:
            continue
        own_template = model.template_file if model.chat_template is not None else None
        named = (model.tokenizer_path or model.path, own_template)
        entry = {"model": ", ".join(str(file) for file in named if file), "digest": digest}
        tokenizer = model.tokenizer_path or _source(model)
        then, now[name] = saved.get(name, {}), entry
        if then.get("model") == entry["model"] and weights_changed(then.get("digest"), digest):
            log.warning(
                "the files of the tokenizer or chat template of %s changed since this run was "
                "started, so rows may have other tokens than before; restore the files if this is "
                "not intended",
                ", ".join(map(str, filter(None, (tokenizer, model.template_file)))),
            )
    return now


def _compared(config: TrainingJob, run_dir: Path, saved: WeightsRecord) -> WeightsRecord:
    """Return the entries of the weights that are in the folders now, with the configs of trained
    models, since weights mean something else with another one.

    Raises RunError if they differ from those in ``saved``, unless the recipe names another model
    for a frozen role, which the run logs as a changed setting."""
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
        export = f"burnish export {run_dir} --model {config.trained.kind} --out DIR"
        if config.trained.name in changed:
            export += " --base FOLDER_OF_THE_ORIGINAL_BASE"
        raise RunError(
            f"the weights or configs of these models changed since the run {run_dir} was started: "
            f"{'; '.join(changed.values())}. "
            "They are read from there again, so a resumed run would continue with other models. "
            f"Restore them, or export the trained model ({export}) and start a new run with "
            "model.path=DIR"
        )
    return now


def _digests(role: TrainRole, config: TrainingJob) -> Iterator[tuple[str, str, ModelConfig, str]]:
    """Yield (name, title, model, digest) of what a role reads again and is on this machine: the
    weights that checkpoints do not contain, and the config of a trained model."""
    model = role.model_read_on_resume
    digest = None if model is None else present_weights_digest(model)
    if model is not None and digest is not None:
        title = f"the {role.name.replace('reward', 'reward model')}"
        if role.trainable:
            title += " (the frozen base of its adapters)"
        elif role.model is config.model:
            title += " (the policy at the start of the run)"
        yield role.name, title, model, digest
    if role.trainable and (digest := present_config_digest(role.model)) is not None:
        yield f"{role.name} config", f"the config of the {role.name}", role.model, digest


def _source(model: ModelConfig) -> str:
    """Return the folder or hub name of a model, with its revision and adapter."""
    adapter = None if model.lora is None else model.lora.path
    parts = {"": describe(model), "revision ": model.revision, "with the adapter ": adapter}
    return ", ".join(f"{label}{part}" for label, part in parts.items() if part)
