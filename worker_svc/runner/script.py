"""What a scripted worker does besides answering right: delays, ends of text, and faults on purpose.

Written as JSON (`--script`, STEPFENCE_SCRIPT) or built in a test. docs/worker.md describes every field.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from worker_svc.step import StepAnswer


class FaultKind(Enum):
    """What goes wrong."""

    # The step fails; the worker awaits a new epoch.
    FAIL = "fail"
    # The device is poisoned: the step fails, and the process exits after the answer.
    DEVICE = "device"
    # The process exits at once, with `exit_code`.
    EXIT = "exit"
    # The answer comes `seconds` late, or never; nothing else is executed meanwhile.
    STALL = "stall"
    # The rows of the requests that `request_id` names fail alone.
    INVALID_ROW = "invalid_row"
    # The last sampled id is left out.
    MISSING_ROW = "missing_row"
    # The first sampled id is the vocabulary's size.
    OUT_OF_RANGE = "out_of_range"
    # The answer is given twice.
    REPEATED_RESULT = "repeated_result"
    # The step is executed and never answered.
    WITHHELD_RESULT = "withheld_result"
    # The answer carries the number of the next step.
    WRONG_STEP_SEQ = "wrong_step_seq"


# These change what is said about a step, not the step: request ids are not known there.
_SPOKEN: Final = frozenset({FaultKind.REPEATED_RESULT, FaultKind.WITHHELD_RESULT, FaultKind.WRONG_STEP_SEQ})


# A year: beyond what anybody waits for, and within what timers can hold.
MAX_SECONDS: Final = 31_536_000.0
_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
_Milliseconds = Annotated[float, Field(ge=0, le=1000 * MAX_SECONDS, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fault(_Strict):
    """One fault: when every given condition holds (`at_step`, `epoch`, `request_id`), `times` times in a process."""

    kind: FaultKind
    # step_seq.
    at_step: int | None = Field(None, ge=1)
    epoch: int | None = Field(None, ge=1)
    # A request whose id starts like this computes in the step.
    request_id: str | None = None
    # 0: every time.
    times: int = Field(1, ge=0)
    # Of a stall; None: until the process ends.
    seconds: _Seconds | None = None
    exit_code: int = Field(1, ge=0, le=255)

    @model_validator(mode="after")
    def _has_a_condition(self) -> Fault:
        if self.at_step is None and self.request_id is None:
            raise ValueError("a fault needs at_step or request_id")
        if self.request_id is None and self.kind is FaultKind.INVALID_ROW:
            raise ValueError("invalid_row needs request_id")
        if self.request_id is not None and self.kind in _SPOKEN:
            raise ValueError(f"{self.kind.value} goes with at_step, not with request_id")
        return self

    def is_due(self, epoch: int, step_seq: int, request_ids: Iterable[str]) -> bool:
        """Whether the conditions hold, `times` apart."""
        if self.at_step not in (None, step_seq) or self.epoch not in (None, epoch):
            return False
        prefix = self.request_id
        return prefix is None or any(request_id.startswith(prefix) for request_id in request_ids)


class Script(_Strict):
    """The whole script; the empty one is a worker without faults that never ends a text."""

    # Each step takes delay_ms, plus up to jitter_ms drawn from (jitter_seed, epoch, step).
    delay_ms: _Milliseconds = 0.0
    jitter_ms: _Milliseconds = 0.0
    jitter_seed: int = 0
    load_delay_s: _Seconds = 0.0
    # Not empty: loading fails with this message.
    load_error: str = ""
    # Output index at which the end of the text is sampled; or at every index at which it is not masked.
    eos_at: int | None = Field(None, ge=0)
    eos_always: bool = False
    # Check earlier slots of a row when it enters and when another row wrote into its blocks ("changed"), in every step
    # ("full"), or never ("off").
    verify: Literal["changed", "full", "off"] = "changed"
    # Whether a block may be given to a row only after the last step that used it before is processed (contract rule 5).
    # To be turned off for a scheduler that runs with fence = transfers.
    check_fences: bool = True
    faults: tuple[Fault, ...] = ()

    def delay_s(self, epoch: int, step_seq: int) -> float:
        """Seconds that this step takes."""
        if not self.jitter_ms:
            return self.delay_ms / 1000
        draw = random.Random(f"{self.jitter_seed}/{epoch}/{step_seq}").random()
        return (self.delay_ms + self.jitter_ms * draw) / 1000

    def wants_eos(self, output_index: int) -> bool:
        return self.eos_always or output_index == self.eos_at


class FaultPlan:
    """A script's faults and how often each has fired. `take` is for the executor thread, `distort` for the event loop:
    they touch different faults."""

    def __init__(self, script: Script) -> None:
        self._faults: Final = [fault for fault in script.faults if fault.kind not in _SPOKEN]
        self._spoken: Final = [fault for fault in script.faults if fault.kind in _SPOKEN]
        self._num_fired: Final[dict[int, int]] = {}

    def take(self, epoch: int, step_seq: int, request_ids: Iterable[str]) -> list[Fault]:
        """The faults of this step, counted as fired; those of answers apart."""
        if not self._faults:
            return []
        ids = list(request_ids)
        return [fault for fault in self._faults if self._fires(fault, epoch, step_seq, ids)]

    def distort(self, answer: StepAnswer) -> tuple[StepAnswer, ...]:
        """The answers that are given in place of this one."""
        given: tuple[StepAnswer, ...] = (answer,)
        for fault in self._spoken:
            if not self._fires(fault, answer.epoch, answer.step_seq, ()):
                continue
            if fault.kind is FaultKind.REPEATED_RESULT:
                given = (*given, answer)
            elif fault.kind is FaultKind.WRONG_STEP_SEQ:
                given = (replace(answer, step_seq=answer.step_seq + 1),)
            else:
                given = ()
        return given

    def _fires(self, fault: Fault, epoch: int, step_seq: int, request_ids: Iterable[str]) -> bool:
        num_fired = self._num_fired.get(id(fault), 0)
        if (fault.times and num_fired >= fault.times) or not fault.is_due(epoch, step_seq, request_ids):
            return False
        self._num_fired[id(fault)] = num_fired + 1
        return True
