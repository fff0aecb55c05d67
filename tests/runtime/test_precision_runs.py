"""Whole runs in fp16 and bf16: what is measured and drawn, what stops a run, and what is left of
it."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import burnish
from burnish.checkpoint.errors import CheckpointError
from burnish.cli import app
from burnish.config import JobConfig, dump_yaml
from burnish.driver.errors import StoppedError
from burnish.observe.metrics import read_metrics
from burnish.rollout.base import SamplingError

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
# large enough for trainer and sampler, which add up in other orders, to round differently
LIVELY = [
    "max_steps=4",
    "train.lr=1e-2",
    "model.scratch.hidden_size=64",
    "model.scratch.num_layers=3",
    "rollout.generate_max_len=24",
]


def _newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step_*"))


def test_fp16_rl_runs_end_to_end_and_everything_is_measured(
    rl: MakeConfig, reward: Reward, evaluation: list[str]
) -> None:
    config = rl("precision.dtype=fp16", *LIVELY, *evaluation)
    result = burnish.run(config, rewards=reward)
    lines = [line for line in read_metrics(result.run_dir) if line["step"] > 0]
    for line in lines:
        assert line["train/loss_scale"] == 65536.0
        assert line["train/overflows"] == line["train/skipped_steps"] == 0.0
        assert line["train/skipped_total"] == 0.0 and line["train/loss_spike"] == 0.0
        assert line["train/mismatch_abs"] < line["train/mismatch_max"] < 0.05
        assert math.isfinite(line["train/mismatch_k3"])
    masters = load_file(_newest(result.run_dir) / "policy" / "master.safetensors")
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert any(not torch.equal(v, v.half().float()) for v in masters.values())
    page = (result.run_dir / "report.html").read_text(encoding="utf-8")
    for title in ("Loss scale", "Skipped steps", "Trainer vs. sampler"):
        assert title in page


def test_the_gap_between_trainer_and_sampler_is_smaller_in_fp16_than_in_bf16(
    rl: MakeConfig, reward: Reward
) -> None:
    """Same model, same seeds; 11 bits against 8, so about 8 times."""
    gaps = {}
    for dtype in ("bf16", "fp16"):
        config = rl(f"precision.dtype={dtype}", *LIVELY, f"run_dir={rl().run_dir}-{dtype}")
        lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
        gaps[dtype] = sum(line["train/mismatch_abs"] for line in lines) / len(lines)
    assert 0 < gaps["fp16"] < gaps["bf16"] / 3


@pytest.mark.parametrize("advantage", ["critic", "lora"])
def test_fp16_trains_a_critic_and_adapters(advantage: str, rl: MakeConfig, reward: Reward) -> None:
    options = {
        "critic": [
            "algorithm.advantage=gae",
            "algorithm.kl.init_kl_coef=0.1",
            "rollout.n_samples_per_prompt=1",
            "rollout.rollout_batch_size=16",
        ],
        "lora": ["model.lora.lora_rank=4", "algorithm.kl.init_kl_coef=0.1"],
    }[advantage]
    lines = read_metrics(
        burnish.run(
            rl("precision.dtype=fp16", *LIVELY, "max_steps=8", *options), rewards=reward
        ).run_dir
    )
    assert any(line["train/skipped_steps"] == 0 for line in lines)
    for line in lines:  # the first losses may overflow at a scale of 65536
        assert (line["train/grad_norm"] > 0) == (line["train/skipped_steps"] == 0)
    if advantage == "critic":
        assert all("critic/loss_scale" in line for line in lines)
        assert 1 <= sum(line["critic/skipped_steps"] for line in lines) < 8, "its scale came down"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("job", ["sft", "rm"])
def test_supervised_jobs_run_in_half_precision(
    job: str, dtype: str, supervised: Callable[..., JobConfig]
) -> None:
    result = burnish.run(supervised(job, f"precision.dtype={dtype}", "train.lr=1e-2"))
    losses = [line["train/loss"] for line in read_metrics(result.run_dir)]
    assert losses[-1] < losses[0]
    assert ("train/loss_scale" in result.metrics) == (dtype == "fp16")


def test_a_run_whose_scale_is_far_too_high_finds_it(rl: MakeConfig, reward: Reward) -> None:
    config = rl("precision.dtype=fp16", "precision.fp16.initial_scale_power=40", "max_steps=30")
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    skipped = [line["train/skipped_steps"] for line in lines]
    assert 3 < sum(skipped) < 29 and skipped[-1] == 0
    assert lines[-1]["train/skipped_total"] == sum(skipped)
    assert lines[-1]["train/loss_scale"] < 2.0**40


def test_a_loss_scale_that_grows_trains_as_one_that_stays(
    supervised: Callable[..., JobConfig],
) -> None:
    """8 steps: the scale doubles after 3 clean steps and after every 2 more. Both scales are powers
    of two, so only gradients that are subnormal in fp16 are rounded differently."""
    grows = ["fp16.initial_scale_power=10", "fp16.loss_scale_window=2"]
    lines, masters = {}, {}
    for name, options in (("grows", grows), ("stays", ["fp16.loss_scale=1024"])):
        precision = [f"precision.{option}" for option in ("dtype=fp16", *options)]
        config = supervised("sft", *precision, f"run_dir={supervised('sft').run_dir}-{name}")
        run_dir = burnish.run(config).run_dir
        lines[name] = read_metrics(run_dir)
        masters[name] = load_file(_newest(run_dir) / "policy" / "master.safetensors")
    powers = [math.log2(line["train/loss_scale"]) for line in lines["grows"]]
    assert powers == [10, 10, 10, 11, 11, 12, 12, 13]
    for grown, stayed in zip(lines["grows"], lines["stays"], strict=True):
        assert grown["train/skipped_total"] == stayed["train/skipped_total"] == 0
        for name in ("train/loss", "train/grad_norm"):
            assert grown[name] == pytest.approx(stayed[name], rel=1e-6)
    # measured: 1e-7; eight steps at a rate of 1e-3 move a weight by up to 8e-3
    torch.testing.assert_close(masters["grows"], masters["stays"], atol=1e-6, rtol=0)


def stopping(rl: MakeConfig, *more: str) -> JobConfig:
    """Every step overflows: a constant scale of 2^60."""
    scale = f"precision.fp16.loss_scale={2.0**60}"
    return rl("precision.dtype=fp16", scale, "train.max_consecutive_skips=3", "max_steps=9", *more)


def test_a_run_that_only_skips_stops_with_a_checkpoint_and_says_where_it_begins(
    rl: MakeConfig, reward: Reward
) -> None:
    config = stopping(rl)
    with pytest.raises(StoppedError) as caught:
        burnish.run(config, rewards=reward)
    said, run_dir = str(caught.value), Path(config.run_dir)
    assert said.startswith("stopped at step 3 of 9: 3 consecutive steps of the policy")
    assert "First bad tensor: " in said and "precision.dtype=bf16 precision.fp16={}" in said
    assert f"--resume {run_dir}" in said
    assert _newest(run_dir).name.endswith("3")
    assert "First bad tensor" in (run_dir / "stopped.txt").read_text(encoding="utf-8")
    assert "First bad tensor" in (run_dir / "run.log").read_text(encoding="utf-8")
    assert (run_dir / "report.html").is_file()
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["train/skipped_total"] for line in lines] == [1, 2, 3]


def test_a_stopped_run_goes_on_with_other_settings(rl: MakeConfig, reward: Reward) -> None:
    with pytest.raises(StoppedError):
        burnish.run(stopping(rl), rewards=reward)
    again = rl("max_steps=5", "precision.dtype=bf16")
    lines = read_metrics(burnish.run(again, resume=again.run_dir, rewards=reward).run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["train/skipped_steps"] for line in lines] == [1, 1, 1, 0, 0]
    assert "train/loss_scale" not in lines[-1]


def test_a_run_at_the_floor_of_its_loss_scale_stops(rl: MakeConfig, reward: Reward) -> None:
    config = rl(
        "precision.dtype=fp16",
        "precision.fp16.initial_scale_power=50",
        f"precision.fp16.min_loss_scale={2.0**49}",
        "max_steps=9",
    )
    with pytest.raises(StoppedError, match=r"stopped at step 3 of 9: .*at its minimum"):
        burnish.run(config, rewards=reward)
    lines = read_metrics(Path(config.run_dir))
    assert [line["train/loss_scale"] for line in lines] == [2.0**50, 2.0**50, 2.0**49]


def test_the_command_stops_with_exit_code_3_and_no_traceback(
    rl: MakeConfig, tmp_path: Path
) -> None:
    config = stopping(rl, reward_file(tmp_path))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(config))
    done = CliRunner().invoke(app, ["rl", str(recipe)])
    assert done.exit_code == 3
    assert "error: stopped at step 3 of 9" in done.output and "Traceback" not in done.output


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may grow to any size: for tests of what follows then."""
    monkeypatch.setattr("burnish.train.optim.MEASURED_FROM", math.inf)


@pytest.mark.usefixtures("any_size")
def test_fp32_losses_that_are_not_finite_stop_a_run(supervised: Callable[..., JobConfig]) -> None:
    """A rate of 1e38 makes weights whose products are infinite: every loss after the first is
    NaN."""
    config = supervised("sft", "train.lr=1e38", "train.max_consecutive_skips=2", "max_epochs=4")
    with pytest.raises(StoppedError, match="2 consecutive steps of the policy") as caught:
        burnish.run(config)
    assert "First bad tensor" in str(caught.value)


@pytest.mark.parametrize("lr", ["10", "1e4", "1e30"])
@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_rate_that_ruins_the_weights_stops_the_run_and_is_named(
    job: str, lr: str, rl: MakeConfig, supervised: Callable[..., JobConfig], tmp_path: Path
) -> None:
    """Every loss stays finite, with gradients of 0 or steps that are skipped: the run ended as if
    it had trained. Adapters and all, exit code 3; nothing is saved."""
    config = rl(reward_file(tmp_path)) if job == "rl" else supervised("sft")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(config))
    done = CliRunner().invoke(app, [job, str(recipe), f"train.lr={lr}"])
    assert done.exit_code == 3, done.output
    for part in (
        "stopped at step 1 of",
        "times as large as at the start",
        "This step could not be saved",
    ):
        assert part in done.output
    assert f"learning rate of the last step was {float(lr):g}" in done.output
    assert not list((Path(config.run_dir) / "checkpoints").glob("step_*"))


@pytest.mark.usefixtures("any_size")
def test_a_run_whose_steps_were_skipped_does_not_end_as_a_success(
    rl: MakeConfig, reward: Reward
) -> None:
    """Fewer steps than max_consecutive_skips (10): 4 of 5 are skipped, the last one too."""
    with pytest.raises(
        StoppedError, match="stopped at step 5 of 5: 4 optimizer steps were skipped"
    ):
        burnish.run(rl("train.lr=1e30", "max_steps=5"), rewards=reward)


def test_a_checkpoint_is_due_by_time_too(
    rl: MakeConfig, reward: Reward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reading of the clock is 11 minutes later; checkpoints every 50 steps or 30 minutes."""
    seconds = itertools.count(step=660.0)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter)
    monkeypatch.setattr("burnish.driver.checkpointing.time", clock)
    kept = ["max_steps=7", "checkpoint.keep_last=9"]
    for minutes, steps in (("30", {3, 6, 7}), ("null", {7})):
        config = rl(
            *kept, f"checkpoint.every_minutes={minutes}", f"run_dir={rl().run_dir}{minutes}"
        )
        burnish.run(config, rewards=reward)
        saved = (Path(config.run_dir) / "checkpoints").glob("step_*")
        assert {int(path.name[-6:]) for path in saved} == steps


def test_a_stop_does_not_depend_on_being_resumed_before_it(rl: MakeConfig, reward: Reward) -> None:
    """Two skips, a resume, and the third skip in a row stops all the same."""
    short = stopping(rl, "max_steps=2")
    burnish.run(short, rewards=reward)
    with pytest.raises(StoppedError, match="stopped at step 3 of 9"):
        burnish.run(stopping(rl), resume=short.run_dir, rewards=reward)


def reward_file(tmp_path: Path) -> str:
    (tmp_path / "r.py").write_text("def r(response):\n    return float(len(response) % 3)\n")
    return f"rewards=[{{kind: function, function: '{tmp_path / 'r.py'}:r'}}]"


def test_the_way_out_that_a_stopped_run_names_works_on_the_command_line(
    rl: MakeConfig, tmp_path: Path
) -> None:
    """The floor was raised in the recipe, so bf16 alone would be refused."""
    config = rl(
        "precision.dtype=fp16",
        "precision.fp16.initial_scale_power=50",
        f"precision.fp16.min_loss_scale={2.0**49}",
        "max_steps=5",
        reward_file(tmp_path),
    )
    recipe, run_dir = tmp_path / "recipe.yaml", Path(config.run_dir)
    recipe.write_text(dump_yaml(config))
    stopped = CliRunner().invoke(app, ["rl", str(recipe)])
    assert stopped.exit_code == 3 and (run_dir / "stopped.txt").is_file()
    hint = re.search(r"Try (precision\.dtype=bf16[^,]*),", stopped.output)
    assert hint is not None
    done = CliRunner().invoke(app, ["rl", "--resume", str(run_dir), *hint.group(1).split()])
    assert done.exit_code == 0, done.output
    assert not (run_dir / "stopped.txt").exists(), "it was about the last time"
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("any_size")
def test_weights_that_broke_are_not_saved_and_the_good_checkpoint_stays(
    rl: MakeConfig, reward: Reward
) -> None:
    good = rl("max_steps=2", "checkpoint.every_n_steps=1")
    burnish.run(good, rewards=reward)
    bad = rl("max_steps=6", "train.lr=1e38", "checkpoint.every_n_steps=1")
    with pytest.raises(CheckpointError, match=r"weights of the policy are not finite.* not saved"):
        burnish.run(bad, resume=good.run_dir, rewards=reward)
    assert _newest(Path(good.run_dir)).name == "step_000002"
    burnish.run(rl("max_steps=4"), resume=good.run_dir, rewards=reward)
    lines = read_metrics(Path(good.run_dir))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["train/skipped_total"] == 0


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("sampling", ["rollout.top_p=1.0", "rollout.top_p=0.9", "rollout.top_k=3"])
def test_logits_that_are_not_numbers_end_a_run_in_plain_words(
    sampling: str, rl: MakeConfig, reward: Reward
) -> None:
    config = rl("max_steps=6", "train.lr=1e38", sampling, "checkpoint.every_n_steps=0")
    with pytest.raises(SamplingError, match=r"version 1 .*its weight \S+ is not finite"):
        burnish.run(config, rewards=reward)


def test_a_stop_at_the_last_step_says_that_more_steps_are_needed(
    rl: MakeConfig, reward: Reward
) -> None:
    with pytest.raises(StoppedError, match=r"stopped at step 3 of 3: .* max_steps=MORE"):
        burnish.run(stopping(rl, "max_steps=3"), rewards=reward)


def test_a_stopped_run_has_as_many_tries_again(rl: MakeConfig, reward: Reward) -> None:
    for last in (3, 6):
        resume = None if last == 3 else rl().run_dir
        with pytest.raises(StoppedError, match=f"stopped at step {last} of 9: 3 consecutive steps"):
            burnish.run(stopping(rl), resume=resume, rewards=reward)


def test_several_updates_per_rollout_are_finished_and_told_once(
    rl: MakeConfig, reward: Reward
) -> None:
    config = stopping(rl, "train.train_batch_size=2", "max_steps=2")
    with pytest.raises(
        StoppedError, match=r"stopped at step 1 of 2: 3 consecutive steps of the policy"
    ) as caught:
        burnish.run(config, rewards=reward)
    assert str(caught.value).count("First bad tensor") == 1
    assert read_metrics(Path(config.run_dir))[-1]["train/skipped_steps"] == 8


def test_a_run_that_mostly_skipped_says_so_at_its_end(
    rl: MakeConfig, reward: Reward, capsys: pytest.CaptureFixture[str]
) -> None:
    burnish.run(stopping(rl, "max_steps=2"), rewards=reward)
    assert "2 optimizer steps were skipped" in capsys.readouterr().err


# ---- what is said about the recipe ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["precision.dtype=fp16", "precision.fp16.loss_scale=1000"],
            "loss_scale=1000 is not a power of two, so scaling rounds every gradient; use 512 or "
            "1024",
        ),
        (
            [
                "precision.dtype=fp16",
                "precision.fp16.loss_scale=128",
                "precision.fp16.hysteresis=3",
            ],
            "hysteresis applies only to a dynamic loss scale",
        ),
        (
            ["precision.rollout_dtype=fp16"],
            "the trainer computes in fp32 but the sampler in fp16",
        ),
    ],
)
def test_precision_that_is_rarely_meant_is_warned_of_at_load_and_in_the_log(  # house: ok fixtures
    overrides: list[str],
    said: str,
    rl: MakeConfig,
    reward: Reward,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = rl(*overrides, "max_steps=1")
    assert any(said in warning for warning in config.warnings())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(config))
    caplog.clear()
    dry = CliRunner().invoke(app, ["rl", str(recipe), "--dry-run"])
    assert dry.exit_code == 0
    warned = [record.message for record in caplog.records if ": warning: " in record.message]
    assert len(warned) == 1 and said in warned[0]
    assert warned[0].startswith(f"{recipe}: warning: ") and "precision" in warned[0]
    run_dir = burnish.run(config, rewards=reward).run_dir
    assert said in (run_dir / "run.log").read_text(encoding="utf-8")
    assert said not in capsys.readouterr().err  # told once, when the recipe was loaded


@pytest.mark.parametrize(
    "plain",
    [
        [],
        ["precision.dtype=bf16"],
        ["precision.dtype=fp16"],
        ["precision.dtype=fp16", "precision.fp16.loss_scale=0"],
        ["precision.dtype=fp16", "precision.fp16.loss_scale=1024"],
        ["precision.dtype=fp16", "precision.fp16.loss_scale=0.5"],
        ["precision.dtype=bf16", "precision.rollout_dtype=bf16"],
    ],
)
def test_nothing_is_said_about_ordinary_settings(plain: list[str], rl: MakeConfig) -> None:
    assert rl(*plain).warnings() == []


def test_the_gap_of_two_formats_is_measured_and_said_once(
    rl: MakeConfig, reward: Reward, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl("precision.rollout_dtype=bf16", "max_steps=3")
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    said = capsys.readouterr().err
    gap = f"differ by {lines[0]['train/mismatch_abs']:.2g} nats per token on average"
    assert said.count("precision.rollout_dtype: at step 1") == 1 and gap in said
    assert "precision.rollout_dtype: at step 2" not in said


def test_the_batch_table_is_printed_at_the_start(
    rl: MakeConfig, reward: Reward, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl("max_steps=1", "train.micro_train_batch_size=4")
    burnish.run(config, rewards=reward)
    out = capsys.readouterr().out
    for part in ("train_batch_size (B)", "gradient_accumulation_steps", "P x n"):
        assert part in out
    assert "gradient_accumulation_steps" in (Path(config.run_dir) / "run.log").read_text()


@pytest.mark.usefixtures("any_size")
def test_an_export_that_the_format_cannot_hold_is_refused(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    """Weights beyond 65504 would become infinite without a word."""
    run_dir = burnish.run(rl("max_steps=2", "train.lr=1e6"), rewards=reward).run_dir
    assert burnish.export(run_dir, tmp_path / "fp32")
    with pytest.raises(CheckpointError, match="fp16"):
        burnish.export(run_dir, tmp_path / "fp16", dtype="fp16")
