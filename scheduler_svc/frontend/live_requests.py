"""One request from its submission to its end, over as many schedulers as that takes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Final, Protocol

from scheduler_svc.frontend import codec
from scheduler_svc.frontend.calls import CancelReason, Ended, FinishReason, ModelDescription, Submission
from scheduler_svc.frontend.errors import CLIENT_GONE, DRAINING, SCHEDULER_LOST, SLOW_READER, Code, Failure
from scheduler_svc.frontend.usage import UsageSoFar
from stepfence.v1 import session_service_pb2

# A request that so many streams in a row were lost with, none of which had answered it, ends: it may be what they were
# lost for.
_MAX_UNANSWERED: Final = 10

OVERDUE: Final = Failure(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline of the call passed")
# How a request ends that is cancelled while no scheduler knows of it.
CANCELLED: Final[Mapping[CancelReason, Failure]] = {
    CancelReason.CLIENT_GONE: CLIENT_GONE,
    CancelReason.ABORTED: Failure(Code.CANCELLED, "ABORTED", "Abort was called"),
    CancelReason.SLOW_READER: SLOW_READER,
    CancelReason.DRAINED: DRAINING,
}


class CallSink(Protocol):
    """Receives what happens to one submitted request. Called from the loop; must neither block nor raise."""

    def accepted(self, max_tokens: int) -> None: ...

    def tokens(self, token_ids: Sequence[int]) -> None: ...

    def refused(self, failure: Failure) -> None: ...

    def ended(self, ended: Ended) -> None: ...


class Verdict(Enum):
    """What becomes of a request whose stream is lost, when it does not end."""

    GOES_ON = "goes on"


GOES_ON: Final = Verdict.GOES_ON


class LiveRequest:
    """What the next scheduler must know of a request, and what its cost was so far. Times in seconds of the event
    loop's clock. model: what was served when it was submitted."""

    def __init__(
        self, handle: int, submission: Submission, sink: CallSink, model: ModelDescription, now: float
    ) -> None:
        self.handle = handle
        # None: it was released.
        self.sink: CallSink | None = sink
        self.deadline = None if submission.timeout_s is None else now + submission.timeout_s
        # On the present stream.
        self.is_sent = False
        # What the scheduler was asked, if anything, to end it for.
        self.cancelled: CancelReason | None = None
        self.text_has_ended = False
        self.usage = UsageSoFar()
        self._submission = submission
        self._model = model
        self._submitted_at = now
        # As accepted; None: not accepted by any scheduler yet.
        self._max_tokens: int | None = None
        self._outputs = array("i")
        self._num_unanswered = 0

    @property
    def is_accepted(self) -> bool:
        """Whether some scheduler has accepted it."""
        return self._max_tokens is not None

    def fits(self, model: ModelDescription) -> bool:
        """Whether this model can go on with it."""
        mine = self._model
        return (mine.name, mine.vocab_size, mine.tokenizer_digest) == (
            model.name,
            model.vocab_size,
            model.tokenizer_digest,
        )

    # --- to a scheduler ---

    def submit(self, now: float) -> session_service_pb2.Submit:
        """The message that submits it, or submits it again."""
        self.is_sent = True
        self._num_unanswered += 1
        submission = self._submission
        if self.deadline is not None:
            submission = replace(submission, timeout_s=max(0.0, self.deadline - now))
        if self._max_tokens is None:
            return codec.encode_submit(self.handle, submission)
        self.usage.resumed(now)
        # 0 is what a scheduler says that does not limit it.
        most = self._max_tokens or submission.sampling.max_tokens
        least = min(submission.sampling.min_tokens, most) if most else submission.sampling.min_tokens
        sampling = replace(submission.sampling, max_tokens=most, min_tokens=least)
        again = codec.encode_submit(self.handle, replace(submission, sampling=sampling))
        codec.add_history(again, self._outputs, max(0.0, now - self._submitted_at))
        return again

    # --- from a scheduler ---

    def accepted(self, max_tokens: int) -> None:
        is_first = self._max_tokens is None
        self._max_tokens = max_tokens
        self._num_unanswered = 0
        if is_first and self.sink is not None:
            self.sink.accepted(max_tokens)

    def tokens(self, token_ids: array[int]) -> None:
        self._outputs.extend(token_ids)
        if self.sink is not None:
            self.sink.tokens(token_ids)

    def refused(self, failure: Failure, now: float) -> None:
        if self._max_tokens is not None:
            # It had run before: it ends with what it has cost.
            self.end(failure, now)
        elif self.sink is not None:
            self.sink.refused(failure)

    def ended(self, ended: Ended) -> None:
        if self.sink is not None:
            usage = None if ended.usage is None else self.usage.total(ended.usage)
            self.sink.ended(replace(ended, usage=usage))

    # --- without a scheduler ---

    def stream_lost(self, now: float) -> Failure | Verdict | None:
        """Whether it goes on with the next scheduler, or how it ends now: with a failure or, None, well."""
        self.is_sent = False
        if self.sink is None:
            return CLIENT_GONE
        if self.text_has_ended:
            return None
        if self.cancelled is not None:
            return CANCELLED[self.cancelled]
        if self._num_unanswered >= _MAX_UNANSWERED:
            return SCHEDULER_LOST
        self.usage.stream_lost(now, has_outputs=bool(self._outputs))
        return GOES_ON

    def end(self, failure: Failure | None, now: float) -> None:
        """The sink hears of its end, and of nothing more."""
        sink, self.sink = self.sink, None
        if sink is None:
            return
        if failure is not None and self._max_tokens is None:
            sink.refused(failure)
            return
        usage = self.usage.known(len(self._submission.prompt_token_ids), len(self._outputs), now)
        sink.ended(Ended(None if failure is not None else FinishReason.STOP, None, failure, usage))
