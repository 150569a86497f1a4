"""What the log says about preemptions: one warning a minute when KV memory is too small, with the numbers and what
helps; a line for each request that a lost or leaving worker, or a reset, took off."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from scheduler_svc.core.events import RequestPreempted
from scheduler_svc.core.scheduler import Scheduler

log = logging.getLogger(__name__)

# Preemptions are gathered for so long before the first warning, and so long lies between two. Seconds.
GATHER_S: Final = 5.0
PERIOD_S: Final = 60.0
# The cause of a preemption that makes room for another request.
_FOR_BLOCKS: Final = "blocks"
# With so few requests running, fewer of them would not help.
_FEW: Final = 2
# The largest watermark that docs/preemption-study.md found to cost little.
_MORE_FREE: Final = 0.05


class PreemptionLog:
    """Lives on the event loop. Preemptions for want of blocks are lines of level debug and count for the warning; the
    others, which have causes that an operator looks for, are lines of level info."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        # Since the last warning, or since the first of them after a pause: preemptions, by rank, and the totals before.
        self._by_rank: dict[str, int] = {}
        self._first_at = 0.0
        self._tokens_before = (0, 0)
        self._warned_at: float | None = None

    def preempted(self, effect: RequestPreempted) -> None:
        """A request was preempted."""
        is_for_blocks = effect.cause == _FOR_BLOCKS
        log.log(
            logging.DEBUG if is_for_blocks else logging.INFO,
            "preempted",
            extra={
                "rank": effect.rank,
                "victim": effect.victim,
                "beneficiary": effect.beneficiary,
                "cause": effect.cause,
                "num_blocks_gained": effect.num_blocks_gained,
                "num_tokens_to_recompute": effect.num_tokens_to_recompute,
                "num_preemptions_before": effect.num_preemptions_before,
            },
        )
        if is_for_blocks:
            self._count(effect.rank)

    def _count(self, rank: str) -> None:
        if not self._by_rank:
            loop = asyncio.get_running_loop()
            self._first_at = loop.time()
            totals = self._core.totals
            self._tokens_before = (totals.num_computed_tokens, totals.num_recomputed_tokens)
            since = 0.0 if self._warned_at is None else self._warned_at + PERIOD_S - self._first_at
            loop.call_later(max(GATHER_S, since), self._warn)
        self._by_rank[rank] = self._by_rank.get(rank, 0) + 1

    def _warn(self) -> None:
        self._warned_at = asyncio.get_running_loop().time()
        rank, _ = max(self._by_rank.items(), key=lambda item: item[1])
        number = sum(self._by_rank.values())
        self._by_rank.clear()
        totals, before = self._core.totals, self._tokens_before
        computed = totals.num_computed_tokens - before[0]
        recomputed = totals.num_recomputed_tokens - before[1]
        view = self._core.rank_view(rank)
        running = 0 if view is None else view.num_running
        log.warning(
            "KV memory is too small for the requests that run: %s",
            self._remedy(running),
            extra={
                "num_preemptions": number,
                "seconds": round(self._warned_at - self._first_at, 1),
                "num_recomputed_tokens": recomputed,
                "recomputed_share": round(recomputed / computed, 3) if computed else 0.0,
                "rank": rank,
                "num_blocks": 0 if view is None else view.num_blocks,
                "num_running": running,
            },
        )

    def _remedy(self, num_running: int) -> str:
        more = "give the workers more (--kv-memory or --num-blocks, on a GPU --gpu-memory-utilization)"
        if num_running <= _FEW:
            return f"{more}, or allow shorter sequences only (--max-model-len)"
        config = self._core.config
        wanted = min(num_running, config.max_num_seqs) - 1
        fewer = f"let fewer run at once (--max-num-seqs {wanted} or less)"
        spare = f", keep more free (--watermark {_MORE_FREE})" if config.watermark < _MORE_FREE else ""
        return f"{more}, start more workers{spare}, or {fewer}"
