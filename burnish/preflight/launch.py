"""Find the mistakes of a launch before a model is loaded: unusable rows, rows beyond the model's
positions, and reward functions that fail on one row."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from burnish.config import JobConfig
from burnish.config.model import ModelConfig
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.data.config import DataConfig
from burnish.data.encoded import encoder_of
from burnish.data.files import content_digest
from burnish.data.forms import open_rows
from burnish.data.reader import reader_of
from burnish.data.sources import DataError, Source
from burnish.data.stream import RowRef
from burnish.data.streamed import StreamedRows, num_first
from burnish.driver.errors import RunError
from burnish.models.family import recall_json, store_json
from burnish.models.load import ModelError, load_tokenizer
from burnish.preflight.limits import limited, vocabulary_problems
from burnish.preflight.row_scan import ERRORS, DataSection, Found, Span, quiet, scan
from burnish.preflight.scored_prompts import scorers_of
from burnish.rewards.base import RewardError
from burnish.rewards.build import build_rewards
from burnish.rewards.kinds import RewardConfig
from burnish.rewards.labels import label_readers
from burnish.rewards.reward_set import RewardSet
from burnish.types import Group, Prompt, Sample
from burnish.vocabulary import num_embeddings

log = logging.getLogger("burnish")

Say = Callable[[str], None]

HEAD_ROWS = 1000
"""Rows of each source that ``validate: head`` checks, and of each streamed source."""

PARALLEL_ROWS = 20_000
"""From this number of rows on, several processes check them. Below it, starting them takes
longer."""

_SPAN_ROWS = 2000
_MAX_WORKERS = 16


def check_launch(config: JobConfig, *, say: Say) -> None:
    """Check all data sections and call the rewards on one row, for ``burnish check``. ``say``
    receives one line per result. Raises one DataError or RewardError with all problems."""
    problems = [*vocabulary_problems(config), *_data_problems(config, say)]
    problems += _reward_problems(config, say)
    if problems:
        raise DataError("\n".join(problems))


def check_before_run(config: JobConfig, *, resumed: bool) -> None:
    """Check the data sections and the reward functions of a recipe, before a run loads a model.

    Jobs that write rows are not checked: they encode all rows before they sample, and report all
    errors together. Raises DataError or RewardError, and RunError for sampling parameters that do
    not fit the model.
    """
    if problems := list(vocabulary_problems(config)):
        raise RunError("\n".join(problems))
    if config.writes_rows:
        return
    problems = list(_data_problems(config, log.info))
    if problems:
        raise DataError("\n".join(problems))
    if not resumed:
        problems = list(_reward_problems(config, log.info, only_user_code=True))
    if problems:
        raise RewardError("\n".join(problems))


# --- rows


def sections_of(config: JobConfig) -> list[DataSection]:
    """Return the data sections of a job, with their length limits within the positions of its
    models. Raises ModelError if a model has no room for a prompt."""
    sections = []
    rewards, in_episodes, policy = config.scoring
    scorers = scorers_of(config)
    for name, data in config.paths_of(DataConfig):
        section: Any = limited(config, data, field=name)
        readers: tuple[str, ...] = ()
        if section.reference_key is not None:
            readers = label_readers(rewards, policy)
        num_rows = config.section_limits(name).num_rows
        rest = (num_rows, readers, in_episodes, scorers)
        sections.append(DataSection(name, section, config.model, *rest))
    return sections


def _data_problems(config: JobConfig, say: Say) -> Iterator[str]:
    """Yield one message for each section with rows at which the run would stop."""
    with quiet():
        sections = sections_of(config)
        tokenizer = load_tokenizer(config.model)
    for section in sections:
        if section.data.validate == "off":
            say(f"{section.name}: rows are not checked (validate: off)")
            continue
        scanned, cached = checked_section(section, tokenizer, say)
        by_kind = ", ".join(f"{n} {kind}" for kind, n in scanned.counts.items() if n)
        kind = "source" if section.data.validate == "head" else "streamed source"
        is_limited = kind == "source" or section.data.streamed
        scope = f"first {HEAD_ROWS} rows of each {kind}, " if is_limited else ""
        say(
            f"{section.name}: {scope}{scanned.rows} rows checked, {by_kind or 'no problems'}"
            f"{' (cached result)' * cached}"
        )
        _say_shared_prompts(section, tokenizer, say)
        if scanned.num_bad:
            yield _listing(section, scanned)


def _say_shared_prompts(section: DataSection, tokenizer: PreTrainedTokenizerBase, say: Say) -> None:
    """Report the number of held-out rows whose prompt is also a training prompt, as a warning."""
    data = section.data
    if data.held_out is None or data.part == "train":
        return
    key = _key(section, tokenizer)
    num = None if key is None else recall_json("shared", key)
    if not isinstance(num, int):
        with quiet():
            num = num_shared_prompts(data, limit=HEAD_ROWS if data.validate == "head" else None)
        if key is not None:
            store_json("shared", key, num)
    if num:
        text = (
            f"{section.name}: {num} held-out rows have the prompt of a training row, so their "
            "metrics are not those of unseen prompts; remove the duplicates from the data"
        )
        (log.warning if say == log.info else say)(text)


def _listing(section: DataSection, scanned: Found) -> str:
    if scanned.num_bad == 1:
        skips = f"; correct or remove the row, or set {section.name}.on_bad_row=skip"
        return scanned.problems[0] + (skips if scanned.counts["unusable"] else "")
    kinds = ", ".join(f"{scanned.counts[kind]} {kind}" for kind in ERRORS if scanned.counts[kind])
    ways = {
        "unusable": f"{section.name}.on_bad_row=skip for unusable rows",
        "too long": f"{section.name}.overlong=drop for long ones",
    }
    settings = " and ".join(way for kind, way in ways.items() if scanned.counts[kind])
    return (
        f"{section.name}: {scanned.num_bad} of {scanned.rows} rows cannot be used ({kinds}):"
        f"{scanned.by_reason()}\nCorrect or remove the rows{', or set ' * bool(settings)}{settings}"
    )


_results: dict[str, Found] = {}
"""Last results of this process by cache key, or by section if it has none."""


def checked_section(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, say: Say, *, again: bool = True
) -> tuple[Found, bool]:
    """Return the result for a section, and if it comes from the cache.

    The cache key contains the bytes of the files, so an entry cannot be outdated. A file that
    changes while it is checked is not cached. ``again``: False to return the last result of this
    process, if there is one; the rows must not have changed since.
    """
    states = _states(section.data)
    key = _key(section, tokenizer)
    digest_key = key or json.dumps(section.to_json(), sort_keys=True)
    if digest_key in _results and not again:
        return _results[digest_key], True
    stored = None if key is None else recall_json("rows", key)
    if isinstance(stored, list) and len(stored) == 4:
        return Found.from_json(stored), True
    with quiet():
        sources = open_rows(section.data)
    spans = list(_spans(section, sources))
    num = sum(stop - start for _, start, stop in spans)
    workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    is_made = any(source.is_made for source in section.data.sources)  # another process reads others
    if num >= PARALLEL_ROWS and workers > 1 and not is_made:
        scanned = _scan_parallel(section, spans, workers, say)
    else:
        scanned = Found()
        with quiet():
            for part in scan(section, tokenizer, sources, spans):
                scanned.add(part)
    if key is not None and states == _states(section.data):
        store_json("rows", key, scanned.to_json())
    if states == _states(section.data):
        _results[digest_key] = scanned
    return scanned, False


def _spans(section: DataSection, sources: Sequence[Source]) -> Iterator[Span]:
    left = section.num_rows
    for number, source in enumerate(sources):
        streamed = isinstance(source, StreamedRows)
        end = num_first(source, HEAD_ROWS) if streamed else len(source)
        if section.data.validate == "head":
            end = min(end, HEAD_ROWS)
        if left is not None:
            end = min(end, left)
            left -= end
        for start in range(0, end, _SPAN_ROWS):
            yield number, start, min(start + _SPAN_ROWS, end)


def _scan_parallel(section: DataSection, spans: Sequence[Span], workers: int, say: Say) -> Found:
    """Scan in worker processes. The result lists problems in file order."""
    num = min(workers, len(spans))  # each has consecutive spans, and so reads few of many files
    shares = [range(len(spans) * i // num, len(spans) * (i + 1) // num) for i in range(num)]
    done: dict[int, Found] = {}
    lock, total = threading.Lock(), sum(stop - start for _, start, stop in spans)
    shown = [0]

    def finish(number: int, scanned: Found) -> None:
        with lock:
            done[number] = scanned
            rows = sum(part.rows for part in done.values())
            if 10 * rows // total > shown[0]:
                shown[0] = 10 * rows // total
                say(f"{section.name}: checked {rows} of {total} rows ({len(shares)} processes)")

    def work(share: range) -> None:
        results = _worker(section, [spans[i] for i in share])
        for number, scanned in zip(share, results, strict=True):
            finish(number, scanned)

    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(work, shares))
    whole = Found()
    for number in range(len(spans)):
        whole.add(done[number])
    return whole


def _worker(section: DataSection, spans: Sequence[Span]) -> Iterator[Found]:
    command = [sys.executable, "-m", "burnish.preflight.row_scan"]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            request = {"section": section.to_json(), "spans": list(spans)}
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
            for line in process.stdout:
                yield Found.from_json(json.loads(line))
            cause = process.stderr.read().decode(errors="replace").strip()
        finally:
            process.kill()
        if process.wait() not in (0, -9):
            raise RunError(
                f"a process that checks the rows of {section.name} failed: {cause[-800:]}\n"
                f"Set {section.name}.validate=off to start without this check"
            )


# --- cache


def _key(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the cache key, a digest of rows, settings, tokenizer and code; None if the rows or the
    tokenizer have no digest."""
    files = [source.files for source in section.data.sources]
    own_code = section.model.trust_remote_code
    if not all(files) or own_code:
        return None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    # The code that results depend on, and the versions of the libraries that it calls.
    package = Path(__file__).parents[1]
    code = [Path(__file__).with_name("row_scan.py"), *sorted(package.glob("*.py"))]
    for folder in ("data", "config", "rewards"):
        code += sorted((package / folder).rglob("*.py"))
    digest = hashlib.sha256()
    for file in code:
        digest.update(file.read_bytes())
    for name in ("transformers", "tokenizers", "jinja2", "pyarrow"):
        digest.update(importlib.metadata.version(name).encode())
    paths = [path for of_source in files for path in of_source]
    settings = [
        *([str(path) for path in paths], type(section.data).__name__),
        section.data.model_dump(mode="json"),
        *(section.num_rows, num_embeddings(tokenizer), section.label_readers),
        section.in_episodes,
        *(f"{name} {_template_of(model)}" for name, model in section.scorers),
        *(type(tokenizer).__name__, str(tokenizer.chat_template)),
        *(tokenizer.special_tokens_map, tokenizer.backend_tokenizer.to_str()),
    ]
    digest.update(json.dumps(settings, default=str).encode())
    for path in paths:
        digest.update(content_digest(path))
    return digest.hexdigest()


def _template_of(model: ModelConfig) -> str:
    try:
        return str(load_tokenizer(model).chat_template)
    except ModelError:
        return ""


def _states(data: DataConfig) -> list[tuple[str, int, int, int]]:
    stats = [(str(path), path.stat()) for source in data.sources for path in source.files]
    return [(path, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats]


# --- rewards


def _reward_problems(config: JobConfig, say: Say, *, only_user_code: bool = False) -> Iterator[str]:
    """Call each reward that can run alone on one row. Yield one message for each that fails."""
    entries, episodes, policy = config.scoring
    called = []
    for i, entry in enumerate(entries):
        name = entry.name or f"rewards.{i} ({entry.kind})"
        if entry.needs_callable:
            say(f"{name}: not called, because the recipe names no function")
        elif not entry.runs_alone:
            say(f"{name}: not called, because kind={entry.kind} needs a server, model or episode")
        elif episodes:
            say(f"{name}: not called, because its input is an episode; only its signature is read")
            yield from _failure(entry, None, policy)
        elif entry.user_code or not only_user_code:
            called.append((name, entry))
    if not called:
        return
    with quiet():
        prompt = _one_prompt(config)
    if prompt is None:
        say("rewards: not called, because no row is usable")
        return
    for name, entry in called:
        problems = list(_failure(entry, prompt, policy))
        say(f"{name}: {'failed on' if problems else 'called on'} {prompt.id}")
        if problems and policy.then == "drop_group":
            log.warning("%s\nSuch groups are dropped (on_reward_failure)", problems[0])
            continue
        yield from problems


def _failure(entry: RewardConfig, prompt: Prompt | None, policy: FailurePolicy) -> Iterator[str]:
    """Build a reward and, with a prompt, call it once, on a response that is the label if that is a
    text. Yield the message of its error."""
    try:
        pairs = build_rewards([entry])
    except RewardError as error:
        yield str(error)
        return
    try:
        if prompt is not None:
            rewards = RewardSet(
                pairs,
                on_failure=FailurePolicy(retries=policy.retries),
                shaping=ShapingConfig(),
                generate_max_len=1,
            )
            text = prompt.label if isinstance(prompt.label, str) else "0"
            response = Sample(
                sample_id=f"{prompt.id}/0",
                prompt_id=prompt.id,
                group_id=0,
                prompt_ids=prompt.token_ids,
                response_ids=(0,),
                sampler_logprobs=(0.0,),
                action_mask=(True,),
                versions=(0,),
                text=text,
                finish_reason="stop",
            )
            rewards.measure([Group(0, prompt, (response,))])
    except RewardError as error:
        yield str(error)
    finally:
        pairs[0][0].close()


def _one_prompt(config: JobConfig) -> Prompt | None:
    """Return the first usable prompt among the first rows; None if there is none."""
    section = next((s for s in sections_of(config) if s.name in ("data", "eval.data")), None)
    if section is None:
        return None
    tokenizer, sources = load_tokenizer(config.model), open_rows(section.data)
    encoder = encoder_of(section.data, tokenizer, sources, in_episodes=section.in_episodes)
    for i in range(num_first(sources[0], 100)):
        try:
            item = encoder.encode(sources[0][i], RowRef(sources[0].name, i, 0))
        except DataError:  # reported by the check of the rows
            continue
        return item if isinstance(item, Prompt) else item.group.prompt
    return None


def num_shared_prompts(config: DataConfig, *, limit: int | None = None) -> int:
    """Return the number of held-out rows of ``config`` whose prompt is also that of a training row.

    ``limit``: the most training rows to compare, of each source. Rows without a readable prompt
    are not compared.
    """
    held = list(_prompts(config.model_copy(update={"part": "held_out"})))
    held_digests, shared = set(held), set[bytes]()
    for prompt in _prompts(config.model_copy(update={"part": "train"}), limit=limit):
        if prompt in held_digests:
            shared.add(prompt)
    return sum(prompt in shared for prompt in held)


def _prompts(config: DataConfig, *, limit: int | None = None) -> Iterator[bytes]:
    """Yield a digest of the prompt of each row."""
    reader = reader_of(config)
    for source in open_rows(config):
        for i in range(len(source) if limit is None else min(limit, len(source))):
            try:
                prompt = reader.prompt(source[i])
            except DataError:  # reported with the other unusable rows
                continue
            text = json.dumps(prompt, sort_keys=True, default=str)
            yield hashlib.blake2b(text.encode(), digest_size=16).digest()
