"""Recipes of a few steps on a model of a few thousand weights, with data made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig, load_config
from burnish.config.sources import FileSource
from burnish.data.sources import open_source
from burnish.train.engine import BaseTrainEngine

SCRATCH = {
    "alphabet": "0123456789+=",
    "hidden_size": 32,
    "num_layers": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """``write_rows("train", rows)`` writes ``train.jsonl`` and gives its path."""

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def sums(write_rows: Callable[..., str]) -> str:
    """16 prompts ``a+b=`` with their labels."""
    pairs = [(a, b) for a in range(4) for b in range(4)]
    return write_rows("sums", [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs])


@pytest.fixture
def rl(tmp_path: Path, sums: str) -> Callable[..., JobConfig]:
    """``rl("max_steps=3", "train.lr=1e-2")``: 4 prompts x 4 samples, one update per step."""

    def make(*overrides: str) -> JobConfig:
        tree = {
            "job": "rl",
            "run_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "model": {"scratch": SCRATCH},
            "data": {"sources": [sums], "prompt_max_len": 16},
            "rollout": {
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "generate_max_len": 4,
            },
            "train": {"train_batch_size": 16, "lr": 1e-3},
        }
        return load_config(tree, overrides)

    return make


def digits(response: str) -> float:
    """The share of a response that is digits: never equal for long, cheap, no label needed."""
    return sum(c.isdigit() for c in response) / 4


@pytest.fixture
def reward() -> Callable[[str], float]:
    return digits


@pytest.fixture
def evaluation(sums: str) -> list[str]:
    """Overrides that switch evaluation on: 8 held-out prompts, 2 samples each."""
    return [
        f"eval.data.sources=[{sums}]",
        "eval.num_prompts=8",
        "eval.n_samples_per_prompt=2",
        "eval.temperature=1.0",
        "eval.pass_k=[1, 2]",
        "eval.pass_threshold=0.5",
    ]


GENERATE_MODEL = {
    "alphabet": "0123456789+=<>|uas",
    "hidden_size": 32,
    "num_layers": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture
def generate(tmp_path: Path, write_rows: Callable[..., str]) -> Callable[..., JobConfig]:
    """22 prompts in steps of 4, 4 samples each, scored by the share of digits."""
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1), "level": i % 3} for i in range(22)]
    prompts = write_rows("asked", rows)

    def make(*overrides: str, name: str = "run") -> JobConfig:
        tree: dict[str, Any] = {
            "job": "generate",
            "run_dir": str(tmp_path / name),
            "model": {"scratch": GENERATE_MODEL},
            "data": {"sources": [prompts], "prompt_max_len": 40},
            "rollout": {
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "generate_max_len": 4,
            },
            "rewards": [{"kind": "function", "name": "digits"}],
        }
        return load_config(tree, overrides)

    return make


@pytest.fixture
def supervised(tmp_path: Path) -> Callable[..., JobConfig]:
    """``supervised("sft" or "rm", *overrides)``: 16 rows, 4 a step, two epochs."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}=", "response": str(i), "chosen": str(i), "rejected": "+"}
        for i in range(16)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(job: str, *overrides: str) -> JobConfig:
        tree = {
            "job": job,
            "run_dir": str(tmp_path / "run"),
            "max_epochs": 2,
            "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
            "data": {"sources": [str(data)]},
            "train": {"train_batch_size": 4, "lr": 1e-3},
        }
        return load_config(tree, overrides)

    return make


@pytest.fixture
def chat_template() -> str:
    """Roles by their first letter; the assistant's turns end with the end token."""
    return (
        "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )


@pytest.fixture
def modes() -> dict[str, list[str]]:
    """What a ``generate`` recipe says for each mode."""
    cut = "mode.keep_truncated=true"
    return {
        "all": ["mode=all"],
        "best_of_n": ["mode.kind=best_of_n", cut],
        "pairs": ["mode.kind=pairs", cut],
        "conditioned": ["mode.kind=conditioned", cut, "condition.template='{reward:.1f}|{prompt}'"],
    }


@pytest.fixture
def rows_of() -> Callable[..., list[dict[str, Any]]]:
    """The rows of a file in a run folder, as the next job reads them."""

    def read(run_dir: Path, name: str = "generated.jsonl") -> list[dict[str, Any]]:
        source = open_source(FileSource(path=str(run_dir / name)))
        return [dict(source[i].values) for i in range(len(source))]

    return read


@pytest.fixture
def compare() -> Callable[[list[dict[str, float]], list[dict[str, float]]], None]:
    """Two runs measured the same, step by step: all of the first's names but clocks, memory and
    how the weights travelled."""

    def check(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
        assert [line["step"] for line in one] == [line["step"] for line in other]
        for first, second in zip(one, other, strict=True):
            names = {n for n in first if not n.startswith(("time", "memory/", "sync/"))}
            names = {n for n in names if not n.endswith("tokens_per_s")}
            assert len(names) >= 2 and names <= set(second)
            for name in names:
                # fp32 sums over two ranks instead of one; gaps are of that size themselves
                about = pytest.approx(first[name], rel=1e-4, abs=2e-6, nan_ok=True)
                assert second[name] == about, (first["step"], name)

    return check


Passes = list[tuple[str, str]]


@pytest.fixture
def passes_of_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Passes, Passes]]:
    """``made, planned = passes_of_two_steps(config)`` runs three steps. Passes without gradient of
    the last two, and those of the plan, as sorted (role, method of its engine)."""
    calls: Passes = []
    running: list[str] = []
    for name in ("logprobs", "base_logprobs", "entropies", "values", "states", "forward_backward"):
        original = getattr(BaseTrainEngine, name)

        def counted(
            self: Any, *args: Any, name: str = name, original: Any = original, **kwargs: Any
        ) -> Any:
            if not running:  # base_logprobs calls logprobs
                calls.append((self.role, name))
            running.append(name)
            result = original(self, *args, **kwargs)
            running.pop()
            return result

        monkeypatch.setattr(BaseTrainEngine, name, counted)

    def run(
        config: JobConfig, *, updates_per_step: int = 1, **options: Any
    ) -> tuple[Passes, Passes]:
        burnish.run(config, **options)
        updates = [i for i, call in enumerate(calls) if call == ("policy", "forward_backward")]
        steps = calls[updates[0] : updates[2 * updates_per_step]]
        made = [call for call in steps if call[1] != "forward_backward"]
        roles = config.resolve().train_roles
        return sorted(made), sorted((role.name, name) for role in roles for name in role.passes * 2)

    return run
