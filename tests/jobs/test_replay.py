"""A replay trains from the recorded groups of a run and reaches its weights and metrics in every
bit; the log of groups accounts for every prompt. Both survive kills."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import burnish
from burnish.checkpoint import (
    capture_rng,
    load_state,
    read_manifest,
    save_state,
    write_manifest,
)
from burnish.cli import app
from burnish.config import load_config
from burnish.driver.checkpointing import Checkpointing, RunPosition
from burnish.driver.errors import RunError
from burnish.driver.records import (
    read_group_log,
    rollout_folders,
)
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples
from burnish.observe.timeline import Timeline
from burnish.user_calls import UserCalls

ENVIRONMENT = str(Path(__file__).parents[2] / "recipes/environments/guess_number.py:GuessNumber")
STEPS, SAVED_EVERY = 6, 2
TEXT: dict[str, Any] = {
    "model": {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}},
    "data": {"sources": ["PROMPTS"], "prompt_max_len": 8},
    "rollout": {"rollout_batch_size": 5, "n_samples_per_prompt": 3, "generate_max_len": 7},
    "train": {"train_batch_size": 5, "lr": 5e-3, "lr_scheduler": "linear"},
}
STALE = {
    "asynchronous": {"max_staleness": 3, "run_ahead": 1, "oversample": 1.4},
    "engine": {"own_weights": True},
}
PPO: dict[str, Any] = {
    **TEXT,
    "rollout": {**TEXT["rollout"], **STALE, "top_p": 0.9, "top_k": 6},  # kept ids are recorded
    "rewards": [{"kind": "function", "name": "even", "running_norm": "std"}],
    "algorithm": {
        "advantage": "gae",
        "kl": {"init_kl_coef": 0.1, "placement": "reward", "estimator": "k1",
               "adaptive": {"target": 0.05, "horizon": 200}},
        "correction": {"mode": "truncate"},
    },
    "ptx": {"data": {"sources": ["TEXTS"], "max_len": 12}, "ptx_coef": 0.2, "batch_size": 2},
    "eval": {"data": {"sources": ["PROMPTS"], "prompt_max_len": 8}, "num_prompts": 4},
}  # fmt: skip
FILTERED: dict[str, Any] = {
    **TEXT,
    "data": {**TEXT["data"], "held_out": 2},
    "model": {**TEXT["model"], "lora": {"lora_rank": 4}},
    "rollout": {**TEXT["rollout"], "dynamic_sampling": {"max_refills": 2, "above": 0.2}},
    "train": {**TEXT["train"], "epochs_per_rollout": 2},
    "algorithm": {"kl": {"init_kl_coef": 0.1, "estimator": "k3"}},
}
CORRECTED: dict[str, Any] = {"algorithm": {"correction": {"mode": "truncate"}}}
EPISODES: dict[str, Any] = {
    **TEXT,
    "model": {"scratch": {"alphabet": "1234567?<>", "hidden_size": 32, "num_layers": 1}},
    "data": {"sources": [{"kind": "seeds", "size": 50}], "prompt_max_len": 4},
    "rollout": {
        "rollout_batch_size": 5,
        "n_samples_per_prompt": 3,
        "generate_max_len": 3,
        "stop": list("1234567"),
        "top_k": 5,
        "sampling_mask": True,
        "episodes": {"environment": ENVIRONMENT, "max_turns": 3, "max_tokens": 32},
    },
    "rewards": [{"kind": "episode", "name": "found", "reward": "found"}],
}


class Killed(BaseException):
    """Ends a run as abruptly as a signal: it is not caught, and no state is saved."""


@pytest.fixture(autouse=True)
def _rewards_can_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Killed end the run as a signal does: calls of the user's code make an error of it."""
    monkeypatch.setattr(UserCalls, "run", lambda _, function, *arguments: function(*arguments))


def even(responses: Sequence[str]) -> list[float]:
    return [sum(c in "02468" for c in response) / 7 for response in responses]


@dataclass(frozen=True)
class Inputs:
    """Files that a run reads."""

    folder: Path

    def config(self, name: str, tree: Mapping[str, Any], *overrides: str) -> Any:
        prompts, texts = self.folder / "prompts.jsonl", self.folder / "texts.jsonl"
        texts.write_text("".join(json.dumps({"text": f"{i}+{i}={2 * i}"}) + "\n" for i in range(9)))
        prompts.write_text(
            "".join(json.dumps({"prompt": f"{i}+{i % 7}=", "label": i}) + "\n" for i in range(40))
        )
        common = {
            "job": "rl",
            "run_dir": str(self.folder / name),
            "max_steps": STEPS,
            "rewards": [{"kind": "function", "name": "even"}],
            "checkpoint": {"every_n_steps": SAVED_EVERY},
            "observe": {"record_rollouts": True},
        }
        text = json.dumps({**common, **tree})
        text = text.replace("PROMPTS", str(prompts)).replace("TEXTS", str(texts))
        return load_config(json.loads(text), overrides)

    def remove(self) -> None:
        (self.folder / "prompts.jsonl").unlink()


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path)


def dying_after(count: int) -> Callable[[Sequence[str]], list[float]]:
    """A reward that ends the run once it has scored that many responses."""
    scored = 0

    def reward(responses: Sequence[str]) -> list[float]:
        nonlocal scored
        scored += len(responses)
        if scored > count:
            raise Killed
        return even(responses)

    return reward


def numbers(folder: Path) -> list[dict[str, float]]:
    """Metrics of each step without times, memory, transfers and evaluations."""
    left_out = ("time", "memory", "sync", "eval")
    lines = [
        {
            name: value
            for name, value in line.items()
            if name.split("/")[0] not in left_out and not name.endswith("_per_s")
        }
        for line in read_metrics(folder)
    ]
    return [line for line in lines if line["step"] > 0]


def samples(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_samples(folder) if row["split"] == "train"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the models in the newest checkpoint, with the optimizer's."""
    newest = max((folder / "checkpoints").glob("step_*"))
    files = sorted(newest.glob("*/**/*.safetensors"))
    assert files
    return {f"{f.relative_to(newest)}/{n}": t for f in files for n, t in load_file(f).items()}


def check_equal(run: Path, replay: Path) -> None:
    assert numbers(replay) == numbers(run)
    assert samples(replay) == samples(run)
    expected, found = weights(run), weights(replay)
    assert expected.keys() == found.keys()
    assert all(torch.equal(t, found[name]) for name, t in expected.items())


@pytest.mark.parametrize(
    ("tree", "kill_at"),
    [
        (PPO, 75),
        (FILTERED, 75),
        ({**EPISODES, "rollout": {**EPISODES["rollout"], **STALE}, **CORRECTED}, None),
    ],
    ids=["asynchronous ppo, resumed", "dynamic sampling, resumed", "asynchronous episodes"],
)
def test_a_replay_reaches_the_weights_and_metrics_of_its_run(
    tree: dict[str, Any], kill_at: int | None, inputs: Inputs
) -> None:
    """The replay reads no prompt and calls no reward. It ends once after two steps, with the
    learning rates of all six, and is then resumed."""
    config = inputs.config("run", tree)
    given: dict[str, Any] = {} if tree["rollout"].get("episodes") else {"rewards": {"even": even}}
    if kill_at is not None:
        with pytest.raises(Killed):
            burnish.run(config, rewards={"even": dying_after(kill_at)})
        given["resume"] = config.run_dir
        assert list(Path(config.run_dir).glob("checkpoints/step_*")), "it was killed too early"
    run = burnish.run(config, **given).run_dir
    inputs.remove()

    saved = run / "config.yaml"
    part = load_config(saved, [f"run_dir={run}-replay", "max_steps=2"])
    replay = burnish.run(part, replay=run).run_dir
    assert numbers(replay) == numbers(run)[:2]
    burnish.run(load_config(saved, [f"run_dir={run}-replay"]), resume=replay)
    check_equal(run, replay)
    assert not rollout_folders(replay) and not read_group_log(replay)
    told = (replay / "run.log").read_text(encoding="utf-8")
    evaluates = "eval" in tree or "held_out" in tree["data"]
    assert told.count("eval is skipped") == 2 * evaluates, "once per process"


def test_the_log_of_an_asynchronous_run_accounts_for_every_prompt_through_a_kill(
    inputs: Inputs,
) -> None:
    """Prompt i of the stream is row i % 40 of epoch i // 40. All up to the newest one that was
    trained are in one line each: trained, with an age of at most 3, or lost."""
    tree = {**TEXT, **CORRECTED, "rollout": {**FILTERED["rollout"], **STALE}, "max_steps": 9}
    config = inputs.config("run", tree, "data.shuffle=false", "observe.record_rollouts=false")
    with pytest.raises(Killed):
        burnish.run(config, rewards={"even": dying_after(100)})
    run = burnish.run(config, resume=config.run_dir, rewards={"even": even}).run_dir
    lines = read_group_log(run)
    assert [line["step"] for line in lines] == list(range(1, 10))
    ages = [age for line in lines for age in line["trained"].values()]
    assert len(ages) == 9 * 5 and max(ages) <= 3 and any(ages)
    ids = [prompt for line in lines for part in ("trained", "lost") for prompt in line[part]]
    assert len(set(ids)) == len(ids)
    seen = int(read_metrics(run)[-1]["data/prompts_seen"])
    stream = [f"prompts:{i % 40}@{i // 40}" for i in range(seen)]
    assert set(ids) == set(stream)
    for line, at in zip(read_metrics(run)[-9:], lines, strict=True):
        assert line["rollout/groups_filtered"] == len(at["lost"])


# ---- errors --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    inputs = Inputs(tmp_path_factory.mktemp("recorded"))
    config = inputs.config("run", TEXT, "max_steps=3")
    return burnish.run(config, rewards={"even": even}).run_dir


def damage_nothing(run: Path) -> None:
    pass


def truncate(run: Path) -> None:
    file = run / "rollouts" / "step_000002" / "groups.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(run: Path) -> None:
    file = run / "rollouts" / "step_000002" / "groups.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def rename_job(run: Path) -> None:
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("job: rl", "job: sft"))


def copy_step(run: Path) -> None:
    shutil.rmtree(run / "rollouts/step_000002")
    shutil.copytree(run / "rollouts/step_000001", run / "rollouts/step_000002")


def forget_sizes(run: Path) -> None:
    write_manifest(run / "rollouts/step_000002", step=2, extra={"settings": ""})


def changed(**arrays: Any) -> Callable[[Path], None]:
    """Return a change of arrays of the samples of step 2, each by a function. The checksums are
    valid: a manifest does not prove that the model of the recipe sampled the tokens."""

    def change(run: Path) -> None:
        folder = run / "rollouts/step_000002"
        state = load_state(folder, "groups")
        for name, function in arrays.items():
            array = state["samples"][name].copy()
            state["samples"][name] = function(array) if callable(function) else array
            if not callable(function):
                state["samples"][name][function[0]] = function[1]
        facts = read_manifest(folder).extra
        save_state(folder, "groups", state)
        write_manifest(folder, step=2, extra=facts)

    return change


ROWS = r"step_000002/groups\.safetensors does not contain a rollout .*"
ERRORS: dict[str, tuple[Callable[[Path], object], Sequence[str], str]] = {
    "no run": (lambda run: (run / "config.yaml").unlink(), (), "not a run folder"),
    "another job": (rename_job, (), "a run of the job 'sft'"),
    "no recording": (
        lambda run: shutil.rmtree(run / "rollouts"), (), "observe.record_rollouts=true",
    ),
    "missing step": (
        lambda run: shutil.rmtree(run / "rollouts" / "step_000002"), (),
        r"step 2 is missing, although step 3 is there.*max_steps=1",
    ),
    "too few steps": (
        damage_nothing, ("max_steps=4",), "step 4 is missing, and max_steps=4.*max_steps=3",
    ),
    "truncated": (truncate, (), r"groups.safetensors has \d+ bytes, but .*max_steps=1"),
    "no manifest": (
        lambda run: (run / "rollouts/step_000001/manifest.json").unlink(), (), "Record the run",
    ),
    "rollout of another step": (
        copy_step, (), r"step_000002 contains the rollout of step 1.*max_steps=1",
    ),
    "no sizes": (
        forget_sizes, (), r"step_000002 does not contain rollout.rollout_batch_size.*max_steps=1",
    ),
    "changed byte": (flip, (), r"step_000002.*SHA-256 differs.*; To replay .* max_steps=1"),
    "id of no token": (changed(response_ids=(-1, 99)), (), ROWS + "row 14: .* 99, .*max_steps=1"),
    "huge id": (changed(prompt_ids=(0, 2**31 - 1)), (), ROWS + "row 0: the prompt .* 2147483647,"),
    "negative id": (changed(prompt_ids=(0, -1)), (), ROWS + "row 0: the prompt .* -1,"),
    "nothing sampled": (changed(action_mask=lambda mask: mask & False), (), ROWS + "no token of"),
    **{
        f"length of {name}": (changed(**{name: lambda array: array[:-1]}), (), ROWS)
        for name in ("prompt_ids", "response_ids", "logprobs", "action_mask", "versions",
                     "prompt_lens", "response_lens", "rows_per_sample")
    },
    "prompts per step": (
        damage_nothing, ("rollout.rollout_batch_size=10",),
        "rollout_batch_size=10, but step 1 was recorded with 5",
    ),
    "samples per prompt": (
        damage_nothing, ("rollout.n_samples_per_prompt=2", "train.train_batch_size=10"),
        "n_samples_per_prompt=2, but step 1 was recorded with 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_a_recording_that_does_not_fit_is_refused_before_models_are_loaded(
    name: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, overrides, message = ERRORS[name]
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    config = load_config(run / "config.yaml", [f"run_dir={tmp_path}/replay", *overrides])
    damage(run)
    monkeypatch.setattr(burnish.jobs.run, "load_tokenizer", lambda model: pytest.fail("loaded"))
    with pytest.raises(RunError, match=f"(?s)--replay {run}: .*{message}"):
        burnish.run(config, replay=run)
    assert not (tmp_path / "replay").exists()


def resumed_elsewhere(run: Path) -> Mapping[str, Any]:
    os.rename(run / "checkpoints/step_000003", run / "checkpoints/step_000004")
    return {}


SESSIONS: dict[str, tuple[Callable[[Path], Mapping[str, Any]], str]] = {
    "another step": (resumed_elsewhere, "ValueError: it was saved at step 3"),
    "negative step": (lambda run: {"step": -3}, "it was saved at step -3"),
    "huge step": (lambda run: {"step": 10**30}, "it was saved at step 1000"),
    "text as step": (lambda run: {"step": "3"}, "ValueError"),
    "list as step": (lambda run: {"step": [3]}, "TypeError"),
    "no metrics": (lambda run: {"last": 5}, "TypeError"),
    "text as metric": (lambda run: {"last": {"eval/loss": "x"}}, "not numbers"),
    "counters": (lambda run: {"stop_counters": {"x": 1}}, "TypeError"),
    "generators": (lambda run: {"rng": {}}, "KeyError"),
    "state of torch": (
        lambda run: {"rng": {**capture_rng(), "torch": torch.zeros(3)}}, "(Type|Runtime)Error",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SESSIONS)
def test_a_checkpoint_without_the_session_of_its_step_is_refused(
    name: str, recorded: Path, tmp_path: Path
) -> None:
    """Also with valid checksums: a manifest does not prove who wrote it."""
    change, message = SESSIONS[name]
    folder = tmp_path / "checkpoints/step_000003"
    shutil.copytree(recorded / "checkpoints" / folder.name, folder)
    more = change(tmp_path)
    folder = next(folder.parent.iterdir())
    save_state(folder, "session", {**load_state(folder, "session"), **more})
    write_manifest(folder, step=3, extra={})
    config, state = load_config(recorded / "config.yaml"), SimpleNamespace(load=lambda folder: None)
    checkpoints = Checkpointing(config, tmp_path, Timeline(), best_metric="reward/mean")
    with pytest.raises(RunError, match=rf"{folder} does not contain the session .*{message}"):
        checkpoints.restore(state, RunPosition())


def test_a_pipe_in_a_run_folder_is_not_opened(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match=r"metrics\.jsonl is a pipe"):
        burnish.run(load_config(tmp_path / "config.yaml"), resume=tmp_path)


def test_settings_that_a_resume_changed_are_reported(
    recorded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    changed = load_config(run / "config.yaml", [f"run_dir={run}", "max_steps=4", "train.lr=1e-4"])
    (run.parent / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    burnish.run(changed, resume=run, rewards={"even": even})
    burnish.run(load_config(run / "config.yaml", [f"run_dir={tmp_path}/replay"]), replay=run)
    assert "settings of that run changed before step 4" in caplog.text


def test_the_command_replays_into_a_folder_beside_the_run(recorded: Path, tmp_path: Path) -> None:
    """``--replay RUN`` alone suffices; its folder is resumed without the option. A run that samples
    cannot be resumed as a replay."""
    run = tmp_path / "it's a run"
    shutil.copytree(recorded, run)
    done = CliRunner().invoke(app, ["rl", "--replay", str(run), "max_steps=2"])
    assert done.exit_code == 0, done.output
    replay = Path(f"{run}-replay")
    assert str(replay) in done.output.replace("\n", "")
    assert numbers(replay) == numbers(run)[:2]
    done = CliRunner().invoke(app, ["rl", "--resume", str(replay), "max_steps=3"])
    assert done.exit_code == 0, done.output
    check_equal(run, replay)
    config = load_config(run / "config.yaml")
    with pytest.raises(RunError, match="cannot continue with those of --replay"):
        burnish.run(config, resume=run, replay=run)
    done = CliRunner().invoke(app, ["rl", "--replay", str(tmp_path / "nowhere")])
    assert "not a run folder" in str(done.exception) + done.output
