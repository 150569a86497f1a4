"""The scheduler's state as one value: equal values behave alike whatever comes, up to names.

Numbers that only grow (steps, fences, runs, admissions, order of arrival) are taken relative to the present, blocks are
named in the order in which the state mentions them, and a block hash by the tokens it stands for, as given by the
caller's `hash_name`. What never decides anything (totals, usage, statistics, text for people) is left out. So a
search over states can tell that it has been somewhere before."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import FINISHED, Request
from scheduler_svc.core.state import CoreState

Snapshot = tuple[object, ...]


def snapshot(
    state: CoreState, hash_name: Callable[[bytes], object] | None = None, *, with_ids: bool = True
) -> Snapshot:
    """The state as a hashable value; see the module. with_ids: names of requests and ids still to be told count as
    well, not only whose turn it is."""
    config = state.config
    order = {r: i for i, r in enumerate(sorted(state.requests.values(), key=_by_sequence))}
    places = {id(rank): i for i, rank in enumerate(state.ranks.values())}
    return (
        tuple(state.requests) if with_ids else None,
        tuple(_request(state, r, places, config.max_preemptions) for r in order),
        tuple(order[r] for r in state.queue.waiting),
        tuple(order[r] for r in state.queue.skipped),
        tuple(_rank(state, rank, order, hash_name, with_ids=with_ids) for rank in state.ranks.values()),
        state.pause,
        state.is_draining,
        state.no_rank_since,
        state.largest_pool,
        tuple(state.unholdable_since.items()) if with_ids else len(state.unholdable_since),
    )


def _by_sequence(request: Request) -> int:
    return request.sequence


def _request(state: CoreState, r: Request, places: dict[int, int], cap: int | None) -> Snapshot:
    rank, run = state.living(r), r.run
    return (
        r.status,
        r.num_tokens,
        r.limit,
        r.row_limit,
        r.priority,
        None if run is None else (run.settled, run.in_flight, run.is_prefill_chunk, run.num_cached),
        r.awaited,
        r.awaited_optional,
        0 if cap is None else min(r.account.num_shortage_preemptions, cap),
        *state.quarantine.history(r),
        r.ticket.num_passes,
        r.ticket.blocked_by,
        None if rank is None or run is None else (places[id(rank)], max(run.last_fence - rank.window.acked_fence, 0)),
    )


def _rank(
    state: CoreState,
    rank: RankState,
    order: dict[Request, int],
    hash_name: Callable[[bytes], object] | None,
    *,
    with_ids: bool,
) -> Snapshot:
    names: dict[int, int] = {}

    def name(block: int) -> int:
        return names.setdefault(block, len(names))

    pool, acked = rank.kv.pool, rank.window.acked_fence
    is_throttled = state.config.prefill_schedule_interval > 1
    return (
        rank.name,
        rank.kv.num_usable,
        tuple(order[run.request] for run in rank.running),
        tuple(tuple(name(b) for b in run.blocks) for run in rank.running),
        tuple((order[run.request], tuple(name(b) for b in run.blocks)) for run in rank.set_aside),
        tuple((max(hold.run.last_fence - acked, 0), tuple(map(name, hold.blocks))) for hold in rank.kv.holds.values()),
        tuple((free.fence - acked, tuple(name(b) for b in free.blocks)) for free in rank.kv.parked),
        # Free blocks without a block hash are all alike.
        tuple(name(b) if pool.index.hash_of(b) else None for b in pool.free_order()),
        _hashes(rank, name, hash_name),
        tuple(_record(record, order, acked) for record in rank.window.records),
        (tuple(rank.preempted), tuple(rank.finished)) if with_ids else rank.has_news,
        (rank.throttle.capacity_bound, rank.throttle.num_steps) if is_throttled else None,
        # Compared by identity: a search that forgets names runs without resources that have a state.
        tuple(resource.snapshot(rank) for resource in state.resources),
        rank.is_draining,
        tuple(order[r] for r in order if state.draining.takes_back(rank, r, lambda _: False)),
        None if rank.reservation is None else order.get(rank.reservation.request),
    )


def _hashes(rank: RankState, name: Callable[[int], int], hash_name: Callable[[bytes], object] | None) -> Snapshot:
    entries = sorted(rank.kv.pool.index.entries())
    return tuple(
        (block_hash if hash_name is None else hash_name(block_hash), tuple(name(b) for b in blocks))
        for block_hash, blocks in entries
    )


def _record(record: StepRecord, order: dict[Request, int], acked: int) -> Snapshot:
    rows: list[Snapshot] = []
    for run, n, expected in zip(record.runs, record.num_tokens, record.expected, strict=True):
        if run.request.status in FINISHED:
            rows.append((None, expected))
        else:
            rows.append((order[run.request], None if run.ended else n, run.drops_results, expected))
    return (record.fence_seq - acked if record.fence_seq else 0, tuple(rows), record.yields_more)
