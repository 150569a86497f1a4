"""Rows that failed alone (D51): the request ends, and no request uses again what its row wrote into KV.

Blocks are cached when a step is dispatched, so others may have found blocks of such a row before its failure was known.
Whatever they computed on top of those is not to be trusted either. What a run has cached that ended before any row of
it sampled is not known to be wrong: the next request that finds it fails, and takes it out of the index.
"""

from __future__ import annotations

from scheduler_svc.core import lifecycle
from scheduler_svc.core.events import EndReason
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import FINISHED, Run, RunEnd, Status
from scheduler_svc.core.state import CoreState


def fail_row(state: CoreState, rank: RankState, run: Run, message: str) -> None:
    """End the request of a failed row, and have every request that uses one of its blocks computed again without it.

    Also for a run that has ended: its blocks may still be cached. A run whose results are dropped had to be computed
    again already."""
    if run.drops_results:
        return
    for other in _forget(rank, run):
        if other in rank.set_aside:
            lifecycle.abandon(state, rank, other, RunEnd.ABANDONED)
        else:
            # Results on the way may come from what is not trusted.
            lifecycle.recompute(state, rank, other, cause="row_error")
    request = run.request
    if request.status not in FINISHED:
        lifecycle.finish(state, request, Status.FINISHED_ERROR, EndReason.MODEL_OUTPUT_INVALID, message=message)


def _forget(rank: RankState, failed: Run) -> list[Run]:
    """Take every block of the failed run out of the prefix index, and every block of whatever run shares one of them.
    Returns those other runs, running or set aside, the newest first."""
    found: dict[Run, None] = {failed: None}
    to_look_at = [failed]
    while to_look_at:
        blocks = rank.kv.forget_blocks(to_look_at.pop())
        for other in (*rank.running, *rank.set_aside):
            if other not in found and not blocks.isdisjoint(other.blocks):
                found[other] = None
                to_look_at.append(other)
    del found[failed]
    return [run for run in reversed((*rank.running, *rank.set_aside)) if run in found]
