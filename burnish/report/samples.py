"""The samples of the report, as compressed JSON, whose rows ``BurnishSamples.rows`` (samples.js)
returns.

Samples and records of episodes (``samples.episode_record``) contain text of models and
environments. All of it stays text: contents, reasoning and arguments of tool calls are strings
here, numbers are finite.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.data_files.arrow_files import READ_ERRORS, num_rows_of_parquet
from burnish.observe.samples import read_sample_file, sample_files
from burnish.runs.curves import is_finite

MAX_ROWS = 3000
MAX_CHARS = 6000  # of one prompt or response
MAX_TOTAL_CHARS = 24_000_000  # of all texts, to limit the size of the page
MAX_PLAIN = 16  # samples that are also readable without scripts
MAX_EPISODE_CHARS = 60_000  # of one episode
_MIN_CHARS = 200  # of one text of an episode beyond that size


COLUMNS = (
    *("step", "split", "prompt", "response", "label", "reward", "parts", "advantage", "finish"),
    *("tokens", "id", "group", "episode"),
)
"""Values of a row, in this order."""


@dataclass(frozen=True)
class EmbeddedSamples:
    """Data for the page's script (samples.js) and the note above the table."""

    json: str
    """``{"prompts": [text], "openings": [{...}], "columns": [name], "rows": [[value]]}``. Rows
    contain the index of their prompt; episodes, of their first messages and tools."""
    num_rows: int
    note: str
    """Which samples are omitted or truncated, and where to find them; "" if all are complete."""
    newest: tuple[dict[str, Any], ...]
    """At most :data:`MAX_PLAIN` samples of the newest step, with the text of their prompt."""

    @property
    def packed(self) -> str:
        """``json`` in gzip and base64, in which no text can end a script element."""
        return base64.b64encode(gzip.compress(self.json.encode(), mtime=0)).decode()


def embed_samples(
    run_dir: Path, *, max_rows: int = MAX_ROWS, step: int | None = None
) -> EmbeddedSamples | None:
    """Return the run's samples for the page, of all steps or of one; None if there are none.

    Beyond ``max_rows``, complete files of the newest and the oldest steps are kept, alternately.
    Long texts are truncated in the middle, and unreadable files are omitted; the note mentions
    both.
    """
    files = _Files([(at, path) for at, path in sample_files(run_dir) if step in (None, at)])
    shared = _Shared()
    entries: list[dict[str, Any]] = []
    num_chars = 0
    for at, path in (files.readable[i] for i in outside_in(len(files.readable))):
        rows = files.rows(path)
        if entries and len(entries) + len(rows) > max_rows:
            break
        for row in rows[:max_rows]:
            entry = _entry(row, shared, at, counts=files.counts)
            num_chars += len(entry["response"])
            entries.append(entry)
        if num_chars + shared.num_chars > MAX_TOTAL_CHARS:
            break
    if not entries and not files.bad:
        return None
    entries.sort(key=lambda entry: entry["step"])
    prompts = list(shared.prompts)
    content = {
        "prompts": prompts,
        "openings": [json.loads(opening) for opening in shared.openings],
        "columns": COLUMNS,
        "rows": [[entry[name] for name in COLUMNS] for entry in entries],
    }
    newest = [entry for entry in entries if entry["step"] == entries[-1]["step"]][:MAX_PLAIN]
    return EmbeddedSamples(
        json=json.dumps(content, allow_nan=False, separators=(",", ":")),
        num_rows=len(entries),
        note=files.note(len(entries)),
        newest=tuple({**entry, "prompt": prompts[entry["prompt"]]} for entry in newest),
    )


def sample_entry(row: dict[str, Any], step: int) -> dict[str, Any]:
    """Return a row of a sample file as ``BurnishSamples.conversation`` (samples.js) takes it. Long
    episodes and messages are shortened in the middle."""
    shared = _Shared()
    entry = _entry(row, shared, step, counts=Counter())
    entry["prompt"] = list(shared.prompts)[entry["prompt"]]
    episode = entry.get("episode")
    if episode is not None:
        entry["opening"] = json.loads(list(shared.openings)[episode["opening"]])
    return entry


class _Shared:
    """Texts that several samples have, each embedded once."""

    def __init__(self) -> None:
        self.prompts: dict[str, int] = {}
        self.openings: dict[str, int] = {}
        """JSON of first messages and tools -> index."""
        self.turns_chars = 0
        """Characters in the turns of episodes."""

    @property
    def num_chars(self) -> int:
        return self.turns_chars + sum(map(len, (*self.prompts, *self.openings)))


class _Files:
    """The sample files of a run and the problems found in them."""

    def __init__(self, files: Sequence[tuple[int, Path]]) -> None:
        self.counts: Counter[str] = Counter()
        self.bad: dict[str, str] = {}
        """File name -> reason why it cannot be read."""
        self.readable: list[tuple[int, Path]] = []
        self._total = 0
        for step, path in files:
            try:
                self._total += num_rows_of_parquet(path)
                self.readable.append((step, path))
            except READ_ERRORS as error:
                self._leave_out(path, error)

    def rows(self, path: Path) -> list[dict[str, Any]]:
        """Return the rows of a file; empty if it cannot be read."""
        try:
            return read_sample_file(path)
        except READ_ERRORS as error:
            self._leave_out(path, error)
            return []

    def note(self, num_shown: int) -> str:
        """Return which samples are omitted or truncated, and where to find them; "" if all are
        complete."""
        notes = []
        if num_shown < self._total:
            notes.append(
                f"{num_shown:,} of {self._total:,} samples, from the newest and the oldest steps"
            )
        if self.counts["truncated"]:
            notes.append(f"{self.counts['truncated']:,} long texts are truncated in the middle")
        if self.counts["shortened"]:
            notes.append(f"{self.counts['shortened']:,} long episodes are shortened")
        if notes:
            notes.append("everything is in samples/*.parquet")
        if self.counts["numbers"]:
            notes.append(f"{self.counts['numbers']:,} samples have numbers that are not finite")
        if self.counts["parts"]:
            notes.append(f"the reward parts of {self.counts['parts']:,} samples cannot be read")
        if self.counts["episodes"]:
            notes.append(f"the episodes of {self.counts['episodes']:,} samples cannot be read")
        bad = [f"{name} ({reason})" for name, reason in list(self.bad.items())[:3]]
        if bad:
            more = f" and {len(self.bad) - 3:,} more" if len(self.bad) > 3 else ""
            notes.append(f"omitted because they cannot be read: {', '.join(bad)}{more}")
        return "; ".join(notes)

    def _leave_out(self, path: Path, error: Exception) -> None:
        reason = str(error).partition("\n")[0][:120]
        self.bad[path.name] = reason or type(error).__name__


def _entry(
    row: dict[str, Any], shared: _Shared, step: int, *, counts: Counter[str]
) -> dict[str, Any]:
    texts = [row["prompt"] or "", row["response"] or ""]
    prompt, response = map(_truncated, texts)
    numbers = [row["reward"], row["advantage"]]
    reward, advantage = map(_finite, numbers)
    parts = _parts(row["reward_parts"])
    counts["truncated"] += [prompt, response] != texts
    counts["parts"] += parts is None
    part_values = [_finite(value) for value in (parts or {}).values()]
    counts["numbers"] += [*numbers, *(parts or {}).values()] != [reward, advantage, *part_values]
    return {
        "step": step if row["step"] is None else row["step"],
        "split": row["split"],
        "prompt": shared.prompts.setdefault(prompt, len(shared.prompts)),
        "response": response,
        "label": None if row["label"] is None else _truncated(row["label"]),
        "reward": reward,
        "parts": dict(zip(parts or {}, part_values, strict=True)),
        "advantage": advantage,
        "finish": row["finish_reason"],
        "tokens": row["response_tokens"],
        "id": row["sample_id"],
        "group": row["group_id"],
        "episode": None if row["episode"] is None else _episode(row["episode"], shared, counts),
    }


def _episode(text: str, shared: _Shared, counts: Counter[str]) -> dict[str, Any] | None:
    """Return an episode as JSON values, from its record: the index of its first messages and tools,
    its status and its turns. Turns in the middle of a long episode are omitted. None if the text is
    not such a record."""
    try:
        record = json.loads(text)
        texts = _Texts()
        start = [_message(message, texts) for message in record["start"]]
        functions = [tool.get("function", tool) for tool in record["tools"]]
        tools = [{"name": texts(f.get("name", "")), "schema": texts(f)} for f in functions]
        texts.num_chars = 0  # the opening is embedded once per group
        turns = _turns(record, texts)
        data = {
            "status": str(record["status"]),
            "seconds": _finite(record["seconds"]),
            "num_turns": len(record["turns"]),
            "num_rows": len(record["rows"]),
            "turns": turns,
        }
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        counts["episodes"] += 1
        return None
    counts["shortened"] += texts.is_shortened or len(turns) < len(record["turns"])
    shared.turns_chars += texts.num_chars
    opening = json.dumps({"messages": start, "tools": tools})
    index = shared.openings.setdefault(opening, len(shared.openings))
    return {**data, "opening": index}


def _parts(text: str | None) -> dict[str, Any] | None:
    """Parse a JSON object with number or null values; None if the text is anything else."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    good = isinstance(values, dict) and all(
        value is None or isinstance(value, int | float) for value in values.values()
    )
    return values if good else None


def _finite(value: Any) -> float | None:
    return value if is_finite(value) else None


def _truncated(text: str, limit: int = MAX_CHARS) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


class _Texts:
    """Truncates the texts of an episode, the more the closer it is to its limit."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.is_shortened = False

    @property
    def full(self) -> bool:
        return self.num_chars >= MAX_EPISODE_CHARS

    def __call__(self, value: Any) -> str:
        """Return a value as text: a string unchanged, other values as JSON."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
        shown = _truncated(text, _MIN_CHARS if self.full else MAX_CHARS)
        self.is_shortened |= shown != text
        self.num_chars += len(shown)
        return shown


def _turns(record: Mapping[str, Any], texts: _Texts) -> list[dict[str, Any]]:
    """Return the turns from both ends until the limit of texts, in the order of time."""
    row_of = {t: i for i, row in enumerate(record["rows"]) for t, _ in row["spans"] if t >= 0}
    numbers = ("tokens", "prompt_tokens", "cached_tokens", "engine_s", "environment_s")
    turns: dict[int, dict[str, Any]] = {}
    for number in outside_in(len(record["turns"])):
        if texts.full and len(turns) >= 2:
            break
        turn = record["turns"][number]
        turns[number] = {
            "number": number,
            "row": row_of.get(number),
            "message": _message(turn["message"], texts),
            "answer": [_message(message, texts) for message in turn["answer"]],
            "rewards": {texts(name): _finite(value) for name, value in turn["rewards"].items()},
            "counts": {texts(name): _finite(value) for name, value in turn["counts"].items()},
            "problem": texts(turn["problem"]),
            **{name: _finite(turn[name]) for name in numbers},
        }
    return [turns[number] for number in sorted(turns)]


def outside_in(count: int) -> Iterator[int]:
    """Yield the last number, the first, the second last, and so on."""
    for i in range(count):
        yield i // 2 if i % 2 else count - 1 - i // 2


def _message(message: Mapping[str, Any], texts: _Texts) -> dict[str, Any]:
    """Return a message with ``role`` and ``text``, and, if it has them, ``name`` (of the tool),
    ``reasoning`` and ``calls``. Blocks of its content that have text become one text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else part
            for part in content
        ]
        content = "\n".join(parts) if all(isinstance(part, str) for part in parts) else parts
    entry: dict[str, Any] = {"role": texts(message["role"])}
    entry["text"] = texts("" if content is None else content)
    if message.get("name"):
        entry["name"] = texts(message["name"])
    if message.get("reasoning_content"):
        entry["reasoning"] = texts(message["reasoning_content"])
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if calls:
        entry["calls"] = [
            {"name": texts(call.get("name", "")), "arguments": texts(call.get("arguments", {}))}
            for call in calls
        ]
    return entry
