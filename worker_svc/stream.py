"""One RunSteps stream, seen from the worker: what was asked on it, and the frames on their way down.

Every step frame on a stream is one question and gets one answer on that stream, in the order of asking, whether the
step is executed for it or remembered. A question that is open when the stream is lost is asked again on the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from stepfence.v1 import worker_service_pb2
from worker_svc import codec
from worker_svc.epoch import Epoch
from worker_svc.errors import ContractError, StepRefused
from worker_svc.limits import MAX_STAGED_COMMANDS

Frame = worker_service_pb2.RunStepsResponse


class StepStream:
    """Lives on the event loop. `next_frame` is called by one writer; everything else never waits."""

    def __init__(self) -> None:
        # The epoch it was opened for.
        self.epoch: Epoch | None = None
        # The opened frame was sent.
        self.is_open = False
        self._asked: Final[deque[int]] = deque()
        self._frames: Final[deque[Frame]] = deque()
        self._wake: Final = asyncio.Event()
        self._is_ending = False
        self._ends_when_answered = False
        self._refusal: ContractError | None = None
        # Called once, when no more frames will be pushed.
        self.on_end: Callable[[], None] = lambda: None

    @property
    def refusal(self) -> ContractError | None:
        """With what the stream ends; None: OK, or not yet."""
        return self._refusal

    def is_asked(self, step_seq: int) -> bool:
        """Whether the answer to this step is still to be pushed."""
        return step_seq in self._asked

    @property
    def is_ending(self) -> bool:
        return self._is_ending

    @property
    def is_quiet(self) -> bool:
        """Nothing asked that is not answered, nothing left to send."""
        return not self._asked and not self._frames

    def push(self, frame: Frame) -> None:
        if self._is_ending:
            return
        self._frames.append(frame)
        self._wake.set()

    def ask(self, step_seq: int) -> None:
        """A step came in that deserves an answer. Raises StepRefused when the peer asks on without reading."""
        if len(self._asked) + len(self._frames) >= MAX_STAGED_COMMANDS:
            raise StepRefused("TOO_MANY_UNREAD", f"more than {MAX_STAGED_COMMANDS} answers are waiting to be read")
        self._asked.append(step_seq)
        self.pump()

    def pump(self) -> None:
        """Send the answers that are there, in the order of asking; a failure is the last one."""
        epoch = self.epoch
        while epoch is not None and self._asked and (answer := epoch.answer(self._asked[0])) is not None:
            self._asked.popleft()
            self.push(codec.encode_answer(answer))
            if answer.failure is not None:
                # Ends OK: a status other than OK can overtake the frame before it at the client.
                self.end(None)
        if self._ends_when_answered and not self._asked:
            self.end(None)

    def end_when_answered(self) -> None:
        """The peer will ask nothing more: end OK after the last answer."""
        self._ends_when_answered = True
        self.pump()

    def end(self, refusal: ContractError | None) -> None:
        """No more frames after those pushed; then the end, with the status of the refusal if there is one. Only the
        first call counts."""
        if self._is_ending:
            return
        self._is_ending = True
        self._refusal = refusal
        self._asked.clear()
        self._wake.set()
        self.on_end()

    async def next_frame(self) -> Frame | None:
        """The next frame down, or None after the last. Raises the refusal that ends the stream, after its frames."""
        while not self._frames:
            if self._refusal is not None:
                raise self._refusal
            if self._is_ending:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._frames.popleft()
