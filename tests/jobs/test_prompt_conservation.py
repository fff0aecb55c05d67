"""Every prompt is trained exactly once per epoch of the data, through failures and resumes.

The tests count the rows that enter ``forward_backward`` in each step, and compare them with the
prompt ids in the sample files.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig, load_config
from burnish.jobs import rl as loop
from burnish.models.scratch import scratch_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples
from burnish.rewards.function.reward import FunctionScorer
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch
from burnish.user_calls import UserCalls

ALPHABET = "0123456789="
TOKENIZER = scratch_tokenizer(ALPHABET)
PROMPTS = 18  # and one more that is over the length limit
PER_STEP, SAMPLES, PASSES = 4, 2, 2


class Killed(BaseException):
    """Ends a run as abruptly as a signal: it is not caught, and no state is saved."""


@pytest.fixture(autouse=True)
def _rewards_can_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Killed end the run as a signal does: calls of the user's code make an error of it."""
    monkeypatch.setattr(UserCalls, "run", lambda _, function, *arguments: function(*arguments))
    monkeypatch.setattr(FunctionScorer, "_failed", lambda _, __, error: error)


@dataclass
class Trained:
    """Rows that were trained on: step -> prompt tokens -> how often. A step that is done again
    after a crash replaces its first try, as its checkpoint does."""

    step: int = 0
    rows: dict[int, Counter[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(Counter))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    seen = Trained()
    step_of_loop, forward_backward = loop.rl_step, TorchTrainEngine.forward_backward

    def rl_step(parts: Any, step: int) -> dict[str, float]:
        seen.step = step
        seen.rows[step].clear()
        return step_of_loop(parts, step)

    def count(engine: TorchTrainEngine, batch: Batch, loss: Any) -> Any:
        starts, lengths = batch.offsets.tolist(), batch.prompt_lens.tolist()
        tokens = batch.tokens.tolist()
        seen.rows[seen.step].update(
            tuple(tokens[start : start + length])
            for start, length in zip(starts[:-1], lengths, strict=True)
        )
        return forward_backward(engine, batch, loss)

    monkeypatch.setattr(loop, "rl_step", rl_step)
    monkeypatch.setattr(TorchTrainEngine, "forward_backward", count)
    return seen


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., JobConfig]:
    """4 prompts x 2 samples a step, two optimizer steps a pass and two passes, saved every third
    step."""
    rows = [{"prompt": f"{i:02d}="} for i in range(PROMPTS)] + [{"prompt": "0123456789="}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def make(*overrides: str) -> JobConfig:
        tree = {
            "job": "rl",
            "run_dir": str(tmp_path / "run"),
            "max_steps": 9,
            "model": {
                "scratch": {
                    "alphabet": ALPHABET,
                    "hidden_size": 16,
                    "num_layers": 1,
                    "num_heads": 2,
                    "num_kv_heads": 1,
                }
            },
            "data": {"sources": [str(data)], "prompt_max_len": 5, "overlong": "drop"},
            "rollout": {
                "rollout_batch_size": PER_STEP,
                "n_samples_per_prompt": SAMPLES,
                "generate_max_len": 3,
            },
            "train": {
                "train_batch_size": PER_STEP * SAMPLES // 2,
                "epochs_per_rollout": PASSES,
                "lr": 1e-2,
            },
            "checkpoint": {"every_n_steps": 3},
        }
        return load_config(tree, overrides)

    return make


def number_of(prompt: str) -> int:
    return int(prompt[:2])


def ids_by_step(run_dir: Path) -> dict[int, Counter[str]]:
    """Step -> prompt id -> samples."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for sample in (sample for sample in read_samples(run_dir) if sample["split"] == "train"):
        found[sample["step"]][sample["prompt_id"]] += 1
    return found


def assert_each_prompt_once(run_dir: Path, trained: Trained, good: set[int]) -> None:
    """9 steps x 4 = 36 groups: each good row of as many epochs once, in one step, with all its
    samples, in each of the passes; no bad row occurs."""
    by_step = ids_by_step(run_dir)
    assert sorted(by_step) == sorted(trained.rows) == list(range(1, 10))
    epochs = 9 * PER_STEP // len(good)
    expected = {f"rows:{row}@{epoch}" for row in good for epoch in range(epochs)}
    whole = sum(by_step.values(), Counter[str]())
    assert whole == dict.fromkeys(expected, SAMPLES)
    assert sum(len(step) for step in by_step.values()) == len(expected), "each is in one step only"
    for step, ids in by_step.items():
        assert len(ids) == PER_STEP, "no group is missing and none is left over"
        rows = Counter(int(prompt.split(":")[1].split("@")[0]) for prompt in ids)
        counted = Counter({row_of(t): n for t, n in trained.rows[step].items()})
        expected_rows = {row: SAMPLES * PASSES * times for row, times in rows.items()}
        assert counted == expected_rows, step  # twice where a step ends one epoch and begins one


def row_of(tokens: tuple[int, ...]) -> int:
    return number_of("".join(TOKENIZER.convert_ids_to_tokens(list(tokens))))


def run_through_crashes(
    config: JobConfig, reward: Callable[[str, str], float], crashes: tuple[int, ...]
) -> Path:
    """Run, dying at those calls of the reward (counted over all tries), and resume until done."""
    calls = 0

    def dying(prompt: str, response: str) -> float:
        nonlocal calls
        calls += 1
        if calls in crashes:
            raise Killed
        return reward(prompt, response)

    resume = None
    for _ in crashes:
        with pytest.raises(Killed):
            burnish.run(config, resume=resume, rewards=dying)
        run_dir = Path(config.run_dir)
        resume = run_dir if (run_dir / "config.yaml").is_file() else None
    return burnish.run(config, resume=resume, rewards=dying).run_dir


def length(prompt: str, response: str) -> float:
    return float(len(response))


@pytest.mark.parametrize("crashes", [(), (10,), (29, 61), (25, 26, 27, 70)])
def test_each_prompt_is_trained_once_per_epoch_through_crashes(
    crashes: tuple[int, ...], recipe: Callable[..., JobConfig], trained: Trained
) -> None:
    """18 rows that fit: 36 groups are two epochs."""
    run_dir = run_through_crashes(recipe(), length, crashes)
    assert_each_prompt_once(run_dir, trained, set(range(PROMPTS)))
    assert read_metrics(run_dir)[-1]["data/prompts_seen"] == 36


@pytest.mark.parametrize("crashes", [(), (14, 90), (40, 41, 100)])
def test_each_prompt_with_a_reward_is_trained_once_per_epoch_if_groups_are_dropped(
    crashes: tuple[int, ...], recipe: Callable[..., JobConfig], trained: Trained
) -> None:
    """Rows 0, 3, 6, ... have no reward: 12 rows are left, and 36 groups are three epochs. Their
    places are filled from fresh prompts within the step; none is put back or comes twice."""

    def picky(prompt: str, response: str) -> float:
        return math.nan if number_of(prompt) % 3 == 0 else float(len(response))

    config = recipe("on_reward_failure.then=drop_group")
    run_dir = run_through_crashes(config, picky, crashes)
    good = {row for row in range(PROMPTS) if row % 3}
    assert_each_prompt_once(run_dir, trained, good)
    lines = read_metrics(run_dir)
    dropped = sum(line["reward/groups_dropped"] for line in lines)
    assert lines[-1]["data/prompts_seen"] == 36 + dropped
    assert 12 <= dropped <= 18, "six a whole epoch; those after the last good one may come later"


def test_a_reward_that_succeeds_on_retry_costs_no_prompt(
    recipe: Callable[..., JobConfig], trained: Trained
) -> None:
    asked: Counter[str] = Counter()

    def flaky(prompt: str, response: str) -> float:
        asked[prompt] += 1
        return math.nan if asked[prompt] % 5 == 0 else float(len(response))

    config = recipe("on_reward_failure.then=drop_group", "on_reward_failure.retries=3")
    run_dir = burnish.run(config, rewards=flaky).run_dir
    assert_each_prompt_once(run_dir, trained, set(range(PROMPTS)))
    assert sum(line["reward/groups_dropped"] for line in read_metrics(run_dir)) == 0


def spread(prompt: str, response: str) -> float:
    """Every third row's samples have equal scores, as if a problem is always or never solved."""
    return 1.0 if number_of(prompt) % 3 == 0 else float(sum(map(ord, response)))


@pytest.mark.parametrize("crashes", [(), (14, 90), (40, 41, 100)])
def test_dynamic_sampling_trains_every_other_prompt_once_and_accounts_for_the_rest(
    crashes: tuple[int, ...], recipe: Callable[..., JobConfig], trained: Trained
) -> None:
    """Groups with equal scores are replaced by fresh prompts within their step: every drawn prompt
    is trained or filtered exactly once, none is left over, and the stream continues."""
    config = recipe("rollout.dynamic_sampling={}", "rollout.generate_max_len=8")
    run_dir = run_through_crashes(config, spread, crashes)
    by_step, lines = ids_by_step(run_dir), read_metrics(run_dir)
    whole = sum(by_step.values(), Counter[str]())
    assert all(len(ids) == PER_STEP for ids in by_step.values())
    assert set(whole.values()) == {SAMPLES}, "each in one step only"
    assert all(int(p.split(":")[1].split("@")[0]) % 3 for p in whole), (
        "nothing that teaches nothing"
    )
    filtered = sum(line["rollout/groups_filtered"] for line in lines)
    assert lines[-1]["data/prompts_seen"] == len(whole) + filtered
    assert all(  # filtered groups score 1, all others far more
        line["reward/mean"] < line["reward/trained_mean"]
        if line["rollout/groups_filtered"]
        else line["reward/mean"] == pytest.approx(line["reward/trained_mean"])
        for line in lines
    )
    epochs = [int(p.split("@")[1]) for p in whole]
    assert max(epochs) >= 2 and filtered >= 12, "the stream was neither ended nor begun again"
    for epoch in range(max(epochs) - 1):  # whole epochs: each row that teaches, unless by chance
        rows = {int(p.split(":")[1].split("@")[0]) for p in whole if p.endswith(f"@{epoch}")}
        assert len(rows) >= 11


def test_without_signal_the_step_is_still_filled_and_logged(
    recipe: Callable[..., JobConfig],
) -> None:
    config = recipe("rollout.dynamic_sampling={max_refills: 2}", "max_steps=2")
    run_dir = burnish.run(config, rewards=lambda response: 1.0).run_dir
    for line in read_metrics(run_dir):
        assert line["rollout/groups_kept_anyway"] == PER_STEP
        assert line["rollout/groups_filtered"] == 2 * PER_STEP
    told = (run_dir / "run.log").read_text(encoding="utf-8")
    assert "4 of 4 groups have no signal after 2 refills" in told


@pytest.mark.parametrize(
    ("band", "kept"),
    [
        ("", {1, 2}),
        ("above: 0.4", {2}),
        ("below: 0.5", {1}),
        ("above: 0.2, below: 0.6", {1, 2}),
    ],
)
def test_the_band_applies_to_mean_scores_and_excludes_equal_scores(
    band: str, kept: set[int], recipe: Callable[..., JobConfig]
) -> None:
    """By the row's number mod 4: scores (0, 0), (0, 0.6), (0, 1), (1, 1); means 0, 0.3, 0.5, 1."""
    low, high = [0.0, 0.0, 0.0, 1.0], [0.0, 0.6, 1.0, 1.0]

    def reward(prompts: list[str], responses: list[str], labels: list[Any]) -> list[float]:
        return [(high if i % SAMPLES else low)[number_of(p) % 4] for i, p in enumerate(prompts)]

    band = ", ".join(part for part in (band, "max_refills: 100") if part)
    config = recipe(f"rollout.dynamic_sampling={{{band}}}", "max_steps=3")
    run_dir = burnish.run(config, rewards=reward).run_dir
    rows = {
        int(p.split(":")[1].split("@")[0]) for ids in ids_by_step(run_dir).values() for p in ids
    }
    assert {row % 4 for row in rows} <= kept and rows


SAME_ONCE_CLIPPED = ["rewards=[{kind: function, name: a}]", "shaping.reward_clip=1"]
SAME_BUT_FOR_ROUNDING = ["rewards=[{kind: function, name: a}, {kind: function, name: b}]"]


@pytest.mark.parametrize(
    ("words", "a", "b"),
    [
        (SAME_ONCE_CLIPPED, (5.0, 7.0), (0.0, 0.0)),
        ([*SAME_ONCE_CLIPPED, "shaping.length_penalty=0.1"], (5.0, 7.0), (0.0, 0.0)),
        (SAME_BUT_FOR_ROUNDING, (0.1, 0.3), (0.2, 0.0)),
    ],
)
def test_scores_equal_after_clipping_or_up_to_rounding_have_no_signal(
    words: list[str], a: tuple[float, ...], b: tuple[float, ...], recipe: Callable[..., JobConfig]
) -> None:
    """5 and 7 are both clipped to 1, before length penalties; 0.1 + 0.2 is 0.30000000000000004 and
    0.3 + 0 is not."""
    config = recipe("rollout.dynamic_sampling={max_refills: 1}", "max_steps=1", *words)
    scores = {"a": a, "b": b}

    def reward(name: str) -> Callable[[list[str]], list[float]]:
        return lambda responses: [scores[name][i % SAMPLES] for i in range(len(responses))]

    names = {str(entry.name): reward(str(entry.name)) for entry in config.rewards}
    (line,) = read_metrics(burnish.run(config, rewards=names).run_dir)
    assert line["rollout/groups_kept_anyway"] == line["rollout/groups_filtered"] == PER_STEP
    if "shaping.length_penalty=0.1" not in words:
        assert line["reward/equal_groups_frac"] == 1.0
