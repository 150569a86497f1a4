"""The steps of one epoch that the worker has not acknowledged, as the frames that carry them.

The mirror image of `worker_svc/ledger.py`. No I/O; times are seconds of one clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from scheduler_svc import codec
from scheduler_svc.codec import StepResult
from scheduler_svc.core.events import WorkerProtocolError
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.errors import LinkRejected

# Steps of an epoch for which the longer watchdog holds: the worker compiles and warms up in them.
_FIRST_STEPS: Final = 3


@dataclass(slots=True)
class _Frame:
    """One step frame until its result is in. core_seq None: it only carries what did not fit into the next one
    (codec.encode_step)."""

    wire_seq: int
    core_seq: int | None
    data: bytes
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A result that was expected. core_seq: the core's number of the step, None when the core does not know the frame.
    rtt_s: seconds from first sending to the result."""

    core_seq: int | None
    rtt_s: float


class StepWindow:
    """Frames of one epoch, oldest first. The first `num_sent` of them are on the present stream.

    max_unacknowledged: frames that may wait at the worker at once, as it was announced at open.
    max_message_bytes: the largest frame the worker takes.
    """

    def __init__(self, max_unacknowledged: int, max_message_bytes: int) -> None:
        self._max_unacknowledged = max_unacknowledged
        self._max_message_bytes = max_message_bytes
        self._frames: deque[_Frame] = deque()
        self._num_sent = 0
        self._next_wire_seq = 1
        # (core step_seq, its wire number) of steps that the core may still name as processed.
        self._wire_numbers: deque[tuple[int, int]] = deque()
        self._processed_wire_seq = 0
        self._processed_progress_seq = 0
        # Since when the oldest frame has been the oldest one that was sent.
        self._oldest_since = 0.0

    def __len__(self) -> int:
        """Frames without a result."""
        return len(self._frames)

    @property
    def newest_seq(self) -> int:
        """Wire number of the newest frame; 0 before the first."""
        return self._next_wire_seq - 1

    @property
    def num_acknowledged(self) -> int:
        return self.newest_seq - len(self._frames)

    def queue(self, output: SchedulerOutput) -> None:
        """Append a step; it is cut into several frames when it does not fit into one."""
        while self._wire_numbers and self._wire_numbers[0][0] <= output.processed_step_seq:
            self._processed_wire_seq = self._wire_numbers.popleft()[1]
        first = self._next_wire_seq
        frames = codec.encode_step(
            output,
            first,
            self._processed_wire_seq,
            self._max_message_bytes,
            processed_progress_seq=self._processed_progress_seq,
        )
        self._next_wire_seq += len(frames)
        for index, data in enumerate(frames):
            is_last = index == len(frames) - 1
            self._frames.append(_Frame(first + index, output.step_seq if is_last else None, data))
        self._wire_numbers.append((output.step_seq, first + len(frames) - 1))

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

    @property
    def has_frame_to_send(self) -> bool:
        return self._num_sent < min(len(self._frames), self._max_unacknowledged)

    def take_frame(self, now: float) -> bytes | None:
        """The next frame for the present stream; None when there is none, or the worker's window is full."""
        if not self.has_frame_to_send:
            return None
        frame = self._frames[self._num_sent]
        self._num_sent += 1
        if frame.sent_at is None:
            frame.sent_at = now
            if self._num_sent == 1:
                self._oldest_since = now
        return frame.data

    def acknowledge(self, result: StepResult, now: float) -> Acknowledged:
        """Take the result of the oldest frame out of the window.

        Raises WorkerProtocolError for any other result, LinkRejected for a step that failed (contract rule 8).
        """
        frame = self._frames[0] if self._num_sent else None
        if frame is None or result.step_seq != frame.wire_seq:
            expected = "none" if frame is None else f"step {frame.wire_seq}"
            raise WorkerProtocolError(f"a result of step {result.step_seq}, expected {expected}")
        if result.error is not None:
            raise LinkRejected("step failed", f"step {result.step_seq}: {result.error}")
        if frame.core_seq is None and result.sampled:
            raise WorkerProtocolError(f"step {result.step_seq} has no tokens, its result has {len(result.sampled)}")
        self._frames.popleft()
        self._num_sent -= 1
        self._oldest_since = now
        return Acknowledged(frame.core_seq, now - (now if frame.sent_at is None else frame.sent_at))

    def overdue(self, now: float, step_watchdog_s: float, first_steps_watchdog_s: float) -> str | None:
        """Why the oldest frame has waited for its result for too long; None when it has not."""
        oldest = self._frames[0] if self._frames else None
        if oldest is None or oldest.sent_at is None:
            return None
        limit_s = step_watchdog_s
        if oldest.wire_seq <= _FIRST_STEPS:
            limit_s = max(limit_s, first_steps_watchdog_s)
        if now - self._oldest_since < limit_s:
            return None
        return f"watchdog: no result of step {oldest.wire_seq} within {limit_s:g} s"

    def postpone(self, seconds: float) -> None:
        """This process stood still for so long: results may be waiting to be read."""
        self._oldest_since += seconds
