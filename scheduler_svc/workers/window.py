"""The steps of one epoch that the worker has not acknowledged, as the frames that carry them.

The mirror image of `worker_svc/ledger.py`. No I/O; times are seconds of one clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from scheduler_svc.core.events import WorkerProtocolError
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.errors import LinkRejected
from scheduler_svc.workers import codec
from scheduler_svc.workers.codec import StepResult

# Steps of an epoch for which the longer watchdog holds: the worker compiles and warms up in them.
_FIRST_STEPS: Final = 3


@dataclass(slots=True)
class _Frame:
    """One step frame until its result is in."""

    step_seq: int
    data: bytes
    sent_at: float | None = None


class StepWindow:
    """Frames of one epoch, oldest first. The first `num_sent` of them are on the present stream.

    max_message_bytes: the largest frame the worker takes. The core plans its steps so that they fit.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._frames: deque[_Frame] = deque()
        self._num_sent = 0
        self._newest_seq = 0
        self._processed_progress_seq = 0
        # Since when the oldest frame has been the oldest one that was sent.
        self._oldest_since = 0.0

    def __len__(self) -> int:
        """Frames without a result."""
        return len(self._frames)

    @property
    def newest_seq(self) -> int:
        """Number of the newest step; 0 before the first."""
        return self._newest_seq

    @property
    def num_acknowledged(self) -> int:
        return self.newest_seq - len(self._frames)

    def queue(self, output: SchedulerOutput) -> None:
        """Append a step."""
        data = codec.encode_step(output, self._max_message_bytes, processed_progress_seq=self._processed_progress_seq)
        self._frames.append(_Frame(output.step_seq, data))
        self._newest_seq = output.step_seq

    def take_progress(self, progress_seq: int) -> bool:
        """Whether this progress is news: what was handled before a stream was lost is sent again. Later steps tell the
        worker that it was handled. Raises WorkerProtocolError for a gap."""
        if progress_seq <= self._processed_progress_seq:
            return False
        if progress_seq != self._processed_progress_seq + 1:
            raise WorkerProtocolError(f"progress {progress_seq} after progress {self._processed_progress_seq}")
        self._processed_progress_seq = progress_seq
        return True

    def start_stream(self) -> None:
        """A new stream: every frame without a result will be sent again, byte for byte."""
        self._num_sent = 0

    def take_frame(self, now: float) -> bytes | None:
        """The next frame for the present stream; None when there is none."""
        if self._num_sent == len(self._frames):
            return None
        frame = self._frames[self._num_sent]
        self._num_sent += 1
        if frame.sent_at is None:
            frame.sent_at = now
            if self._num_sent == 1:
                self._oldest_since = now
        return frame.data

    def acknowledge(self, result: StepResult, now: float) -> float:
        """Take the result of the oldest frame out of the window. Returns the seconds since the frame was first sent.

        Raises WorkerProtocolError for any other result, LinkRejected for a step that failed (contract rule 8).
        """
        frame = self._frames[0] if self._num_sent else None
        if frame is None or result.step_seq != frame.step_seq:
            expected = "none" if frame is None else f"step {frame.step_seq}"
            raise WorkerProtocolError(f"a result of step {result.step_seq}, expected {expected}")
        if result.error is not None:
            raise LinkRejected("step failed", f"step {result.step_seq}: {result.error}")
        self._frames.popleft()
        self._num_sent -= 1
        self._oldest_since = now
        return now - (now if frame.sent_at is None else frame.sent_at)

    def overdue(self, now: float, step_watchdog_s: float, first_steps_watchdog_s: float) -> str | None:
        """Why the oldest frame has waited for its result for too long; None when it has not."""
        oldest = self._frames[0] if self._frames else None
        if oldest is None or oldest.sent_at is None:
            return None
        limit_s = step_watchdog_s
        if oldest.step_seq <= _FIRST_STEPS:
            limit_s = max(limit_s, first_steps_watchdog_s)
        if now - self._oldest_since < limit_s:
            return None
        return f"watchdog: no result of step {oldest.step_seq} within {limit_s:g} s"

    def postpone(self, seconds: float) -> None:
        """This process stood still for so long: results may be waiting to be read."""
        self._oldest_since += seconds
