"""Check the inputs of a job before any heavy import: files, model folders, first rows.

This module imports neither torch nor transformers, so that a misspelled path fails immediately. The
messages are those of the code that reads the inputs later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.config.data import DataConfig, PreferenceDataConfig, PromptDataConfig, SFTDataConfig
from burnish.config.job import JobConfig, RowsJob
from burnish.config.paths import model_problems, models_of
from burnish.config.rated import RatedDataConfig
from burnish.config.rewards import FunctionReward
from burnish.config.steps import StepsDataConfig
from burnish.data.forms import form_of_row, in_columns
from burnish.data.messages import as_messages
from burnish.data.rated_targets import target_of
from burnish.data.rows import column, content_column, demonstration_key, prompt_column
from burnish.data.sources import DataError, Row, first_rows
from burnish.environments.importing import LoadError, check_file
from burnish.models.paths import ModelError, check_path
from burnish.observe.trackers import check_trackers
from burnish.rewards.errors import RewardError

REPLAY_FILE = "replay.json"
"""File in the folder of a replay, with the folder of the recorded run."""


def recorded_run(run_dir: Path) -> Path | None:
    """Return the run that the run in ``run_dir`` replays; None if it is not a replay."""
    path = run_dir / REPLAY_FILE
    if not path.is_file():
        return None
    return Path(json.loads(path.read_text(encoding="utf-8"))["run"])


def check_inputs(config: JobConfig, *, resumed: bool = False) -> None:
    """Raise DataError, ModelError or RewardError if an input is unusable. Examples are a missing
    file or folder, and a source whose first row has no usable content.

    A resumed run that writes rows is not checked, because it may be finished and need no input.
    """
    check_trackers(config)
    if resumed and isinstance(config, RowsJob):
        return
    for data in config.nodes_of(DataConfig):
        for source in data.sources:
            strict = data.on_bad_row == "fail"
            rows = first_rows(source) if strict else first_rows(source, 1)
            form = form_of_row(rows[0], data) if rows else "columns"
            for row in rows if strict else ():
                _check_row(in_columns(row, form, data), data)
    for entry in config.nodes_of(FunctionReward):
        try:
            check_file(entry.function or "")
        except LoadError as error:
            raise RewardError(f"reward {entry.name or entry.kind!r}: function {error}") from error
    _check_models(config)


def _check_models(config: JobConfig) -> None:
    """Raise ModelError listing all missing folders of models and tokenizers."""
    # On a cluster, the other models are read by workers, which may have other folders.
    ray = config.cluster.runtime == "ray"
    problems = model_problems(config)
    if problems := [p for p in problems if not ray or p.startswith("model.")]:
        raise ModelError("\n".join(problems))
    for _, model in models_of(config):
        if model.path is not None and (not ray or model is config.model):
            check_path(model)


def _check_row(row: Row, data: DataConfig) -> None:
    """Raise DataError, with the location, if a row has no usable content. Checks that need a
    tokenizer run when the row is encoded."""
    try:
        for content in _contents(row, data):
            if not isinstance(content, str):
                as_messages(content)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error


def _contents(row: Row, data: DataConfig) -> list[Any]:
    """Return the texts and conversations that the job reads from the row."""
    if isinstance(data, SFTDataConfig):
        key = demonstration_key(row, data)
        if key == data.text_key:
            return []
        if key != data.response_key:
            return [content_column(row, key, "messages_key")]
        prompt = prompt_column(row, data.prompt_key, data.prompt_template)
        return [prompt, content_column(row, key, "response_key")]
    if isinstance(data, PromptDataConfig):
        return [prompt_column(row, data.prompt_key, data.prompt_template)]
    if isinstance(data, StepsDataConfig):
        column(row, data.labels_key, "labels_key")
        return [prompt_column(row, data.prompt_key, data.prompt_template)]
    if isinstance(data, RatedDataConfig):
        target_of(row, data)
        prompt = prompt_column(row, data.prompt_key, data.prompt_template)
        return [prompt, content_column(row, data.response_key, "response_key")]
    if not isinstance(data, PreferenceDataConfig):
        return []
    prompt = prompt_column(row, data.prompt_key, data.prompt_template)
    if data.label_key is not None:
        return [prompt, content_column(row, data.response_key, "response_key")]
    chosen = content_column(row, data.chosen_key, "chosen_key")
    return [prompt, chosen, content_column(row, data.rejected_key, "rejected_key")]
