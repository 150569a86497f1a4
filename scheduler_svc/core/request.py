"""One request and its life: identity, limits and tokens (Request), its stays on ranks (Run), what it cost (Account),
its place in the queue (Ticket), and the status table. Nothing here decides.

Counters (D13). `settled` tokens of a run have their KV on the rank for sure: their result is in, or their blocks were
hit. `in_flight` tokens are dispatched. Together they are what the reference calls num_computed_tokens. `awaited`
sampled tokens of a request are still to come; with drafts it is an upper bound, `awaited_optional` of which may not
come."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from scheduler_svc.core.events import RequestArrived
from scheduler_svc.core.kv.prefix_index import HashChain
from scheduler_svc.core.reasons import SkipReason


class Status(Enum):
    """Where a request is. Predicates over it are the named sets below, never an order."""

    WAITING = "WAITING"
    # A resource keeps it from being admitted, whatever room there is; its ticket says why.
    BLOCKED = "BLOCKED"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED_STOPPED = "FINISHED_STOPPED"
    FINISHED_LENGTH = "FINISHED_LENGTH_CAPPED"
    FINISHED_ABORTED = "FINISHED_ABORTED"
    FINISHED_ERROR = "FINISHED_ERROR"

    # Identity hash: members are dictionary keys on paths that run per request.
    __hash__ = object.__hash__


# Queued: stands in one of the lanes.
QUEUED = frozenset({Status.WAITING, Status.BLOCKED, Status.PREEMPTED})
FINISHED = frozenset({Status.FINISHED_STOPPED, Status.FINISHED_LENGTH, Status.FINISHED_ABORTED, Status.FINISHED_ERROR})
LIVE = frozenset(Status) - FINISHED

TRANSITIONS: dict[Status, frozenset[Status]] = {
    # FINISHED: a request that was submitted again may have stopped on the stream that was lost.
    Status.WAITING: frozenset({Status.RUNNING, Status.BLOCKED}) | FINISHED,
    Status.BLOCKED: frozenset({Status.WAITING, Status.PREEMPTED}) | FINISHED,
    Status.RUNNING: frozenset({Status.PREEMPTED}) | FINISHED,
    # A token sampled before the preemption may arrive after it, and stop the request.
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.BLOCKED}) | FINISHED,
    Status.FINISHED_STOPPED: frozenset(),
    Status.FINISHED_LENGTH: frozenset(),
    Status.FINISHED_ABORTED: frozenset(),
    Status.FINISHED_ERROR: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a request may go, clipped to what fits."""

    max_tokens: int
    min_tokens: int
    # Tokens, prompt included, at which it ends with LENGTH.
    limit: int
    # No row computes position row_limit or beyond: the last token of all needs no KV slot.
    row_limit: int


class FenceWindow(Protocol):
    """What a run must know of its rank's steps in flight."""

    @property
    def acked_fence(self) -> int:
        """The newest fence that is acknowledged."""


class RunsOn(Protocol):
    """What a run must know of its rank."""

    @property
    def name(self) -> str:
        """Of the rank."""

    @property
    def window(self) -> FenceWindow:
        """Its steps in flight."""


class Account:
    """What a request cost so far, and what happened to it. Nothing here says how far it is. Times of Tick's clock in
    seconds. Written by lifecycle and admission, recomputed tokens and reasons by the plan."""

    __slots__ = (
        "arrived_at",
        "first_admitted_at",
        "high_water",
        "num_cached_tokens",
        "num_preemptions",
        "num_recomputed_tokens",
        "num_shortage_preemptions",
        "preempted_at",
        "preempted_s",
        "preemption_cause",
        "skip_reason",
        "skipped_in_pass",
    )

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self.first_admitted_at: float | None = None
        # Hit of the first admission.
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        # Those for want of blocks, which max_preemptions bounds; losing a worker or a reset does not count.
        self.num_shortage_preemptions = 0
        # Positions below this were dispatched in an earlier run: computing them again is recomputation.
        self.high_water = 0
        self.num_recomputed_tokens = 0
        # Since when it has stood still after its last preemption; None while it runs.
        self.preempted_at: float | None = None
        self.preempted_s = 0.0
        # Of the last preemption; "" before any.
        self.preemption_cause = ""
        # The last reason for getting nothing, and the number of the pass that noted it.
        self.skip_reason: SkipReason | None = None
        self.skipped_in_pass = 0


class Ticket:
    """The place of a request in the queue. Written by the queue and the admission pass."""

    __slots__ = ("blocked_by", "num_passes", "queue_entry", "skipped")

    def __init__(self) -> None:
        # Whether it stands in the skipped lane, and its heap entry under priority.
        self.skipped = False
        self.queue_entry: object = None
        # Why it cannot be admitted whatever room there is; set exactly while its status is BLOCKED.
        self.blocked_by: SkipReason | None = None
        # Steps of ranks that left it to another rank with a longer cached prefix.
        self.num_passes = 0


class Request:
    """A live request. Fields are public to the core and written by the module that owns the change."""

    __slots__ = (
        "account",
        "arrival",
        "awaited",
        "awaited_optional",
        "chain",
        "deadline",
        "features",
        "handle",
        "limit",
        "min_length",
        "needs_result_first",
        "num_prompt_tokens",
        "num_tokens",
        "priority",
        "request_id",
        "row_limit",
        "run",
        "sampling",
        "sequence",
        "skip_prefix_cache",
        "status",
        "stops",
        "tenant",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        event: RequestArrived,
        limits: Limits,
        *,
        sequence: int,
        now: float,
        chain: HashChain,
        needs_result_first: bool = False,
    ) -> None:
        self.request_id = event.request_id
        self.handle = event.handle
        self.tenant = event.tenant
        self.tokens = array("i", event.prompt)
        self.num_prompt_tokens = self.num_tokens = len(event.prompt)
        # No stop of any kind below this many tokens, prompt included.
        self.min_length = self.num_prompt_tokens + limits.min_tokens
        self.limit = limits.limit
        self.row_limit = limits.row_limit
        # EOS ids (unless ignored) and stop ids.
        self.stops = frozenset((*event.eos_token_ids, *event.stop_token_ids))
        self.priority = event.priority
        # Order among equals: time of arrival or, when none was given, the order of arrival.
        self.arrival = float(sequence) if event.arrival is None else event.arrival
        self.sequence = sequence
        self.sampling = event.sampling
        self.deadline = event.deadline
        self.skip_prefix_cache = event.skip_prefix_cache
        # What a rank must have to run it.
        self.features = frozenset(event.features)
        # Whether a row may be scheduled only when the result of the row before is in.
        self.needs_result_first = needs_result_first
        self.status = Status.WAITING
        self.account = Account(now)
        self.ticket = Ticket()
        self.chain = chain
        # Sampled tokens still to come, of this run and earlier ones; and how many of them may not come (drafts).
        self.awaited = 0
        self.awaited_optional = 0
        # The latest run, kept when it has ended; None before the first one and after the end of the request.
        self.run: Run | None = None

    @property
    def computed(self) -> int:
        """Tokens computed or in flight in the run that goes on; 0 while it waits."""
        return 0 if self.run is None or self.run.ended else self.run.computed

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def has_rows_in_flight(self) -> bool:
        """Whether the result of some row of it is still to come."""
        return self.run is not None and self.run.last_fence > self.run.rank.window.acked_fence

    def __repr__(self) -> str:
        return f"<{self.request_id} {self.status.value} {self.num_tokens} tokens, {self.computed} computed>"


# Bits of Run.special. Partial prefill: the last row left known tokens to compute.
CHUNK = 1
# Each row needs the result of the row before.
RESULT_FIRST = 2
# Resources have the bits from this one on.
FIRST_RESOURCE_BIT = 4


class RunEnd(Enum):
    """How a run ends."""

    PREEMPTED = "preempted"
    FINISHED = "finished"
    # It was set aside and gave up; the request stays in the queue.
    ABANDONED = "abandoned"
    # Its rank is lost, with all that it held.
    RANK_LOST = "rank_lost"


class Run:
    """One stay of a request on a rank, from the moment it has blocks there until it is preempted, ends, or its rank is
    lost. Results that come after that append tokens to the request and change nothing else.

    A run may be *set aside* first: it has blocks, whose contents come from elsewhere, but no row, and its request
    stands in the queue. `settled` are then the tokens that were hit, `in_flight` those on their way."""

    __slots__ = (
        "blocks",
        "cache_at",
        "capacity",
        "drops_results",
        "ended",
        "in_flight",
        "last_fence",
        "num_cached",
        "plain_until",
        "rank",
        "request",
        "row",
        "run_since",
        "settled",
        "special",
    )

    def __init__(self, request: Request, rank: RunsOn, row: int, now: float) -> None:
        self.request = request
        self.rank = rank
        # Of the worker's batch; -1: it is set aside, or was until it ended.
        self.row = row
        self.run_since = now
        # Set once, by lifecycle.
        self.ended = False
        # Whether results still to come are dropped, tokens included: they belong to what a reset has forgotten.
        self.drops_results = False
        # Tokens whose KV is on the rank for sure, and tokens dispatched (plan, settlement).
        self.settled = 0
        self.in_flight = 0
        # Why it is no plain decode: bits, written by mark and clear only. Until its first row is built it counts as a
        # partial prefill.
        self.special = CHUNK
        if request.needs_result_first:
            self.special |= RESULT_FIRST
        # fence_seq of the newest step that holds a row of it; 0: none (plan).
        self.last_fence = 0
        # The block table, and len(blocks) * block_size (kv).
        self.blocks: list[int] = []
        self.capacity = 0
        # A row of one token that ends here or before has its slot, slots to look ahead, and a token to yield (kv).
        self.plain_until = 0
        # Leading blocks that are in the prefix index, and the number of tokens at which the next one will be full (kv).
        self.num_cached = 0
        self.cache_at = request.chain.first_cache_at

    @property
    def computed(self) -> int:
        """Settled and in flight: the reference's num_computed_tokens."""
        return self.settled + self.in_flight

    @property
    def is_set_aside(self) -> bool:
        """Whether it has blocks but does not run yet."""
        return self.row < 0 and not self.ended

    @property
    def is_prefill_chunk(self) -> bool:
        """Whether its last row left known tokens to compute."""
        return bool(self.special & CHUNK)

    def mark(self, bit: int) -> None:
        """From now on every row of it is looked at as a whole."""
        self.special |= bit

    def clear(self, bit: int) -> None:
        """This reason is gone. Without any the run is plain: it lacks exactly one token."""
        self.special &= ~bit

    def __repr__(self) -> str:
        return f"<run of {self.request.request_id}, {self.settled}+{self.in_flight}>"


def transition(request: Request, to: Status) -> None:
    """The only place that changes a status."""
    if to not in TRANSITIONS[request.status]:
        raise AssertionError(f"{request.request_id}: {request.status.value} -> {to.value} is not in the table")
    request.status = to


def block(request: Request, reason: SkipReason) -> None:
    """Keep a queued request from being admitted until `unblock`."""
    transition(request, Status.BLOCKED)
    request.ticket.blocked_by = reason


def unblock(request: Request) -> None:
    """It may be admitted again; it stays where it stands in the queue."""
    transition(request, Status.PREEMPTED if request.account.num_preemptions else Status.WAITING)
    request.ticket.blocked_by = None
