"""When `stepfence up` starts a part again that has ended, and when it gives up. No clock: the caller says the time."""

from __future__ import annotations

import signal
from collections import deque
from typing import Final

# Seconds before the next start: the first for a part that had lived for more than SETTLED_S, the others for one that
# ends soon, again and again.
PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
SETTLED_S: Final = 30.0
# A part is started again at most so many times within so many seconds.
RESTARTS_IN_WINDOW: Final = 5
WINDOW_S: Final = 60.0


class Restarts:
    """The restarts of one part."""

    def __init__(self) -> None:
        self._moments: deque[float] = deque()
        self._num_short_lives = 0

    @property
    def count(self) -> int:
        """How often it is to be started again or has been, within the window of the last end."""
        return len(self._moments)

    def after_end(self, now: float, lived_s: float) -> float | None:
        """The part has ended `now`, after `lived_s` seconds: how many seconds later it is to be started again; None
        when it has been started again too often. `now` must not go back."""
        while self._moments and now - self._moments[0] > WINDOW_S:
            self._moments.popleft()
        if len(self._moments) >= RESTARTS_IN_WINDOW:
            return None
        self._moments.append(now)
        self._num_short_lives = 0 if lived_s > SETTLED_S else self._num_short_lives + 1
        return PAUSES_S[min(self._num_short_lives, len(PAUSES_S) - 1)]


def ending(code: int) -> str:
    """How a process ended, in words. code: as of `subprocess`, -N for signal N."""
    if code >= 0:
        return f"exit code {code}; its last lines say why"
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL:
        return f"signal {name}: killed from outside, by an operator or by the kernel for want of memory (see its log)"
    return f"signal {name}"
