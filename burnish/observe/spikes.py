"""An alarm for sudden jumps of the loss. It is only a metric: no run stops or skips a step for
it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

WINDOW = 64
MIN_VALUES = 16
THRESHOLD = 6.0
_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_FLOOR_FRAC, _FLOOR_ABS = 1e-3, 1e-6


class SpikeAlarm:
    """Detects values far above the preceding ones.

    A spike is ``value - median > threshold x spread``, with the median of the last ``window``
    finite values and ``spread = 1.4826 x`` their median absolute deviation. Both are robust against
    a few outliers, so one spike does not hide the next. After a permanent increase the alarm stops
    once half of the window is at the new level. The spread is at least a thousandth of the median
    and at least 1e-6, so that rounding in a constant curve is no spike. There is no alarm for drops
    and none before ``min_values`` values. A value that is not finite always raises the alarm and is
    not stored.

    The result depends only on the last ``window`` finite values. A resumed run therefore rebuilds
    the alarm with :meth:`replay` over the values in its log, where infinity reads as NaN.

    >>> alarm = SpikeAlarm(min_values=4)
    >>> [alarm.check(loss) for loss in (2.0, 2.1, 1.9, 2.0, 2.1, 9.0, 2.0)]
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """

    def __init__(
        self, *, window: int = WINDOW, min_values: int = MIN_VALUES, threshold: float = THRESHOLD
    ) -> None:
        """Create an alarm. Raises ValueError unless ``2 <= min_values <= window`` and
        ``threshold > 0``."""
        if not (2 <= min_values <= window and threshold > 0):
            raise ValueError(
                f"a spike alarm with window={window}, min_values={min_values}, "
                f"threshold={threshold} cannot work; choose 2 <= min_values <= window and "
                "threshold > 0"
            )
        self._min_values, self._threshold = min_values, threshold
        self._values: deque[float] = deque(maxlen=window)

    def check(self, value: float) -> float:
        """Return 1.0 if ``value`` is a spike, else 0.0, and store the value."""
        if not math.isfinite(value):
            return 1.0
        is_spike = False
        if len(self._values) >= self._min_values:
            middle = median(self._values)
            deviation = median(abs(v - middle) for v in self._values)
            spread = max(_SIGMA * deviation, _FLOOR_FRAC * abs(middle), _FLOOR_ABS)
            is_spike = value - middle > self._threshold * spread
        self._values.append(value)
        return float(is_spike)

    def replay(self, values: Iterable[float]) -> None:
        """Store earlier values, oldest first, as if each had been checked."""
        self._values.extend(value for value in values if math.isfinite(value))
