"""The block pool against a plain model of the reference's one free queue, and the counts of parked blocks."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.deferred import ParkedFree, ParkedFrees


def block_hash(block: int) -> bytes:
    return b"block hash of %d" % block


def cache(pool: BlockPool, *blocks: int) -> None:
    for block in blocks:
        pool.index.add(block, block_hash(block), block_hash(block))


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert (pool.num_usable, pool.num_free) == (4, 4)
    assert pool.take(4) == [1, 2, 3, 4] and pool.num_free == 0
    with pytest.raises(ValueError, match="at least one more"):
        BlockPool(1)


def test_blocks_without_a_hash_come_back_last_in_first_out() -> None:
    pool = BlockPool(8)
    first, second = pool.take(2), pool.take(2)
    pool.release(first)
    pool.release(second)
    assert pool.free_order() == [4, 3, 2, 1, 5, 6, 7]
    assert pool.take(1) == [4]


def test_cached_blocks_come_back_least_recently_used_tail_first() -> None:
    pool = BlockPool(8)
    table = pool.take(3)
    cache(pool, 1, 2)
    pool.release(table)
    assert pool.free_order() == [3, 4, 5, 6, 7, 2, 1]
    other = pool.take(1)
    cache(pool, *other)
    pool.release(other)
    assert pool.free_order() == [4, 5, 6, 7, 2, 1, 3]


def test_taking_a_cached_block_forgets_its_block_hash() -> None:
    pool = BlockPool(4)
    table = pool.take(3)
    cache(pool, *table)
    pool.release(table)
    assert pool.take(2) == [3, 2]
    assert pool.index.hash_of(3) is None and pool.index.find(block_hash(2)) is None
    assert pool.index.find(block_hash(1)) == 1


@pytest.mark.parametrize("count", range(8))
def test_any_number_is_taken_from_the_front(count: int) -> None:
    pool = BlockPool(8)
    table = pool.take(3)
    cache(pool, 1, 2)
    pool.release(table)
    order = pool.free_order()
    assert pool.take(count) == order[:count]
    assert pool.free_order() == order[count:] and pool.num_free == 7 - count
    assert [pool.refs[b] for b in order[:count]] == [1] * count


def test_a_touched_block_leaves_the_queue_and_counts_its_holders() -> None:
    pool = BlockPool(6)
    table = pool.take(2)
    cache(pool, *table)
    pool.release(table)
    assert pool.count_free([1, 2]) == 2
    pool.touch([1])
    pool.touch([1])
    assert (pool.refs[1], pool.num_free, pool.count_free([1, 2])) == (2, 4, 1)
    pool.release([1])
    assert pool.refs[1] == 1 and 1 not in pool.free_order()
    pool.release([1])
    assert pool.free_order() == [3, 4, 5, 2, 1], "used last, so evicted last"


def test_releasing_once_too_often_is_a_bug() -> None:
    pool = BlockPool(4)
    table = pool.take(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(table)


def test_forgetting_all_block_hashes_keeps_the_order() -> None:
    pool = BlockPool(8)
    table = pool.take(4)
    cache(pool, 1, 2, 3)
    pool.release(table)
    order = pool.free_order()
    pool.forget_cached()
    assert pool.free_order() == order == pool.take(7) and len(pool.index) == 0


# --- parked -------------------------------------------------------------------------------------------------------


def test_a_parked_block_is_neither_free_nor_held() -> None:
    pool = BlockPool(6)
    table = pool.take(3)
    pool.park(table)
    assert (pool.num_free, pool.num_parked, pool.refs[1], pool.parked_refs(1)) == (2, 3, 1, 1)
    pool.unpark(table)
    assert (pool.num_free, pool.num_parked, pool.refs[1], pool.parked_refs(1)) == (5, 0, 0, 0)


def test_a_parked_block_that_a_living_table_holds_does_not_count_as_parked() -> None:
    pool = BlockPool(6)
    table = pool.take(2)
    cache(pool, *table)
    pool.park(table)
    pool.touch([1])
    assert pool.num_parked == 1
    pool.unpark(table)
    assert (pool.num_parked, pool.refs[1], pool.num_free) == (0, 1, 4)


def test_a_living_holder_that_leaves_first_makes_it_parked_again() -> None:
    pool = BlockPool(6)
    table = pool.take(2)
    cache(pool, *table)
    pool.touch([1])
    pool.park(table)
    assert pool.num_parked == 1
    pool.release([1])
    assert pool.num_parked == 2
    pool.unpark(table)
    assert (pool.num_parked, pool.num_free) == (0, 5)


def test_a_block_parked_twice_counts_once_until_the_last_fence() -> None:
    pool = BlockPool(6)
    table = pool.take(2)
    cache(pool, *table)
    pool.touch(table)
    pool.park(table)
    pool.park([1])
    assert pool.num_parked == 1
    pool.park([2])
    assert pool.num_parked == 2
    pool.unpark(table)
    assert (pool.num_parked, pool.num_free) == (2, 3)
    pool.unpark([1])
    pool.unpark([2])
    assert (pool.num_parked, pool.num_free) == (0, 5)


def test_frees_are_due_in_the_order_of_their_fences() -> None:
    frees = ParkedFrees()
    parked = [ParkedFree(fence, f"r{i}", (i + 1,), "aborted") for i, fence in enumerate([1, 2, 2, 4])]
    for free in parked:
        frees.park(free)
    assert list(frees) == parked and frees.unannounced == parked
    assert frees.pop_due(0) == []
    assert frees.pop_due(2) == parked[:3] and len(frees) == 1
    assert frees.pop_due(3) == [] and frees.pop_due(9) == parked[3:]


# --- against a model ----------------------------------------------------------------------------------------------


class OneQueue:
    """The reference's pool in the plainest form: one list, front first."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.hashes: set[int] = set()

    def take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.refs[block] = 1
            self.hashes.discard(block)
        return taken

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                self.queue.remove(block)
            self.refs[block] += 1

    def release(self, table: list[int]) -> None:
        gone = []
        for block in reversed(table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                gone.append(block)
        self.queue = [
            *(b for b in gone if b not in self.hashes), *self.queue, *(b for b in gone if b in self.hashes)
        ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_the_two_structures_are_the_one_queue(seed: int) -> None:
    rng = random.Random(seed)
    pool, model = BlockPool(12), OneQueue(12)
    tables: list[list[int]] = []
    parked: list[list[int]] = []
    for _ in range(300):
        kind = rng.randrange(6)
        if kind == 0 and (count := rng.randrange(pool.num_free + 1)):
            # As an admission: some cached free blocks first, then new ones.
            hits = [b for b in rng.sample(sorted(model.hashes), len(model.hashes)) if rng.random() < 0.5][:2]
            fresh = max(0, min(count, pool.num_free - pool.count_free(hits)))
            pool.touch(hits)
            model.touch(hits)
            taken = pool.take(fresh)
            assert taken == model.take(fresh)
            tables.append([*hits, *taken])
        elif kind == 1 and tables:
            for block in rng.choice(tables):
                if block not in model.hashes and rng.random() < 0.7:
                    cache(pool, block)
                    model.hashes.add(block)
        elif kind == 2 and tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.release(table)
            model.release(table)
        elif kind == 3 and tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.park(table)
            parked.append(table)
        elif kind == 4 and parked:
            table = parked.pop(0)
            pool.unpark(table)
            model.release(table)
        assert pool.free_order() == model.queue and pool.refs == model.refs
        held = {b for table in tables for b in table}
        assert pool.num_parked == len({b for table in parked for b in table} - held)
