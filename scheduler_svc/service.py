"""The scheduler process without its sockets: core, loop, rank clients and front ends, wired once.

Transport, resolver and randomness come from outside and time from the running event loop (D48), so the very same object
runs behind gRPC servers (`server.py`) and in a simulation on virtual time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, assert_never

from scheduler_svc.codec import SessionFeature
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    DrainStarted,
    Effect,
    EndReason,
    Event,
    PrefixCacheReset,
    PrefixCacheResetRequested,
    RequestAccepted,
    RequestEnded,
    RequestPreempted,
    RequestRefused,
    TokensProduced,
    UsageChanged,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import SHUT_DOWN
from scheduler_svc.facts import MetricsSink, NullMetrics, NullRecorder, Recorder
from scheduler_svc.loop import LoopLimits, SchedulerLoop
from scheduler_svc.preemption_log import PreemptionLog
from scheduler_svc.session import SessionHub
from scheduler_svc.workers.client import RankClient
from scheduler_svc.workers.fitness import RankRegister, SessionConfig
from scheduler_svc.workers.pool import WorkerPool
from scheduler_svc.workers.served_model import ServedModel
from scheduler_svc.workers.session import Timeouts
from scheduler_svc.workers.transport import AddressResolver, WorkerTransport

log = logging.getLogger(__name__)

# Time for front ends to read the last frames, once everything has ended. Seconds.
_FAREWELL_S: Final = 2.0
# Of a term; the start time in milliseconds stands above them.
_TERM_RANDOM_BITS: Final = 22
# Ends that no client and no operator asked for.
_FAILURES: Final = frozenset({EndReason.WORKER_FAULT, EndReason.NO_WORKER, EndReason.MODEL_OUTPUT_INVALID})


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What the shell needs to know besides the core's configuration. Seconds and bytes."""

    workers: tuple[str, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: LoopLimits = field(default_factory=LoopLimits)
    drain_deadline_s: float = 30.0
    max_outgoing_bytes: int = 16 << 20
    front_end_silence_s: float = 10.0
    # A line of the log for every request that ends, not only for those that fail.
    log_requests: bool = False


class SchedulerService:
    """run() does everything; the rest are questions, and wishes that take effect in the loop's next turn."""

    def __init__(
        self,
        config: SchedulerConfig,
        options: ServiceOptions,
        *,
        transport: WorkerTransport,
        resolver: AddressResolver,
        rng: random.Random,
        wall_time: Callable[[], float] = time.time,
        metrics: MetricsSink | None = None,
        recorder: Recorder | None = None,
        on_readiness: Callable[[bool, str], None] | None = None,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.options = options
        # Drawn once: what makes epochs of this process's life differ from those of another one.
        self.incarnation = rng.getrandbits(64) or 1
        self.term = (round(wall_time() * 1000) << _TERM_RANDOM_BITS) | rng.getrandbits(_TERM_RANDOM_BITS)
        self.core = Scheduler(config)
        self._transport = transport
        self._rng = rng
        self._metrics = NullMetrics() if metrics is None else metrics
        self._on_readiness = on_readiness
        self._on_idle = on_idle
        self._was_ready: bool | None = None
        # When live requests were accepted, by handle; the core's clock.
        self._accepted_at: dict[int, float] = {}
        self._preemptions = PreemptionLog(self.core)
        self._resets: deque[asyncio.Future[PrefixCacheReset]] = deque()
        self._register = RankRegister()
        self.model = ServedModel(self._is_model_in_use, lambda facts: self.hub.model_changed(facts))
        self.pool = WorkerPool(options.workers, resolver, self._make_client)
        self.loop = SchedulerLoop(
            self.core,
            deliver=self._deliver,
            turn_ended=self._turn_ended,
            idle=self._idle,
            metrics=self._metrics,
            recorder=NullRecorder() if recorder is None else recorder,
            limits=options.limits,
        )
        self.hub = SessionHub(
            self.loop,
            self.model,
            self._metrics,
            scheduler_incarnation=self.incarnation,
            term=self.term,
            features=frozenset(_features(self.core)),
            max_outgoing_bytes=options.max_outgoing_bytes,
            silence_s=options.front_end_silence_s,
        )
        self._drain_deadline: float | None = None
        self._drain_moved = asyncio.Event()
        # Requests the drain deadline ended.
        self.num_cut_off = 0

    # --- life ---

    async def run(self) -> None:
        """Serve until drained, or cancelled. An exception is a bug in here or in the core."""
        work = [
            asyncio.create_task(self.loop.run(), name="loop"),
            asyncio.create_task(self.pool.run(), name="workers"),
        ]
        drain = asyncio.create_task(self._drain_when_asked(), name="drain")
        try:
            # Once the rank clients exist, so that a cause can name them.
            await asyncio.sleep(0)
            self.report_readiness()
            await asyncio.wait([*work, drain], return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
            drain.result()
        finally:
            for task in (drain, *reversed(work)):
                task.cancel()
            await asyncio.gather(drain, *work, return_exceptions=True)

    # --- readiness ---

    @property
    def is_draining(self) -> bool:
        """Whether a drain was asked for."""
        return self._drain_deadline is not None

    @property
    def is_ready(self) -> bool:
        """Whether new requests find a rank that is up."""
        return not self.is_draining and self.pool.is_ready

    def not_ready_cause(self) -> str:
        """Why not; "" when ready."""
        return "draining" if self.is_draining else self.pool.not_ready_cause()

    def report_readiness(self) -> None:
        """Tell about a change of readiness, once."""
        is_ready = self.is_ready
        if is_ready is self._was_ready:
            return
        cause = self.not_ready_cause()
        if is_ready:
            log.info("ready")
        else:
            # News only after it had been ready, and unless it is asked to end.
            level = logging.WARNING if self._was_ready and not self.is_draining else logging.INFO
            log.log(level, "not ready", extra={"cause": cause})
        self._was_ready = is_ready
        self.hub.readiness_changed(is_ready, cause)
        if self._on_readiness is not None:
            self._on_readiness(is_ready, cause)

    # --- wishes ---

    def drain(self, deadline_s: float | None = None) -> None:
        """Refuse new requests; end the process when the accepted ones have ended, or at the deadline (seconds from now;
        None: the configured one). Called again it may only shorten the deadline."""
        seconds = self.options.drain_deadline_s if deadline_s is None else max(0.0, deadline_s)
        deadline = asyncio.get_running_loop().time() + seconds
        if self._drain_deadline is None:
            self._drain_deadline = deadline
            log.info("draining", extra={"deadline_s": seconds, "num_live_requests": self.core.num_live_requests})
            self.loop.post(DrainStarted())
            self.hub.start_draining()
            self.report_readiness()
        else:
            self._drain_deadline = min(self._drain_deadline, deadline)
        self._drain_moved.set()

    async def reset_prefix_cache(self, *, preempt_running: bool) -> PrefixCacheReset:
        """Forget all cached prefixes of all ranks, or none of them."""
        answer: asyncio.Future[PrefixCacheReset] = asyncio.get_running_loop().create_future()

        def ask() -> tuple[Event, ...]:
            self._resets.append(answer)
            return (PrefixCacheResetRequested(preempt_running),)

        await self.loop.put(ask)
        return await answer

    # --- drain ---

    async def _drain_when_asked(self) -> None:
        await self._drain_moved.wait()
        if not await self._all_ended_in_time():
            self.num_cut_off = self.core.num_live_requests
            log.warning(
                "drain deadline passed: front ends keep the live requests for the next scheduler",
                extra={"num_requests": self.num_cut_off},
            )
        await self.hub.end_all(SHUT_DOWN, _FAREWELL_S)
        log.info("drained", extra={"num_requests_left": self.num_cut_off})

    async def _all_ended_in_time(self) -> bool:
        """Wait until nothing is live; False when the deadline, which may move, came first."""
        loop = asyncio.get_running_loop()
        while True:
            self._drain_moved.clear()
            if not self.core.num_live_requests and not self.loop.num_queued_items:
                return True
            assert self._drain_deadline is not None
            try:
                # Woken by every turn of the loop and by every change of the deadline.
                async with asyncio.timeout(max(0.0, self._drain_deadline - loop.time())):
                    await self._drain_moved.wait()
            except TimeoutError:
                if loop.time() >= self._drain_deadline:
                    return not self.core.num_live_requests

    # --- wiring ---

    def _make_client(self, address: str) -> RankClient:
        config = self.config
        return RankClient(
            address,
            self._transport,
            self.loop,
            self.model,
            self._register,
            config=SessionConfig(
                block_size=config.block_size,
                num_rows=config.num_rows,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                max_inflight_steps=config.max_inflight_steps,
                num_speculative_tokens=config.num_speculative_tokens,
            ),
            timeouts=self.options.timeouts,
            scheduler_incarnation=self.incarnation,
            term=self.term,
            rng=self._rng,
            metrics=self._metrics,
            on_state=lambda _: self.report_readiness(),
        )

    def _is_model_in_use(self) -> bool:
        return self.pool.has_joined_rank or self.core.num_live_requests > 0

    def _deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case TokensProduced():
                    self.hub.tokens(effect)
                case RequestAccepted():
                    self._accepted_at[effect.handle] = self.core.state.now
                    self.hub.accepted(effect)
                case RequestRefused():
                    self.hub.refused(effect)
                case UsageChanged():
                    self.hub.usage_changed(effect)
                case RequestEnded():
                    self._log_end(effect)
                    self.hub.ended(effect)
                case RequestPreempted():
                    self._preemptions.preempted(effect)
                case PrefixCacheReset():
                    self._answer_reset(effect)
                case _:
                    assert_never(effect)

    def _log_end(self, effect: RequestEnded) -> None:
        total_s = self.core.state.now - self._accepted_at.pop(effect.handle)
        if effect.reason in _FAILURES:
            log.warning("request failed", extra=_cost_of(effect, effect.message, total_s))
        elif self.options.log_requests:
            cause = None if effect.cause is None else effect.cause.value
            log.info("request ended", extra=_cost_of(effect, cause, total_s))

    def _answer_reset(self, effect: PrefixCacheReset) -> None:
        answer = self._resets.popleft()
        if not answer.done():
            answer.set_result(effect)

    def _turn_ended(self) -> None:
        self.hub.flush()
        if self.is_draining:
            self._drain_moved.set()

    def _idle(self) -> None:
        for facts in self.core.audit():
            if facts.violations:
                log.error("invariant broken", extra={"rank": facts.rank, "violations": list(facts.violations)})
        if self._on_idle is not None:
            self._on_idle()


def _features(core: Scheduler) -> tuple[SessionFeature, ...]:
    always = (SessionFeature.RESUBMIT, SessionFeature.TENANTS)
    return (*always, SessionFeature.PRIORITY) if core.accepts_priority else always


def _cost_of(effect: RequestEnded, cause: str | None, total_s: float) -> dict[str, object]:
    """How a request ended and what it cost, as fields of the log."""
    usage = effect.usage
    return {
        "request_id": effect.request_id,
        "reason": effect.reason.value,
        **({} if cause is None else {"cause": cause}),
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_completion_tokens": usage.num_completion_tokens,
        "num_cached_tokens": usage.num_cached_tokens,
        "num_preemptions": usage.num_preemptions,
        "num_recomputed_tokens": usage.num_recomputed_tokens,
        "queued_s": round(usage.queued_s, 3),
        "preempted_s": round(usage.preempted_s, 3),
        "total_s": round(total_s, 3),
    }
