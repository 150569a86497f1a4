"""New requests wait a moment after a scheduler's start: those that an earlier scheduler had accepted come first.

Without it, the first front end to come back would fill the ranks with new requests before another one has submitted
requests that had been running."""

from __future__ import annotations

import asyncio
from typing import Final

# Front ends that attach so long after the first one are waited for, and new requests wait so long at most. Seconds.
_ATTACH_S: Final = 1.0
_MOST_S: Final = 2.0


class StartGate:
    """Times in seconds of the event loop's clock. The gate is open, and costs nothing, unless a front end comes that
    had been attached to another scheduler, or to this one, before."""

    def __init__(self) -> None:
        self._first_attach: float | None = None
        self._is_shut = False
        # Sessions that are still to submit their requests again.
        self._pending: set[int] = set()
        self._moved = asyncio.Event()

    def attached(self, session: int, *, again: bool, now: float) -> None:
        """A front end has attached. again: it had been attached before, so it may have requests to submit again."""
        if self._first_attach is None:
            self._first_attach = now
            self._is_shut = again
        elif now < self._first_attach + _ATTACH_S:
            self._is_shut = self._is_shut or again
        else:
            return
        if again:
            self._pending.add(session)
        self._moved.set()

    def done(self, session: int) -> None:
        """The front end has submitted its requests again, or has left. Idempotent."""
        if session in self._pending:
            self._pending.remove(session)
            self._moved.set()

    def opens_at(self) -> float | None:
        """When the gate opens by itself, as things stand; None: it is open."""
        if not self._is_shut or self._first_attach is None:
            return None
        return self._first_attach + (_MOST_S if self._pending else _ATTACH_S)

    async def passed(self) -> None:
        """Returns when new requests may come in."""
        loop = asyncio.get_running_loop()
        while (opens_at := self.opens_at()) is not None:
            left = opens_at - loop.time()
            if left <= 0:
                self._is_shut = False
                self._moved.set()
                return
            self._moved.clear()
            try:
                async with asyncio.timeout(left):
                    await self._moved.wait()
            except TimeoutError:
                continue
