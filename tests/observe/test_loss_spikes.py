"""The spike alarm: hand-worked cases, curves that never alarm, and the same results after a
resume."""

from __future__ import annotations

import doctest
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import burnish.observe.spikes
from burnish.observe.metrics import MetricsLog, read_metrics
from burnish.observe.spikes import MIN_VALUES, WINDOW, SpikeAlarm

quick = settings(max_examples=100, deadline=None)
losses = st.floats(-1e6, 1e6)
anything = st.floats(width=64)


def alarm_after(values: list[float], **options: float) -> SpikeAlarm:
    alarm = SpikeAlarm(**options)  # type: ignore[arg-type]
    alarm.replay(values)
    return alarm


def answers(values: list[float]) -> list[float]:
    alarm = SpikeAlarm()
    return [alarm.check(value) for value in values]


def test_the_line_between_no_alarm_and_alarm_is_six_spreads_above_the_median() -> None:
    """Twenty values, ten at 1 and ten at 3: median 2, every deviation 1, spread 1.4826; the line is
    2 + 6 x 1.4826 = 10.8956."""
    history = [1.0, 3.0] * 10
    assert alarm_after(history).check(10.89) == 0.0
    assert alarm_after(history).check(10.90) == 1.0


def test_one_earlier_spike_does_not_hide_the_next() -> None:
    """With 1000 among them the mean and the standard deviation are 51 and 200, so 50 would look
    ordinary; the median stays 2 and the spread 1.4826."""
    assert alarm_after([1.0, 2.0, 3.0] * 6 + [1000.0]).check(50.0) == 1.0


def test_there_is_no_alarm_downwards() -> None:
    assert alarm_after([1.0, 3.0] * 10).check(-1e9) == 0.0


def test_fewer_than_sixteen_values_raise_no_alarm() -> None:
    assert alarm_after([1.0] * (MIN_VALUES - 1)).check(1e9) == 0.0
    assert alarm_after([1.0] * MIN_VALUES).check(1e9) == 1.0
    # a window of 16 remembers all 16, or this alarm would wait for ever
    assert alarm_after([1.0] * 40, window=MIN_VALUES).check(1e9) == 1.0


def test_a_constant_curve_alarms_on_a_jump_and_not_on_rounding() -> None:
    """The floor is a thousandth of the median: at 2 the line is 2 + 6 x 0.002 = 2.012. At 0 it is
    6e-6."""
    still = [2.0] * 30
    assert alarm_after(still).check(2.0 * (1 + 2**-8)) == 0.0  # one rounding of bf16: 2.0078
    assert alarm_after(still).check(2.0119) == 0.0
    assert alarm_after(still).check(2.0121) == 1.0
    assert alarm_after([0.0] * 30).check(5.9e-6) == 0.0
    assert alarm_after([0.0] * 30).check(6.1e-6) == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_alarm_and_is_not_remembered(value: float) -> None:
    alarm = SpikeAlarm()
    assert alarm.check(value) == 1.0  # even as the first value
    history = [1.0, 3.0] * 10
    mixed = [x for pair in zip(history, [value] * 20, strict=True) for x in pair]
    assert alarm_after(mixed).check(10.89) == 0.0
    assert alarm_after(mixed).check(10.90) == 1.0


def test_a_lasting_step_up_stops_alarming_once_half_the_window_is_on_the_new_level() -> None:
    """64 values of 1, then 10: with k < 32 tens remembered the median is 1 and the spread the
    floor, an alarm. With 32 the median is 5.5 and every deviation 4.5, no alarm; from 33 on the
    median is 10."""
    assert answers([1.0] * WINDOW + [10.0] * 100) == [0.0] * WINDOW + [1.0] * 32 + [0.0] * 68


def test_a_curve_that_falls_or_climbs_slowly_never_alarms() -> None:
    falling = [4 * math.exp(-i / 100) for i in range(500)]
    assert not any(answers(falling))
    assert not any(answers(falling[::-1]))


def test_on_gaussian_noise_there_is_at_most_one_false_alarm_in_ten_thousand_steps() -> None:
    """30 curves of 1000 values. Six exact standard deviations are passed once in 1e9 values; the
    rest comes from spreads underestimated from few values."""
    total = 0.0
    for seed in range(30):
        noise = random.Random(seed)
        total += sum(answers([2 + 0.1 * noise.gauss(0, 1) for _ in range(1000)]))
    assert total <= 3


def test_on_the_same_noise_a_jump_of_ten_standard_deviations_is_seen() -> None:
    for seed in range(30):
        noise = random.Random(seed)
        history = [2 + 0.1 * noise.gauss(0, 1) for _ in range(WINDOW)]
        assert alarm_after(history).check(3.0) == 1.0, seed


@given(values=st.lists(anything, max_size=150), cut=st.integers(0, 150))
@quick
def test_a_resumed_alarm_answers_as_the_uninterrupted_one(values: list[float], cut: int) -> None:
    uninterrupted = answers(values)
    resumed = alarm_after(values[:cut])
    assert [resumed.check(value) for value in values[cut:]] == uninterrupted[cut:]
    assert set(uninterrupted) <= {0.0, 1.0}


@given(values=st.lists(anything, max_size=40))
@settings(max_examples=15, deadline=None)  # writes files
def test_the_metrics_log_is_enough_to_restore_the_alarm(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    """Infinity and NaN come back as NaN, everything else as it was."""
    run_dir: Path = tmp_path_factory.mktemp("run")
    log = MetricsLog(run_dir)
    for step, value in enumerate(values):
        log.log(step, {"train/loss": value})
    log.close()
    logged = [line["train/loss"] for line in read_metrics(run_dir)]
    future = [1.0, 1.5, 3.0, 1e6]
    from_log, from_memory = alarm_after(logged), alarm_after(values)
    assert [from_log.check(v) for v in future] == [from_memory.check(v) for v in future]


@given(history=st.lists(losses, min_size=16, max_size=64), value=losses, more=st.floats(0, 1e6))
@quick
def test_if_a_value_alarms_a_larger_one_does_too(
    history: list[float], value: float, more: float
) -> None:
    assert alarm_after(history).check(value) <= alarm_after(history).check(value + more)


@given(history=st.lists(losses, min_size=16, max_size=64), value=losses, seed=st.integers(0, 99))
@quick
def test_the_order_within_the_window_does_not_matter(
    history: list[float], value: float, seed: int
) -> None:
    shuffled = random.Random(seed).sample(history, len(history))
    assert alarm_after(history).check(value) == alarm_after(shuffled).check(value)


@given(
    old=st.lists(anything, max_size=30),
    history=st.lists(losses, min_size=WINDOW, max_size=WINDOW),
    value=losses,
)
@quick
def test_values_before_the_window_have_no_effect(
    old: list[float], history: list[float], value: float
) -> None:
    assert alarm_after(old + history).check(value) == alarm_after(history).check(value)


@pytest.mark.parametrize(
    "options", [{"window": 8}, {"min_values": 1}, {"threshold": 0.0}, {"threshold": math.nan}]
)
def test_an_alarm_that_can_never_work_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"cannot work; choose 2 <= min_values <= window"):
        SpikeAlarm(**options)  # type: ignore[arg-type]


def test_the_example_in_the_docstring_holds() -> None:
    assert doctest.testmod(burnish.observe.spikes).failed == 0
