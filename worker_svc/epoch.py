"""One epoch: the life of a session with one scheduler. Keeps the order of its steps and remembers their answers.

No threads and no gRPC here. Everything is called from the event loop, except that the executor reads `is_over` and may
call `end`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from worker_svc.errors import OpenRefused, StepRefused
from worker_svc.ledger import DraftedRows, Ledger
from worker_svc.limits import MAX_EMPTY_STEPS_UNPROCESSED
from worker_svc.runner.base import Geometry, RunnerCapabilities
from worker_svc.step import Step, StepAnswer


class Epoch:
    """Usable once `start` was called; over for good once `end` was.

    Contract rules 1 (order), 2 (remembered answers), 3 (refusals) and 8 (nothing goes on after a failure).
    """

    def __init__(self, incarnation: int, number: int, geometry: Geometry) -> None:
        self.incarnation: Final = incarnation
        self.number: Final = number
        self.geometry: Final = geometry
        self.num_blocks = 0
        # Why it is over; None while it is not. Written once, by either thread: a plain attribute is enough.
        self._over: str | None = None
        # The step whose failure ended it; None when another reason did.
        self._failed_step_seq: int | None = None
        self._ledger: Ledger | None = None
        self._accepted_step_seq = 0
        self._answered_step_seq = 0
        self._processed_step_seq = 0
        self._fence_seq = 0
        # Answers after _processed_step_seq.
        self._answers: Final[dict[int, StepAnswer]] = {}
        self._drafted: Final[dict[int, DraftedRows]] = {}
        # Steps with tokens after _processed_step_seq, in order.
        self._window: Final[deque[int]] = deque()

    @property
    def is_over(self) -> bool:
        return self._over is not None

    @property
    def executed_step_seq(self) -> int:
        return self._answered_step_seq

    @property
    def num_unanswered(self) -> int:
        return self._accepted_step_seq - self._answered_step_seq

    @property
    def num_rows_held(self) -> int:
        return 0 if self._ledger is None or self.is_over else self._ledger.num_rows_held

    def start(self, num_blocks: int, capabilities: RunnerCapabilities) -> None:
        """The runner is ready with so many blocks."""
        self.num_blocks = num_blocks
        self._ledger = Ledger(self.geometry, num_blocks, capabilities)

    def end(self, why: str) -> None:
        """Nothing more is executed. Idempotent: the first reason stays."""
        if self._over is None:
            self._over = why

    def fail(self, step_seq: int) -> None:
        """The step failed, so nothing more is executed. Its answer is still to come; see `failed_step_seq`."""
        if self._over is None:
            # In this order: the event loop may look in between.
            self._failed_step_seq = step_seq
            self._over = f"step {step_seq} failed"

    @property
    def failed_step_seq(self) -> int | None:
        """The step whose failure ended the epoch: it is answered, later ones are not."""
        return self._failed_step_seq

    def check_reopen(self, geometry: Geometry) -> None:
        """Whether a stream may go on with this epoch. Raises OpenRefused."""
        if self._over is not None:
            raise OpenRefused("EPOCH_OVER", f"epoch {self.number} is over ({self._over}): open a later one")
        if geometry != self.geometry:
            raise OpenRefused("GEOMETRY_CHANGED", f"epoch {self.number} was opened as {self.geometry}")

    def accept(self, step: Step) -> bool:
        """Take a step: True when it is new and must be executed, False when it is a repetition.

        A repetition has a remembered answer, or will have one. Raises MalformedStep or StepRefused, and then the epoch
        is over.
        """
        try:
            return self._accept(step)
        except Exception as error:
            self.end(f"step {step.step_seq} was refused: {error}")
            raise

    def remember(self, answer: StepAnswer) -> None:
        """Keep the answer of the oldest unanswered step."""
        self._answered_step_seq = answer.step_seq
        self._answers[answer.step_seq] = answer
        drafted = self._drafted.pop(answer.step_seq, None)
        if drafted is not None and answer.output is not None and self._ledger is not None:
            self._ledger.settle(drafted, answer.output)

    def answer(self, step_seq: int) -> StepAnswer | None:
        """The remembered answer; None when it is still to come."""
        return self._answers.get(step_seq)

    def _accept(self, step: Step) -> bool:
        if step.epoch != self.number:
            raise StepRefused("WRONG_EPOCH", f"step of epoch {step.epoch}, this is epoch {self.number}")
        if self._over is not None:
            if self._is_answered_after_all(step.step_seq):
                return False
            raise StepRefused("EPOCH_OVER", f"epoch {self.number} is over: {self._over}")
        if step.step_seq <= self._accepted_step_seq:
            if step.step_seq <= self._processed_step_seq:
                raise StepRefused("ANSWER_FORGOTTEN", f"step {step.step_seq} was processed already, its answer is gone")
            return False
        if step.step_seq != self._accepted_step_seq + 1:
            raise StepRefused("STEP_GAP", f"step {step.step_seq} after step {self._accepted_step_seq}")
        self._check_fence(step)
        self._forget_processed(step)
        self._check_window(step)
        assert self._ledger is not None, "steps are read after opened only"
        drafted = self._ledger.apply(step)
        if drafted is not None:
            self._drafted[step.step_seq] = drafted
        if len(step.rows):
            self._window.append(step.step_seq)
        self._accepted_step_seq = step.step_seq
        self._fence_seq = step.fence_seq
        return True

    def _is_answered_after_all(self, step_seq: int) -> bool:
        """Of an epoch that is over: whether the step's answer is there, or on its way."""
        failed = self._failed_step_seq
        return step_seq in self._answers or (failed is not None and self._answered_step_seq < step_seq <= failed)

    def _check_fence(self, step: Step) -> None:
        num_fences = 1 if len(step.rows) else 0
        # The first step of an epoch says where counting starts.
        expected = step.fence_seq if self._accepted_step_seq == 0 else self._fence_seq + num_fences
        if step.fence_seq != expected or step.fence_seq < num_fences:
            raise StepRefused("FENCE_GAP", f"step {step.step_seq}: fence_seq {step.fence_seq} after {self._fence_seq}")

    def _forget_processed(self, step: Step) -> None:
        processed = step.processed_step_seq
        if processed > self._answered_step_seq:
            raise StepRefused(
                "PROCESSED_AHEAD", f"processed_step_seq {processed}, but only {self._answered_step_seq} were answered"
            )
        if processed < self._processed_step_seq:
            raise StepRefused("PROCESSED_BACKWARDS", f"processed_step_seq {processed} after {self._processed_step_seq}")
        for step_seq in range(self._processed_step_seq + 1, processed + 1):
            self._answers.pop(step_seq, None)
        self._processed_step_seq = processed
        while self._window and self._window[0] <= processed:
            self._window.popleft()

    def _check_window(self, step: Step) -> None:
        depth = self.geometry.max_inflight_steps
        if len(step.rows) and len(self._window) >= depth:
            raise StepRefused("WINDOW_FULL", f"step {step.step_seq}: {depth} steps with tokens are unacknowledged")
        if step.step_seq - self._processed_step_seq > depth + MAX_EMPTY_STEPS_UNPROCESSED:
            raise StepRefused(
                "WINDOW_FULL", f"step {step.step_seq}: the last processed one is {self._processed_step_seq}"
            )
