"""The job ``score``: rewards of given responses, resumable, with every bad input refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig, load_config
from burnish.data.sources import DataError
from burnish.driver.errors import RunError
from burnish.observe.samples import read_samples
from burnish.plan.command import PlanOptions, plan_text
from burnish.plan.shapes import PlanError
from burnish.rewards.base import RewardError

MakeConfig = Callable[..., JobConfig]
RowsOf = Callable[..., list[dict[str, Any]]]
ALPHABET = "0123456789+=<>|uas"


def digits(response: str) -> float:
    return sum(c.isdigit() for c in response) / 4


@pytest.fixture
def score(tmp_path: Path, write_rows: Callable[..., str]) -> MakeConfig:
    """``score(rows, *overrides)``: steps of 4 rows, one reward. ``rows`` may be a file."""

    def make(rows: list[dict[str, Any]] | Path, *overrides: str, name: str = "scored") -> JobConfig:
        path = str(rows) if isinstance(rows, Path) else write_rows(f"{name}-rows", rows)
        tree: dict[str, Any] = {
            "job": "score",
            "run_dir": str(tmp_path / name),
            "model": {"scratch": {"alphabet": ALPHABET}},
            "data": {"sources": [path]},
            "batch_size": 4,
            "rewards": [{"kind": "function", "name": "digits"}],
        }
        return load_config(tree, overrides)

    return make


ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1), "level": i % 3} for i in range(22)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_rows_of_generate_get_the_rewards_that_generate_gave_them(
    kind: str, generate: MakeConfig, score: MakeConfig, rows_of: RowsOf
) -> None:
    """All columns stay, of both forms of file, and the reward sees the same prompt, response,
    label and metadata."""
    seen: list[tuple[Any, ...]] = []

    def reward(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
        seen.append((prompt, response, label, metadata))
        return digits(response) + int(label) / 100 + metadata["level"]

    run = burnish.run(generate(f"output='{{run_dir}}/rows.{kind}'"), rewards=reward)
    sampled, seen = seen, []
    again = score(run.run_dir / f"rows.{kind}", f"output='{{run_dir}}/rows.{kind}'")
    result = burnish.run(again, rewards=reward)
    assert len(seen) == 88 and seen == sampled
    rows, scored = (rows_of(path, f"rows.{kind}") for path in (run.run_dir, result.run_dir))
    assert scored == rows
    assert result.metrics["total/rows"] == 88
    # 1e-12: 88 numbers up to 4, added in another order.
    assert result.metrics["total/reward"] == pytest.approx(
        sum(r["reward"] for r in rows), abs=1e-12
    )


def test_weights_shaping_and_each_reward_by_hand(score: MakeConfig, rows_of: RowsOf) -> None:
    """Response ``12+`` cut at the limit of 3 characters: 2 x 2/4 - 1 x 1/3 = 2/3 is the weighted
    sum. Off come 0.5 for the cut and 3 x 0.1 for its tokens: 2/3 - 0.8. An ended ``1`` has 2
    tokens: 2 x 1/4 - 0 - 0.2 = 0.3."""
    rows = [
        {"prompt": "a=", "response": "12+", "finish_reason": "length"},
        {"prompt": "a=", "response": "1", "finish_reason": "stop"},
    ]
    config = score(
        rows,
        "rewards=[{kind: function, name: d, weight: 2}, {kind: function, name: p, weight: -1}]",
        "shaping={length_penalty: 0.1, truncation_penalty: 0.5}",
    )

    def plus(response: str) -> float:
        return response.count("+") / len(response)

    result = burnish.run(config, rewards={"d": digits, "p": plus})
    first, second = rows_of(result.run_dir, "scored.jsonl")
    # 1e-12: sums of three or four terms.
    assert first["reward"] == pytest.approx(2 / 3 - 0.8, abs=1e-12)
    expected = {"d": 0.5, "p": pytest.approx(1 / 3), "shaping": pytest.approx(-0.8)}
    assert first["rewards"] == expected
    assert second["reward"] == pytest.approx(0.3, abs=1e-12)
    assert second["rewards"] == {"d": 0.25, "p": 0.0, "shaping": pytest.approx(-0.2)}


@pytest.mark.parametrize("output", ["rows.jsonl", "rows.parquet"])
def test_a_stopped_and_resumed_run_writes_the_bytes_of_one_that_was_not(
    output: str, score: MakeConfig
) -> None:
    """Also with a reward that draws random numbers."""
    import random

    calls = 0

    def noisy(responses: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return [digits(response) + random.random() for response in responses]

    out = f"output='{{run_dir}}/{output}'"
    stopped = score(ROWS, out, name="stopped")
    with pytest.raises(burnish.Interrupted) as caught:
        burnish.run(stopped, rewards=noisy)
    run_dir = caught.value.run_dir
    assert len(list((run_dir / "parts").iterdir())) == 3 and not (run_dir / output).exists()
    burnish.run(stopped, rewards=noisy, resume=run_dir)
    assert calls == 6  # 22 rows in steps of 4; no step twice
    whole = burnish.run(score(ROWS, out, name="whole"), rewards=noisy).run_dir
    assert (run_dir / output).read_bytes() == (whole / output).read_bytes()
    assert [s["reward"] for s in read_samples(run_dir)] == [
        s["reward"] for s in read_samples(whole)
    ]
    finished = burnish.run(stopped, rewards=noisy, resume=run_dir)
    assert finished.metrics["total/rows"] == 22 and calls == 12


def test_a_row_on_which_a_reward_fails_keeps_its_place_with_null(
    score: MakeConfig, rows_of: RowsOf
) -> None:
    def picky(response: str) -> float:
        if response in ("5", "9", "10", "11", "12"):
            raise LookupError("no opinion")
        return 1.0

    with pytest.raises(RewardError, match="no opinion"):
        burnish.run(score(ROWS, name="fails"), rewards=picky)
    config = score(ROWS, "on_reward_failure.then=drop_group")
    result = burnish.run(config, rewards=picky)
    rows = rows_of(result.run_dir, "scored.jsonl")
    assert [row["response"] for row in rows] == [row["response"] for row in ROWS]
    failed = [row["response"] for row in rows if row["reward"] is None and row["rewards"] is None]
    assert failed == ["5", "9", "10", "11", "12"]  # 9 to 12 are a step of their own
    assert result.metrics["total/prompts_reward_failed"] == 5
    assert result.metrics["total/scored"] == result.metrics["total/reward"] == 17


def test_the_token_ids_of_a_row_are_taken_only_while_they_say_its_text(
    score: MakeConfig, rows_of: RowsOf
) -> None:
    """Two ids that decode to ``12`` count as two tokens although the response has no end token;
    those of another text are ignored, and ``12`` with its end token has three."""
    import burnish.models.load as load

    config = score([{"prompt": "a=", "response": "12"}], name="one")
    tokenizer = load.load_tokenizer(config.model)
    ids, other = (tokenizer.encode(t, add_special_tokens=False) for t in ("12", "13"))
    rows = [{"prompt": "a=", "response": "12", "response_tokens": i} for i in (ids, other, [99999])]
    config = score(rows, "shaping.length_penalty=1")
    result = burnish.run(config, rewards=lambda response: 0.0)
    assert [row["reward"] for row in rows_of(result.run_dir, "scored.jsonl")] == [-2, -3, -3]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1="}, "no column 'response'"),
        ({"prompt": "1+1=", "response": 2}, "response_key.* has a int, and a response is a text"),
        ({"prompt": "1+1=", "response": None}, "'response' .*is empty here"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused_before_anything_is(
    row: dict[str, Any], said: str, score: MakeConfig
) -> None:
    rows = [{"prompt": "0+1=", "response": "1"}, row]
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{said}"):
        burnish.run(score(rows), rewards=lambda response: 1 / 0)


def test_an_output_that_exists_and_data_that_changed_are_refused(
    score: MakeConfig, tmp_path: Path
) -> None:
    taken = tmp_path / "taken.jsonl"
    taken.write_text("{}\n")
    with pytest.raises(RunError, match=r"taken\.jsonl"):
        burnish.run(score(ROWS, f"output={taken}"), rewards=digits)
    config, calls = score(ROWS, name="begun"), 0

    def fails_late(responses: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        return [1.0] * len(responses) if calls < 3 else []

    with pytest.raises(RewardError):
        burnish.run(config, rewards=fails_late)
    data = Path(config.data.sources[0].path)  # type: ignore[attr-defined]
    data.write_text("".join(json.dumps({**row, "response": "0"}) + "\n" for row in ROWS))
    with pytest.raises(RunError, match="contains 22"):
        burnish.run(config, rewards=digits, resume=config.run_dir)


def test_a_job_that_loads_no_model_has_no_plan() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    with pytest.raises(PlanError, match="this score job loads no model: it needs no memory plan"):
        plan_text(load_config(recipes / "tiny_score.yaml"), PlanOptions())
