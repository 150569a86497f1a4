"""Every state that a small world can reach, visited once.

A world is a configuration, one rank with a pool of some blocks, and room for some arrivals and some faults. From every
state every move is tried: the arrival of every kind of request that is allowed, the abort of every live one, the
acknowledgement of the oldest step, the planning of the next, and as a fault the loss of the rank (which comes back at
once) or a reset of the prefix cache that preempts. States are compared by `snapshot`, so what only differs in names is
visited once.

In every state that is reached: all invariants hold; every live request has a reason or a row; with work waiting and
nothing in flight the next step runs a token (a step that only preempts may come before it); and no sequence of steps
and acknowledgements comes back to where it was, so that every request ends however the two are interleaved. An idle
state has nothing left of anybody.

All prompts and texts are beginnings of one endless text, whose token at position i is i: sharing of prefixes is then as
likely as it can be."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    AbortCause,
    PrefixCacheResetRequested,
    RankJoined,
    RankLost,
    RequestAborted,
    RequestArrived,
    RequestPreempted,
    StepAcked,
)
from scheduler_svc.core.inflight import InflightWindow, StepRecord
from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.deferred import ParkedFrees
from scheduler_svc.core.kv.manager import KvManager
from scheduler_svc.core.kv.prefix_index import HashChain, PrefixIndex
from scheduler_svc.core.policies import make_policy
from scheduler_svc.core.rank import RankState, Reservation
from scheduler_svc.core.request import FINISHED, Account, Request, Run, RunsOn, Ticket
from scheduler_svc.core.resources import Resources, make_resources
from scheduler_svc.core.resources.draining import Draining
from scheduler_svc.core.resources.quarantine import Quarantine
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.throttle import Throttle
from scheduler_svc.simulation.snapshot import snapshot
from scheduler_svc.simulation.step_rules import Before, PlannedStep, queued_without_reason, violations
from tests.support.loader import Loader

RANK = "r"
_LONGEST_TEXT = 64


class SmallWorldViolation(AssertionError):
    """A reachable state in which something is wrong; the message ends with the moves that lead there."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A kind of request."""

    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SmallWorld:
    config: SchedulerConfig
    num_blocks: int
    arrivals: tuple[Arrival, ...]
    max_requests: int
    max_faults: int = 0
    # Tokens of each request that can be loaded from elsewhere; 0: none, and no such resource.
    max_loaded: int = 0


@dataclass(slots=True)
class Count:
    states: int = 0
    transitions: int = 0
    idle_states: int = 0
    deepest: int = 0

    def add(self, other: Count) -> None:
        self.states += other.states
        self.transitions += other.transitions
        self.idle_states += other.idle_states
        self.deepest = max(self.deepest, other.deepest)


Move = Arrival | str
_SCHEDULE = "schedule"
_ACK = "ack"
_LOSE = "lose"
_RESET = "reset"
_LOAD_ENDS, _LOAD_FAILS = "load ends ", "load fails "


class _Node:
    """A state of the core, the arrivals and faults still to come, and per step in flight the blocks that it reads or
    writes."""

    __slots__ = ("arrivals_left", "faults_left", "key", "moves", "reads", "state")

    def __init__(
        self, state: CoreState, arrivals_left: int, faults_left: int, reads: tuple[frozenset[int], ...]
    ) -> None:
        self.state = state
        self.arrivals_left = arrivals_left
        self.faults_left = faults_left
        self.reads = reads
        self.key = 0
        # Those not tried yet, last first.
        self.moves: list[Move] = []

    def fork(self) -> _Node:
        return _Node(clone(self.state), self.arrivals_left, self.faults_left, self.reads)

    def successor(self) -> _Node:
        return _Node(self.state, self.arrivals_left, self.faults_left, self.reads)


class Search:
    """Depth first through one small world."""

    def __init__(self, world: SmallWorld) -> None:
        self.world = world
        self.count = Count()
        # For a look at the search itself: stop early; see that a move never changes the state it starts from.
        self.max_states: int | None = None
        self.demand_independent_copies = False
        # Works on the state of one node after another.
        self._scheduler = Scheduler(world.config)
        if world.max_loaded:
            state = self._scheduler.state
            state.resources = Resources([*state.resources, Loader(world.max_loaded, of_all=True)])
        self._done: set[int] = set()
        self._on_path: set[int] = set()
        self._path: list[Move] = []
        size = world.config.block_size
        chain = HashChain(size, "", enabled=True)
        text = array("i", range(_LONGEST_TEXT))
        self._hashes = {chain.block_hash(i, text): i for i in range(_LONGEST_TEXT // size)}

    def run(self) -> Count:
        """Visit every state. Raises SmallWorldViolation."""
        self._join(epoch=1)
        try:
            self._walk(_Node(self._scheduler.state, self.world.max_requests, self.world.max_faults, ()))
        except Exception as problem:
            moves = ", ".join(str(move) for move in self._path)
            raise SmallWorldViolation(f"{type(problem).__name__}: {problem}; moves: {moves}") from problem
        return self.count

    def _walk(self, root: _Node) -> None:
        root.key = self._key(root)
        self._enter(root)
        stack = [root]
        while stack and self.count.states != self.max_states:
            node = stack[-1]
            if not node.moves:
                self._done.add(node.key)
                self._on_path.discard(node.key)
                stack.pop()
                del self._path[-1:]
                continue
            move = node.moves.pop()
            # The last move may use up the state: of the node only the key is needed from here on.
            child = node.fork() if node.moves or self.demand_independent_copies else node.successor()
            self._path.append(move)
            if self._apply(child, move) and self._is_new(child, node):
                self._enter(child)
                stack.append(child)
                self.count.deepest = max(self.count.deepest, len(stack))
            else:
                self._path.pop()
            if self.demand_independent_copies:
                _demand(self._key(node) == node.key, "a move changed the state it started from")

    def _is_new(self, child: _Node, parent: _Node) -> bool:
        self.count.transitions += 1
        key = child.key = self._key(child)
        if key == parent.key or key in self._done:
            return False
        _demand(key not in self._on_path, "steps and acknowledgements lead back to where they started")
        return True

    def _key(self, node: _Node) -> int:
        return hash((node.arrivals_left, node.faults_left, snapshot(node.state, self._hashes.get, with_ids=False)))

    # --- one state ----------------------------------------------------------------------------------------------------

    def _enter(self, node: _Node) -> None:
        """A new state: look at it, list its moves."""
        self.count.states += 1
        self._on_path.add(node.key)
        state = node.state
        invariants.check(state)
        rank = state.ranks[RANK]
        if node.arrivals_left:
            node.moves += self.world.arrivals
        node.moves += state.requests
        if node.faults_left and state.requests:
            node.moves += (_LOSE, _RESET)
        loads = _loads_that_go_on(state)
        node.moves += [f"{move}{index}" for index in range(len(loads)) for move in (_LOAD_ENDS, _LOAD_FAILS)]
        if len(rank.window):
            node.moves.append(_ACK)
        elif loads:
            pass
        elif state.requests:
            self._demand_progress(node)
        else:
            self.count.idle_states += 1
            _demand_nothing_left(rank)
        if not rank.window.is_full:
            node.moves.append(_SCHEDULE)

    def _demand_progress(self, node: _Node) -> None:
        """Work waits and nothing is in flight: the next step runs a token or begins a load, or the one after a step
        that preempts."""
        scheduler = self._scheduler
        scheduler.state = clone(node.state)
        for _ in range(2):
            output = scheduler.schedule(RANK)
            if (output is not None and output.total_num_tokens) or _loads_that_go_on(scheduler.state):
                return
            if not any(isinstance(effect, RequestPreempted) for effect in scheduler.take_effects()):
                break
            rank = scheduler.state.ranks[RANK]
            scheduler.handle(StepAcked(RANK, rank.epoch, rank.window.newest_step, []))
        _demand(False, f"nothing is in flight, nothing runs, but {list(node.state.requests.values())} live")

    # --- moves --------------------------------------------------------------------------------------------------------

    def _apply(self, node: _Node, move: Move) -> bool:
        """Whether it was possible."""
        self._scheduler.state = node.state
        if isinstance(move, Arrival):
            return self._arrive(node, move)
        if move == _SCHEDULE:
            self._schedule(node)
        elif move == _ACK:
            self._acknowledge(node)
        elif move in (_LOSE, _RESET):
            self._break(node, move)
        elif move.startswith((_LOAD_ENDS, _LOAD_FAILS)):
            self._end_load(node, move)
        else:
            self._scheduler.handle(RequestAborted(move, AbortCause.ABORTED))
        return True

    def _arrive(self, node: _Node, arrival: Arrival) -> bool:
        node.arrivals_left -= 1
        number = node.state.next_sequence
        prompt = array("i", range(arrival.num_prompt_tokens))
        event = RequestArrived(
            f"q{number}", number + 1, prompt, max_tokens=arrival.max_tokens, priority=arrival.priority
        )
        before = len(node.state.requests)
        self._scheduler.handle(event)
        return len(node.state.requests) > before

    def _join(self, epoch: int) -> None:
        longest = self.world.config.max_model_len
        self._scheduler.handle(RankJoined(RANK, epoch, self.world.num_blocks, longest, _LONGEST_TEXT))

    def _break(self, node: _Node, fault: str) -> None:
        node.faults_left -= 1
        if fault == _RESET:
            self._scheduler.handle(PrefixCacheResetRequested(preempt_running=True))
            return
        epoch = node.state.ranks[RANK].epoch
        self._scheduler.handle(RankLost(RANK, "lost"))
        self._join(epoch + 1)
        node.reads = ()

    def _end_load(self, node: _Node, move: str) -> None:
        """A load brings all of its tokens, or none."""
        loader = node.state.resources.get(Loader)
        run = _loads_that_go_on(node.state)[int(move.split()[-1])]
        loader.end(node.state.ranks[RANK], run, loader.loads[run].num_tokens if move.startswith(_LOAD_ENDS) else 0)

    def _schedule(self, node: _Node) -> None:
        scheduler, rank = self._scheduler, node.state.ranks[RANK]
        before = Before.of(scheduler, rank)
        output = scheduler.schedule(RANK)
        effects = tuple(scheduler.take_effects())
        problems = violations(PlannedStep(scheduler, rank, before, output, effects)) + queued_without_reason(scheduler)
        _demand(not problems, "; ".join(problems))
        if output is not None:
            given = set(output.appended_blocks)
            for new in output.new_requests:
                given.update(new.block_table[new.num_computed_tokens // rank.kv.block_size :])
            taken = given.intersection(*node.reads) if rank.kv.deferring and node.reads else ()
            _demand(not taken, f"blocks {taken} are given out while a step in flight reads them")
            runs = rank.window.records[-1].runs
            node.reads = (*node.reads, frozenset(block for run in runs for block in run.blocks))

    def _acknowledge(self, node: _Node) -> None:
        rank = node.state.ranks[RANK]
        record = rank.window.oldest
        assert record is not None
        sampled = [
            0 if request.status in FINISHED else request.num_tokens
            for request, expected in zip(record.requests, record.expected, strict=True)
            if expected
        ]
        self._scheduler.handle(StepAcked(RANK, rank.epoch, record.step_seq, sampled))
        node.reads = node.reads[1:]


def _loads_that_go_on(state: CoreState) -> list[Run]:
    loader = state.resources.find(Loader)
    return [] if loader is None else [run for run, load in loader.loads.items() if not load.is_over]


def _demand_nothing_left(rank: RankState) -> None:
    all_free = rank.kv.pool.num_free == rank.kv.num_usable and not rank.kv.parked
    all_rows = rank.has_news or not rank.released_rows
    _demand(all_free and all_rows and not rank.running, "something is left of somebody")


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise SmallWorldViolation(message)


# --- copies -----------------------------------------------------------------------------------------------------------
# copy.deepcopy takes a hundred times as long, and these are most of the search.


def _field_copier(names: Sequence[str]) -> Callable[[object, object], None]:
    """A function that copies these fields from its first argument to its second: one assignment each, no loop."""
    body = "\n".join(f"    new.{name} = old.{name}" for name in names)
    scope: dict[str, Callable[[object, object], None]] = {}
    exec(f"def copy(old, new):\n{body}", scope)
    return scope["copy"]


_copy_request = _field_copier(Request.__slots__)
_copy_account = _field_copier(Account.__slots__)
_copy_ticket = _field_copier(Ticket.__slots__)
_copy_run = _field_copier(Run.__slots__)
_copy_throttle = _field_copier(Throttle.__slots__)
_copy_rank = _field_copier(RankState.__slots__)
_copy_window = _field_copier(("acked_fence", "acked_step", "newest_fence", "newest_step"))
_copy_kv = _field_copier(KvManager.__slots__)


def clone(old: CoreState) -> CoreState:
    """The same state once more. Shared are what nothing decides by (counts) and block hashes, which only depend on
    tokens."""
    new: CoreState = CoreState.__new__(CoreState)
    new.__dict__.update(old.__dict__)
    copies = _Copies()
    copies.ranks = {rank: RankState.__new__(RankState) for rank in old.ranks.values()}
    new.requests = {request_id: copies.request(request) for request_id, request in old.requests.items()}
    loader = old.resources.find(Loader)
    copies.loaders = (
        [] if loader is None else [loader.copied(copies.request, copies.run, lambda rank: copies.ranks[rank])]
    )
    new.ranks = {name: _clone_rank(rank, copies) for name, rank in old.ranks.items()}
    new.resources = Resources([*make_resources(old.config), *copies.loaders])
    new.quarantine, new.draining = new.resources.get(Quarantine), new.resources.get(Draining)
    new.quarantine._losses = {copies.request(request): loss for request, loss in old.quarantine._losses.items()}
    new.quarantine._reserved = {
        copies.request(request): copies.ranks[rank] for request, rank in old.quarantine._reserved.items()
    }
    new.policy = make_policy(old.config)
    queue = new.queue = new.policy.queue
    for old_lane, new_lane in ((old.queue.waiting, queue.waiting), (old.queue.skipped, queue.skipped)):
        for request in old_lane:
            new_lane.append(copies.request(request))
    queue.num_prompt_tokens = old.queue.num_prompt_tokens
    if old.admission_stopped is not None:
        reason, request = old.admission_stopped
        new.admission_stopped = (reason, copies.request(request))
    new.effects, new.unholdable_since, new.deadlines = [], {}, []
    return new


class _Copies:
    """Each request, run and rank of a state once."""

    def __init__(self) -> None:
        self.ranks: dict[RunsOn, RankState] = {}
        self.loaders: list[Loader] = []
        self._requests: dict[Request, Request] = {}
        self._runs: dict[Run, Run] = {}

    def request(self, old: Request) -> Request:
        new = self._requests.get(old)
        if new is None:
            new = self._requests[old] = Request.__new__(Request)
            _copy_request(old, new)
            new.tokens = old.tokens[:]
            new.account, new.ticket = Account.__new__(Account), Ticket.__new__(Ticket)
            _copy_account(old.account, new.account)
            _copy_ticket(old.ticket, new.ticket)
            new.run = None if old.run is None else self.run(old.run)
        return new

    def run(self, old: Run) -> Run:
        new = self._runs.get(old)
        if new is None:
            new = self._runs[old] = Run.__new__(Run)
            _copy_run(old, new)
            new.request = self.request(old.request)
            new.blocks = old.blocks[:]
            # Lost ranks do not change any more.
            new.rank = self.ranks.get(old.rank, old.rank)
        return new


def _clone_rank(old: RankState, copies: _Copies) -> RankState:
    new = copies.ranks[old]
    _copy_rank(old, new)
    new.free_rows, new.finished, new.preempted = old.free_rows[:], old.finished[:], old.preempted[:]
    new.running = {copies.run(run): None for run in old.running}
    new.set_aside = {copies.run(run): None for run in old.set_aside}
    new.prefills = {copies.run(run): None for run in old.prefills}
    new.throttle = Throttle.__new__(Throttle)
    _copy_throttle(old.throttle, new.throttle)
    new.reservation = None if old.reservation is None else Reservation(copies.request(old.reservation.request))
    window = new.window = InflightWindow(old.window.depth)
    _copy_window(old.window, window)
    for r in old.window.records:
        window._records.append(
            StepRecord(
                r.step_seq,
                r.fence_seq,
                [copies.run(run) for run in r.runs],
                r.num_tokens,
                r.expected,
                r.num_sampling,
                r.yields_more,
                r.released_rows,
            )
        )
    new.kv = _clone_kv(old.kv, copies)
    return new


def _clone_kv(old: KvManager, copies: _Copies) -> KvManager:
    new: KvManager = KvManager.__new__(KvManager)
    _copy_kv(old, new)
    # Of the resources here only the loader holds anything.
    new.holds = {
        number: replace(hold, run=copies.run(hold.run), owner=copies.loaders[0]) for number, hold in old.holds.items()
    }
    new.parked = ParkedFrees()
    new.parked._queue.extend(old.parked)
    new.parked.unannounced = old.parked.unannounced[:]
    pool = new.pool = BlockPool.__new__(BlockPool)
    pool.num_blocks, pool.num_parked = old.pool.num_blocks, old.pool.num_parked
    pool.refs, pool._stack = old.pool.refs[:], old.pool._stack[:]
    pool._cached, pool._parked_refs = OrderedDict(old.pool._cached), dict(old.pool._parked_refs)
    index = pool.index = PrefixIndex.__new__(PrefixIndex)
    index._hash_of = old.pool.index._hash_of[:]
    index._first_of = old.pool.index._first_of[:]
    index._blocks = {d: b[:] if isinstance(b, list) else b for d, b in old.pool.index._blocks.items()}
    return new
