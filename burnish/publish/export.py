"""Write the trained model as a HuggingFace folder at the end of a run
(``checkpoint.export_at_end``).

The model is exported from the run's last checkpoint, on the CPU of the process that controls the
run, after the engines are closed. It is therefore the same folder for every train engine and every
number of ranks.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from burnish.checkpoint import CheckpointError
from burnish.checkpoint.export import export
from burnish.config.base import LOCK_FILE
from burnish.config.job import TrainingJob
from burnish.data_files.arrow_files import is_utf8
from burnish.driver.errors import RunError
from burnish.observe.files import write_text
from burnish.small_files import read_small

log = logging.getLogger("burnish")

RECORD = "export.json"
"""File in the run folder with the folder that the run exported to."""


def check_export_folder(config: TrainingJob, run_dir: Path) -> None:
    """Raise RunError if the export would replace files that this run did not write, or if it
    cannot be written."""
    folder = config.checkpoint.export_folder(run_dir)
    if folder is not None and not is_utf8(folder):
        raise RunError(
            f"checkpoint.export_at_end: {str(folder)!a} is not UTF-8, so safetensors cannot write "
            "the model there; choose another path with checkpoint.export_at_end.path=..."
        )
    if folder is None or not folder.exists() or _own(folder, run_dir):
        return
    if folder.is_dir() and all(path.name == LOCK_FILE for path in folder.iterdir()):
        return
    raise RunError(
        f"checkpoint.export_at_end: {folder} exists and was not written by this run; use a new "
        "folder, or true for a folder in run_dir"
    )


def export_at_end(config: TrainingJob, run_dir: Path) -> None:
    """Export the newest checkpoint of a completed run, if the recipe asks for it. Exactly one
    process of a run calls this: the one that writes the run folder.

    The folder is complete if it exists: it is written under a hidden name and renamed. An export
    that this run wrote before is replaced. Raises RunError, with the command that repeats the
    export, if it fails; the run itself is complete.
    """
    options, folder = config.checkpoint.export_at_end, config.checkpoint.export_folder(run_dir)
    if options is None or folder is None:
        return
    check_export_folder(config, run_dir)
    from burnish.publish.model_card import write_card  # needs the report's catalog and the hub

    model = config.trained.kind
    scratch = folder.with_name(f".{folder.name}.tmp")
    try:
        if scratch.exists():
            shutil.rmtree(scratch)
        export(
            run_dir,
            scratch,
            model=model,
            dtype=options.dtype,
            lora=options.lora,
            trust_remote_code=config.model.trust_remote_code,
        )
        write_card(scratch, run_dir, model=model, lora=options.lora, title=folder.name)
        if folder.exists():
            shutil.rmtree(folder)
        write_text(run_dir / RECORD, json.dumps({"folder": str(folder.resolve())}))
        scratch.rename(folder)
    except (OSError, ValueError, CheckpointError, RunError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RunError(
            f"the run is complete, but its export to {folder} failed: {error}. Correct the cause "
            f"and run: burnish export {run_dir} --model {model} --out {folder}"
        ) from error
    log.info("the trained model is in %s", folder)


def _own(folder: Path, run_dir: Path) -> bool:
    """Return whether an earlier end of this run wrote ``folder``."""
    record = run_dir / RECORD
    if not record.is_file():
        return False
    try:
        written = json.loads(read_small(record))["folder"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False  # a damaged record proves nothing
    return bool(written == str(folder.resolve()))
