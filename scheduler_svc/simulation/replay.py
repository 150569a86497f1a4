"""Replay a recording: the same events into a fresh core, and the same steps must come out, byte for byte.

Says at which line and in which field the first difference is, tells in numbers what happened, and can tell the story
of one request. A core that raises during the replay is told with its line: the recording then is the way to see it
again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Final, TextIO

from scheduler_svc.core import reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    Effect,
    Event,
    RequestAborted,
    RequestAccepted,
    RequestArrived,
    RequestEnded,
    RequestPreempted,
    RequestRefused,
    TextEnded,
    Tick,
    TokensProduced,
    WorkerProtocolError,
)
from scheduler_svc.core.output import NewRow, SchedulerOutput
from scheduler_svc.core.resources import ALL_REASONS
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal import (
    RecordedLine,
    Recording,
    RecordingError,
    Scheduled,
    StepChanges,
    schedule_line,
    stepfence_version,
)

EXIT_SAME: Final = 0
EXIT_DIFFERENT: Final = 1
EXIT_UNREADABLE: Final = 2

# Characters of a value shown in a difference.
_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the replay first parts from the recording; `field` is empty when one of them has no step, or the core
    raised."""

    line: int
    # Events before it.
    num_events: int
    what: str
    field: str = ""
    recorded: str = ""
    replayed: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}, after {self.num_events} events: {self.what}"
        if not self.field:
            return where
        return f"{where}: {self.field}\n  recorded {self.recorded}\n  replayed {self.replayed}"


@dataclass(slots=True)
class Summary:
    """What a recording holds, counted while it is replayed. Times in seconds of the recorded clock."""

    events: Counter[str] = field(default_factory=Counter)
    num_asked: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_wrong_answers: int = 0
    first_time: float | None = None
    last_time: float = 0.0

    def count(self, what: Event | Scheduled) -> None:
        if isinstance(what, Scheduled):
            self.num_asked += 1
            if what.output is not None:
                self.num_steps += 1
                self.num_step_tokens += what.output.total_num_tokens
            return
        self.events[type(what).__name__] += 1
        if isinstance(what, Tick):
            self.first_time = what.now if self.first_time is None else self.first_time
            self.last_time = what.now


class Replay:
    """One recording fed to one fresh core. `difference` is the first one found; the run ends there."""

    def __init__(self, recording: Recording, *, verify: bool = True) -> None:
        self.recording = recording
        self.scheduler = Scheduler(recording.config)
        self.summary = Summary()
        self.difference: Difference | None = None
        self._verify = verify
        self._recorded, self._replayed = StepChanges(), StepChanges()

    def run(self, story: Story | None = None) -> None:
        """To the end of the recording, or to the first difference. Raises RecordingError for a damaged file."""
        for line in self.recording.lines():
            self.difference = self._take(line, story)
            if self.difference is not None:
                return
            self.summary.count(line.what)

    def _take(self, line: RecordedLine, story: Story | None) -> Difference | None:
        what = line.what
        output: SchedulerOutput | None = None
        try:
            if isinstance(what, Scheduled):
                output = self.scheduler.schedule(what.rank)
                effects = self.scheduler.take_effects()
            else:
                effects = self.scheduler.handle(what)
        except WorkerProtocolError:
            # The recorded scheduler refused it just so; it changed nothing.
            self.summary.num_wrong_answers += 1
            return None
        except Exception as error:
            # Whatever the core raises is a result of the replay, not a failure of it.
            return self._difference(line, f"the core raised {type(error).__name__}: {error}")
        if not isinstance(what, Scheduled):
            if story is not None:
                story.handled(what, effects)
            return None
        if story is not None:
            story.scheduled(self.scheduler, output, effects)
        return self._compare(line, what, output) if self._verify else None

    def _compare(self, line: RecordedLine, what: Scheduled, output: SchedulerOutput | None) -> Difference | None:
        recorded = schedule_line(what.rank, what.output, self._recorded)
        if recorded == schedule_line(what.rank, output, self._replayed):
            return None
        if what.output is None or output is None:
            had, has = ("a step", "none") if output is None else ("no step", f"step {output.step_seq}")
            return self._difference(line, f"the recording has {had} of {what.rank} here, the replay {has}")
        for name in (f.name for f in fields(SchedulerOutput)):
            before, after = getattr(what.output, name), getattr(output, name)
            if before != after:
                step = f"step {what.output.step_seq} of {what.rank}"
                return self._difference(line, step, name, _shown(before), _shown(after))
        raise AssertionError("lines differ and no field does")

    def _difference(
        self, line: RecordedLine, what: str, name: str = "", recorded: str = "", replayed: str = ""
    ) -> Difference:
        return Difference(line.number, self.summary.events.total(), what, name, recorded, replayed)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


# --- one request --------------------------------------------------------------------------------------------------


class Story:
    """What happened to one request, as sentences. Times count from the first Tick of the recording."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.sentences: list[str] = []
        self._start: float | None = None
        self._now_s = 0.0
        self._handle: int | None = None
        self._num_admissions = 0
        self._has_token = False
        # What it was last said to wait for. Among the reasons is a request before it, which may become another one.
        self._waits_for: str | None = None
        self._tellers: dict[type, Callable[[Any], None]] = {
            Tick: self._tick,
            RequestArrived: self._arrived,
            RequestAborted: self._aborted,
            TextEnded: self._text_ended,
            RequestAccepted: self._accepted,
            RequestRefused: self._refused,
            TokensProduced: self._produced,
            RequestPreempted: self._preempted,
            RequestEnded: self._ended,
        }

    def handled(self, event: Event, effects: list[Effect]) -> None:
        """Take in an event and what it caused."""
        for fact in (event, *effects):
            teller = self._tellers.get(type(fact))
            if teller is not None and getattr(fact, "request_id", self.request_id) == self.request_id:
                teller(fact)

    def scheduled(self, scheduler: Scheduler, output: SchedulerOutput | None, effects: list[Effect]) -> None:
        """Take in a call of `schedule`."""
        for effect in effects:
            if isinstance(effect, RequestPreempted):
                self._preempted(effect)
        if output is not None:
            for row in output.new_requests:
                if row.request_id == self.request_id:
                    self._admitted(output, row)
        self._look_at(scheduler)

    def _tell(self, sentence: str) -> None:
        self.sentences.append(f"{self._now_s:10.3f} s  {sentence}")

    def _tick(self, event: Tick) -> None:
        self._start = event.now if self._start is None else self._start
        self._now_s = event.now - self._start

    def _arrived(self, event: RequestArrived) -> None:
        most = f"at most {event.max_tokens} tokens" if event.max_tokens else "as many tokens as fit"
        if event.output_tokens is not None:
            self._tell(
                f"was submitted again after the loss of a scheduler, or of its stream, with {len(event.prompt)} prompt "
                f"tokens and {len(event.output_tokens)} output tokens"
            )
            return
        self._tell(f"arrived with a prompt of {len(event.prompt)} tokens, asking for {most}")

    def _accepted(self, effect: RequestAccepted) -> None:
        self._handle = effect.handle
        self._waits_for = None
        self._num_admissions = 0
        self._has_token = False
        self._tell(f"was accepted, with at most {effect.max_tokens} tokens")

    def _refused(self, effect: RequestRefused) -> None:
        self._tell(f"was refused, {effect.reason.value}: {effect.message}")

    def _admitted(self, output: SchedulerOutput, row: NewRow) -> None:
        verb = "resumed" if self._num_admissions else "was admitted"
        self._num_admissions += 1
        self._waits_for = None
        cached = f", {row.num_computed_tokens} of them cached" if row.num_computed_tokens else ""
        self._tell(f"{verb} in step {output.step_seq} of {output.rank}: {len(row.token_ids)} tokens to hold{cached}")

    def _produced(self, effect: TokensProduced) -> None:
        if not self._has_token and self._handle in effect.handles:
            self._has_token = True
            self._tell("had its first token")

    def _preempted(self, effect: RequestPreempted) -> None:
        if effect.victim == self.request_id:
            who = f"for {effect.beneficiary}" if effect.beneficiary else f"({effect.cause})"
            self._tell(
                f"was preempted on {effect.rank} {who}: {effect.num_blocks_gained} blocks gained, "
                f"{effect.num_tokens_to_recompute} tokens to compute again"
            )
        elif effect.beneficiary == self.request_id:
            self._tell(f"needed blocks on {effect.rank}: {effect.victim} was preempted for it")

    def _aborted(self, event: RequestAborted) -> None:
        self._tell(f"was to be ended: {event.cause.value}")

    def _text_ended(self, event: TextEnded) -> None:
        self._tell(f"reached a stop string with {event.num_tokens} tokens")

    def _ended(self, effect: RequestEnded) -> None:
        usage = effect.usage
        self._handle = None
        self._tell(
            f"ended, {effect.reason.value}, with {usage.num_completion_tokens} tokens: {usage.num_preemptions} "
            f"preemptions, {usage.num_recomputed_tokens} tokens computed again, queued for {usage.queued_s:.3f} s, "
            f"preempted for {usage.preempted_s:.3f} s"
        )

    def _look_at(self, scheduler: Scheduler) -> None:
        """Tell why it waits, when that has changed: the reason, or the request that it waits behind."""
        explanation = scheduler.explain(self.request_id)
        if explanation is None or explanation.reason not in _WORTH_TELLING:
            return
        if explanation.detail != self._waits_for:
            self._waits_for = explanation.detail
            self._tell(f"waits: {explanation.detail}")


# Reasons that a running request meets in every other step are not news.
_WORTH_TELLING: Final = frozenset(ALL_REASONS) - {
    reasons.LAST_TOKEN_IN_FLIGHT,
    reasons.AWAITING_RESULT,
    reasons.LENGTH_REACHED,
    reasons.PREEMPTED,
    reasons.NOT_EXAMINED,
    reasons.WINDOW_FULL,
}


# --- telling ------------------------------------------------------------------------------------------------------


def main(path: Path, *, out: TextIO, verify: bool = True, explain: str | None = None) -> int:
    """Replay `path` and tell the result on `out`. Returns the exit code: 0 the same, 1 different or without the
    request to explain, 2 not readable (why is told on standard error).

    verify: compare every step with the recorded one. explain: id of a request whose story to tell."""
    story = None if explain is None else Story(explain)
    try:
        replay = Replay(Recording(path), verify=verify)
        replay.run(story)
    except RecordingError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    if story is not None:
        print(f"{story.request_id}:", file=out)
        print("\n".join(story.sentences) or "  no such request is in the recording", file=out)
        print(file=out)
    for sentence in _sentences(replay, verify):
        print(sentence, file=out)
    is_told = story is None or bool(story.sentences)
    return EXIT_SAME if replay.difference is None and is_told else EXIT_DIFFERENT


def _sentences(replay: Replay, verify: bool) -> Iterator[str]:
    recording, summary, totals = replay.recording, replay.summary, replay.scheduler.totals
    here = stepfence_version()
    yield f"recording of Stepfence {recording.stepfence}" + (f", replayed by {here}" * (here != recording.stepfence))
    yield f"settings: {', '.join(_settings(recording.config)) or 'the defaults'}"
    span_s = summary.last_time - (summary.first_time or 0.0)
    yield f"{summary.events.total()} events in {span_s:.3f} s: {_counts(summary.events)}"
    yield f"{summary.num_steps} steps with {summary.num_step_tokens} tokens, in {summary.num_asked} calls of schedule"
    yield (
        f"{totals.num_accepted} requests accepted, {totals.num_refused} refused, {totals.num_finished} finished, "
        f"{totals.num_aborted} aborted, {totals.num_failed} failed, {replay.scheduler.num_live_requests} still live; "
        f"{totals.num_preemptions} preemptions, {totals.num_recomputed_tokens} of {totals.num_computed_tokens} tokens "
        "computed again"
    )
    if summary.num_wrong_answers:
        yield f"{summary.num_wrong_answers} answers of workers did not fit what they were sent"
    if replay.difference is not None:
        yield f"DIFFERENT at {replay.difference}"
        return
    yield f"the recording ends: {recording.end}"
    yield f"the same: all {summary.num_steps} steps are identical" if verify else "steps were not compared"


def _counts(events: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in events.most_common()) or "none"


def _settings(config: SchedulerConfig) -> Iterator[str]:
    """Those that differ from the defaults."""
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.default is MISSING or value != setting.default:
            yield f"{setting.name} {value.value if isinstance(value, Enum) else value}"
