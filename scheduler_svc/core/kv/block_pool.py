"""The blocks of one rank: who is free, how often each is referenced, and in which order free ones are taken.

One queue in the sense of the reference, kept as two: freed blocks without a block hash go to a stack (its top is the
queue's front: last in, first out), freed blocks with one to the end of an ordered dictionary (least recently used
first). Taking pops the stack, then the oldest cached block, which thereby leaves the prefix index. Block 0 is the null
block: never free, never referenced, never cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from scheduler_svc.core.kv.prefix_index import PrefixIndex


class BlockPool:
    """`num_blocks` blocks, the null block included. References of tables and of parked frees count alike."""

    __slots__ = ("_cached", "_parked_refs", "_stack", "index", "num_blocks", "num_parked", "refs")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.refs = [0] * num_blocks
        self._stack = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # References that parked frees hold, per block, and the number of blocks that only parked frees hold.
        self._parked_refs: dict[int, int] = {}
        self.num_parked = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._stack) + len(self._cached)

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks, referenced once each. The caller has checked num_free."""
        stack, refs = self._stack, self.refs
        if count == 1 and stack:
            # A decode's growth: most of all calls.
            block = stack.pop()
            refs[block] = 1
            return [block]
        if count <= len(stack):
            taken = stack[-1 : -count - 1 : -1]
            del stack[len(stack) - count :]
        else:
            taken = stack[::-1]
            stack.clear()
            for _ in range(count - len(taken)):
                block, _ = self._cached.popitem(last=False)
                self.index.remove(block)
                taken.append(block)
        for block in taken:
            refs[block] = 1
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference on each; free ones leave the queue."""
        refs, parked = self.refs, self._parked_refs
        for block in blocks:
            count = refs[block]
            if count == 0:
                del self._cached[block]
            elif parked and parked.get(block) == count:
                self.num_parked -= 1
            refs[block] = count + 1

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the free queue (a hit there uses one up)."""
        refs = self.refs
        return sum(1 for block in blocks if refs[block] == 0)

    def release(self, table: Sequence[int]) -> None:
        """One reference less on each block of a table. Those that become free are queued so that a chain's tail is
        taken before its head."""
        refs, stack, cached, parked = self.refs, self._stack, self._cached, self._parked_refs
        hash_of = self.index.hash_of
        for block in table:
            count = refs[block] - 1
            refs[block] = count
            if count < 0:
                raise AssertionError(f"block {block} was released more often than referenced")
            if count == 0 and hash_of(block) is None:
                stack.append(block)
            elif count and parked and parked.get(block) == count:
                self.num_parked += 1
        for block in reversed(table):
            if refs[block] == 0 and hash_of(block) is not None:
                cached[block] = None

    def park(self, table: Iterable[int]) -> None:
        """The table's references now belong to a parked free."""
        refs, parked = self.refs, self._parked_refs
        for block in table:
            count = parked[block] = parked.get(block, 0) + 1
            if refs[block] == count:
                self.num_parked += 1

    def unpark(self, table: Sequence[int]) -> None:
        """The parked free is due: release its references."""
        refs, parked = self.refs, self._parked_refs
        for block in table:
            count = parked[block]
            if refs[block] == count:
                self.num_parked -= 1
            if count == 1:
                del parked[block]
            else:
                parked[block] = count - 1
                # Still parked elsewhere: counted again by release() when that is all that holds it.
        self.release(table)

    def forget_cached(self) -> None:
        """Drop every block hash. Queue order stays: blocks that were cached come after those that were not."""
        self.index.clear()
        self._stack[:0] = reversed(self._cached)
        self._cached.clear()

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they would be taken."""
        return [*reversed(self._stack), *self._cached]

    def parked_refs(self, block: int) -> int:
        return self._parked_refs.get(block, 0)
