"""Asynchronous runs in one process: a bound of 0 is the synchronous run in every bit, whatever the
latencies; larger bounds hold, and no prompt is lost through losses, evaluations and kills."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import burnish
from burnish.checkpoint.state import load_state
from burnish.config import load_config
from burnish.config.rollout import AsynchronousRollout
from burnish.driver.trainer import Trainer
from burnish.jobs import rl as loop
from burnish.jobs.evaluate import Evaluator
from burnish.models.cache_attention import least_rows
from burnish.observe.metrics import read_metrics
from burnish.observe.progress import time_phases
from burnish.observe.samples import read_samples
from burnish.rollout.base import Completion
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.runtime.base import WorkerLostError

ENVIRONMENT = str(Path(__file__).parents[2] / "recipes/environments/guess_number.py:GuessNumber")
REWARD = """
def even(responses):
    return [sum(c in "02468" for c in r) / 7 for r in responses]

def fails(responses):
    if any(r.count("1") > 1 for r in responses):
        raise RuntimeError("too many")
    return even(responses)
"""
KEYS = AsynchronousRollout.model_fields.keys()
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
        "kl": {"init_kl_coef": 0.1, "placement": "reward", "estimator": "k1",
               "adaptive": {"target": 0.05, "horizon": 200}},
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
    asynchronous = {key: rollout.pop(key) for key in KEYS & rollout.keys()}
    tree["rollout"] = {**tree["rollout"], **rollout}
    if asynchronous:
        tree["rollout"]["asynchronous"] = asynchronous
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
    the trained version have its log-probs, unless ``continue`` reads keys of older weights, which
    needs weights that arrive within a conversation: five runs fail if none of them has such."""
    own = {"max_staleness": 2, "oversample": 1.5, "in_flight": mode, **OWN}
    tree = {**EPISODES, "algorithm": {"correction": {}}, "max_steps": 8}
    for attempt in range(5):
        burnish.run(recipe(tmp_path, f"run{attempt}", tree, **own))
        lines = numbers(tmp_path / f"run{attempt}")
        ages = [line["rollout/age_max"] for line in lines]
        assert len(ages) == 8 and 1 <= max(ages) <= 2
        assert max(line["episodes/turns"] for line in lines) > 1
        kls = [
            (name, line[name]) for line in lines for name in line if name.endswith("behavior_kl")
        ]
        now = max(kl for name, kl in kls if name == "train/age_0_behavior_kl")
        assert max(kl for name, kl in kls if name != "train/age_0_behavior_kl") > 1e-4
        steps = trained_prompts(tmp_path / f"run{attempt}")
        assert len({name for ids in steps for name in ids}) == 4 * 8
        if mode != "continue":
            assert now < 1e-10  # half the square of an fp32 rounding error
            break
        if now > 1e-8:
            break
    else:
        pytest.fail("no run has log-probs from keys of older weights")


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[WorkerLostError]:
    """Losses from which runs recovered, at most one."""
    attach, found = Trainer.attach, list[WorkerLostError]()

    def recover(lost: WorkerLostError) -> None:
        found.append(lost)
        assert len(found) == 1, "the rollback found the same loss again"

    def recoverable(self: Trainer[Any], runtime: Any) -> None:
        attach(self, runtime)
        self.recover = recover

    monkeypatch.setattr(Trainer, "attach", recoverable)
    return found


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """If it is set, the engine's next poll raises a loss."""
    poll, now = LocalRolloutEngine.poll, threading.Event()

    def poll_or_lose(self: LocalRolloutEngine) -> list[Completion]:
        if now.is_set():
            now.clear()
            raise WorkerLostError("rank 0 of the policy died (during a weight transfer)")
        return poll(self)

    monkeypatch.setattr(LocalRolloutEngine, "poll", poll_or_lose)
    return now


def test_a_lost_rank_in_the_engine_thread_is_a_rollback(
    tmp_path: Path,
    random_latency: None,
    losses: list[WorkerLostError],
    dies: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In step 4 the engine's poll raises the loss of a worker, as a transfer of weights to a new
    rollout worker does if a rank of the policy dies. The run rolls back to step 2 once and trains
    each prompt once."""
    step_of_loop = loop.rl_step

    def rl_step(parts: Any, step: int) -> dict[str, float]:
        if step == 4 and not losses:
            dies.set()
        return step_of_loop(parts, step)

    monkeypatch.setattr(loop, "rl_step", rl_step)
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


def test_a_load_that_loses_a_rank_is_a_rollback_although_the_engine_then_fails_too(
    tmp_path: Path,
    random_latency: None,
    losses: list[WorkerLostError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests are open, so the next poll follows at once and finds an engine without weights. In a
    run none may be open at any load; five such runs fail."""
    load, poll = LocalRolloutEngine.load_weights, LocalRolloutEngine.poll
    failed, broken = threading.Event(), threading.Event()

    def load_or_lose(self: LocalRolloutEngine, version: int, *given: Any, **options: Any) -> None:
        broken.set()
        if version >= 3 and self.busy and not failed.is_set():
            failed.set()
            raise WorkerLostError("rank 0 of the policy died (during a weight transfer)")
        load(self, version, *given, **options)
        broken.clear()

    def poll_or_fail(self: LocalRolloutEngine) -> list[Completion]:
        if broken.is_set():
            raise RuntimeError("the engine has no valid weights")
        time.sleep(0.01)  # slower than training, so that requests are open at a load
        return poll(self)

    monkeypatch.setattr(LocalRolloutEngine, "load_weights", load_or_lose)
    monkeypatch.setattr(LocalRolloutEngine, "poll", poll_or_fail)
    tree = {**TEXT, **SMALL, "algorithm": {"correction": {}}, "max_steps": 10}
    for name in map("run{}".format, range(5)):
        burnish.run(recipe(tmp_path, name, tree, **OWN, max_staleness=2, rollout_batch_size=4))
        assert Counter(row for ids in trained_prompts(tmp_path / name) for row in ids) == {
            f"prompts:{i}@0": 1 for i in range(40)
        }
        if failed.is_set():
            break
    assert failed.is_set() and len(losses) == 1


def test_a_rank_lost_in_the_first_evaluation_is_a_rollback(
    tmp_path: Path,
    losses: list[WorkerLostError],
    dies: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no checkpoint yet. Sampling starts again with the initial weights."""
    evaluate = Evaluator.evaluate

    def lost_once(self: Evaluator, step: int) -> dict[str, float]:
        if not losses:
            dies.set()
        return evaluate(self, step)

    monkeypatch.setattr(Evaluator, "evaluate", lost_once)
    burnish.run(recipe(tmp_path, "run", TEXT, WITH_EVAL, {"max_steps": 2}, max_staleness=0))
    assert len(losses) == 1
    assert [len(ids) for ids in trained_prompts(tmp_path / "run")] == [5, 5]


def test_a_rank_lost_before_the_first_asynchronous_checkpoint_is_a_rollback(
    tmp_path: Path, losses: list[WorkerLostError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was resumed from a checkpoint of a synchronous one."""
    step_of_loop = loop.rl_step

    def rl_step(parts: Any, step: int) -> dict[str, float]:
        if step == 3 and not losses:
            parts.source.next(step)
            raise WorkerLostError("rank 0 of the policy died")
        return step_of_loop(parts, step)

    burnish.run(recipe(tmp_path, "run", TEXT, {"max_steps": 2}))
    monkeypatch.setattr(loop, "rl_step", rl_step)
    config = recipe(tmp_path, "run", TEXT, {"max_steps": 4}, max_staleness=0)
    burnish.run(config, resume=tmp_path / "run")
    assert len(losses) == 1
    assert [len(ids) for ids in trained_prompts(tmp_path / "run")] == [5] * 4
