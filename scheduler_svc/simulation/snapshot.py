"""The scheduler's state as one value: equal values behave alike whatever comes, up to names.

Numbers that only grow (steps, fences, runs, admissions, order of arrival) are taken relative to the present, blocks are
named in the order in which the state mentions them, and a digest by the tokens it stands for, as given by the
caller's `digest_name`. What never decides anything (totals, usage, statistics, text for people) is left out. So a
search over states can tell that it has been somewhere before."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import FINISHED, Request
from scheduler_svc.core.state import CoreState

Snapshot = tuple[object, ...]


def snapshot(state: CoreState, digest_name: Callable[[bytes], object] | None = None) -> Snapshot:
    """The state as a hashable value; see the module."""
    order = {r: i for i, r in enumerate(sorted(state.requests.values(), key=_by_sequence))}
    places = {id(rank): i for i, rank in enumerate(state.ranks.values())}
    cap = state.config.max_preemptions
    return (
        tuple(_request(state, r, order, places, cap) for r in order),
        tuple(order[r] for r in state.queue.waiting),
        tuple(order[r] for r in state.queue.skipped),
        tuple(_rank(rank, order, digest_name) for rank in state.ranks.values()),
        state.pause,
        state.is_draining,
        state.no_rank_since,
        state.largest_pool,
        tuple(state.unholdable_since.items()),
    )


def _by_sequence(request: Request) -> int:
    return request.sequence


def _request(
    state: CoreState, r: Request, order: dict[Request, int], places: dict[int, int], cap: int | None
) -> Snapshot:
    rank = state.living(r)
    preemptions = 0 if cap is None else min(r.num_scheduler_preemptions, cap)
    return (
        r.request_id,
        r.status,
        r.num_tokens,
        r.limit,
        r.row_limit,
        r.priority,
        r.settled,
        r.in_flight,
        r.awaited,
        r.awaited_drafts,
        r.is_prefill_chunk,
        tuple(r.drafts),
        r.num_published,
        preemptions,
        r.num_preemptions > 0,
        r.run - r.reset_mark if r.reset_mark else None,
        r.fruitless_epochs,
        r.num_tokens == r.tokens_at_loss,
        r.num_passes,
        r.grammar_ready,
        None if rank is None else (places[id(rank)], max(r.last_fence - rank.window.acked_fence, 0)),
    )


def _rank(rank: RankState, order: dict[Request, int], digest_name: Callable[[bytes], object] | None) -> Snapshot:
    names: dict[int, int] = {}

    def name(block: int) -> int:
        return names.setdefault(block, len(names))

    window, pool, kv = rank.window, rank.kv.pool, rank.kv
    acked = window.acked_fence
    tables = tuple(tuple(name(b) for b in r.blocks) for r in rank.running)
    parked = tuple((free.fence - acked, tuple(name(b) for b in free.blocks)) for free in kv.parked)
    # Blocks without a digest are all alike once they are free: only their number counts, unless named above.
    free = tuple(name(b) if pool.index.digest_of(b) else None for b in pool.free_order())
    digests = tuple(
        (digest if digest_name is None else digest_name(digest), tuple(name(b) for b in blocks))
        for digest, blocks in sorted(pool.index.entries())
    )
    return (
        rank.name,
        kv.num_usable,
        tuple(order[r] for r in rank.running),
        tables,
        parked,
        free,
        digests,
        tuple(_record(record, order, acked) for record in window.records),
        tuple(rank.preempted_ids),
        tuple(rank.finished_ids),
        len(kv.parked.unannounced),
        rank.capacity_bound,
        rank.num_nonempty_steps,
        rank.is_draining,
        None if rank.reserved_for is None else order.get(rank.reserved_for),
    )


def _record(record: StepRecord, order: dict[Request, int], acked: int) -> Snapshot:
    rows: list[Snapshot] = []
    for request, n, run, expected in zip(record.requests, record.num_tokens, record.runs, record.expected, strict=True):
        if request.status in FINISHED:
            rows.append((None, 0, 0, expected))
        else:
            rows.append((order[request], n, request.run - run, expected))
    return record.fence_seq - acked if record.fence_seq else 0, tuple(rows), record.has_drafts
