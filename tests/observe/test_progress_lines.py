"""Away from a terminal each step is one plain line, run.log has the same, and handlers close."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from burnish.observe.progress import (
    ProgressDisplay,
    close_logging,
    describe_step,
    format_duration,
    setup_logging,
    tell,
)

METRICS = {
    "reward/mean": 0.3124,
    "rollout/tokens_per_s": 151.6,
    "time/rollout_s": 4.1,
    "time/train_s": 5.7,
    "time/sync_s": 0.2,
    "time/step_s": 10.0,
    "train/loss": 0.01,
}


@pytest.fixture(autouse=True)
def _logging_is_closed() -> Iterator[None]:
    yield
    close_logging()


def _plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=40), out


def test_a_step_is_described_by_reward_speed_time_split_and_time_left() -> None:
    """41% = 4.1 / (4.1 + 5.7 + 0.2); sync's 2% is below the 5% worth a glance."""
    assert describe_step(METRICS, eta_s=80) == [
        "reward 0.312",
        "152 tok/s",
        "rollout 41% train 57%",
        "ETA 1m20s",
    ]


def test_without_a_reward_the_loss_is_shown_and_nan_does_not_break_the_line() -> None:
    metrics = {"train/loss": math.nan, "train/tokens_per_s": math.nan, "time/train_s": math.nan}
    assert describe_step(metrics, eta_s=None) == ["loss nan"]


def test_sampler_gap_loss_scale_and_skipped_steps_are_shown_if_measured() -> None:
    precision = {
        "train/mismatch_abs": 0.01234,
        "train/loss_scale": 65536.0,
        "train/skipped_steps": 2.0,
        "critic/skipped_steps": 1.0,
    }
    assert describe_step(METRICS | precision, eta_s=None) == [
        "reward 0.312",
        "gap 0.0123",
        "scale 2^16",
        "3 skipped",
        "152 tok/s",
        "rollout 41% train 57%",
    ]


def test_a_step_without_skips_does_not_mention_them() -> None:
    metrics = {"train/loss": 2.0, "train/skipped_steps": 0.0, "critic/skipped_steps": math.nan}
    assert describe_step(metrics, eta_s=None) == ["loss 2"]
    assert describe_step({"critic/skipped_steps": 1.0}, eta_s=None) == ["1 skipped"]


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        *((1.0, "2^0"), (0.5, "2^-1"), (2.0**24, "2^24")),
        *((1000.0, "1,000"), (3.0, "3"), (0.0, "0"), (-4.0, "-4"), (math.nan, "nan")),
    ],
)
def test_a_loss_scale_is_shown_as_a_power_of_two_if_it_is_one(scale: float, text: str) -> None:
    assert describe_step({"train/loss_scale": scale}, eta_s=None) == [f"scale {text}"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (59.4, "59s"), (59.6, "1m00s"), (3600, "1h00m"), (90_000, "1d01h")],
)
def test_durations_read_well_at_the_edges_of_their_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_away_from_a_terminal_each_due_step_is_one_unbroken_plain_line(tmp_path: Path) -> None:
    setup_logging(tmp_path)
    console, out = _plain()
    progress = ProgressDisplay(5, every=2, console=console)
    for step in range(1, 6):
        progress.step(step, METRICS)
    progress.message("saved [bold]checkpoints/step_4[/bold]")
    progress.close()
    lines = out.getvalue().splitlines()
    legend = lines.pop(0)
    assert legend.startswith("reward: ")
    assert [line.split(" · ")[0] for line in lines[:-1]] == ["step 2/5", "step 4/5", "step 5/5"]
    assert lines[0].startswith("step 2/5 · reward 0.312 · 152 tok/s · rollout 41% train 57% · ETA ")
    assert "ETA" not in lines[2]  # the last step has no time left
    assert lines[-1] == "saved [bold]checkpoints/step_4[/bold]"  # text is never read as markup
    logged = (tmp_path / "run.log").read_text(encoding="utf-8").splitlines()
    assert [line.split("INFO    ")[1] for line in logged] == [legend, *lines]


def test_a_terminal_gets_a_bar_and_messages_above_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    progress = ProgressDisplay(4, console=console)
    progress.step(2, METRICS)
    progress.message("half way")
    progress.close()
    progress.close()
    assert "2/4" in out.getvalue() and "reward 0.312" in out.getvalue()
    assert "half way" in out.getvalue()


def test_a_table_is_printed_and_logged_with_its_cells_as_plain_text(tmp_path: Path) -> None:
    setup_logging(tmp_path)
    console, out = _plain()
    ProgressDisplay(1, console=console).table("Batch", ["name", "value"], [["B [samples]", "64"]])
    for text in (out.getvalue(), (tmp_path / "run.log").read_text(encoding="utf-8")):
        assert "Batch" in text and "B [samples]" in text and "64" in text


def test_warnings_of_any_part_reach_the_log_and_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path)
    logging.getLogger("burnish.metrics").warning("dropped a line")
    logging.getLogger("burnish").info("only in the file")
    assert capsys.readouterr().err == "WARNING: dropped a line\n"
    log = (tmp_path / "run.log").read_text()
    assert "WARNING dropped a line" in log and "only in the file" in log


def test_control_characters_reach_neither_terminal_nor_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of servers and models may contain commands of terminals, and unpaired surrogates."""
    # pytest's own handlers would keep the record, which pytest-xdist cannot send
    monkeypatch.setattr(logging.getLogger("burnish"), "propagate", False)
    text = "a\x1b[2J\x9b1A\r\x00\ud800b\nc"
    shown = r"a\x1b[2J\x9b1A\x0d\x00\ud800b" + "\nc\n"
    setup_logging(tmp_path)
    logging.getLogger("burnish.part").warning("%s", text)
    console, out = _plain()
    tell(text, console)
    close_logging()
    assert capsys.readouterr().err == f"WARNING: {shown}" and out.getvalue() == shown
    assert (tmp_path / "run.log").read_text().count(shown) == 2


def test_logging_moves_to_the_next_run_appends_on_resume_and_closes(tmp_path: Path) -> None:
    logger = logging.getLogger("burnish")
    before = list(logger.handlers)
    for run, text in (("a", "one"), ("b", "two"), ("a", "three")):
        setup_logging(tmp_path / run)
        logger.info(text)
    close_logging()
    close_logging()
    logger.info("nobody listens")
    assert logger.handlers == before
    read = {run: (tmp_path / run / "run.log").read_text() for run in "ab"}
    assert [line.split()[-1] for line in read["a"].splitlines()] == ["one", "three"]
    assert [line.split()[-1] for line in read["b"].splitlines()] == ["two"]


@pytest.mark.parametrize(
    ("reward", "shown"),
    [(1e38, "1e+38"), (-2.5e9, "-2.5e+09"), (999_999_999.0, "999,999,999"), (1000.0, "1,000")],
)
def test_a_number_of_many_digits_is_shown_by_its_exponent(reward: float, shown: str) -> None:
    assert describe_step({"reward/mean": reward}, eta_s=None) == [f"reward {shown}"]


def test_the_turns_and_the_failed_episodes_of_a_step_are_shown() -> None:
    metrics = {"reward/mean": 0.5, "episodes/turns": 2.6, "episodes/done": 12.0}
    assert describe_step(metrics, eta_s=None) == ["reward 0.5", "turns 2.6"]
    failed = metrics | {"episodes/timeout": 2.0, "episodes/env_error": 1.0}
    assert describe_step(failed, eta_s=None) == ["reward 0.5", "turns 2.6", "3 failed episodes"]


def test_a_repeated_warning_is_printed_at_powers_of_ten_and_logged_every_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path)
    for step in range(12):
        logging.getLogger("burnish").warning("step %d: %d of 16 groups", step, step % 3)
    logging.getLogger("burnish").warning("another one")
    printed = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in printed] == [
        "WARNING: step 0: 0 of 16 groups",
        "WARNING: step 9: 0 of 16 groups",
        "WARNING: another one",
    ]
    assert (tmp_path / "run.log").read_text().count("of 16 groups") == 12


def test_the_numbers_of_a_step_are_explained_once() -> None:
    console, out = _plain()
    progress = ProgressDisplay(3, console=console)
    for step in (1, 2, 3):
        progress.step(step, METRICS | {"train/mismatch_abs": 1e-7})
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and lines[0].startswith("reward: ") and "gap: " in lines[0]
