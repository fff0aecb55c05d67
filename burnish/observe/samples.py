"""``samples/``: prompts and responses of complete groups, one parquet file per step, for inspection
and the report.

Any parquet reader can read them: ``pandas.read_parquet("runs/rl/samples")``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.compact import IntRuns
from burnish.data_files.arrow_files import FOR_INSPECTION, SAMPLE_COLUMNS, record_batches
from burnish.observe.files import replacing
from burnish.secret import without_secrets

if TYPE_CHECKING:  # (readers of runs need no torch)
    from burnish.transcript import Episode, Turn
    from burnish.types import Group, Sample

SAMPLES_DIR = "samples"

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("split", pa.string()),
        ("prompt_id", pa.string()),
        ("group_id", pa.int64()),
        ("sample_id", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),  # JSON object: part -> number or null
        ("advantage", pa.float64()),  # null if none was computed
        ("finish_reason", pa.string()),
        ("response_tokens", pa.int64()),
        ("label", pa.string()),
        ("version", pa.int64()),  # optimizer steps of the newest weights that sampled a token
        ("episode", pa.string()),  # JSON of `episode_record`; null for a single response
        ("dropped", pa.string()),  # split `dropped`: why no step trains its group; else null
    ]
)
"""Columns of a sample file. All but ``dropped`` are columns of data for jobs that read it."""

TOKEN_SCHEMA = pa.schema(
    [
        ("tokens", pa.list_(pa.string())),  # texts, as `sample_tokens.TokenTexts`
        ("token_ids", pa.list_(pa.int32())),
        ("row_numbers", pa.list_(pa.int32())),  # training row in the sample, from 0
        ("turns", pa.list_(pa.int32())),  # -1: not sampled; null: prompt of its row
        ("action_mask", pa.list_(pa.bool_())),
        # null outside of the action mask
        ("versions", pa.list_(pa.int64())),  # optimizer steps of the weights that sampled it
        ("sampler_logprobs", pa.list_(pa.float32())),
        ("trainer_logprobs", pa.list_(pa.float32())),  # of the policy before the update
        ("ref_logprobs", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),  # of the policy before the update
        ("token_advantages", pa.list_(pa.float32())),
        ("values", pa.list_(pa.float32())),  # of the critic before the update
        ("tokens_omitted", pa.int64()),  # tokens of the sample that are not saved
    ]
)
"""Columns of a sample file with the tokens of a sample, all rows of an episode in their order. The
lists of a sample have the same length. A column that a run does not compute, and all of a file
without tokens, are null. Numbers that are not finite are saved as they are."""

_REPEATED = [
    *SCHEMA.names,
    *(f"{f.name}.list.element" for f in TOKEN_SCHEMA if f.type != pa.list_(pa.float32())),
]
"""Columns of the file with values that repeat. Dictionaries make the others a third larger."""

DROPPED = "dropped"
"""Split of the samples that no step trains."""
_TRAIN_STEM = "step"
"""Prefix of the file names of the split ``train``. Other splits use their own name."""
_FILE_NAME = re.compile(r"(?P<split>.+)_(?P<step>\d+)\.parquet")


def write_samples(
    run_dir: Path,
    step: int,
    groups: Sequence[Group],
    advantages: Mapping[str, float] | None,
    *,
    limit: int,
    split: str = "train",
    tokens: pa.Table | None = None,
    dropped: Mapping[str, str] | None = None,
) -> Path | None:
    """Write the first groups of a step to ``samples/step_000012.parquet`` (``eval_000012`` for
    split eval), atomically.

    ``advantages`` maps sample_id -> advantage. At most ``limit`` samples are written, in complete
    groups; the first group is written even if it exceeds ``limit``. With ``limit`` 0 nothing is
    written and None is returned. NaN and infinity become null. ``tokens``: the columns of
    :data:`TOKEN_SCHEMA` of the first samples. ``dropped``: prompt id -> why no step trains its
    group, for the split ``dropped``.
    """
    written = first_groups(groups, limit)
    if not written:
        return None
    known = advantages or {}
    reasons = {prompt: _text(without_secrets(text)) for prompt, text in (dropped or {}).items()}
    rows = [
        {
            "step": step,
            "split": split,
            **_row(group, sample, known.get(sample.sample_id)),
            "dropped": None if split != DROPPED else reasons.get(group.prompt.id, ""),
        }
        for group in written
        for sample in group.samples
    ]
    stem = _TRAIN_STEM if split == "train" else split
    path = Path(run_dir) / SAMPLES_DIR / f"{stem}_{step:06d}.parquet"
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    known_tokens = TOKEN_SCHEMA.empty_table() if tokens is None else tokens
    nulls = known_tokens.slice(0, 0).take(pa.nulls(len(table) - len(known_tokens), pa.int64()))
    columns = pa.concat_tables([known_tokens, nulls])
    for field in TOKEN_SCHEMA:
        table = table.append_column(field, columns[field.name])
    fields = [
        f if f.name in SAMPLE_COLUMNS else f.with_metadata(FOR_INSPECTION) for f in table.schema
    ]
    with replacing(path) as scratch, scratch.open("wb") as file:
        pq.write_table(
            table.cast(pa.schema(fields)), file, compression="zstd", use_dictionary=_REPEATED
        )
    return path


def first_groups(groups: Sequence[Group], limit: int) -> list[Group]:
    """Return the groups that are written: complete ones with at most ``limit`` samples, and at
    least one unless ``limit`` is 0."""
    written: list[Group] = []
    for group in groups if limit > 0 else ():
        if written and sum(len(g.samples) for g in written) + len(group.samples) > limit:
            break
        written.append(group)
    return written


def sample_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of every sample file, oldest step first."""
    folder = Path(run_dir) / SAMPLES_DIR
    matches = ((_FILE_NAME.fullmatch(path.name), path) for path in folder.glob("*.parquet"))
    return sorted((int(match["step"]), path) for match, path in matches if match and path.is_file())


def split_of(path: Path) -> str:
    """Return the split of a sample file."""
    stem = path.stem.rpartition("_")[0]
    return "train" if stem == _TRAIN_STEM else stem


def samples_of_step(run_dir: Path, step: int) -> dict[str, Path]:
    """Return split -> file of a step's samples."""
    paths = (Path(run_dir) / SAMPLES_DIR).glob(f"*_{step:06d}.parquet")
    by_split = {split_of(path): path for path in paths}
    train_first = sorted(by_split, key=lambda split: (split != "train", split))
    return {split: by_split[split] for split in train_first}


def read_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Return every stored sample as a dict with the columns of :data:`SCHEMA`, oldest step first.

    ``reward_parts`` remains JSON text. The list is empty if the run has no samples.
    """
    return [row for _, path in sample_files(run_dir) for row in read_sample_file(path)]


def read_sample_file(
    path: Path, *, limit: int | None = None, max_bytes: float = math.inf
) -> list[dict[str, Any]]:
    """Return the rows of a sample file, or only the first ``limit``, or those of its first batches
    that have ``max_bytes`` together."""
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for batch in record_batches(path, limit, columns=SCHEMA.names):
        table = pa.Table.from_batches([batch])
        for field in SCHEMA:
            if field.name not in table.column_names:
                table = table.append_column(field, pa.nulls(len(table), field.type))
        table = table.select(SCHEMA.names).cast(SCHEMA)
        rows += table.to_pylist()
        num_bytes += table.nbytes
        if num_bytes >= max_bytes:
            break
    return rows


def samples_with_tokens(path: Path) -> list[str]:
    """Return the ids of the samples of a file whose tokens are saved."""
    return [row["sample_id"] for row in _token_rows(path, ("sample_id", "tokens_omitted"))]


def read_tokens(path: Path, sample_id: str) -> dict[str, Any] | None:
    """Return the columns of :data:`TOKEN_SCHEMA` of one sample of a file, as lists; None if its
    tokens are not saved."""
    for row in _token_rows(path, ("sample_id", *TOKEN_SCHEMA.names)):
        if row["sample_id"] == sample_id:
            return {name: row.get(name) for name in TOKEN_SCHEMA.names}
    return None


def _token_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the given columns of the samples whose tokens are saved."""
    rows: list[dict[str, Any]] = []
    for batch in record_batches(path, columns=columns):
        if "tokens_omitted" in batch.schema.names:
            rows += batch.filter(batch["tokens_omitted"].is_valid()).to_pylist()
    return rows


def drop_samples_after(run_dir: Path, step: int) -> None:
    """Remove the samples of later steps (for resuming from the checkpoint of ``step``)."""
    for at, path in sample_files(run_dir):
        if at > step:
            path.unlink()


def _row(group: Group, sample: Sample, advantage: float | None) -> dict[str, Any]:
    parts = {name: _finite(value) for name, value in sample.reward_parts.items()}
    label = group.prompt.label
    return {
        "prompt_id": _text(sample.prompt_id),
        "group_id": sample.group_id,
        "sample_id": _text(sample.sample_id),
        "prompt": _text(group.prompt.text),
        "response": _text(sample.text),
        "reward": _finite(sample.reward),
        "reward_parts": json.dumps(parts, allow_nan=False),
        "advantage": None if advantage is None else _finite(advantage),
        "finish_reason": sample.finish_reason,
        "response_tokens": sample.num_sampled_tokens,
        "label": None if label is None else _text(str(label)),
        "version": max(
            (v for row in sample.rows for v, _ in IntRuns(row.versions).runs()), default=None
        ),
        "episode": None if sample.episode is None else json.dumps(episode_record(sample)),
    }


def episode_record(sample: Sample) -> dict[str, Any]:
    """Return the record of an episode as JSON values: status, first messages, the tools of all
    turns, turns, seconds and training rows.

    A turn that begins another conversation has the names of its ``tools``. Each row has its number
    of ``prompt_tokens`` and ``spans``: lists of [turn, tokens], in which turn -1 stands for
    observations, which are masked. ``untrained`` has the calls of an agent that no row has, if
    there are any.
    """
    episode = sample.episode
    assert episode is not None
    untrained = [
        {"prompt": list(turn.prompt or ()), **_turn_record(turn)} for turn in episode.untrained
    ]
    return {
        "status": episode.status,
        "seconds": round(episode.seconds, 3),
        "start": list(episode.start),
        "tools": _all_tools(episode),
        "turns": [_turn_record(turn) for turn in episode.turns],
        "rows": [
            {
                "prompt_tokens": len(row.prompt_ids),
                "spans": [[turn, count] for turn, count in IntRuns(row.turns).runs()],
            }
            for row in sample.rows
        ],
        **({"untrained": untrained} if untrained else {}),
    }


def _turn_record(turn: Turn) -> dict[str, Any]:
    return {
        "message": dict(turn.message),
        "answer": list(turn.answer),
        "rewards": dict(turn.rewards),
        "counts": dict(turn.counts),
        "problem": turn.problem,
        "tokens": turn.num_tokens,
        "prompt_tokens": turn.num_prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "engine_s": round(turn.engine_s, 4),
        "environment_s": round(turn.environment_s, 4),
        **({} if turn.tools is None else {"tools": [*map(_name, turn.tools)]}),
    }


def _all_tools(episode: Episode) -> list[Mapping[str, Any]]:
    """Return the tools of all turns, each once."""
    tools = [*episode.tools, *(tool for turn in episode.turns for tool in turn.tools or ())]
    return [tool for i, tool in enumerate(tools) if tool not in tools[:i]]


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _text(value: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode, by ``?``."""
    return value.encode("utf-8", errors="replace").decode("utf-8")
