"""Rows that failed alone (D51): the request ends, and no request uses again what its row wrote into KV.

Blocks are cached when a step is dispatched, so others may have found blocks of such a row before its failure was known.
Whatever was computed on top of those is not to be trusted either, also where the run that computed it has ended. Blocks
of a run that ended before any row of it sampled are not known to be wrong: the next request that finds them fails, and
takes them out of the index.
"""

from __future__ import annotations

from scheduler_svc.core import lifecycle
from scheduler_svc.core.events import EndReason
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import FINISHED, Run, RunEnd, Status
from scheduler_svc.core.state import CoreState


def fail_row(state: CoreState, rank: RankState, run: Run, message: str) -> None:
    """End the request of a failed row, and have every request that uses one of its blocks computed again without it.

    Also for a run that has ended: its blocks may still be cached. A request whose results are dropped is computed
    again already and goes on."""
    blocks = rank.kv.forget_blocks(run)
    # The newest first. A run that shares a later block with one of these shares an earlier one with the failed run.
    for other in reversed((*rank.running, *rank.set_aside)):
        if other is run or blocks.isdisjoint(other.blocks):
            continue
        if other in rank.set_aside:
            lifecycle.abandon(state, rank, other, RunEnd.ABANDONED)
        else:
            # Results on the way may come from what is not trusted.
            lifecycle.recompute(state, rank, other, cause="row_error")
    request = run.request
    if request.status not in FINISHED and not run.drops_results:
        lifecycle.finish(state, request, Status.FINISHED_ERROR, EndReason.MODEL_OUTPUT_INVALID, message=message)
