"""Write the folder of ``burnish init``: fill the template of a job, choose the columns of the rows,
and refuse rows and models that the job cannot use."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from burnish.config import ConfigError, load_config
from burnish.config.columns import usual_column
from burnish.config.paths import folder_problem
from burnish.config.sources import FileSource
from burnish.config.yaml_text import RecipeLoader
from burnish.data.base import Row
from burnish.data.config import DataConfig
from burnish.data.forms import form_of_row, in_columns
from burnish.data.reader import reader_of
from burnish.data.sources import DataError, first_rows
from burnish.data_files.writing import json_line
from burnish.preflight.inputs import check_source
from burnish.starter.jobs import STARTERS, sample_rows

TINY = "tiny"
"""Answer that stands for a model with random weights."""
RECIPE, SAMPLE = "recipe.yaml", "data.jsonl"
_COMMENT = 31
"""Column of the comments of a recipe."""
_CHAT = (
    "  apply_chat_template: {}  # wrap prompts in the model's chat template; false for a base model"
)


@dataclass(frozen=True)
class Answers:
    """Choices of the user."""

    choice: str
    """A key of STARTERS."""
    model: str
    """TINY, a folder or a hub name."""
    data: str | None
    """Files of rows. None: a sample is written, or the environment makes the tasks."""


def choice_for(data: str) -> str:
    """Return the first job that can use the rows of a file: preference for pairs, sft for
    demonstrations, rl for prompts. Raises DataError if none can."""
    row = _first_row(data)
    if row is not None:
        _held_out(data)  # (a single row is no reason to try another job)
    for choice in ("preference", "sft", "rl"):
        try:
            recipe_text(Answers(choice, TINY, data))
        except (ConfigError, DataError):
            continue
        return choice
    columns = "" if row is None else f", whose columns are {', '.join(row.values)}"
    raise DataError(
        f"no job can use the rows of {data}{columns}. Rows need prompt, chosen and rejected "
        "(preference), messages, or prompt and response (sft), or prompt and label (rl): "
        "docs/data.md has other forms. --job JOB says what the rows lack for one job"
    )


def check_model(model: str) -> None:
    """Raise ConfigError if a model can be neither a folder with a model nor a hub name."""
    if model != TINY and (problem := folder_problem(model)):
        raise ConfigError(problem)


def recipe_text(answers: Answers) -> str:
    """Return the recipe. Raises DataError or ConfigError if the job cannot use the rows."""
    if answers.data is None:
        return _filled(answers, {}, form="one JSON object per line")
    row = _first_row(answers.data)
    guesses = {} if row is None else _keys(answers, row)
    errors: list[ConfigError | DataError] = []
    columns = (guesses, {}) if "label_key" in guesses else ({}, guesses)  # a label may be absent
    attempts = [(keys, chat) for keys in columns for chat in (True, False)]
    for keys, chat in attempts:
        try:
            data = _checked_data(_filled(answers, keys, chat=chat))
        except (ConfigError, DataError) as error:
            errors.append(error)
            continue
        form = "rows" if row is None else data.reading_of(row.values)
        has_text = row is None or isinstance(_prompt(row, data), str)
        return _filled(answers, keys, form=str(form), chat=chat and has_text)
    raise errors[-1]


def write_folder(folder: Path, answers: Answers, *, force: bool) -> list[str]:
    """Write the files and return a line for each. Raises ConfigError if one exists (unless
    ``force``), or if the folder cannot be written, before anything is written."""
    starter = STARTERS[answers.choice]
    files = {RECIPE: recipe_text(answers).encode()}
    if starter.code is not None:
        files[starter.code] = _template(starter.code).encode()
    if starter.columns and answers.data is None:
        files[SAMPLE] = b"".join(map(json_line, sample_rows(starter.columns)))
    present = [name for name in files if (folder / name).exists()]
    if present and not force:
        raise ConfigError(
            f"{folder} already has {', '.join(present)}, which would be overwritten; give another "
            "folder, or --force"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; give another folder") from None
    return [f"{'overwrote' if name in present else 'wrote'} {folder / name}" for name in files]


def _filled(answers: Answers, keys: Mapping[str, str], *, form: str = "", chat: bool = True) -> str:
    """Return the template with the values of the model. Numbers are filled in first, so that the
    comments behind them can be aligned."""
    starter, tiny = STARTERS[answers.choice], answers.model == TINY
    values: Mapping[str, str] = starter.tiny if tiny else starter.full
    if tiny and answers.data is not None:
        values = {**starter.tiny, **_TINY_LIMITS}
    values = {"held_out": _held_out(answers.data), **values}
    text = string.Template(_template(f"{answers.choice}.yaml")).safe_substitute(values)
    lines = [_aligned(line) for line in text.splitlines()]
    data = json.dumps(SAMPLE if answers.data is None else str(Path(answers.data).resolve()))
    source = f"  sources: [{data}]"
    section = [source if "  # " in data else _aligned(f"{source}  # {form}")]
    section += [f"  {key}: {json.dumps(column)}" for key, column in keys.items()]
    if chat and starter.columns:
        section.append(_aligned(_CHAT.format(json.dumps(_has_template(answers.model)))))
    late = {"model": _model(answers), "rows": "\n".join(section)}
    return string.Template("\n".join(lines)).substitute(late) + "\n"


_TINY_LIMITS = {"max_len": "2048", "response": "64"}
"""Lengths for rows of the user, which the tiny model has not been sized for."""


def _held_out(data: str | None) -> str:
    """Return a tenth of the rows, or 1 of fewer than ten. Raises ConfigError for a single row."""
    num_rows = None if data is None else FileSource(path=data).num_rows()
    if num_rows is not None and num_rows < 2:
        raise ConfigError(
            f"{data} has {num_rows} row; a recipe needs one to train on and one to measure with: "
            "give a file with two rows or more"
        )
    return "0.1" if num_rows is None or num_rows >= 10 else "1"


def _aligned(line: str) -> str:
    code, mark, comment = line.partition("  # ")
    return f"{code:<{_COMMENT}} # {comment}" if mark else line


def _model(answers: Answers) -> str:
    """Return the lines of the model below ``model:``."""
    if answers.model == TINY:
        letters, size = STARTERS[answers.choice].alphabet, ""
        if answers.data is not None:
            letters = string.printable.strip() + " \n"
            size = ", max_position_embeddings: 4096"
        return (
            "# A small model with random weights, made at the start. Another one: path: FOLDER or "
            f"hub name\n  scratch: {{alphabet: {json.dumps(letters)}{size}}}"
        )
    path = Path(answers.model)
    name = str(path.resolve()) if path.exists() else answers.model
    return (
        f"path: {json.dumps(name)}\n"
        "  # lora: {lora_rank: 16, lora_alpha: 32}   (trains adapters instead of all weights)\n"
        "precision:\n" + _aligned("  dtype: fp32  # bf16 on a GPU")
    )


def _has_template(model: str) -> bool:
    """Return whether a model has a chat template; True for hub models, which are not read."""
    folder = Path(model)
    if not folder.is_dir():
        return True
    config = folder / "tokenizer_config.json"
    in_config = config.is_file() and b'"chat_template"' in config.read_bytes()
    return in_config or (folder / "chat_template.jinja").is_file()


def _first_row(data: str) -> Row | None:
    """Return the first row of a file; None if only reading all rows would find it. Raises
    DataError."""
    rows = first_rows(FileSource(path=str(Path(data).resolve())), 1)
    return rows[0] if rows else None


def _keys(answers: Answers, row: Row) -> dict[str, str]:
    """Return the columns with other names than those that the job reads, by key, if public data
    sets use their names: ``{"prompt_key": "question"}``."""
    cls = STARTERS[answers.choice].data
    plain = None if cls is None else cls.model_validate({"sources": [answers.data]})
    if plain is None or plain.reading_of(row.values).form != "columns":
        return {}
    if plain.conversation_key in row.values:
        return {}
    names = {"prompt_key": plain.prompt_key, **plain.content_keys}
    if plain.reference_key is not None:
        names["label_key"] = plain.reference_key
    if plain.answer_key is not None:
        names["response_key"] = plain.answer_key
    missing = [key for key, column in names.items() if column not in row.values]
    guesses = {key: usual_column(key, row.values) for key in missing}
    return {key: column for key, column in guesses.items() if column is not None}


def _prompt(row: Row, data: DataConfig) -> object:
    """Return the prompt of a row; None if it has none."""
    try:
        return reader_of(data).prompt(in_columns(row, form_of_row(row, data), data))
    except DataError:
        return None


def _checked_data(text: str) -> DataConfig:
    """Return the data section of a recipe. Raises the errors of its reader."""
    data: DataConfig = dict(load_config(yaml.load(text, Loader=RecipeLoader)))["data"]
    check_source(data.sources[0], data)
    return data


def _template(name: str) -> str:
    return (resources.files("burnish.starter") / "files" / name).read_text(encoding="utf-8")
