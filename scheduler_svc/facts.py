"""Where the shell reports what it does, for metrics and recordings. The null objects do nothing, and are the
default."""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.events import Effect, Event
from scheduler_svc.core.output import SchedulerOutput


class MetricsSink(Protocol):
    """Told every fact once, on the event loop; must be quick and must not raise. Times in seconds."""

    def step_sent(self, output: SchedulerOutput) -> None:
        """A step went to its rank's outgoing queue."""

    def step_acked(self, rank: str, step_seq: int, rtt_s: float, staged_s: float, executed_s: float) -> None:
        """A rank's result arrived: from sending to now, and the worker's own times."""

    def effect(self, effect: Effect) -> None:
        """The core produced an effect."""

    def refused_at_the_door(self, reason: str) -> None:
        """A request was refused before the core saw it."""

    def rank_changed(self, rank: str, state: str, epoch: int) -> None:
        """A rank's state is now "connecting", "up", "draining" or "lost"."""

    def epoch_ended(self, rank: str, graceful: bool) -> None:
        """An epoch that had joined is over; graceful: it was meant to end (drained, let go). Called once for each."""

    def turn(self, num_events: int, duration_s: float) -> None:
        """The loop took so many events in one turn."""


class NullMetrics:
    """MetricsSink that keeps nothing."""

    def step_sent(self, output: SchedulerOutput) -> None:
        """See MetricsSink."""

    def step_acked(self, rank: str, step_seq: int, rtt_s: float, staged_s: float, executed_s: float) -> None:
        """See MetricsSink."""

    def effect(self, effect: Effect) -> None:
        """See MetricsSink."""

    def refused_at_the_door(self, reason: str) -> None:
        """See MetricsSink."""

    def rank_changed(self, rank: str, state: str, epoch: int) -> None:
        """See MetricsSink."""

    def epoch_ended(self, rank: str, graceful: bool) -> None:
        """See MetricsSink."""

    def turn(self, num_events: int, duration_s: float) -> None:
        """See MetricsSink."""


class Recorder(Protocol):
    """Told everything that goes into the core and every step that comes out, in order: enough to replay a run."""

    def event(self, event: Event) -> None:
        """The core is about to handle this event."""

    def scheduled(self, rank: str, output: SchedulerOutput | None) -> None:
        """The core was asked for a rank's next step and gave this one (None: nothing to do)."""


class NullRecorder:
    """Recorder that keeps nothing."""

    def event(self, event: Event) -> None:
        """See Recorder."""

    def scheduled(self, rank: str, output: SchedulerOutput | None) -> None:
        """See Recorder."""
