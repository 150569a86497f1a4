"""The single writer: nothing but this loop ever calls the core.

Whatever happens outside becomes an item in the inbox. A *turn* takes a bounded number of items, tells the core the time
and then each of them, hands on the effects, and asks the core for steps for every rank whose stream is up, until the
core has none. So an external event never changes anything at the moment it happens, and the order of the inbox is the
history.

    inbox ──► Tick, events ──► core ──► effects ──► front ends, log
                                └────► steps ────► rank clients
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.events import (
    Effect,
    Event,
    RankDraining,
    RankJoined,
    RankLost,
    StepAcked,
    Tick,
    WorkerProtocolError,
)
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.facts import MetricsSink, Recorder
from scheduler_svc.workers.client import RankClient

log = logging.getLogger(__name__)


class Core(Protocol):
    """The part of core.scheduler.Scheduler the loop needs."""

    def handle(self, event: Event) -> list[Effect]:
        """Take one event in. Raises WorkerProtocolError, with nothing changed, for a result that does not fit."""

    def schedule(self, rank: str) -> SchedulerOutput | None:
        """The rank's next step, or None: its window is full or there is nothing to tell it."""

    def take_effects(self) -> list[Effect]:
        """Effects of schedule() not handed out yet."""

    def next_deadline(self) -> float | None:
        """When a Tick has something to decide; None: no time matters now."""

    @property
    def num_live_requests(self) -> int:
        """Accepted and not ended."""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """max_inbox: items that wait before those who bring new work must; max_batch: items of one turn."""

    max_inbox: int = 4096
    max_batch: int = 256
    # Without any event the core hears the time this often while requests live. Seconds.
    live_tick_s: float = 1.0
    # Quiet for so long means idle. Seconds.
    idle_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class _Joined:
    client: RankClient
    event: RankJoined


@dataclass(frozen=True, slots=True)
class _Lost:
    epoch: int
    event: RankLost


@dataclass(frozen=True, slots=True)
class _Draining:
    epoch: int
    event: RankDraining


# Decides when its turn comes which events it means (a cancel means nothing when its request has just ended).
Deferred = Callable[[], Iterable[Event]]
Item = Event | _Joined | _Lost | _Draining | Deferred


class SchedulerLoop:
    """See the module. `deliver` gets the effects of one event at a time, `turn_ended` is called after each turn, `idle`
    once after every busy time."""

    def __init__(
        self,
        core: Core,
        *,
        deliver: Callable[[list[Effect]], None],
        turn_ended: Callable[[], None],
        idle: Callable[[], None],
        metrics: MetricsSink,
        recorder: Recorder,
        limits: LoopLimits,
    ) -> None:
        self._core = core
        self._deliver = deliver
        self._turn_ended = turn_ended
        self._idle = idle
        self._metrics = metrics
        self._recorder = recorder
        self._limits = limits
        self._inbox: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        # Ranks of which the core knows, in the order they joined.
        self._ranks: dict[str, _Joined] = {}

    # --- inbox ---

    async def put(self, item: Event | Deferred) -> None:
        """Bring in new work; waits while the inbox is full."""
        while len(self._inbox) >= self._limits.max_inbox:
            self._has_room.clear()
            await self._has_room.wait()
        self.post(item)

    def post(self, item: Item) -> None:
        """Bring in what cannot wait and is bounded by itself: results, losses, ends."""
        self._inbox.append(item)
        self._wake.set()

    def rank_joined(self, client: RankClient, event: RankJoined) -> None:
        """See RankInbox."""
        self.post(_Joined(client, event))

    def rank_lost(self, rank: str, epoch: int, reason: str, graceful: bool) -> None:
        """See RankInbox."""
        self.post(_Lost(epoch, RankLost(rank, reason, graceful)))

    def rank_draining(self, event: RankDraining, epoch: int) -> None:
        """See RankInbox."""
        self.post(_Draining(epoch, event))

    def step_acked(self, event: StepAcked) -> None:
        """See RankInbox."""
        self.post(event)

    @property
    def num_queued_items(self) -> int:
        """Items in the inbox."""
        return len(self._inbox)

    # --- turns ---

    async def run(self) -> None:
        """Turn after turn, until cancelled. An exception out of here is a bug, and fatal."""
        loop = asyncio.get_running_loop()
        is_idle = True
        while True:
            if not self._inbox:
                is_idle = await self._wait(loop, is_idle)
            began = loop.time()
            num_items = self.turn(began)
            self._metrics.turn(num_items, loop.time() - began)
            # Let streams be read and written between two turns that follow each other.
            await asyncio.sleep(0)

    async def _wait(self, loop: asyncio.AbstractEventLoop, is_idle: bool) -> bool:
        """Sleep until something is to be done; tells the idle hook once. Returns whether that was told."""
        while not self._inbox:
            self._wake.clear()
            timeout_s = self._sleep_s(loop.time())
            goes_idle = not is_idle and self._core.num_live_requests == 0
            if goes_idle:
                idle_s = self._limits.idle_after_s
                timeout_s = idle_s if timeout_s is None else min(timeout_s, idle_s)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
                return False
            except TimeoutError:
                if not goes_idle or self._deadline_passed(loop.time()):
                    return is_idle
                self._idle()
                is_idle = True
        return False

    def _sleep_s(self, now: float) -> float | None:
        deadline = self._core.next_deadline()
        # A deadline the core has just been told about and did not act upon must not make this spin.
        sleep_s = None if deadline is None else max(0.001, deadline - now)
        if self._core.num_live_requests:
            tick_s = self._limits.live_tick_s
            return tick_s if sleep_s is None else min(sleep_s, tick_s)
        return sleep_s

    def _deadline_passed(self, now: float) -> bool:
        deadline = self._core.next_deadline()
        return deadline is not None and deadline <= now

    def turn(self, now: float) -> int:
        """One turn at this time (seconds of the event loop's clock); returns how many items it took."""
        self._tell(Tick(now))
        num_items = min(len(self._inbox), self._limits.max_batch)
        for _ in range(num_items):
            self._take(self._inbox.popleft())
        if len(self._inbox) < self._limits.max_inbox:
            self._has_room.set()
        self._schedule()
        self._hand_on(self._core.take_effects())
        self._turn_ended()
        return num_items

    def _take(self, item: Item) -> None:
        if isinstance(item, StepAcked):
            self._take_result(item)
        elif isinstance(item, _Joined):
            self._ranks[item.event.rank] = item
            self._tell(item.event)
        elif isinstance(item, _Lost):
            if self._is_current(item.event.rank, item.epoch):
                del self._ranks[item.event.rank]
                self._tell(item.event)
        elif isinstance(item, _Draining):
            if self._is_current(item.event.rank, item.epoch):
                self._tell(item.event)
        elif callable(item):
            for event in item():
                self._tell(event)
        else:
            self._tell(item)

    def _take_result(self, event: StepAcked) -> None:
        if not self._is_current(event.rank, event.epoch):
            return  # late result of an epoch that is over
        try:
            self._tell(event)
        except WorkerProtocolError as error:
            reason = f"wrong answer: {error}"
            joined = self._ranks.pop(event.rank)
            self._tell(RankLost(event.rank, reason))
            joined.client.fail(event.epoch, reason)

    def _is_current(self, rank: str, epoch: int) -> bool:
        joined = self._ranks.get(rank)
        return joined is not None and joined.event.epoch == epoch

    def _tell(self, event: Event) -> None:
        self._recorder.event(event)
        self._hand_on(self._core.handle(event))

    def _hand_on(self, effects: list[Effect]) -> None:
        if effects:
            for effect in effects:
                self._metrics.effect(effect)
            self._deliver(effects)

    def _schedule(self) -> None:
        for rank, joined in self._ranks.items():
            client = joined.client
            while client.is_connected and client.epoch == joined.event.epoch:
                output = self._core.schedule(rank)
                self._recorder.scheduled(rank, output)
                if output is None:
                    break
                client.send(output)
