"""One rank: who runs there in which order, its KV blocks, its rows and its steps in flight (D15)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.inflight import InflightWindow
from scheduler_svc.core.kv.manager import Hold, KvManager
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import CHUNK, Request, Run
from scheduler_svc.core.throttle import Throttle


@dataclass(frozen=True, slots=True)
class Reservation:
    """The rank is kept for `request`, which runs there alone: no other one is admitted while anything runs."""

    request: Request


class RankState:
    """State of one epoch of a rank. A new epoch is a new object: pool, index, rows and window start empty."""

    __slots__ = (
        "epoch",
        "features",
        "finished",
        "free_rows",
        "is_draining",
        "kv",
        "last_pass",
        "last_pass_fence",
        "max_step_bytes",
        "name",
        "num_rows",
        "preempted",
        "prefills",
        "quiet_since",
        "reservation",
        "running",
        "set_aside",
        "stopped",
        "throttle",
        "vocab_size",
        "window",
    )

    def __init__(
        self,
        name: str,
        epoch: int,
        num_blocks: int,
        vocab_size: int,
        config: SchedulerConfig,
        *,
        deferring: bool,
        lookahead: int = 0,
        max_step_bytes: int | None = None,
        features: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.vocab_size = vocab_size
        self.features = frozenset(features)
        self.max_step_bytes = max_step_bytes
        self.kv = KvManager(
            num_blocks,
            config.block_size,
            caching=config.enable_prefix_caching,
            deferring=deferring,
            watermark=config.watermark,
            lookahead=lookahead,
        )
        self.window = InflightWindow(config.max_inflight_steps)
        # In order of admission.
        self.running: dict[Run, None] = {}
        # Runs that have blocks and do not run yet; their requests stand in the queue.
        self.set_aside: dict[Run, None] = {}
        # Of running, those whose last row was a partial prefill, and those that have no row yet.
        self.prefills: dict[Run, None] = {}
        self.num_rows = config.num_rows
        self.free_rows = list(range(self.num_rows - 1, -1, -1))
        # Requests that the next step drops, in order, each with the row that is free once that step is acknowledged, or
        # -1 if it had none any more.
        self.preempted: list[tuple[str, int]] = []
        self.finished: list[tuple[str, int]] = []
        self.throttle = Throttle(config.prefill_schedule_interval)
        self.is_draining = False
        # When its newest result came, or a step went out while none was in flight: should the rank be lost, what ran
        # there has stood still since then.
        self.quiet_since = 0.0
        self.reservation: Reservation | None = None
        # Number of the pass that planned its last step, and the fence of that step, 0 if it has no rows.
        self.last_pass = 0
        self.last_pass_fence = 0
        # Why that pass ended before the last of the running requests; those behind have no row and no reason of it.
        self.stopped: SkipReason | None = None

    def admit(self, request: Request, now: float) -> Run:
        """The request runs from now on, with a row of the worker's batch: a run that was set aside here, or a new one,
        which has no blocks yet."""
        run = request.run
        if run is None or run not in self.set_aside:
            run = request.run = Run(request, self, -1, now)
        else:
            del self.set_aside[run]
            run.run_since = now
        run.row = self.free_rows.pop()
        self.running[run] = self.prefills[run] = None
        return run

    def set_run_aside(self, request: Request, now: float) -> Run:
        """Begin a run of a request that stays in the queue, without blocks yet."""
        run = request.run = Run(request, self, -1, now)
        self.set_aside[run] = None
        return run

    @property
    def num_decodes(self) -> int:
        """Running requests whose last row was not a partial prefill."""
        return len(self.running) - len(self.prefills)

    def set_chunk(self, run: Run, is_chunk: bool) -> None:
        """Whether the run's last row was a partial prefill: the only place where that changes."""
        if is_chunk:
            self.prefills[run] = None
            run.mark(CHUNK)
        else:
            del self.prefills[run]
            run.clear(CHUNK)

    def remove(self, run: Run) -> None:
        """Take out of running, or out of those set aside. The caller announces it, and with it the row."""
        if run.row < 0:
            del self.set_aside[run]
            return
        del self.running[run]
        self.prefills.pop(run, None)

    def reuse_rows(self, rows: list[int]) -> None:
        self.free_rows.extend(rows)

    def free_blocks_of(self, run: Run, reason: str) -> None:
        """Empty its table behind the fence."""
        self.kv.free(run, acked_fence=self.window.acked_fence, newest_fence=self.window.newest_fence, reason=reason)

    def keep_blocks_of(self, run: Run, owner: object) -> None:
        """Its table becomes a hold of `owner`."""
        self.kv.keep(run, owner)

    def let_go(self, hold: Hold) -> None:
        """Free the blocks of a hold, behind the fence."""
        self.kv.let_go(hold, acked_fence=self.window.acked_fence, newest_fence=self.window.newest_fence)

    @property
    def has_news(self) -> bool:
        """Whether the worker must hear of ids although no row runs."""
        return bool(self.preempted or self.finished)

    @property
    def released_rows(self) -> list[int]:
        """Rows that are free once the requests that had them are announced as dropped."""
        return [row for _, row in (*self.preempted, *self.finished) if row >= 0]

    def take_dropped(self) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """What one step announces: preempted and finished requests, at most as many as there are rows if messages are
        bounded. The rest waits for the next step."""
        most = len(self.finished) if self.max_step_bytes is None else max(0, self.num_rows - len(self.preempted))
        taken = self.preempted, self.finished[:most]
        self.preempted, self.finished = [], self.finished[most:]
        return taken
