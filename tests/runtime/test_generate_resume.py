"""Batch inference that is stopped or disturbed goes on where it was, or says why it cannot."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from older_runs import save_with_older_keys
from safetensors.torch import save_file

import burnish
from burnish.config import JobConfig, load_config
from burnish.config.model import LoraConfig, ModelConfig
from burnish.driver.errors import RunError
from burnish.driver.rows_run import check_same_recipe, may_change
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.lora import ADAPTER_FILE, adapter_tensors, peft_config
from burnish.observe.metrics import read_metrics
from burnish.observe.public_recipe import write_recipe
from burnish.observe.samples import read_samples
from burnish.rewards.base import RewardError

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
RowsOf = Callable[..., list[dict[str, Any]]]


def _stopping(step: int, how: Callable[[], None]) -> Callable[..., list[float]]:
    """A batch reward that does something in its ``step``-th call."""
    calls = 0

    def score(responses: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == step:
            how()
        return [sum(c.isdigit() for c in r) / 4 for r in responses]

    return score


def _measured(run_dir: Path) -> list[dict[str, float]]:
    drop = ("time", "memory/")
    return [
        {k: v for k, v in line.items() if not k.startswith(drop) and not k.endswith("_per_s")}
        for line in read_metrics(run_dir)
    ]


@pytest.mark.parametrize(
    ("mode", "output"),
    [
        *((mode, "rows.jsonl") for mode in ("all", "best_of_n", "pairs", "conditioned")),
        ("pairs", "rows.parquet"),
    ],
)
def test_a_stopped_and_resumed_run_writes_the_bytes_of_one_that_went_through(
    mode: str, output: str, generate: MakeConfig, reward: Reward, modes: dict[str, list[str]]
) -> None:
    options = [*modes[mode], f"output='{{run_dir}}/{output}'"]
    whole = burnish.run(generate(*options, name="whole"), rewards=reward)
    stopped = generate(*options, name="stopped")
    with pytest.raises(burnish.Interrupted) as caught:
        asked = _stopping(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        burnish.run(stopped, rewards=asked)
    run_dir = caught.value.run_dir
    assert len(list((run_dir / "parts").iterdir())) == 3 and not (run_dir / output).exists()
    again = burnish.run(stopped, rewards=reward, resume=run_dir)
    assert (run_dir / output).read_bytes() == (whole.run_dir / output).read_bytes()
    assert _measured(run_dir) == _measured(whole.run_dir)
    assert read_samples(run_dir) == read_samples(whole.run_dir)
    totals = {k: v for k, v in whole.metrics.items() if k.startswith("total/")}
    assert totals == {k: v for k, v in again.metrics.items() if k.startswith("total/")}


class _Tomorrow(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.now(tz) + timedelta(days=1)


def test_a_run_keeps_the_date_of_its_start(
    generate: MakeConfig, reward: Reward, rows_of: RowsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3's template writes the date into every prompt."""
    template = "{{ strftime_now('%d') }}{{ messages[0].content }}"
    options = [f"model.chat_template={json.dumps(template)}", "data.apply_chat_template=true"]
    whole = burnish.run(generate(*options, name="whole"), rewards=reward)
    config, run_dir = _half_done(generate, *options)
    monkeypatch.setattr("burnish.templates.datetime", _Tomorrow)
    monkeypatch.setattr("burnish.driver.run_dir.datetime", _Tomorrow)
    burnish.run(config, rewards=reward, resume=run_dir)
    assert rows_of(run_dir) == rows_of(whole.run_dir)
    next_day = burnish.run(generate(*options, name="next"), rewards=reward)
    assert rows_of(next_day.run_dir) != rows_of(whole.run_dir)
    (run_dir / "date.txt").write_text("yesterday")
    with pytest.raises(RunError, match=r"date\.txt"):
        burnish.run(config, rewards=reward, resume=run_dir)


class _Crash(Exception):
    pass


def _crash() -> None:
    raise _Crash


def _half_done(generate: MakeConfig, *overrides: str, steps: int = 3) -> tuple[JobConfig, Path]:
    """A run that crashed in the step after ``steps``."""
    config = generate(*overrides, name="half")
    with pytest.raises(RewardError):
        burnish.run(config, rewards=_stopping(steps + 1, _crash))
    return config, Path(config.run_dir)


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "other"])
def test_a_damaged_part_and_those_after_it_are_done_again(
    damage: str, generate: MakeConfig, reward: Reward
) -> None:
    whole = burnish.run(generate(name="whole"), rewards=reward).run_dir
    config, run_dir = _half_done(generate)
    part = run_dir / "parts" / "part_000002.jsonl"
    data = part.read_bytes()
    damaged = {
        "torn": data[: len(data) // 2],
        "flipped": data[:-9] + b"x" + data[-8:],
        "other": (run_dir / "parts" / "part_000003.jsonl").read_bytes(),
    }
    part.unlink() if damage == "missing" else part.write_bytes(damaged[damage])
    (run_dir / "parts" / ".part_000004.jsonl.99999.tmp").write_bytes(b"left by a kill")
    burnish.run(config, rewards=reward, resume=run_dir)
    assert (run_dir / "generated.jsonl").read_bytes() == (whole / "generated.jsonl").read_bytes()
    assert _measured(run_dir) == _measured(whole)


def test_rewards_that_draw_random_numbers_draw_the_same_ones_again(
    generate: MakeConfig, rows_of: RowsOf
) -> None:
    import random

    def noisy(responses: list[str]) -> list[float]:
        return [random.random() for _ in responses]

    whole = burnish.run(generate(name="whole"), rewards=noisy).run_dir
    config, run_dir = _half_done(generate)
    shutil.rmtree(run_dir / "parts")  # those of another reward
    burnish.run(config, rewards=noisy, resume=run_dir)
    assert rows_of(run_dir) == rows_of(whole)


def test_a_finished_run_stays_as_it_is(generate: MakeConfig, reward: Reward) -> None:
    config = generate()
    first = burnish.run(config, rewards=reward)
    output = first.run_dir / "generated.jsonl"
    before = output.read_bytes(), output.stat().st_mtime_ns
    again = burnish.run(config, rewards=_stopping(1, _crash), resume=first.run_dir)
    assert (output.read_bytes(), output.stat().st_mtime_ns) == before
    assert again.metrics["total/rows"] == 88
    state, saved = first.run_dir / "generate.json", (first.run_dir / "generate.json").read_text()
    for damage in ({"output": None}, {"finished": 5}, {"finished": {"rows": "88"}}):
        state.write_text(json.dumps(json.loads(saved) | damage))
        with pytest.raises(RunError, match=r"generate\.json does not contain"):
            burnish.run(config, rewards=reward, resume=first.run_dir)
    state.write_text(saved)
    output.unlink()
    with pytest.raises(RunError, match=r"its output .* no longer exists"):
        burnish.run(config, rewards=reward, resume=first.run_dir)


def test_a_run_killed_between_its_output_and_its_end_finishes(
    generate: MakeConfig, reward: Reward
) -> None:
    whole = burnish.run(generate(name="whole"), rewards=reward).run_dir / "generated.jsonl"
    config, run_dir = _half_done(generate)
    shutil.copy(whole, run_dir / "generated.jsonl")
    burnish.run(config, rewards=reward, resume=run_dir)
    assert (run_dir / "generated.jsonl").read_bytes() == whole.read_bytes()


def test_a_foreign_output_is_never_written_over_and_nothing_is_lost(
    generate: MakeConfig, reward: Reward, tmp_path: Path, rows_of: RowsOf
) -> None:
    config, run_dir = _half_done(generate)
    (run_dir / "generated.jsonl").write_text("mine\n")
    with pytest.raises(RunError, match=r"created by another process.*All completed steps are kept"):
        burnish.run(config, rewards=reward, resume=run_dir)
    assert (run_dir / "generated.jsonl").read_text() == "mine\n"
    elsewhere = config.model_copy(update={"output": str(tmp_path / "new" / "rows.jsonl")})
    burnish.run(elsewhere, rewards=_stopping(1, _crash), resume=run_dir)
    assert len(rows_of(tmp_path / "new", "rows.jsonl")) == 88, "no step was done again"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("seed=1", "seed: was 0, now 1"),
        ("rollout.temperature=0.5", r"rollout.temperature: was 1.0, now 0.5"),
        ("mode=best_of_n", "mode.kind: was 'all', now 'best_of_n'"),
        ("num_prompts=3", "num_prompts: was None, now 3"),
        ("rewards.0.weight=2", "rewards.0.weight: was 1.0, now 2.0"),
    ],
)
def test_a_resumed_run_keeps_to_its_recipe(
    changed: str, told: str, generate: MakeConfig, reward: Reward
) -> None:
    _, run_dir = _half_done(generate)
    with pytest.raises(RunError, match=told):
        burnish.run(generate(changed, name="half"), rewards=reward, resume=run_dir)


def test_a_run_of_an_earlier_version_has_the_same_recipe(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "response": "2", "label": "2"}\n')
    tree = {
        "job": "score",
        "model": {"scratch": {}},
        "run_dir": str(tmp_path),
        "output": str(tmp_path / "scored.jsonl"),
        "data": {"sources": [str(rows)]},
        "rewards": [{"kind": "math"}],
    }
    config = load_config(tree)
    write_recipe(config, tmp_path)
    save_with_older_keys(tmp_path)
    assert "overlong_penalty" in (tmp_path / "config.yaml").read_text()
    check_same_recipe(config, tmp_path)
    with pytest.raises(RunError, match="reward_clip"):
        check_same_recipe(load_config(tree, ["shaping.reward_clip=1"]), tmp_path)


def test_a_resumed_run_may_use_a_smaller_engine(
    generate: MakeConfig, reward: Reward, rows_of: RowsOf
) -> None:
    _, run_dir = _half_done(generate)
    smaller = generate("rollout.engine.max_batch_size=3", "observe.samples_per_step=1", name="half")
    burnish.run(smaller, rewards=reward, resume=run_dir)
    assert len(rows_of(run_dir)) == 88


def test_a_run_that_a_reward_ended_goes_on_with_what_the_error_advises(
    generate: MakeConfig, reward: Reward, rows_of: RowsOf
) -> None:
    _, run_dir = _half_done(generate)
    advised = ("on_reward_failure.then=drop_group", "on_reward_failure.retries=2")
    burnish.run(generate(*advised, name="half"), rewards=reward, resume=run_dir)
    assert len(rows_of(run_dir)) == 88


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("rewards.0.urls.1", True),
        ("rewards.1.read_timeout_s", True),
        ("on_reward_failure.score", True),
        ("rewards.0.weight", False),
        ("rewards.0.timeout_s", False),  # of math: decides what counts as wrong
        ("rewards", False),
        ("rewards.0.urlsx", False),
    ],
)
def test_how_rewards_are_asked_may_change_and_what_they_say_may_not(key: str, may: bool) -> None:
    assert may_change(key) is may


@pytest.mark.parametrize(
    ("then", "now"),
    [("+1=", "+2="), ('"label": "7"', '"label": "8"'), ('"level": 0', '"level": 9')],
)
def test_data_that_changed_under_a_run_is_refused(
    generate: MakeConfig, reward: Reward, then: str, now: str
) -> None:
    config, run_dir = _half_done(generate)
    source = Path(config.data.sources[0].path)  # type: ignore[union-attr]
    told = source.read_text()
    source.write_text(told.replace(then, now))
    assert source.read_text() != told
    with pytest.raises(RunError, match="different ones; rows would be repeated"):
        burnish.run(config, rewards=reward, resume=run_dir)


def _write_adapter(model: ModelConfig, folder: Path, seed: int) -> None:
    """Write an adapter with random weights, of the same names and sizes for every seed."""
    adapted = load_causal_lm(model.model_copy(update={"lora": LoraConfig(lora_rank=2)}))
    torch.manual_seed(seed)
    peft_config(LoraConfig(lora_rank=2), adapted).save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{n}": torch.randn_like(t) for n, t in adapter_tensors(adapted).items()
    }
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("part", ["base", "adapter"])
def test_weights_that_changed_under_a_run_are_refused(
    generate: MakeConfig, reward: Reward, tmp_path: Path, rows_of: RowsOf, part: str
) -> None:
    plain, base, adapter = generate().model, tmp_path / "model", tmp_path / "adapter"

    def write_base(seed: int) -> None:
        scratch = plain.scratch.model_copy(update={"seed": seed})  # type: ignore[union-attr]
        model = plain.model_copy(update={"scratch": scratch})
        load_causal_lm(model, dtype="fp32", device="cpu").save_pretrained(base)
        load_tokenizer(model).save_pretrained(base)

    def write(seed: int) -> None:
        if part == "base":
            write_base(seed)
        else:
            _write_adapter(plain, adapter, seed)

    write_base(0)
    _write_adapter(plain, adapter, 0)
    lora = f", lora: {{path: '{adapter}'}}" if part == "adapter" else ""
    config, run_dir = _half_done(generate, f"model={{path: '{base}'{lora}}}")
    write(1)
    with pytest.raises(RunError, match="started with other weights"):
        burnish.run(config, rewards=reward, resume=run_dir)
    write(0)
    burnish.run(config, rewards=reward, resume=run_dir)
    assert len(rows_of(run_dir)) == 88


def test_rows_that_fit_no_parquet_are_kept_and_go_to_json_lines(
    generate: MakeConfig,
    reward: Reward,
    write_rows: Callable[..., str],
    tmp_path: Path,
    chat_template: str,
    rows_of: RowsOf,
) -> None:
    """A field of a message that is text in one row and a list in another."""
    rows = [{"prompt": [{"role": "user", "content": "1", "tag": tag}]} for tag in ("a", ["a"])]
    config = generate(
        f"data.sources=[{write_rows('two', rows)}]",
        f"model.chat_template={json.dumps(chat_template)}",
        "output='{run_dir}/rows.parquet'",
    )
    with pytest.raises(RunError, match=r"cannot be written as Parquet: .*'prompt'.*--resume"):
        burnish.run(config, rewards=reward)
    lines = config.model_copy(update={"output": str(tmp_path / "rows.jsonl")})
    burnish.run(lines, rewards=_stopping(1, _crash), resume=config.run_dir)
    assert len(rows_of(tmp_path, "rows.jsonl")) == 8
