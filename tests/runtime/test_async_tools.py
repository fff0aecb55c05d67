"""Asynchronous episodes with tools in one process, with an engine whose every token is known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_families import chat_tokenizer
from scripted_engine import ScriptedEngine
from torch import Tensor

import burnish
from burnish.batches import groups_to_batch
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import load_causal_lm
from burnish.observe.metrics import read_metrics
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan, generate
from burnish.steps import rl as steps_of_rl
from burnish.types import Batch, Group

CALCULATE = str(Path(__file__).parents[2] / "recipes/tools/calculator.py:calculate")


class ToolCaller(ScriptedEngine):
    """Calls a tool in the first turn of an episode and answers in the second one. Two of the first
    six groups wait in their second turn until the weights of the first step are loaded."""

    max_len, keeps_cache_on_update = None, False

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(self._script, tokenizer)
        self.versions: dict[str, list[int]] = {}
        """Request -> the version of each of its tokens."""
        self._begun: dict[str, int] = {}
        self._groups: dict[int, int] = {}
        """Row of a prompt -> number of prompts that began before it."""
        self._waiting: list[tuple[Request, Sampling]] = []

    def _script(self, request: Request) -> list[int]:
        sample, turn = request.request_id.rsplit("/", 1)
        call = json.dumps({"name": "calculate", "arguments": {"expression": f"20+{_row(sample)}"}})
        text = f"<tool_call>\n{call}\n</tool_call>" if turn == "0" else f"It is {sample[-1]}."
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._waiting)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        for request in requests:
            name = request.request_id
            self._begun[name] = self.version
            self._groups.setdefault(_row(name), len(self._groups))
            if name.endswith("/1") and self._groups[_row(name)] in (4, 5) and self.version == 0:
                self._waiting.append((request, sampling))
            else:
                super().submit([request], sampling)

    def poll(self) -> list[Completion]:
        return [self._with_versions(done) for done in super().poll()] if super().busy else []

    def _with_versions(self, done: Completion) -> Completion:
        """The first token is of the version at submission, the others of the current one."""
        begun, now, end = self._begun[done.request_id], self.version, len(done.token_ids)
        spans = (VersionSpan(begun, 0, 1), VersionSpan(now, 1, end))
        self.versions[done.request_id] = [begun] + [now] * (end - 1)
        return replace(done, spans=spans if begun != now else (VersionSpan(now, 0, end),))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return generate(self, requests, sampling)

    def sampled(self, name: str) -> tuple[int, ...]:
        """The ids of a request."""
        return next(ids for request, ids in self.log if request.request_id == name)

    def cancel(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        self._waiting = [(r, s) for r, s in self._waiting if r.request_id not in gone]
        super().cancel(gone)

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        assert all(tensor.isfinite().all() for _, tensor in tensors)
        waiting, self._waiting, self.version = self._waiting, [], version
        for request, sampling in waiting:
            super().submit([request], sampling)


def _row(name: str) -> int:
    """The row of the prompt of a sample or a request."""
    return int(name.split("@")[0].rsplit(":", 1)[1])


@pytest.fixture
def tool_model(tmp_path: Path) -> Any:
    """A tiny chat model with a template for tools, in a folder; its tokenizer."""
    tokenizer = chat_tokenizer("chatml")
    scratch = ScratchConfig(hidden_size=32, num_layers=1, max_position_embeddings=2048)
    model = load_causal_lm(ModelConfig(scratch=scratch))
    torch.manual_seed(0)  # the new embeddings are random
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tokenizer


def test_results_of_tools_are_not_trained_and_tokens_keep_their_versions(
    tmp_path: Path, tool_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's log is the record: exactly the logged ids are trained, with the versions under
    which they were sampled. Some samples get new weights within their second turn."""
    engine, made = ToolCaller(tool_model), []

    def batch_of(groups: Sequence[Group], ages: Any) -> Batch:
        made.append((groups, ages, groups_to_batch(groups, ages)))
        return made[-1][-1]

    monkeypatch.setattr("burnish.runtime.inline.make_rollout_engine", lambda *_, **__: engine)
    monkeypatch.setattr(steps_of_rl, "groups_to_batch", batch_of)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i % 7}="}) + "\n" for i in range(40)))
    tree = {
        "job": "rl",
        "run_dir": str(tmp_path / "run"),
        "max_steps": 5,
        "model": {"path": str(tmp_path / "model")},
        "data": {"sources": [str(prompts)], "prompt_max_len": 8},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 64,
                    "episodes": {"tools": [CALCULATE], "max_turns": 2, "max_tokens": 1024},
                    "asynchronous": {"max_staleness": 2, "run_ahead": 2},
                    "engine": {"own_weights": True}},
        "rewards": [{"kind": "function"}],
        "algorithm": {"correction": {}},
        "train": {"train_batch_size": 4, "lr": 1e-3},
    }  # fmt: skip
    burnish.run(burnish.load_config(tree), rewards=lambda prompt, response: len(response) % 2)
    assert len(made) == 5
    changed = 0
    for groups, ages, batch in made:
        samples = [sample for group in groups for sample in group.samples]
        assert len(samples) == batch.num_rows == 4
        for sample, begin, end in zip(samples, batch.offsets[:-1], batch.offsets[1:], strict=True):
            turns = [f"{sample.sample_id}/{turn}" for turn in (0, 1)]
            sampled = [t for name in turns for t in engine.sampled(name)]
            versions = [v for name in turns for v in engine.versions[name]]
            trained = batch.action_mask[begin:end]
            assert batch.tokens[begin:end][trained].tolist() == sampled
            assert batch.ages[begin:end][trained].tolist() == [ages[v] for v in versions]
            (row,) = sample.rows
            kept = zip(row.versions, row.action_mask, strict=True)
            assert [version for version, action in kept if action] == versions
            unread = batch.tokens[begin:end][~trained]
            total = 20 + _row(sample.sample_id)
            assert f"<tool_response>\n{total}\n" in tool_model.decode(unread)
            changed += len(set(versions)) > 1
    assert changed
    oldest = [line["rollout/age_max"] for line in read_metrics(tmp_path / "run")]
    assert len(oldest) == 5 and 1 <= max(oldest) <= 2
    assert oldest == [int(batch.ages.max()) for _, _, batch in made]
