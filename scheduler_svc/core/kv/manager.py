"""KV blocks of one rank's requests: hits, the two admission gates, growth, caching, freeing behind the fence.

Answers "does it fit?" and performs one change at a time; whom to refuse or preempt is decided in `admission.py` and
`running.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.deferred import ParkedFree, ParkedFrees
from scheduler_svc.core.stats import PrefixStats

if TYPE_CHECKING:
    from scheduler_svc.core.request import Request, Run


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks that outlive their run, because something outside the steps still reads or writes them. number: unique in
    the epoch; an id of a request is not, since it may be used again."""

    number: int
    owner: object
    run: Run
    blocks: tuple[int, ...]


class KvManager:
    """Block tables, pool and parked frees of one rank."""

    __slots__ = (
        "_num_holds",
        "block_size",
        "caching",
        "deferring",
        "holds",
        "lookahead",
        "parked",
        "pool",
        "stats",
        "watermark_blocks",
    )

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool, deferring: bool, watermark: float, lookahead: int = 0
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.parked = ParkedFrees()
        self.caching = caching
        # Whether frees wait for their fence.
        self.deferring = deferring
        # Slots kept behind every row.
        self.lookahead = lookahead
        # Kept free at admission while something runs; the null block counts in the base, as in the reference.
        self.watermark_blocks = int(watermark * num_blocks)
        self.stats = PrefixStats()
        # Blocks kept for a resource after the run that held them, by number.
        self.holds: dict[int, Hold] = {}
        self._num_holds = 0

    @property
    def num_usable(self) -> int:
        return self.pool.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- prefix cache ---------------------------------------------------------------------------------------------

    def find_hits(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix, whole blocks only, always leaving one token to compute. Takes no
        reference."""
        if not self.caching or request.skip_prefix_cache:
            return []
        hits: list[int] = []
        find, block_hash, tokens = self.pool.index.find, request.chain.block_hash, request.tokens
        for index in range((request.num_tokens - 1) // self.block_size):
            block = find(block_hash(index, tokens))
            if block is None:
                break
            hits.append(block)
        return hits

    def look_up(self, request: Request) -> list[int]:
        """find_hits, counted in the statistics."""
        hits = self.find_hits(request)
        if self.caching and not request.skip_prefix_cache:
            self.stats.count(
                request.num_tokens, len(hits) * self.block_size, preempted=request.account.num_preemptions > 0
            )
        return hits

    def cache_blocks(self, run: Run, num_tokens: int) -> None:
        """Enter the run's full blocks below `num_tokens` in the index."""
        first, full = run.num_cached, num_tokens // self.block_size
        chain, blocks, tokens = run.request.chain, run.blocks, run.request.tokens
        add, block_hash = self.pool.index.add, chain.block_hash
        for index in range(first, full):
            add(blocks[index], block_hash(index, tokens), chain.hashes[0])
        run.num_cached = full
        run.cache_at = (full + 1) * self.block_size

    def uncache_blocks(self, run: Run, num_cached: int) -> None:
        """Take blocks beyond the first `num_cached` out of the index: no step computes them now. A block that another
        request has found meanwhile stays in the index, since that request relies on it."""
        for block in run.blocks[num_cached : run.num_cached]:
            if self.pool.refs[block] == 1:
                self.pool.index.remove(block)
        run.num_cached = num_cached
        run.cache_at = (num_cached + 1) * self.block_size

    def forget_blocks(self, run: Run) -> set[int]:
        """Take out of the index every block that holds tokens of this run's request, and every block that was computed
        on top of one. Returns the former: the blocks of its table, and those found by the hashes of its full blocks,
        since the table of a run that has ended is empty."""
        index, request = self.pool.index, run.request
        blocks, num_full = set(run.blocks), request.num_tokens // self.block_size
        if self.caching and num_full:
            for number in range(num_full):
                blocks.update(index.find_all(request.chain.block_hash(number, request.tokens)))
            index.remove_all_behind(request.chain.hashes[0])
        return blocks

    # --- allocation -----------------------------------------------------------------------------------------------

    def blocks_short(self, run: Run, num_slots: int) -> int:
        """Blocks a run still needs to hold `num_slots` tokens."""
        return self.blocks_for(num_slots) - len(run.blocks)

    def grow(self, run: Run, count: int) -> list[int]:
        """Append `count` new blocks; the caller has checked that they are free."""
        blocks = self.pool.take(count)
        run.blocks += blocks
        run.capacity = len(run.blocks) * self.block_size
        run.plain_until = min(run.capacity - self.lookahead, run.request.limit - 1)
        return blocks

    def fits_admission(
        self,
        hits: list[int],
        *,
        whole: int | None,
        num_slots: int,
        others_run: bool,
        margin: int = 0,
        reserved: int = 0,
    ) -> bool:
        """The two gates: the whole sequence known so far (`whole` tokens; None: gate off), then the slots of this
        step. Free hits count, since using them takes them from the free queue; `hits` may be a run's own table. margin:
        blocks that must stay free in both gates; reserved: in the second one. Equality passes."""
        pool = self.pool
        room = pool.num_free - pool.count_free(hits) - (self.watermark_blocks if others_run else 0) - margin
        if whole is not None and self.blocks_for(whole) - len(hits) > room:
            return False
        return max(0, self.blocks_for(num_slots) - len(hits)) <= room - reserved

    def admit(self, run: Run, hits: list[int], num_slots: int) -> None:
        """Build the block table: the hits, then new blocks up to `num_slots`. fits_admission has said yes."""
        self.pool.touch(hits)
        run.blocks = list(hits)
        if self.caching:
            run.num_cached = len(hits)
            run.cache_at = (len(hits) + 1) * self.block_size
        self.grow(run, max(0, self.blocks_for(num_slots) - len(hits)))

    # --- freeing --------------------------------------------------------------------------------------------------

    def free(self, run: Run, *, acked_fence: int, newest_fence: int, reason: str) -> None:
        """Empty the run's table. Its blocks become free now, or, while a step that holds the run is unacknowledged,
        behind the newest step dispatched."""
        if run.blocks:
            waits = self.deferring and run.last_fence > acked_fence
            self._give_back(run.blocks, newest_fence if waits else 0, run.request.request_id, reason)
        self._empty(run)

    def keep(self, run: Run, owner: object) -> Hold:
        """Empty the run's table without freeing its blocks: they are held for `owner` until `let_go`."""
        self._num_holds += 1
        hold = Hold(self._num_holds, owner, run, tuple(run.blocks))
        self.holds[hold.number] = hold
        self._empty(run)
        return hold

    def let_go(self, hold: Hold, *, acked_fence: int, newest_fence: int) -> None:
        """The owner needs the blocks no longer. They become free as those of a run do."""
        del self.holds[hold.number]
        if hold.blocks:
            waits = self.deferring and hold.run.last_fence > acked_fence
            self._give_back(hold.blocks, newest_fence if waits else 0, hold.run.request.request_id, "finished")

    def _give_back(self, blocks: Sequence[int], fence: int, request_id: str, reason: str) -> None:
        """Free blocks, behind `fence` unless it is 0."""
        if fence:
            self.pool.park(blocks)
            self.parked.park(ParkedFree(fence, request_id, tuple(blocks), reason))
        else:
            self.pool.release(blocks)

    def _empty(self, run: Run) -> None:
        """Without a table a run is no plain decode any more."""
        run.blocks = []
        run.capacity = run.plain_until = 0
        run.num_cached = 0
        run.cache_at = run.request.chain.first_cache_at

    def release_due(self, acked_fence: int) -> None:
        """Free what waited for fences up to `acked_fence`."""
        if self.parked:
            for free in self.parked.pop_due(acked_fence):
                self.pool.unpark(free.blocks)

    @property
    def is_held(self) -> bool:
        """Whether a run or a hold has a block. Parked ones belong to no request any more."""
        return self.pool.num_free + self.pool.num_parked != self.pool.num_usable

    def reset_prefix_cache(self) -> None:
        """Forget all block hashes, those of parked blocks included: steps in flight may still write to such blocks,
        but no request can find them any more. Only while no block is held."""
        self.pool.forget_cached()
