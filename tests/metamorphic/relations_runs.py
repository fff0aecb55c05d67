"""Relations of runs: what they write, what they call, and which groups they keep."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from metamorphic.base import Draw, equal, relation
from metamorphic.relations_rewards import _group

from burnish.config import JobConfig, load_config
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.config.rollout import DynamicSampling
from burnish.config.sources import FileSource
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptStream
from burnish.driver.digests import record_user_code
from burnish.driver.errors import RunError
from burnish.driver.run_dir import locked_outputs
from burnish.models.load import load_tokenizer
from burnish.observe.metrics import damaged_lines
from burnish.rewards.episode.reward import EpisodeScorer
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.runner import GroupFilter
from burnish.runs.compare import metric_rows
from burnish.runs.folder import load_run
from burnish.transcript import Episode, Turn
from burnish.watch.library import Library
from burnish.watch.views import curves

MODEL = {"scratch": {"alphabet": "0123456789+="}}
SOURCES = {"sources": ["x.jsonl"]}


def _sft(export: str) -> JobConfig:
    tree = {"job": "sft", "model": MODEL, "data": SOURCES, "train": {"train_batch_size": 2}}
    return load_config(tree | {"checkpoint": {"export_at_end": export}})


def _score(output: str) -> JobConfig:
    tree = {"job": "score", "model": MODEL, "data": SOURCES, "rewards": [{"kind": "math"}]}
    return load_config(tree | {"output": output})


WRITERS = {"export": _sft, "output": _score}


def _place(draw: Draw, folder: Path, number: int) -> tuple[str, Path, Path]:
    """Return an output as a recipe spells it, the run folder, and where it really is."""
    run_dir = folder / f"run{number}"
    where = draw.rng.choice(["shared", "run0", "run1"])
    name = draw.rng.choice(["a.jsonl", "b.jsonl"])
    spellings = [folder / where, folder / "link" / where, folder / "shared" / ".." / where]
    texts = [str(spelling / name) for spelling in spellings]
    texts.append(os.path.relpath(folder / where / name))
    if where == run_dir.name:
        texts.append(f"{{run_dir}}/{name}")
    return draw.rng.choice(texts), run_dir, folder / where / name


@relation
def an_output_has_one_writer(draw: Draw) -> None:
    """Of two runs at the same time, the second is refused if and only if both write the same file
    or folder, however their recipes spell it. Exact."""
    folder = draw.folder
    for name in ("shared", "run0", "run1"):
        (folder / name).mkdir()
    (folder / "link").symlink_to(folder)
    kind = draw.one(kind=list(WRITERS))
    text, run_dir, place = _place(draw, folder, 0)
    other_text, other_dir, other_place = _place(draw, folder, 1)
    draw.note(texts=(text, other_text))
    is_refused = False
    with locked_outputs(WRITERS[kind](text).output_locks(run_dir)):
        try:
            with locked_outputs(WRITERS[kind](other_text).output_locks(other_dir)):
                pass
        except RunError:
            is_refused = True
    equal(is_refused, place == other_place, "refused")
    equal([*folder.rglob("*.lock")], [], "lock files that are left")


@relation
def changed_code_is_named(draw: Draw) -> None:
    """A resumed run names the files of the recipe's code that changed since its last start, and no
    other. Exact."""
    folder = draw.folder
    files = [folder / name for name in ("a.py", "b.py", "c.py")]
    for file in files:
        file.write_text("def score(response):\n    return 1.0\n")
    rewards = [
        {"kind": "function", "name": file.stem, "function": f"{file}:score"} for file in files
    ]
    tree = {"job": "score", "model": MODEL, "data": SOURCES, "rewards": rewards}
    config = load_config(tree)
    record_user_code(config, folder, resumed=False)
    for _ in range(draw.rng.randint(1, 3)):
        changed = draw.rng.sample(files, draw.rng.randint(0, 2))
        for file in changed:
            file.write_text(file.read_text() + "#\n")
        draw.note(changed=changed)
        named = record_user_code(config, folder, resumed=True)
        equal(sorted(named), sorted(changed), "named")


@relation
def turns_that_differ_are_kept(draw: Draw) -> None:
    """Dynamic sampling keeps a group if and only if its totals, or its rewards of any turn that is
    credited on its own, differ. Exact: the rewards are multiples of 0.5."""
    rng = draw.rng
    per_turn = draw.one(per_turn=[True, False])
    clip = draw.one(clip=[None, 0.5])
    turns = [[rng.choice([0.0, 0.5, 1.0]) for _ in range(rng.randint(1, 3))] for _ in range(2)]
    draw.note(turns=turns)
    records = [
        Episode("done", (), turns=tuple(Turn({}, (), rewards={"a": r}) for r in rewards))
        for rewards in turns
    ]
    rewards_of_run = RewardSet(
        [(EpisodeScorer("a", name="a", per_turn=per_turn), 2.0)],
        on_failure=FailurePolicy(),
        shaping=ShapingConfig(reward_clip=clip),
        generate_max_len=4,
    )
    group = _group(0)
    samples = [replace(s, episode=e) for s, e in zip(group.samples, records, strict=True)]
    group = replace(group, samples=tuple(samples))
    (scored,) = rewards_of_run.measure([group])
    is_kept = GroupFilter(DynamicSampling()).keeps(scored, rewards_of_run)
    totals = [min(2 * sum(rewards), clip or 100.0) for rewards in turns]
    padded = [[*rewards, 0.0, 0.0, 0.0][:3] for rewards in turns]
    equal(is_kept, totals[0] != totals[1] or (per_turn and padded[0] != padded[1]), "kept")


@relation
def weights_hold_for_used_rows(draw: Draw) -> None:
    """The source of each row that is used does not depend on which rows are left out, and every
    usable row of a source is used once per pass. Exact, also after a resume."""
    rng = draw.rng
    names = ("first", "second", "third")[: rng.randint(2, 3)]
    sources = []
    for name in names:
        count = rng.randint(2, 8)
        usable = rng.sample(range(count), rng.randint(1, count))
        rows = [{"prompt": f"{i}" if i in usable else "1" * 30} for i in range(count)]
        path = draw.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        weight = rng.choice([0.5, 1.0, 3.0])
        sources.append(FileSource(path=str(path), name=name, weight=weight))
        draw.note(**{name: (weight, sorted(usable), count)})
    seed, tokenizer = rng.randrange(100), load_tokenizer(load_config(_TREE).model)
    used = {}
    for overlong, limit in (("drop", 10), ("error", 40)):
        config = PromptDataConfig(sources=tuple(sources), prompt_max_len=limit, overlong=overlong)
        stream = PromptStream(config, tokenizer, seed=seed)
        prompts = list(stream.next(rng.randint(1, 20)))
        state = json.loads(json.dumps(stream.state_dict()))
        stream = PromptStream(config, tokenizer, seed=seed)
        stream.load_state_dict(state)
        used[overlong] = [p.id for p in (*prompts, *stream.next(60 - len(prompts)))]
    by_source = {key: [id.partition(":")[0] for id in ids] for key, ids in used.items()}
    equal(by_source["drop"], by_source["error"], "sources")
    equal(len(set(used["drop"])), 60, "different rows and passes")


_TREE = {"job": "score", "model": MODEL, "data": SOURCES, "rewards": [{"kind": "math"}]}


_METRICS = ("train/loss", "reward/mean", "eval/accuracy", 'odd "name"\u00e9')


def _number(draw: Draw) -> Any:
    usual = [draw.rng.uniform(-9, 9), draw.rng.randint(-9, 9), 1e-300, -1.5e17]
    return draw.rng.choice([*usual, None, math.nan, math.inf, True, "text", [1], 10**400])


def _metrics_lines(draw: Draw) -> list[bytes]:
    """Lines of a log, with resumes, steps with several lines, other spellings of JSON, and lines
    that are damaged. The last one may have no end."""
    lines, step = [], 0
    for i in range(draw.rng.randint(0, 12)):
        step = max(0, step + draw.rng.choice([1, 1, 1, 0, -3]))
        names = draw.rng.sample(_METRICS, draw.rng.randint(0, len(_METRICS)))
        entry: dict[str, Any] = {"step": step, "time": 1.79e9 + i}
        entry |= {name: _number(draw) for name in names}
        if draw.rng.random() < 0.1:
            entry[draw.rng.choice(["step", "time"])] = _number(draw)
        if draw.rng.random() < 0.3:
            entry = dict(draw.rng.sample(list(entry.items()), len(entry)))
        form = draw.rng.choice([{}, {"separators": (",", ":")}, {"separators": (" , ", " : ")}])
        line = json.dumps(entry, ensure_ascii=draw.rng.random() < 0.5, **form).encode()
        harm = draw.rng.random()
        if harm < 0.1:
            line = line[: draw.rng.randrange(len(line))]
        elif harm < 0.15:
            line = line + line
        elif harm < 0.2:
            line = line[:9] + draw.rng.choice([b"\xff", b"\0"]) + line[9:]
        elif harm < 0.3:
            line = draw.rng.choice([b"", b" ", b"[1]", b"[" * 9999, b"\xef\xbb\xbf" + line])
        lines.append(line + draw.rng.choice([b"\n", b"\n", b"\r\n"]))
    if lines and draw.rng.random() < 0.3:
        lines[-1] = lines[-1].rstrip()
    return lines


def _read_plainly(data: bytes) -> tuple[list[int], dict[str, dict[int, float]]]:
    """Return (steps of all lines, metric -> step -> its last finite number)."""
    steps, table = [], dict[str, dict[int, float]]()
    for line in data.split(b"\n"):
        try:
            entry = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            continue
        clock = entry.get("time") if isinstance(entry, dict) else None
        if type(clock) not in (int, float) or not 0 <= clock < 2**36:
            continue
        if type(entry.get("step")) is not int or abs(entry["step"]) >= 2**53:
            continue
        steps.append(entry["step"])
        for name, value in entry.items():
            is_metric = name not in ("step", "time") and type(value) in (int, float)
            if is_metric and abs(value) < 2**1023:
                table.setdefault(name, {})[entry["step"]] = float(value)
    return steps, {name: dict(sorted(values.items())) for name, values in table.items()}


@relation
def all_views_of_a_run_have_its_numbers(draw: Draw) -> None:
    """The numbers of a log, damaged or not: of the page's table and curves, also if they were read
    while it grew, of `burnish runs` and `burnish compare`, and of a data frame, are those of a
    plain reading of its JSON. Exact."""
    lines = _metrics_lines(draw)
    draw.note(lines=lines)
    file = draw.folder / "run" / "metrics.jsonl"
    file.parent.mkdir()
    seen = draw.rng.randint(0, len(lines))
    library = Library(draw.folder)
    for data in (b"".join(lines[:seen]), b"".join(lines)):
        file.write_bytes(data)
        steps, table = _read_plainly(data)
        run, last = load_run(file.parent), max(steps, default=None)
        frame = run.metrics
        for name in _METRICS:
            expected = table.get(name, {})
            values = list(expected.values())
            summary = (values[-1], min(values), max(values)) if values else None
            asked = {"run": library.scan(), "metric": [name]}
            (page,) = curves(library, asked)["runs"]
            equal(dict(zip(page["x"], page["values"], strict=True)), expected, f"page: {name}")
            equal([r.values[0] for r in metric_rows([run], [name])], [summary] * bool(values), name)
            column = frame[name].items() if name in frame else ()
            finite = {step: value for step, value in column if math.isfinite(value)}
            equal(finite, expected, f"frame: {name}")
        row, headline = library.row("run"), run.headline
        equal((run.step, row["step"]), (last, last), "step")
        shown = None if headline is None else headline.shown([*table[headline.metric].values()][-1])
        equal(row.get("headline", {}).get("last"), shown, "headline")
        complete = [line for line in data.split(b"\n")[:-1] if line.strip()]
        damaged = sum(not _read_plainly(line)[0] for line in complete)
        equal(run.damage, damaged_lines(damaged), "damage")
        equal(row["reason"].endswith(run.damage), True, "damage on the page")
