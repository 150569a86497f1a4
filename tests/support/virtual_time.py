"""An event loop whose clock jumps: when nothing is ready it is at once the time of the next timer.

Hours pass in milliseconds, and what runs on it alone (no threads, no sockets) runs the same way every time. A loop with
nothing left to wait for raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class StandstillError(Exception):
    """Everything waits for something that can never happen."""


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_jumps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise StandstillError("no timer is set and nothing is ready")
        if timeout > 0:
            self.now += timeout
            self.num_jumps += 1
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end on a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
