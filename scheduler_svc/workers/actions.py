"""What a worker's session wants done: the answers of `session.py`, carried out by `client.py` in their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.events import RankDraining, RankJoined, StepAcked


@dataclass(frozen=True, slots=True)
class Joined:
    """The loop hears that an epoch was opened."""

    event: RankJoined


@dataclass(frozen=True, slots=True)
class Lost:
    """The loop hears that an epoch that had joined is over. graceful: the worker drained, or this scheduler let go.
    is_known: the loop knows already, since the core refused an answer."""

    epoch: int
    reason: str
    graceful: bool
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The loop hears that the worker wants to leave."""

    event: RankDraining
    epoch: int


@dataclass(frozen=True, slots=True)
class Acked:
    """The loop hears of a step's result. Times in seconds."""

    event: StepAcked
    rtt_s: float
    staged_s: float
    executed_s: float


@dataclass(frozen=True, slots=True)
class Transmit:
    """There may be frames to send."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The present attempt, wherever it stands, is to be given up."""


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the log."""

    level: int
    message: str
    fields: Mapping[str, object]


Action = Joined | Lost | Leaving | Acked | Transmit | Interrupt | Say


@dataclass(frozen=True, slots=True)
class Retry:
    """Seconds to wait before the next attempt. is_jittered: take between half and all of it."""

    seconds: float
    is_jittered: bool = False
