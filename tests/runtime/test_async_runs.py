"""Asynchronous runs in one process: a bound of 0 is the synchronous run in every bit, whatever the
latencies; larger bounds hold, and no prompt is lost through losses, evaluations and kills."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_families import chat_tokenizer
from safetensors.torch import load_file
from scripted_engine import ScriptedEngine
from torch import Tensor

import burnish
from burnish.batches import groups_to_batch
from burnish.checkpoint.state import load_state
from burnish.config import load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.jobs import rl as steps_of_rl
from burnish.jobs import rl_job as loop
from burnish.jobs.evaluate import Evaluator
from burnish.jobs.trainer import Trainer
from burnish.models.cache_attention import least_rows
from burnish.models.load import load_causal_lm
from burnish.observe.metrics import read_metrics
from burnish.observe.progress import time_phases
from burnish.observe.samples import read_samples
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan
from burnish.rollout.generation import generate
from burnish.rollout.local import LocalRolloutEngine
from burnish.runtime.base import WorkerLostError
from burnish.types import Batch, Group

ENVIRONMENT = str(Path(__file__).parents[2] / "recipes/environments/guess_number.py:GuessNumber")
CALCULATE = str(Path(__file__).parents[2] / "recipes/tools/calculator.py:calculate")
REWARD = """
def even(responses):
    return [sum(c in "02468" for c in r) / 7 for r in responses]

def fails(responses):
    if any(r.count("1") > 1 for r in responses):
        raise RuntimeError("too many")
    return even(responses)
"""
ROLLOUT = {"rollout_batch_size": 5, "n_samples_per_prompt": 3, "generate_max_len": 7}
OWN = {"engine": {"own_weights": True}}
TEXT: dict[str, Any] = {
    "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
    "rollout": ROLLOUT,
    "train": {"train_batch_size": 15, "lr": 5e-3},
}
SMALL = {"train": {"train_batch_size": 12, "lr": 5e-3}}
PPO: dict[str, Any] = {
    **TEXT,
    "rewards": [{"kind": "function", "name": "r", "function": "REWARD:even",
                 "running_norm": "std"}],
    "algorithm": {
        "advantage": "gae",
        "kl": {"init_kl_coef": 0.1, "placement": "reward", "estimator": "k1", "kl_target": 0.05,
               "kl_horizon": 200},
    },
    "train": {"train_batch_size": 5, "epochs_per_rollout": 2, "lr": 5e-3},
}  # fmt: skip
DROPPED: dict[str, Any] = {
    **TEXT,
    "rewards": [{"kind": "function", "function": "REWARD:fails"}],
    "on_reward_failure": {"then": "drop_group"},
}
EPISODES: dict[str, Any] = {
    **TEXT,
    "model": {"scratch": {"alphabet": "1234567?<>", "hidden_size": 32, "num_layers": 1}},
    "data": {"sources": [{"kind": "seeds", "size": 50}], "prompt_max_len": 4},
    "rollout": {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 3,
        "generate_max_len": 3,
        "stop": list("1234567"),
        "episodes": {"environment": ENVIRONMENT, "max_turns": 3, "max_tokens": 32},
    },
    "rewards": [{"kind": "episode", "name": "found", "reward": "found"}],
    "train": {"train_batch_size": 12, "lr": 5e-3},
}
FILTERED = {"rollout": {**ROLLOUT, "dynamic_sampling": {"max_refills": 2, "above": 0.2}}}
WITH_EVAL = {
    "eval": {"data": {"sources": ["PROMPTS"], "prompt_max_len": 8}, "every_n_steps": 2,
             "num_prompts": 6, "temperature": 1.0},
}  # fmt: skip


class Killed(BaseException):
    """Ends a run as abruptly as a signal: it is not caught, and no state is saved."""


def recipe(folder: Path, name: str, *trees: dict[str, Any], **rollout: Any) -> Any:
    """A recipe of 5 steps with a checkpoint after every second one. ``rollout``: more keys of that
    node."""
    (folder / "rewards.py").write_text(REWARD)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i % 7}="}) + "\n" for i in range(40)))
    tree: dict[str, Any] = {
        "job": "rl",
        "run_dir": str(folder / name),
        "max_steps": 5,
        "data": {"sources": [str(prompts)], "prompt_max_len": 8},
        "rewards": [{"kind": "function", "function": "REWARD:even"}],
        "checkpoint": {"every_n_steps": 2},
    }
    for other in trees:
        tree |= other
    tree["rollout"] = {**tree["rollout"], **rollout}
    text = json.dumps(tree).replace("REWARD", str(folder / "rewards.py"))
    return load_config(json.loads(text.replace("PROMPTS", str(prompts))))


@pytest.fixture
def random_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions of the local engine arrive late and in a random order."""
    engine, draw = LocalRolloutEngine, random.Random(0)
    poll, busy, cancel = engine.poll, engine.busy, engine.cancel
    late: dict[int, list[Completion]] = {}

    def late_poll(self: LocalRolloutEngine) -> list[Completion]:
        waiting = late.get(id(self), []) + poll(self)
        now = [c for c in waiting if draw.random() < 0.2]
        late[id(self)] = [c for c in waiting if c not in now]
        return now

    def late_cancel(self: LocalRolloutEngine, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        late[id(self)] = [c for c in late.get(id(self), []) if c.request_id not in gone]
        cancel(self, gone)

    is_busy = property(lambda self: bool(late.get(id(self))) or busy.fget(self))
    monkeypatch.setattr(engine, "poll", late_poll)
    monkeypatch.setattr(engine, "cancel", late_cancel)
    monkeypatch.setattr(engine, "busy", is_busy)


def numbers(folder: Path) -> list[dict[str, float]]:
    """Metrics of a run without times, memory and transfers."""
    left_out = ("time", "memory", "sync")
    times = ("_s", "seconds", "environment_frac")
    return [
        {
            name: value
            for name, value in line.items()
            if name.split("/")[0] not in left_out and not name.endswith(times)
        }
        for line in read_metrics(folder)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of the policy, and of the critic, in the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step_*"))
    files = sorted(newest.glob("*/*.safetensors"))
    assert files
    return {f"{f.parent.name}/{n}": t for f in files for n, t in load_file(f).items()}


def trained_prompts(folder: Path) -> list[list[str]]:
    """Prompt ids of each step, without those of evaluations."""
    found: dict[int, list[str]] = {}
    for sample in read_samples(folder):
        if sample["split"] == "train":
            found.setdefault(sample["step"], []).append(sample["prompt_id"])
    return [list(dict.fromkeys(ids)) for _, ids in sorted(found.items())]


def check_equal(one: Path, other: Path) -> None:
    expected, found = numbers(one), numbers(other)
    assert len(expected) == len(found) >= 5
    for a, b in zip(expected, found, strict=True):
        assert {name: b.get(name) for name in a} == a
        assert {name for name in b if name not in a} <= {n for n in b if "age_" in n}
    assert trained_prompts(one) == trained_prompts(other)
    expected_weights, found_weights = weights(one), weights(other)
    assert expected_weights.keys() == found_weights.keys()
    assert all(torch.equal(t, found_weights[name]) for name, t in expected_weights.items())


@pytest.mark.skipif(least_rows(1) is None, reason="decoding on this CPU depends on the batch")
@pytest.mark.parametrize(
    "tree",
    [TEXT, PPO, DROPPED, EPISODES, {**TEXT, **FILTERED}, {**TEXT, **WITH_EVAL}],
    ids=["grpo", "ppo", "failing rewards", "episodes", "dynamic sampling", "evaluation"],
)
def test_a_bound_of_zero_is_the_synchronous_run(
    tree: dict[str, Any], tmp_path: Path, random_latency: None
) -> None:
    """Bit-equal metrics, prompts and weights; also a run that resumes after its second step."""
    burnish.run(recipe(tmp_path, "sync", tree))
    burnish.run(recipe(tmp_path, "async", tree, max_staleness=0))
    check_equal(tmp_path / "sync", tmp_path / "async")
    burnish.run(recipe(tmp_path, "resumed", tree, {"max_steps": 2}, max_staleness=0))
    burnish.run(recipe(tmp_path, "resumed", tree, max_staleness=0), resume=tmp_path / "resumed")
    check_equal(tmp_path / "sync", tmp_path / "resumed")


def bounded(name: str, stale: int, **rollout: Any) -> Any:
    return pytest.param(stale, rollout, id=name)


@pytest.mark.parametrize(
    ("stale", "rollout"),
    [
        bounded("1", 1, **OWN),
        bounded("4, two ahead", 4, run_ahead=2, **OWN),
        bounded("oversampling", 2, oversample=1.6, in_flight="finish", **OWN),
        bounded("old cache", 3, run_ahead=3, in_flight="continue", **OWN),
        bounded("partial", 2, run_ahead=0, oversample=1.6, partial=True),
        bounded("partial, old cache", 2, oversample=1.6, partial=True, in_flight="continue"),
    ],
)
def test_larger_bounds_hold_and_every_prompt_is_trained_once(
    stale: int,
    rollout: dict[str, Any],
    tmp_path: Path,
    random_latency: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run over one epoch is killed twice and resumes, with groups that were finished and not
    trained in its checkpoints."""
    step_of_loop, kills = loop.rl_step, {4, 7}

    def rl_step(parts: Any, step: int) -> dict[str, float]:
        if step in kills:
            kills.remove(step)
            raise Killed
        return step_of_loop(parts, step)

    monkeypatch.setattr(loop, "rl_step", rl_step)
    tree = {**TEXT, **SMALL, "algorithm": {"correction": {}}, **WITH_EVAL, "max_steps": 10}
    tree["eval"] = {
        **tree["eval"],
        "training_groups": random.Random(stale).choice(["continue", "wait"]),
    }
    config = recipe(tmp_path, "run", tree, **rollout, max_staleness=stale, rollout_batch_size=4)
    folder = tmp_path / "run"
    unused = 0
    while True:
        try:
            burnish.run(config, resume=folder if folder.exists() else None)
            break
        except Killed:
            newest = max((folder / "checkpoints").glob("step_*"))
            unused += len(load_state(newest, "rl")["rollouts"]["results"])
    assert unused
    ages = [line["rollout/age_max"] for line in numbers(folder) if "rollout/age_max" in line]
    assert len(ages) == 10 and 1 <= max(ages) <= stale
    lines = [line for line in read_metrics(folder) if line["step"]]
    assert {"time/sampler/rollout_s", "time/scoring/reward_s"} <= {
        n for line in lines for n in line
    }
    for line in lines:
        trainer = time_phases(line)
        trainer.pop("checkpoint", None)  # of the step before
        assert {"wait", "train"} <= set(trainer) and not {"rollout", "reward"} & set(trainer)
        assert sum(trainer.values()) <= line["time/step_s"]
        assert line["time/trainer_idle_frac"] == trainer["wait"] / line["time/step_s"]
        assert 0 <= line["time/rollout_idle_frac"] <= 1
    steps = trained_prompts(folder)
    assert [len(ids) for ids in steps] == [4] * 10
    assert Counter(name for ids in steps for name in ids) == {
        f"prompts:{i}@0": 1 for i in range(40)
    }


@pytest.mark.parametrize("mode", ["recompute", "finish", "continue"])
def test_episodes_continue_under_newer_weights(
    mode: str, tmp_path: Path, random_latency: None
) -> None:
    """Weights arrive between and within the turns of conversations whose cache is kept. Tokens of
    the trained version have its log-probs, unless ``continue`` reads keys of older weights."""
    own = {"max_staleness": 2, "oversample": 1.5, "in_flight": mode, **OWN}
    tree = {**EPISODES, "algorithm": {"correction": {}}, "max_steps": 8}
    burnish.run(recipe(tmp_path, "run", tree, **own))
    lines = numbers(tmp_path / "run")
    ages = [line["rollout/age_max"] for line in lines]
    assert len(ages) == 8 and 1 <= max(ages) <= 2
    assert max(line["episodes/turns"] for line in lines) > 1
    kls = [(name, line[name]) for line in lines for name in line if name.endswith("behavior_kl")]
    now = [kl for name, kl in kls if name == "train/age_0_behavior_kl"]
    assert max(kl for name, kl in kls if name != "train/age_0_behavior_kl") > 1e-4
    if mode == "continue":
        assert max(now) > 1e-8  # otherwise no weights arrived within a conversation
    else:
        assert max(now) < 1e-10  # half the square of an fp32 rounding error
    steps = trained_prompts(tmp_path / "run")
    assert len({name for ids in steps for name in ids}) == 4 * 8


def test_a_lost_rank_in_the_engine_thread_is_a_rollback(
    tmp_path: Path, random_latency: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 4 the engine's poll raises the loss of a worker, as a transfer of weights to a new
    rollout worker does if a rank of the policy dies. The run rolls back to step 2 once and trains
    each prompt once."""
    step_of_loop, attach, poll = loop.rl_step, Trainer.attach, LocalRolloutEngine.poll
    losses: list[WorkerLostError] = []
    dies = threading.Event()

    def rl_step(parts: Any, step: int) -> dict[str, float]:
        if step == 4 and not losses:
            dies.set()
        return step_of_loop(parts, step)

    def poll_or_lose(self: LocalRolloutEngine) -> list[Completion]:
        if dies.is_set():
            dies.clear()
            raise WorkerLostError("rank 0 of the policy died (during a weight transfer)")
        return poll(self)

    def recover(lost: WorkerLostError) -> None:
        losses.append(lost)
        assert len(losses) == 1, "the rollback found the same loss again"

    def recoverable(self: Trainer[Any], runtime: Any) -> None:
        attach(self, runtime)
        self.recover = recover

    monkeypatch.setattr(loop, "rl_step", rl_step)
    monkeypatch.setattr(LocalRolloutEngine, "poll", poll_or_lose)
    monkeypatch.setattr(Trainer, "attach", recoverable)
    tree = {**TEXT, **SMALL, "algorithm": {"correction": {}}, "max_steps": 10}
    burnish.run(recipe(tmp_path, "run", tree, **OWN, max_staleness=2, rollout_batch_size=4))
    assert len(losses) == 1
    steps = trained_prompts(tmp_path / "run")
    assert [len(ids) for ids in steps] == [4] * 10
    assert Counter(name for ids in steps for name in ids) == {
        f"prompts:{i}@0": 1 for i in range(40)
    }
    text = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert "resumed from" in text and "at step 2 of 10" in text


@pytest.mark.parametrize("at", ["evaluation 0", "first step after a synchronous run"])
def test_a_rank_lost_before_the_first_asynchronous_checkpoint_is_a_rollback(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling starts again with the weights from before, once."""
    step_of_loop, attach, poll = loop.rl_step, Trainer.attach, LocalRolloutEngine.poll
    evaluate = Evaluator.evaluate
    losses: list[WorkerLostError] = []
    dies = [at]
    evaluating = threading.Event()

    def evaluate_0(self: Evaluator, step: int) -> dict[str, float]:
        evaluating.set()
        return evaluate(self, step)

    def rl_step(parts: Any, step: int) -> dict[str, float]:
        if dies == ["first step after a synchronous run"]:
            dies.clear()
            parts.source.next(step)
            raise WorkerLostError("rank 0 of the policy died")
        return step_of_loop(parts, step)

    def poll_or_lose(self: LocalRolloutEngine) -> list[Completion]:
        if dies == ["evaluation 0"] and evaluating.is_set():
            dies.clear()
            raise WorkerLostError("rank 0 of the policy died (during a weight transfer)")
        return poll(self)

    def recover(lost: WorkerLostError) -> None:
        losses.append(lost)
        assert len(losses) == 1, "the rollback found the same loss again"

    def recoverable(self: Trainer[Any], runtime: Any) -> None:
        attach(self, runtime)
        self.recover = recover

    tree, resume = {**TEXT, **WITH_EVAL, "max_steps": 2}, None
    if at != "evaluation 0":
        burnish.run(recipe(tmp_path, "run", tree))
        tree, resume = {**tree, "max_steps": 4}, tmp_path / "run"
    monkeypatch.setattr(loop, "rl_step", rl_step)
    monkeypatch.setattr(Evaluator, "evaluate", evaluate_0)
    monkeypatch.setattr(LocalRolloutEngine, "poll", poll_or_lose)
    monkeypatch.setattr(Trainer, "attach", recoverable)
    burnish.run(recipe(tmp_path, "run", tree, max_staleness=0), resume=resume)
    assert len(losses) == 1 and not dies
    assert [len(ids) for ids in trained_prompts(tmp_path / "run")] == [5] * tree["max_steps"]


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

    monkeypatch.setattr("burnish.runtime.inline.make_local_engine", lambda *_, **__: engine)
    monkeypatch.setattr(steps_of_rl, "groups_to_batch", batch_of)
    tree = {
        "model": {"path": str(tmp_path / "model")},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 64,
                    "episodes": {"tools": [CALCULATE], "max_turns": 2, "max_tokens": 1024}},
        "rewards": [{"kind": "function", "function": "REWARD:even"}],
        "algorithm": {"correction": {}},
        "train": {"train_batch_size": 4, "lr": 1e-3},
    }  # fmt: skip
    burnish.run(recipe(tmp_path, "run", tree, max_staleness=2, run_ahead=2, **OWN))
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
    oldest = [line["rollout/age_max"] for line in numbers(tmp_path / "run")]
    assert len(oldest) == 5 and 1 <= max(oldest) <= 2
    assert oldest == [int(batch.ages.max()) for _, _, batch in made]
