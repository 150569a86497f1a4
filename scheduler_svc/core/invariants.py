"""Global truths, one function each, true after every event. `check` raises with all that are broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import CHUNK, LIVE, QUEUED, RESULT_FIRST, Run, Status
from scheduler_svc.core.rules import Fence
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.views import RankAuditFacts


class InvariantViolation(AssertionError):
    """Something that must always hold does not."""


def check(state: CoreState) -> None:
    """Raise InvariantViolation naming every broken invariant."""
    broken = [f"{rank.name}: {problem}" for rank in state.ranks.values() for problem in rank_violations(state, rank)]
    broken += [problem for rule in _GLOBAL_RULES for problem in rule(state)]
    if broken:
        raise InvariantViolation("; ".join(broken))


def rank_violations(state: CoreState, rank: RankState) -> list[str]:
    return [problem for rule in _RANK_RULES for problem in rule(state, rank)]


def audit(state: CoreState, rank: RankState) -> RankAuditFacts:
    """Blocks counted from tables and parked frees, not from the pool's own counters."""
    held = {block for table in _tables(rank) for block in table}
    parked = {block for free in rank.kv.parked for block in free.blocks} - held
    return RankAuditFacts(
        rank=rank.name,
        usable=rank.kv.num_usable,
        free=len(rank.kv.pool.free_order()),
        held=len(held),
        parked=len(parked),
        violations=tuple(rank_violations(state, rank)) + tuple(p for rule in _GLOBAL_RULES for p in rule(state)),
    )


def _tables(rank: RankState) -> Iterator[Sequence[int]]:
    """Of runs, running and set aside, and of holds."""
    for run in (*rank.running, *rank.set_aside):
        yield run.blocks
    for hold in rank.kv.holds.values():
        yield hold.blocks


# --- blocks of a rank ---------------------------------------------------------------------------------------------


def blocks_are_conserved(state: CoreState, rank: RankState) -> Iterator[str]:
    """free + held + parked = usable, a shared block counting once (1)."""
    held = {block for table in _tables(rank) for block in table}
    parked = {block for free in rank.kv.parked for block in free.blocks} - held
    free = rank.kv.pool.free_order()
    if len(free) + len(held) + len(parked) != rank.kv.num_usable:
        yield f"{len(free)} free + {len(held)} held + {len(parked)} parked != {rank.kv.num_usable} usable"
    if rank.kv.pool.num_parked != len(parked):
        yield f"the pool counts {rank.kv.pool.num_parked} parked blocks, the tables {len(parked)}"


def references_are_exact(state: CoreState, rank: RankState) -> Iterator[str]:
    """A block's references are its occurrences in tables and parked frees; free means none (2)."""
    refs: Counter[int] = Counter(block for table in _tables(rank) for block in table)
    refs.update(block for free in rank.kv.parked for block in free.blocks)
    pool = rank.kv.pool
    wrong = [b for b in range(1, pool.num_blocks) if pool.refs[b] != refs[b]]
    if wrong:
        yield f"references of blocks {wrong[:5]} are {[pool.refs[b] for b in wrong[:5]]}"
    free = set(pool.free_order())
    if any((refs[b] == 0) != (b in free) for b in range(1, pool.num_blocks)):
        yield "a block is referenced and free, or neither"


def free_queue_is_sound(state: CoreState, rank: RankState) -> Iterator[str]:
    """No block twice in the free queue, never the null block (3)."""
    free = rank.kv.pool.free_order()
    if len(set(free)) != len(free):
        yield "a block is in the free queue twice"
    if 0 in free or rank.kv.pool.refs[0] != 0:
        yield "the null block is in use"


def tables_hold_no_block_twice(state: CoreState, rank: RankState) -> Iterator[str]:
    for table in _tables(rank):
        if len(set(table)) != len(table) or 0 in table:
            yield f"table {table} has a block twice, or the null block"


def index_matches_blocks(state: CoreState, rank: RankState) -> Iterator[str]:
    """A block with a block hash is in the index under it and vice versa (4)."""
    index = rank.kv.pool.index
    listed = {block: block_hash for block_hash, blocks in index.entries() for block in blocks}
    for block in range(rank.kv.pool.num_blocks):
        if index.hash_of(block) != listed.get(block):
            yield f"block hash of block {block} differs from the index"
    if 0 in listed:
        yield "the null block has a block hash"


def cached_blocks_are_of_their_tokens(state: CoreState, rank: RankState) -> Iterator[str]:
    """A running request's cached blocks carry the block hashes of its own tokens, of known and dispatched ones only
    (28)."""
    size = rank.kv.block_size
    for run in (*rank.running, *rank.set_aside):
        request = run.request
        if run.num_cached * size > min(request.num_tokens, run.computed):
            yield f"{request.request_id} cached blocks beyond its computed tokens"
            continue
        for i in range(run.num_cached):
            block_hash = rank.kv.pool.index.hash_of(run.blocks[i])
            if block_hash != request.chain.block_hash(i, request.tokens):
                yield f"block {i} of {request.request_id} carries another block hash"


def fences_are_ordered(state: CoreState, rank: RankState) -> Iterator[str]:
    """Fences never decrease and lie ahead of what is acknowledged; with nothing in flight none is held (19)."""
    window = rank.window
    fences = [free.fence for free in rank.kv.parked]
    if fences != sorted(fences) or any(not window.acked_fence < f <= window.newest_fence for f in fences):
        yield f"fences {fences} outside ({window.acked_fence}, {window.newest_fence}] or out of order"
    if fences and not any(record.fence_seq for record in window.records):
        yield "frees are parked with nothing in flight"
    if fences and state.config.rules.fence is not Fence.ALWAYS:
        yield "frees are parked although no fence is configured"


# --- requests of a rank -------------------------------------------------------------------------------------------


def running_is_running(state: CoreState, rank: RankState) -> Iterator[str]:
    """running holds RUNNING requests of this rank only, at most max_num_seqs (6)."""
    for run in rank.running:
        request = run.request
        if request.status is not Status.RUNNING or request.run is not run or run.rank is not rank or run.ended:
            yield f"{request.request_id} in running is {request.status.value}"
    for run in rank.set_aside:
        if run.request.status not in QUEUED or run.request.run is not run or run.rank is not rank or run.ended:
            yield f"{run.request.request_id} set aside is {run.request.status.value}"
    if len(rank.running) > state.config.max_num_seqs:
        yield f"{len(rank.running)} run, more than max_num_seqs"
    if list(rank.prefills) != [run for run in rank.prefills if run in rank.running]:
        yield f"prefills holds {[run for run in rank.prefills if run not in rank.running]}, which do not run"


def tables_cover_computed(state: CoreState, rank: RankState) -> Iterator[str]:
    """Blocks hold all that is computed or in flight; that never exceeds what is known or awaited (8)."""
    for run in (*rank.running, *rank.set_aside):
        request = run.request
        if run.capacity != len(run.blocks) * rank.kv.block_size:
            yield f"capacity of {request.request_id} is {run.capacity}"
        if run.capacity < min(run.computed, state.max_model_len):
            yield f"{request.request_id} computed {run.computed} with room for {run.capacity}"
        if run.computed > request.num_tokens + request.awaited:
            yield f"{request.request_id} computed {run.computed} of {request.num_tokens} + {request.awaited}"


def special_says_the_truth(state: CoreState, rank: RankState) -> Iterator[str]:
    """Bits of `special` are set exactly where their reason holds, and a plain run lacks exactly one token."""
    for run in rank.running:
        request = run.request
        bits = (CHUNK if run in rank.prefills else 0) | (RESULT_FIRST if request.needs_result_first else 0)
        for resource in state.resources:
            bits |= resource.bit if resource.claims(run) else 0
        if run.special != bits:
            yield f"{request.request_id} is special by {run.special:b}, but should be by {bits:b}"
        if not run.special and run.computed + 1 != request.num_tokens + request.awaited:
            yield f"{request.request_id} is plain and lacks not one token: {run.computed} of {request.num_tokens}"
        if run.plain_until != min(run.capacity - rank.kv.lookahead, request.limit - 1):
            yield f"{request.request_id} is plain until {run.plain_until}"


def resources_are_sound(state: CoreState, rank: RankState) -> Iterator[str]:
    """Each resource's own invariants."""
    for resource in state.resources:
        yield from resource.check(rank)


def in_flight_matches_window(state: CoreState, rank: RankState) -> Iterator[str]:
    """in_flight and awaited are what the window's records say."""
    in_flight: Counter[Run] = Counter()
    awaited: Counter[str] = Counter()
    for record in rank.window.records:
        for run, n, expected in zip(record.runs, record.num_tokens, record.expected, strict=True):
            request = run.request
            if request.status not in LIVE or state.requests.get(request.request_id) is not request:
                continue
            if not run.drops_results:
                awaited[request.request_id] += expected
            if not run.ended:
                in_flight[run] += n
    for request in state.requests.values():
        if request.run is None or request.run.rank is not rank or request.run.is_set_aside:
            continue
        run = request.run
        if run.in_flight != in_flight[run] or request.awaited != awaited[request.request_id]:
            yield f"{request.request_id}: {run.in_flight} in flight and {request.awaited} awaited differ"


def rows_are_distinct(state: CoreState, rank: RankState) -> Iterator[str]:
    """No row is used twice, nor reused before the step that dropped its request is acknowledged."""
    busy = [run.row for run in rank.running]
    busy += rank.released_rows
    busy += [row for record in rank.window.records for row in record.released_rows]
    busy += rank.free_rows
    if sorted(busy) != list(range(rank.num_rows)):
        yield "rows in use, released and free are not all rows once"


# --- everything ---------------------------------------------------------------------------------------------------


def requests_are_in_one_place(state: CoreState) -> Iterator[str]:
    """A live request is in exactly one of running, waiting, skipped; nobody else is anywhere (5)."""
    places: Counter[str] = Counter(r.request.request_id for rank in state.ranks.values() for r in rank.running)
    places.update(r.request_id for r in state.queue.waiting)
    places.update(r.request_id for r in state.queue.skipped)
    if any(count != 1 for count in places.values()) or set(places) != set(state.requests):
        yield f"requests are not in exactly one place each: {dict(places)} for {list(state.requests)}"


def _is_set_aside(state: CoreState, run: Run) -> bool:
    return any(rank is run.rank and run in rank.set_aside for rank in state.ranks.values())


def queued_requests_hold_only_what_is_set_aside(state: CoreState) -> Iterator[str]:
    """A request that waits has blocks exactly if a run of it is set aside on a living rank, and says what blocks it if
    something does (15)."""
    for request in state.queue:
        if request.status not in QUEUED:
            yield f"{request.request_id} in the queue is {request.status.value}"
        run = request.run
        if run is not None and run.ended and (run.blocks or run.computed or run.num_cached):
            yield f"{request.request_id} waits with blocks or computed tokens of a run that has ended"
        if run is not None and not run.ended and not _is_set_aside(state, run):
            yield f"{request.request_id} waits with a run that is not set aside on a living rank"
        if (request.status is Status.BLOCKED) is not (request.ticket.blocked_by is not None):
            yield f"{request.request_id} is {request.status.value}, blocked by {request.ticket.blocked_by}"


def counters_are_sane(state: CoreState) -> Iterator[str]:
    for request in state.requests.values():
        of_run = () if request.run is None else (request.run.settled, request.run.in_flight)
        counters = (request.awaited, request.awaited_optional, *of_run)
        if min(counters) < 0 or request.awaited_optional > request.awaited:
            yield f"{request.request_id} has counters {counters}"
        if request.num_tokens != len(request.tokens):
            yield f"{request.request_id} counts {request.num_tokens} of {len(request.tokens)} tokens"
    if state.queue.num_prompt_tokens != sum(r.num_prompt_tokens for r in state.queue):
        yield f"the queue counts {state.queue.num_prompt_tokens} prompt tokens"


_RANK_RULES: tuple[Callable[[CoreState, RankState], Iterator[str]], ...] = (
    blocks_are_conserved,
    references_are_exact,
    free_queue_is_sound,
    tables_hold_no_block_twice,
    index_matches_blocks,
    cached_blocks_are_of_their_tokens,
    fences_are_ordered,
    running_is_running,
    tables_cover_computed,
    special_says_the_truth,
    resources_are_sound,
    in_flight_matches_window,
    rows_are_distinct,
)
_GLOBAL_RULES: tuple[Callable[[CoreState], Iterator[str]], ...] = (
    requests_are_in_one_place,
    queued_requests_hold_only_what_is_set_aside,
    counters_are_sane,
)
