"""The gate that pauses a rollout engine between steps."""

from __future__ import annotations

import threading

import pytest

from burnish.rollout.gate import StepGate

PATIENCE_S = 60.0


def test_who_waits_goes_on_when_it_is_opened() -> None:
    gate, passed = StepGate(), threading.Event()
    gate.wait()  # open at first

    def walk() -> None:
        gate.wait()
        passed.set()

    gate.shut()
    walker = threading.Thread(target=walk)
    walker.start()
    assert not passed.wait(0.2), "it is shut"
    gate.open()
    gate.open()
    assert passed.wait(PATIENCE_S)
    walker.join(PATIENCE_S)


def test_who_shut_it_is_told_instead_of_waiting_for_itself() -> None:
    gate = StepGate()
    gate.shut()
    with pytest.raises(RuntimeError, match="this thread did it; call resume"):
        gate.wait()
    gate.open()
    gate.wait()
