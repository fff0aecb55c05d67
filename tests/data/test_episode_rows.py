"""SFT rows of episodes: written by generate with exact tokens, read by SFT."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import burnish
from burnish.config import load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.data.batches import BatchStream
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.generation import GenerationPrompts
from burnish.models.load import load_tokenizer

ENVIRONMENT = "recipes/environments/guess_number.py:GuessNumber"
SCRATCH = {"alphabet": "1234567?<>", "hidden_size": 32, "max_position_embeddings": 64}


def generate(tmp_path: Path, output: str, **changes: Any) -> list[dict[str, Any]]:
    recipe = {
        "job": "generate",
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": SCRATCH},
        "data": {"sources": [{"kind": "seeds", "size": 6}], "prompt_max_len": 8},
        "rollout": {
            "n_samples_per_prompt": 2,
            "generate_max_len": 4,
            "stop": list("1234567"),
            "episodes": {"environment": ENVIRONMENT, "max_turns": 3, "max_tokens": 32},
        },
        "rewards": [{"kind": "episode", "name": "found"}],
        "output": str(tmp_path / output),
        **changes,
    }
    path = tmp_path / "generate.yaml"
    path.write_text(yaml.safe_dump(recipe))
    burnish.run(load_config(path))
    if output.endswith(".jsonl"):
        return [json.loads(line) for line in (tmp_path / output).open()]
    return list(pq.read_table(tmp_path / output).to_pylist())


def test_columns_of_the_data_do_not_become_those_of_episodes(tmp_path: Path) -> None:
    data = {"prompt": "1", "status": "open", "tokens": [1], "tools": "none", "level": 3}
    (tmp_path / "data.jsonl").write_text(json.dumps(data))
    config = PromptDataConfig(sources=[str(tmp_path / "data.jsonl")], prompt_max_len=8)
    tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig(**SCRATCH)))
    found = GenerationPrompts(config, tokenizer, in_episodes=True)
    assert found.take(0, 1)[0].columns == {"level": 3}
    assert found.left_out == ["status", "tokens", "tools"]


def test_sft_trains_on_the_sampled_tokens_of_an_episode(tmp_path: Path) -> None:
    """Every sampled token is trained, no observation is, and the ids are those of the row, also
    where the text would be encoded differently (the closing token that the policy left out)."""
    for output in ("rows.jsonl", "rows.parquet"):
        folder = tmp_path / output.partition(".")[2]
        folder.mkdir()
        rows = generate(folder, output)
        assert len(rows) == 12
        assert {row["turns"] for row in rows} > {1}
        tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig(**SCRATCH)))
        data = SFTDataConfig(sources=[str(folder / output)], max_len=64, shuffle=False)
        batch = BatchStream(data, tokenizer, seed=0).next(len(rows))
        offsets = batch.offsets.tolist()
        for row, begin, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
            assert batch.tokens[begin:end].tolist() == row["tokens"]
            assert batch.action_mask[begin:end].tolist() == [bool(m) for m in row["tokens_mask"]]
            messages = row["messages"]
            messages = json.loads(messages) if isinstance(messages, str) else messages
            said = [m["content"] for m in messages if m["role"] == "assistant"]
            sampled = [t for t, m in zip(row["tokens"], row["tokens_mask"], strict=True) if m]
            assert tokenizer.decode(sampled).replace("<eos>", "") == "".join(said)


ECHO = """
import datetime
import json
from decimal import Decimal

class Env:
    def reset(self, task, seed):
        self.task = task
        return {"messages": [{"role": "user", "content": "1"}]}

    def step(self, message):
        names = ("day", "time", "price", "raw", "many", "none", "level")
        right = [self.task[name] for name in names] == VALUES
        return {"messages": [], "done": True, "rewards": {"right": float(right)}}
"""
VALUES = ["2024-01-02", "2024-01-02 03:04:05", "1.50", "/wA=", [{"d": "2024-01-02"}], None, 3]


def test_a_task_has_the_types_of_json(tmp_path: Path) -> None:
    """Dates, times, decimals and bytes of a Parquet file reach the environment as text."""
    day = datetime.date(2024, 1, 2)
    row = {
        **{"prompt": "1", "day": day, "time": datetime.datetime(2024, 1, 2, 3, 4, 5)},
        **{"price": Decimal("1.50"), "raw": b"\xff\x00", "many": [{"d": day}], "level": 3},
    }
    table = pa.Table.from_pylist([row] * 3).append_column("none", pa.array([None] * 3, pa.date32()))
    pq.write_table(table, tmp_path / "data.parquet")
    (tmp_path / "env.py").write_text(f"VALUES = {VALUES!r}\n{ECHO}")
    rollout = {
        **{"n_samples_per_prompt": 1, "generate_max_len": 4, "stop": list("1234567")},
        "episodes": {"environment": f"{tmp_path}/env.py:Env", "max_tokens": 32},
    }
    rows = generate(
        *(tmp_path, "rows.jsonl"),
        data={"sources": [str(tmp_path / "data.parquet")], "prompt_max_len": 8},
        rollout=rollout,
        rewards=[{"kind": "episode", "reward": "right"}],
    )
    assert [(row["status"], row["reward"], row["day"]) for row in rows] == [
        ("done", 1.0, "2024-01-02")
    ] * 3
