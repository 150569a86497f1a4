"""Acknowledgements and the ends of epochs: what was in flight becomes settled, tokens are appended, requests stop,
fences open. Decides nobody's turn."""

from __future__ import annotations

from scheduler_svc.core import lifecycle, stopping, untrusted
from scheduler_svc.core.events import EndReason, StepAcked, TokensProduced, WorkerProtocolError
from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import FINISHED, Request, Run, RunEnd, Status
from scheduler_svc.core.resources.base import Failure
from scheduler_svc.core.state import CoreState

# A request that has its last token: why, and the id that stopped it.
_End = tuple[Request, EndReason, int | None]
_ENDED = {EndReason.STOP: Status.FINISHED_STOPPED, EndReason.LENGTH: Status.FINISHED_LENGTH}


def acknowledge(state: CoreState, event: StepAcked) -> None:
    """Take in the answer to the oldest step of a rank. Raises WorkerProtocolError, nothing changed, when it does not
    fit."""
    rank = state.ranks.get(event.rank)
    if rank is None or rank.epoch != event.epoch:
        # A late result of an ended epoch.
        return
    record = _checked(rank, event, least=1 if state.config.rules.refuse_empty_rows else 0)
    rank.window.acknowledge()
    rank.quiet_since = state.now
    rank.kv.release_due(rank.window.acked_fence)
    rank.reuse_rows(record.released_rows)
    ends: list[_End] = []
    failed = _failed_runs(record, event) if event.row_errors else {}
    if record.yields_more or event.counts is not None:
        produced = _settle_counted(state, rank, record, event, failed, ends)
    else:
        produced = _settle_plain(state, rank, record, event.sampled, ends)
    if produced.handles:
        state.totals.num_output_tokens += len(produced.tokens)
        state.effects.append(produced)
    # After all rows, so that tokens come before ends, and the last block of a request is cached before it is freed.
    for request, reason, stop_token_id in ends:
        lifecycle.finish(state, request, _ENDED[reason], reason, stop_token_id=stop_token_id)
    for run, message in failed.items():
        state.totals.num_row_errors += 1
        untrusted.fail_row(state, rank, run, message)
    _fail(state, state.resources.on_settled(rank, record, event))


def _checked(rank: RankState, event: StepAcked, *, least: int) -> StepRecord:
    """The record the answer is about, if the answer has exactly the rows and ids it must have (contract rule 9).
    `least`: tokens of a row that samples."""
    record = rank.window.oldest
    if record is None or record.step_seq != event.step_seq:
        expected = "none" if record is None else str(record.step_seq)
        raise WorkerProtocolError(f"result for step {event.step_seq} of {event.rank}; expected step {expected}")
    sampled, counts = event.sampled, event.counts
    failed = {each.row for each in event.row_errors}
    if failed:
        rows = {run.row for run in record.runs}
        if len(failed) != len(event.row_errors) or not failed <= rows or counts is None:
            raise WorkerProtocolError(f"step {event.step_seq}: row errors do not fit its rows")
    if sampled and not (min(sampled) >= 0 and max(sampled) < rank.vocab_size):
        raise WorkerProtocolError(f"step {event.step_seq}: a token id is outside 0 to {rank.vocab_size - 1}")
    if counts is None:
        if len(sampled) != record.num_sampling:
            raise WorkerProtocolError(
                f"step {event.step_seq}: {len(sampled)} sampled tokens for {record.num_sampling} sampling rows"
            )
        return record
    fits = len(counts) == len(record.expected) and all(
        count == 0 if run.row in failed else min(least, most) <= count <= most
        for run, count, most in zip(record.runs, counts, record.expected, strict=True)
    )
    if not fits or sum(counts) != len(sampled):
        raise WorkerProtocolError(f"step {event.step_seq}: token counts do not fit its rows")
    return record


def _settle_plain(
    state: CoreState, rank: RankState, record: StepRecord, sampled: list[int], ends: list[_End]
) -> TokensProduced:
    """One token for each sampling row: the common case, and what an acknowledgement costs."""
    caches = not state.config.rules.results_first
    handles: list[int] = []
    tokens: list[int] = []
    add_handle, add_token = handles.append, tokens.append
    next_token = iter(sampled).__next__
    for run, n, expected in zip(record.runs, record.num_tokens, record.expected, strict=True):
        request = run.request
        if run.ended:
            if expected:
                token = next_token()
                if _append_late(run, [token], 1, ends):
                    add_handle(request.handle)
                    add_token(token)
            continue
        run.in_flight -= n
        run.settled += n
        if expected:
            token = next_token()
            request.awaited -= 1
            request.tokens.append(token)
            request.num_tokens += 1
            add_handle(request.handle)
            add_token(token)
            if request.num_tokens >= request.limit or token in request.stops:
                _stop_if_due(request, token, ends)
        if run.settled >= run.cache_at and caches:
            rank.kv.cache_blocks(run, run.settled)
    return TokensProduced(handles, None, tokens)


def _failed_runs(record: StepRecord, event: StepAcked) -> dict[Run, str]:
    messages = {failed.row: failed.message for failed in event.row_errors}
    return {run: messages[run.row] for run in record.runs if run.row in messages}


def _settle_counted(
    state: CoreState,
    rank: RankState,
    record: StepRecord,
    event: StepAcked,
    failed: dict[Run, str],
    ends: list[_End],
) -> TokensProduced:
    """Rows with drafts, or with a count column: each yields between nothing and 1 + its drafts."""
    counts = event.counts
    if counts is None:
        counts = [min(expected, 1) for expected in record.expected]
    handles: list[int] = []
    out_counts: list[int] = []
    tokens: list[int] = []
    at = 0
    for run, n, expected, count in zip(record.runs, record.num_tokens, record.expected, counts, strict=True):
        row = event.sampled[at : at + count]
        at += count
        if run in failed:
            # Its request ends below, or has been taken off already: nothing of the row is settled.
            continue
        if run.ended:
            kept = row if expected and _append_late(run, row, expected, ends) else []
        else:
            kept = _settle_row(state, rank, run, n, expected, row, ends)
        if kept:
            handles.append(run.request.handle)
            out_counts.append(len(kept))
            tokens += kept
    return TokensProduced(handles, out_counts, tokens)


def _settle_row(
    state: CoreState, rank: RankState, run: Run, n: int, expected: int, row: list[int], ends: list[_End]
) -> list[int]:
    """Settle one row of 1 + k tokens: the KV of rejected drafts is overwritten later and does not count as computed.
    Returns the tokens that belong to the request."""
    request = run.request
    run.in_flight -= n
    # A sampling row that yields nothing has computed none of what it was to verify (F39).
    run.settled += n - (expected - len(row))
    request.awaited -= expected
    if expected > 1:
        request.awaited_optional -= expected - 1
    if expected and not row:
        _uncache_uncomputed(rank, run)
    _append(request, row, ends)
    # Tokens behind a stop are computed, but no part of the request.
    settled = min(run.settled, request.num_tokens)
    if not state.config.rules.results_first and settled >= run.cache_at:
        rank.kv.cache_blocks(run, settled)
    return row


def _append(request: Request, row: list[int], ends: list[_End]) -> None:
    """Append tokens up to the one that ends the request, and cut the row there."""
    for index, token in enumerate(row):
        request.tokens.append(token)
        request.num_tokens += 1
        if (request.num_tokens >= request.limit or token in request.stops) and _stop_if_due(request, token, ends):
            del row[index + 1 :]
            return


def _uncache_uncomputed(rank: RankState, run: Run) -> None:
    """Its row yielded nothing: blocks cached because the row would fill them are not to be relied upon."""
    full = run.settled // rank.kv.block_size
    if full < run.num_cached:
        rank.kv.uncache_blocks(run, full)


def _append_late(run: Run, row: list[int], expected: int, ends: list[_End]) -> bool:
    """A row of a run that has ended: its tokens count (the recompute will include them), its progress does not. Returns
    whether they were kept: tokens of ended requests, and of runs that a reset has forgotten, are dropped (contract
    rule 6)."""
    request = run.request
    if request.status in FINISHED or run.drops_results:
        return False
    request.awaited -= expected
    request.awaited_optional -= expected - 1
    _append(request, row, ends)
    return bool(row)


def _stop_if_due(request: Request, token: int, ends: list[_End]) -> bool:
    verdict = stopping.check(request, token)
    if verdict is None:
        return False
    ends.append((request, *verdict))
    return True


# --- the end of an epoch ------------------------------------------------------------------------------------------


def end_epoch(state: CoreState, rank: RankState, *, graceful: bool) -> None:
    """The rank is gone with all it held: whatever ran there is preempted and goes to the head of the queue in running
    order, nothing of it is awaited any more, its fences and its prefix index vanish with the rank's state."""
    del state.ranks[rank.name]
    in_flight = _forget_awaited(rank)
    orphans = list(rank.running)
    for run in reversed(orphans):
        lifecycle.preempt(state, rank, run, beneficiary="", cause="rank_lost")
        state.queue.prepend(run.request)
    for run in list(rank.set_aside):
        lifecycle.abandon(state, rank, run, RunEnd.RANK_LOST)
    _fail(state, state.resources.on_rank_lost(rank, in_flight, graceful=graceful))


def _fail(state: CoreState, failures: list[Failure]) -> None:
    for failure in failures:
        lifecycle.finish(state, failure.request, Status.FINISHED_ERROR, failure.reason, message=failure.message)


def _forget_awaited(rank: RankState) -> list[Request]:
    """Requests with rows in the rank's flight, each once, in the order of the rows; they await nothing any more."""
    touched: dict[Request, None] = {}
    for record in rank.window.clear():
        for run in record.runs:
            if run.request.status not in FINISHED and not run.drops_results:
                touched[run.request] = None
    for request in touched:
        request.awaited = request.awaited_optional = 0
    return list(touched)
