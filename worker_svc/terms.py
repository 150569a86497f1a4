"""Which of two schedulers may open a session: the one that started later."""

from __future__ import annotations

from typing import Final

from worker_svc.errors import OpenRefused

# So long after the end of a scheduler's stream an older one is refused: no longer, since clocks may step back. Seconds.
_REMEMBERED_S: Final = 10.0


class TermGuard:
    """The term of the scheduler that holds this worker. Times in seconds of the event loop's clock.

    A term of 0 was not given: such a scheduler is neither refused nor a reason to refuse another one."""

    def __init__(self) -> None:
        self._term = 0
        self._is_open = False
        self._ended_at = 0.0

    def check(self, term: int, now: float) -> None:
        """Raises OpenRefused for a scheduler that is older than the present one."""
        is_remembered = self._is_open or now - self._ended_at < _REMEMBERED_S
        if 0 < term < self._term and is_remembered:
            raise OpenRefused(
                "NEWER_SCHEDULER", "a scheduler that started later has opened this worker: stop the older one"
            )

    def opened(self, term: int) -> None:
        """The stream of a scheduler with this term is the worker's stream from now on."""
        self._term, self._is_open = term, True

    def ended(self, now: float) -> None:
        """The worker's stream is over."""
        self._is_open, self._ended_at = False, now
