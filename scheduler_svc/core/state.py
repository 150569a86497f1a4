"""What the scheduler knows: one object that the deciding modules share."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Effect, PauseState
from scheduler_svc.core.policies import make_policy
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Request
from scheduler_svc.core.resources import make_resources
from scheduler_svc.core.resources.draining import Draining
from scheduler_svc.core.resources.quarantine import Quarantine
from scheduler_svc.core.rules import Fence
from scheduler_svc.core.stats import Totals


class CoreState:
    """Everything mutable. `ranks` holds the living ranks by name, in order of joining."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now = 0.0
        self.policy = make_policy(config)
        self.queue = self.policy.queue
        # Live requests by id.
        self.requests: dict[str, Request] = {}
        self.ranks: dict[str, RankState] = {}
        # The smaller of the configured and the model's.
        self.max_model_len = config.max_model_len
        self.vocab_size: int | None = None
        self.pause = PauseState.UNPAUSED
        self.is_draining = False
        self.effects: list[Effect] = []
        self.totals = Totals()
        self.next_sequence = 0
        self.deferring_frees = config.rules.fence is Fence.ALWAYS
        self.resources = make_resources(config)
        self.quarantine = self.resources.get(Quarantine)
        self.draining = self.resources.get(Draining)
        # When the last rank was lost; None while one lives, or before any ever joined.
        self.no_rank_since: float | None = None
        # Usable blocks of the largest living rank, or of the last one that lived.
        self.largest_pool = 0
        # Queued requests that no living rank can hold, with the time since when.
        self.unholdable_since: dict[str, float] = {}
        self.deadlines: list[tuple[float, int, str]] = []
        # Times at which the last requests ended, for RetryInfo.
        self.recent_ends: deque[float] = deque(maxlen=64)
        # Why the last pass over the queue of any rank ended, and at which request.
        self.admission_stopped: tuple[SkipReason, Request] | None = None
        # Steps planned so far, with or without a result, and the number of the last one that looked at the queue: a
        # reason noted in an earlier one is not the present one.
        self.num_passes = 0
        self.last_admission_pass = 0

    def living(self, request: Request) -> RankState | None:
        """The rank of the request's latest run, if that epoch of it still lives."""
        run = request.run
        rank = None if run is None else self.ranks.get(run.rank.name)
        return rank if run is not None and rank is run.rank else None

    def skip(self, request: Request, reason: SkipReason) -> None:
        """A pass examined the request and gave it nothing."""
        request.account.skip_reason, request.account.skipped_in_pass = reason, self.num_passes
        skips = self.totals.skips
        skips[reason] = skips.get(reason, 0) + 1

    def watch_deadline(self, request: Request) -> None:
        if request.deadline is not None:
            if len(self.deadlines) > 2 * len(self.requests) + 64:
                self.deadlines = [entry for entry in self.deadlines if self._awaits(entry)]
                heapify(self.deadlines)
            heappush(self.deadlines, (request.deadline, request.sequence, request.request_id))

    def first_deadline(self) -> float | None:
        """Of the live requests. Entries of ended ones go when they surface, or outnumber the live."""
        while self.deadlines and not self._awaits(self.deadlines[0]):
            heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else None

    def _awaits(self, entry: tuple[float, int, str]) -> bool:
        request = self.requests.get(entry[2])
        return request is not None and request.sequence == entry[1]

    def can_stay(self, request: Request) -> bool:
        """Whether some rank that does not drain can ever hold the request."""
        return any(self.can_hold(rank, request) for rank in self.ranks.values() if not rank.is_draining)

    def can_hold(self, rank: RankState, request: Request) -> bool:
        """Whether the rank could run the request, at its greatest length, if it ran nothing else: its worker has what
        the request needs, and its pool is large enough."""
        return request.features <= rank.features and self.blocks_needed(request) <= rank.kv.num_usable

    def blocks_needed(self, request: Request) -> int:
        """Blocks that hold it at its greatest length; the last token of all needs no slot."""
        return -(-(request.limit - 1) // self.config.block_size)
