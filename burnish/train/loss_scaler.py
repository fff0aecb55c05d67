"""Loss scaling for fp16: multiply the loss before backward so that small gradients do not
underflow.

fp16 represents nothing below 2^-24, and gradients of a language model are often smaller. The loss,
and with it every gradient, is multiplied by ``scale`` before backward. Gradients are divided by
``scale`` in fp32 before the norm is computed. If a scaled gradient overflows, the step is skipped.
"""

from __future__ import annotations

from typing import Protocol

from burnish.config.model import PrecisionConfig
from burnish.errors import BurnishError

State = dict[str, float | int]


class LossScaleFloorError(BurnishError, ArithmeticError):
    """A gradient overflowed with the loss scale at its minimum, so reducing the scale cannot
    help."""


class LossScaler(Protocol):
    """Controller of the loss scale, updated with whether gradients overflowed."""

    @property
    def scale(self) -> float:
        """Factor by which the loss of the next backward pass is multiplied."""
        ...

    @property
    def adapts(self) -> bool:
        """Return whether overflows change the scale."""
        ...

    def update(self, overflow: bool) -> None:
        """Record one optimizer step. ``overflow``: its gradient was not finite."""
        ...

    def state_dict(self) -> State:
        """Return the state for :meth:`load_state_dict`."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore the result of :meth:`state_dict`."""
        ...


class StaticLossScaler:
    """A constant scale. An overflow does not change it; the step is still skipped."""

    adapts = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, overflow: bool) -> None:
        """Do nothing: the scale is constant."""

    def state_dict(self) -> State:
        """Return no state: the recipe has the scale."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Ignore the saved state."""


class DynamicLossScaler:
    """A scale as large as the gradients allow: halved on overflow, doubled after a window without
    any.

    With w = ``loss_scale_window``, the scale first doubles at clean step w + 1 after the last
    overflow (or the start). It doubles again at every w-th clean step from there. An overflow
    halves the scale if at least ``hysteresis`` - 1 overflows preceded it since the last growth.
    Those earlier overflows only skip their steps. ``consecutive_hysteresis`` resets this count at
    every clean step. Every decision equals that of DeepSpeed's ``DynamicLossScaler`` (a test
    compares both). torch's ``GradScaler`` grows one step earlier and has no hysteresis and no
    floor.
    """

    adapts = True

    def __init__(
        self,
        *,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: float = 1.0,
        consecutive_hysteresis: bool = False,
    ) -> None:
        self.scale = 2.0**initial_scale_power
        self.loss_scale_window = loss_scale_window
        self.hysteresis = hysteresis
        self.min_loss_scale = min_loss_scale
        self.consecutive_hysteresis = consecutive_hysteresis
        self._left = hysteresis
        """Number of overflows until the scale is halved; 1: the next one."""
        self._clean_steps = 0
        """Clean steps since the last overflow, or since the start."""

    def update(self, overflow: bool) -> None:
        """Record one optimizer step.

        Raises LossScaleFloorError, with no state changed, if the scale would fall below
        ``min_loss_scale``.
        """
        if overflow:
            if self._left > 1:
                self._left -= 1
            elif self.scale == self.min_loss_scale:
                raise LossScaleFloorError(f"the loss scale is at its minimum, {self.scale:g}")
            else:
                self.scale = max(self.scale / 2, self.min_loss_scale)
            self._clean_steps = 0
            return
        if self.consecutive_hysteresis:
            self._left = self.hysteresis
        # Tested before this step is counted: growth comes with the step after a full window.
        if self._clean_steps > 0 and self._clean_steps % self.loss_scale_window == 0:
            self._left = self.hysteresis
            self.scale *= 2
        self._clean_steps += 1

    def state_dict(self) -> State:
        """Return the scale, the overflows left until it is halved, and the clean steps since the
        last overflow."""
        return {"scale": self.scale, "left": self._left, "clean_steps": self._clean_steps}

    def load_state_dict(self, state: State) -> None:
        self.scale = max(float(state["scale"]), self.min_loss_scale)  # the floor may have changed
        self._left = min(int(state["left"]), self.hysteresis)
        self._clean_steps = int(state["clean_steps"])


def make_loss_scaler(config: PrecisionConfig) -> LossScaler:
    """Return the scaler that a recipe selects; a constant 1 for every dtype except fp16."""
    if config.dtype != "fp16":
        return StaticLossScaler()
    scaling = config.fp16
    if scaling.loss_scale:
        return StaticLossScaler(scaling.loss_scale)
    return DynamicLossScaler(
        initial_scale_power=scaling.initial_scale_power,
        loss_scale_window=scaling.loss_scale_window,
        hysteresis=scaling.hysteresis,
        min_loss_scale=scaling.min_loss_scale,
        consecutive_hysteresis=scaling.consecutive_hysteresis,
    )
