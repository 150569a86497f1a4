"""Block hashes of full blocks, and the index from block hash to blocks."""

from __future__ import annotations

from array import array
from hashlib import sha256

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv.manager import KvManager
from scheduler_svc.core.kv.prefix_index import HashChain, Identity, PrefixIndex, root_hash
from scheduler_svc.core.stats import PrefixStats
from tests.support.core_harness import World


def hashes(tokens: list[int], size: int = 4, salt: str = "") -> list[bytes]:
    chain = HashChain(size, salt, enabled=True)
    return [chain.block_hash(i, array("i", tokens)) for i in range(len(tokens) // size)]


def test_a_block_hash_is_of_the_block_and_all_before_it() -> None:
    base = hashes(list(range(12)))
    for changed in range(12):
        tokens = list(range(12))
        tokens[changed] = 99
        other = hashes(tokens)
        assert [a == b for a, b in zip(base, other, strict=True)] == [i < changed // 4 for i in range(3)]
    assert hashes([*range(4), *range(4)])[0] != hashes([*range(4), *range(4)])[1], "place matters"


def test_a_block_hash_depends_on_salt_and_block_size() -> None:
    assert hashes([1, 2, 3, 4], salt="a") != hashes([1, 2, 3, 4], salt="b") != hashes([1, 2, 3, 4])
    assert root_hash(4, "") != root_hash(2, "")


def test_fields_of_the_root_cannot_spell_each_other() -> None:
    salts = ["", "a", "aa", "1:a", "4:salt", "salt4", "10:block_size1:4", "\x00", "4:salt0:"]
    roots = {root_hash(size, salt) for size in (1, 4, 14, 41) for salt in salts}
    assert len(roots) == 4 * len(salts)


def test_the_form_of_a_block_hash_is_fixed() -> None:
    """Other processes and later versions must agree on it."""
    root = sha256(b"stepfence.kv.1" + b"10:block_size1:4" + b"4:salt1:x").digest()
    block = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 70_000))
    assert hashes([1, 2, 3, 70_000], salt="x") == [sha256(root + block).digest()]


def hashes_with(identity: Identity, tokens: list[int]) -> list[bytes]:
    chain = HashChain(4, "", enabled=True, identity=identity)
    return [chain.block_hash(i, array("i", tokens)) for i in range(len(tokens) // 4)]


def test_fields_part_prompts_from_the_first_block_on() -> None:
    plain, tokens = hashes(list(range(12))), list(range(12))
    assert hashes_with(Identity(), tokens) == plain
    one, two = (hashes_with(Identity(fields=((b"adapter", name),)), tokens) for name in (b"one", b"two"))
    assert not set(plain) & set(one) and not set(one) & set(two) and not set(plain) & set(two)
    assert hashes_with(Identity(fields=((b"adapter", b"one"),)), tokens) == one


def test_spans_part_prompts_from_the_first_block_they_overlap_on() -> None:
    tokens = list(range(16))
    plain = hashes(tokens)
    image = hashes_with(Identity(spans=((5, 3, b"image"),)), tokens)
    assert image[0] == plain[0] and not set(image[1:]) & set(plain)
    other = hashes_with(Identity(spans=((5, 3, b"other"),)), tokens)
    moved = hashes_with(Identity(spans=((6, 2, b"image"),)), tokens)
    assert other[0] == moved[0] == plain[0] and not set(other[1:]) & set(image) and not set(moved[1:]) & set(image)


def test_a_span_over_two_blocks_counts_in_both() -> None:
    """The second block of one prompt is the first of another's: the place of the input within the block decides."""
    tokens = list(range(12))
    long, short = (hashes_with(Identity(spans=((2, length, b"image"),)), tokens) for length in (4, 2))
    assert long[0] == short[0] and long[1] != short[1]


def test_block_hashes_are_made_when_asked_for_and_kept() -> None:
    chain = HashChain(4, "", enabled=True)
    tokens = array("i", range(10))
    chain.block_hash(0, tokens)
    assert len(chain.hashes) == 1
    second = chain.block_hash(1, tokens)
    tokens.extend([10, 11])
    assert chain.block_hash(1, tokens) is second and len(chain.hashes) == 2
    assert HashChain(4, "", enabled=False).first_cache_at > 1 << 40


def test_of_several_blocks_with_one_block_hash_the_first_cached_is_used() -> None:
    index = PrefixIndex(1000)
    for block in (700, 3, 900):
        index.add(block, b"d", b"d")
    assert index.find(b"d") == 700 and len(index) == 1
    index.remove(700)
    assert index.find(b"d") == 3
    index.remove(900)
    assert index.find(b"d") == 3
    index.remove(3)
    assert index.find(b"d") is None and len(index) == 0 and index.entries() == []


def test_caching_twice_enters_a_block_once() -> None:
    index = PrefixIndex(1000)
    block = int("500")
    index.add(block, b"d", b"d")
    index.add(int("500"), b"d", b"d")
    assert index.entries() == [(b"d", [500])]


def test_removing_what_holds_no_block_hash_is_nothing() -> None:
    index = PrefixIndex(10)
    index.add(1, b"d", b"d")
    index.remove(2)
    index.remove(1)
    index.remove(1)
    assert len(index) == 0
    index.add(1, b"e", b"e")
    index.clear()
    assert index.find(b"e") is None and index.hash_of(1) is None


# --- the manager --------------------------------------------------------------------------------------------------


def test_look_ups_are_counted_with_every_attempt_and_preempted_ones_apart() -> None:
    stats = PrefixStats()
    stats.count(10, 8, preempted=False)
    stats.count(10, 0, preempted=False)
    stats.count(12, 4, preempted=True)
    assert (stats.num_requests, stats.num_queries, stats.num_hits) == (2, 20, 8)
    assert (stats.num_preempted_requests, stats.num_preempted_queries, stats.num_preempted_hits) == (1, 12, 4)


def test_a_refused_admission_looks_up_again_each_time() -> None:
    world = World(num_blocks=4)
    world.submit("x", 8, 4)
    world.step()
    world.submit("waits", 8, 4)
    before = world.rank().kv.stats.num_requests
    world.schedule()
    world.schedule()
    assert world.rank().kv.stats.num_requests == before + 2
    world.run()
    world.check_texts()


@pytest.mark.parametrize("length, blocks", [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_hits_leave_at_least_one_token(length: int, blocks: int) -> None:
    world = World()
    tokens = list(range(12))
    world.submit("warm", tokens, 1)
    world.run()
    world.submit("a", tokens[:length], 2)
    assert len(world.rank().kv.find_hits(world.request("a"))) == blocks
    world.run()


def test_who_does_not_read_the_cache_still_fills_it() -> None:
    world = World()
    prompt = list(range(9))
    for name, skip, cached in (("a", True, 0), ("b", True, 0), ("c", False, 8)):
        client = world.submit(name, prompt, 1, skip_prefix_cache=skip)
        world.run()
        assert client.ended is not None and client.ended.usage.num_cached_tokens == cached
    stats = world.rank().kv.stats
    assert (stats.num_requests, stats.num_hits) == (1, 8)


def test_a_block_that_a_known_token_fills_is_cached_when_its_row_is_planned() -> None:
    world = World(SchedulerConfig(block_size=4, max_inflight_steps=1))
    world.submit("a", 7, 9)
    world.step()
    assert len(world.rank().kv.pool.index) == 1
    assert world.rows_of(world.schedule()) == [("a", 1)]
    assert len(world.rank().kv.pool.index) == 2, "the result is not in yet"
    world.run()
    world.check_texts()


def test_outputs_are_cached_too() -> None:
    world = World()
    prompt = list(range(6))
    first = world.submit("a", prompt, 8)
    world.run()
    second = world.submit("b", [*prompt, *first.tokens], 3)
    world.run()
    assert second.ended is not None and second.ended.usage.num_cached_tokens == 12
    world.check_texts()


def test_the_gates_count_free_hits_and_the_watermark() -> None:
    kv = KvManager(11, 4, caching=True, deferring=False, watermark=0.2)
    taken = kv.pool.take(4)
    for block in taken[:2]:
        kv.pool.index.add(block, b"%d" % block, b"%d" % block)
    kv.pool.release(taken)
    held = kv.pool.take(3)
    assert kv.pool.num_free == 7 and kv.watermark_blocks == 2

    def fits(slots: int, whole: int | None = None, *, hits: list[int] | None = None, others: bool = False) -> bool:
        return kv.fits_admission(hits or [], whole=whole, num_slots=slots, others_run=others)

    assert fits(28) and not fits(29)
    assert fits(20, others=True) and not fits(21, others=True)
    assert fits(28, hits=[1, 2]) and not fits(29, hits=[1, 2]), "a free hit saves a new block and uses a free one"
    assert fits(4, whole=28) and not fits(4, whole=29)
    assert fits(4, whole=20, others=True) and not fits(4, whole=21, others=True)
    kv.pool.touch([1])
    assert fits(28, hits=[1, 2]) and not fits(29, hits=[1, 2])
    assert held
