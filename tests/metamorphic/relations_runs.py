"""Relations of runs: what they write, what they call, and which groups they keep."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

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
from burnish.rewards.episode.reward import EpisodeScorer
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.runner import GroupFilter
from burnish.transcript import Episode, Turn

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
