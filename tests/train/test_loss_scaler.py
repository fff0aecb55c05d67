"""The loss scaler: DeepSpeed's own ``DynamicLossScaler`` is the oracle, called step by step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import deepspeed.runtime.fp16.loss_scaler as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.model import Fp16Config, PrecisionConfig
from burnish.train.loss_scaler import (
    DynamicLossScaler,
    LossScaleFloorError,
    StaticLossScaler,
    make_loss_scaler,
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """DeepSpeed asks for its rank before it logs; no process group is needed for that."""
    before, oracle.dist = oracle.dist, SimpleNamespace(get_rank=lambda: 1)
    yield
    oracle.dist = before


def theirs(ours: DynamicLossScaler) -> object:
    return oracle.DynamicLossScaler(
        init_scale=ours.scale,
        scale_window=ours.loss_scale_window,
        min_scale=ours.min_loss_scale,
        delayed_shift=ours.hysteresis,
        consecutive_hysteresis=ours.consecutive_hysteresis,
    )


SCALERS = st.builds(
    DynamicLossScaler,
    initial_scale_power=st.integers(2, 32),
    loss_scale_window=st.integers(1, 12) | st.just(1000),
    hysteresis=st.integers(1, 5),
    min_loss_scale=st.sampled_from([0.25, 0.3, 1.0, 3.0, 4.0]),
    consecutive_hysteresis=st.booleans(),
)
# Runs of equal outcomes, so that windows fill up and the floor is reached.
RUNS = st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=40)


@settings(max_examples=3000, deadline=None)
@given(ours=SCALERS, runs=RUNS)
def test_every_trace_equals_deepspeeds(
    ours: DynamicLossScaler, runs: list[tuple[bool, int]]
) -> None:
    reference = theirs(ours)
    for overflow in [overflow for overflow, count in runs for _ in range(count)]:
        try:
            reference.update_scale(overflow)
        except Exception:  # DeepSpeed raises the bare class at its floor
            with pytest.raises(LossScaleFloorError):
                ours.update(overflow)
            return
        ours.update(overflow)
        assert ours.scale == reference.cur_scale


@settings(max_examples=200, deadline=None)
@given(ours=SCALERS, pattern=st.lists(st.booleans(), max_size=80), data=st.data())
def test_a_scaler_resumed_at_any_point_equals_an_uninterrupted_one(
    ours: DynamicLossScaler, pattern: list[bool], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(pattern)))
    resumed = DynamicLossScaler(
        initial_scale_power=7,
        loss_scale_window=ours.loss_scale_window,
        hysteresis=ours.hysteresis,
        min_loss_scale=ours.min_loss_scale,
        consecutive_hysteresis=ours.consecutive_hysteresis,
    )
    try:
        for i, overflow in enumerate(pattern):
            if i == cut:
                resumed.load_state_dict(ours.state_dict())
            ours.update(overflow)
            if i >= cut:
                resumed.update(overflow)
                assert resumed.state_dict() == ours.state_dict()
    except LossScaleFloorError:
        return


def after(scaler: DynamicLossScaler, *steps: tuple[bool, int]) -> float:
    for overflow, count in steps:
        for _ in range(count):
            scaler.update(overflow)
    return scaler.scale


def test_growth_comes_with_the_1001st_clean_step_and_every_1000_after_it() -> None:
    """2^16; 1000 clean steps: the same; the 1001st: 2^17; the 2001st: 2^18."""
    scaler = DynamicLossScaler()
    assert scaler.scale == 65536
    assert after(scaler, (False, 1000)) == 65536
    assert after(scaler, (False, 1)) == 2 * 65536
    assert after(scaler, (False, 999)) == 2 * 65536
    assert after(scaler, (False, 1)) == 4 * 65536


def test_an_overflow_acts_immediately_and_resets_the_count() -> None:
    """999 clean steps and an overflow: halved (hysteresis 1), and 1000 more clean steps do not
    double."""
    scaler = DynamicLossScaler(hysteresis=1)
    assert after(scaler, (False, 999), (True, 1)) == 32768
    assert after(scaler, (False, 1000)) == 32768
    assert after(scaler, (False, 1)) == 65536


def test_hysteresis_2_ignores_the_first_overflow_and_halves_from_the_second() -> None:
    """Overflows 1, 2, 3 since the start: S, S / 2, S / 4. Clean steps between them do not refill
    the hysteresis; growth does: then one more overflow is ignored."""
    scaler = DynamicLossScaler(loss_scale_window=5)
    assert after(scaler, (True, 1)) == 65536
    assert after(scaler, (False, 3), (True, 1)) == 32768
    assert after(scaler, (True, 1)) == 16384
    assert after(scaler, (False, 6)) == 32768
    assert after(scaler, (True, 1)) == 32768
    assert after(scaler, (True, 1)) == 16384


def test_consecutive_hysteresis_counts_only_consecutive_overflows() -> None:
    scaler = DynamicLossScaler(consecutive_hysteresis=True)
    assert after(scaler, *[(True, 1), (False, 1)] * 10) == 65536
    assert after(scaler, (True, 2)) == 32768


def test_an_overflow_at_the_minimum_scale_raises_without_a_state_change() -> None:
    scaler = DynamicLossScaler(initial_scale_power=2, hysteresis=1, min_loss_scale=1.5)
    assert after(scaler, (True, 1)) == 2.0
    assert after(scaler, (True, 1)) == 1.5  # not 1
    before = scaler.state_dict()
    with pytest.raises(LossScaleFloorError, match=r"minimum, 1\.5"):
        scaler.update(True)
    assert scaler.state_dict() == before


def test_a_static_scale_is_constant_over_overflows() -> None:
    scaler = StaticLossScaler(128.0)
    for overflow in (True, True, False, True):
        scaler.update(overflow)
        assert scaler.scale == 128.0


@pytest.mark.parametrize(
    ("options", "kind", "scale"),
    [
        ({"dtype": "fp32"}, StaticLossScaler, 1.0),
        ({"dtype": "bf16"}, StaticLossScaler, 1.0),
        ({"dtype": "fp16"}, DynamicLossScaler, 65536.0),
        ({"dtype": "fp16", "fp16": {"loss_scale": 0}}, DynamicLossScaler, 65536.0),
        ({"dtype": "fp16", "fp16": {"initial_scale_power": 8}}, DynamicLossScaler, 256.0),
        ({"dtype": "fp16", "fp16": {"loss_scale": 512}}, StaticLossScaler, 512.0),
    ],
)
def test_the_recipe_decides_the_kind(options: dict[str, object], kind: type, scale: float) -> None:
    scaler = make_loss_scaler(PrecisionConfig(**options))
    assert type(scaler) is kind
    assert scaler.scale == scale


def test_every_setting_of_the_recipe_reaches_the_scaler() -> None:
    config = PrecisionConfig(
        dtype="fp16",
        fp16=Fp16Config(
            initial_scale_power=5,
            loss_scale_window=7,
            hysteresis=3,
            min_loss_scale=0.5,
            consecutive_hysteresis=True,
        ),
    )
    scaler = make_loss_scaler(config)
    assert isinstance(scaler, DynamicLossScaler)
    assert (scaler.scale, scaler.loss_scale_window, scaler.hysteresis) == (32.0, 7, 3)
    assert (scaler.min_loss_scale, scaler.consecutive_hysteresis) == (0.5, True)


def test_a_resumed_scale_starts_at_a_raised_minimum() -> None:
    saved = DynamicLossScaler(initial_scale_power=0).state_dict()
    scaler = DynamicLossScaler(min_loss_scale=8.0, hysteresis=1)
    scaler.load_state_dict(saved)
    assert scaler.scale == 8.0
    with pytest.raises(LossScaleFloorError):
        scaler.update(True)
