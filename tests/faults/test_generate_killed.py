"""kill -9 of batch inference at random moments, then resume: the output is, byte for byte, that of
a run that was never killed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.config import load_config
from burnish.observe.samples import read_samples

pytestmark = pytest.mark.slow

REWARD = """
import random

def noisy(responses):  # draws random numbers, as a reward that samples would
    return [sum(c.isdigit() for c in r) / 4 + random.random() / 8 for r in responses]
"""


@pytest.fixture
def same_results(measured: Callable[[Path], list[dict[str, Any]]]) -> Callable[..., None]:
    """``same_results(one, other, kind)`` asserts that two runs left the same output, metrics,
    samples and files. The record of resumes is left out, and what a run writes after its output: a
    run that is killed in between has none of it, or a temporary file of it."""

    def check(one: Path, other: Path, kind: str) -> None:
        assert (one / f"rows.{kind}").read_bytes() == (other / f"rows.{kind}").read_bytes()
        assert measured(one) == measured(other)
        assert read_samples(one) == read_samples(other)
        names = [{path.name for path in folder.iterdir()} for folder in (one, other)]
        later = {"timeline.json", "memory.json", "memory.txt", "resumes.jsonl"}
        differing = {re.sub(r"^\.(.*)\.\d+\.tmp$", r"\1", name) for name in names[0] ^ names[1]}
        assert differing <= later

    return check


@pytest.mark.parametrize(("mode", "kind", "seed"), [("all", "jsonl", 1), ("pairs", "parquet", 2)])
def test_no_prompt_is_lost_or_answered_twice_after_any_number_of_kills(
    mode: str,
    kind: str,
    seed: int,
    tmp_path: Path,
    children: Any,
    same_results: Callable[..., None],
) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    rows = [{"prompt": f"{i}+1="} for i in range(70)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(name: str) -> Any:
        return load_config(
            {
                "job": "generate",
                "run_dir": str(tmp_path / name),
                "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32}},
                "data": {"sources": [str(tmp_path / "rows.jsonl")]},
                "rollout": {
                    "rollout_batch_size": 3,
                    "n_samples_per_prompt": 4,
                    "generate_max_len": 8,
                },
                "rewards": [{"kind": "function", "function": f"{tmp_path / 'my_reward.py'}:noisy"}],
                "mode": {"kind": mode} | ({"keep_truncated": True} if mode == "pairs" else {}),
                "output": f"{{run_dir}}/rows.{kind}",
            }
        )

    whole, killed = config("whole"), config("killed")
    children.run(whole)
    seen = children.run_with_kills(killed, kills=4, seed=seed)
    assert seen and max(seen) > 1, "no kill came in time, so nothing was tried"
    same_results(Path(whole.run_dir), Path(killed.run_dir), kind)
    if mode == "all":
        lines = (Path(killed.run_dir) / "rows.jsonl").read_text().splitlines()
        ids = Counter(json.loads(line)["prompt_id"] for line in lines)
        assert ids == {f"rows:{i}@0": 4 for i in range(70)}


def test_no_row_is_lost_or_scored_twice_after_any_number_of_kills(
    tmp_path: Path, children: Any, same_results: Callable[..., None]
) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1), "n": i} for i in range(70)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(name: str) -> Any:
        return load_config(
            {
                "job": "score",
                "run_dir": str(tmp_path / name),
                "model": {"scratch": {"alphabet": "0123456789+="}},
                "data": {"sources": [str(tmp_path / "rows.jsonl")]},
                "batch_size": 3,
                "rewards": [{"kind": "function", "function": f"{tmp_path / 'my_reward.py'}:noisy"}],
                "output": "{run_dir}/rows.jsonl",
            }
        )

    whole, killed = config("whole"), config("killed")
    children.run(whole)
    seen = children.run_with_kills(killed, kills=4, seed=3)
    assert seen and max(seen) > 1, "no kill came in time, so nothing was tried"
    same_results(Path(whole.run_dir), Path(killed.run_dir), "jsonl")
    lines = (Path(killed.run_dir) / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == list(range(70))
