"""What a KV pool would hold, as fingerprints: how the scripted worker knows that a scheduler gives out blocks rightly.

KV of a token depends on all tokens before it. So a slot remembers a fingerprint of the whole prefix that ends in it,
beside token, position and step for messages. A row may read a slot only if it holds the fingerprint of the row's own
prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from worker_svc.runner.base import StepFailed

_Words = npt.NDArray[np.uint64]
_Indices = npt.NDArray[np.int64]

_MASK: Final = 2**64 - 1
# Odd, so that it has an inverse modulo 2**64.
_BASE: Final = 0x9E3779B97F4A7C15
_BASE_INVERSE: Final = pow(_BASE, -1, 2**64)


class Fingerprints:
    """Polynomial fingerprints of token sequences modulo 2**64; the empty sequence has 0.

    f(tokens + [t]) = f(tokens) * BASE + word(t). Sequences of up to `max_len` tokens are done at once.
    """

    def __init__(self, vocab_size: int, max_len: int) -> None:
        # Fixed: fingerprints are compared within one process only, but a failure should look the same twice.
        words = np.random.default_rng(20_240_229).integers(1, 2**64, vocab_size, dtype=np.uint64)
        self._words: Final[_Words] = words
        self._word: Final[list[int]] = words.tolist()
        self._powers: Final[_Words] = np.cumprod(
            np.concatenate([np.ones(1, np.uint64), np.full(max_len, _BASE, np.uint64)]), dtype=np.uint64
        )
        self._inverses: Final[_Words] = np.cumprod(
            np.concatenate([np.ones(1, np.uint64), np.full(max_len, _BASE_INVERSE, np.uint64)]), dtype=np.uint64
        )

    def append(self, before: int, token: int) -> int:
        """Fingerprint of a sequence one token longer."""
        return (before * _BASE + self._word[token]) & _MASK

    def extend(self, before: int, tokens: Sequence[int]) -> _Words:
        """Fingerprints after each of the tokens that follow a sequence with fingerprint `before`."""
        num = len(tokens)
        sums = np.cumsum(self._words[np.asarray(tokens, np.int64)] * self._inverses[:num], dtype=np.uint64)
        result: _Words = sums * self._powers[:num] + np.uint64(before) * self._powers[1 : num + 1]
        return result


@dataclass(frozen=True, slots=True)
class Written:
    """What a slot holds, for messages."""

    token: int
    position: int
    step_seq: int


class SlotMemory:
    """Slots, and who holds which block. Block tables are lists of block ids; positions map to slots through them."""

    def __init__(self, num_blocks: int, block_size: int, *, check_fences: bool) -> None:
        num_slots = num_blocks * block_size
        self.block_size: Final = block_size
        self._check_fences: Final = check_fences
        # 0: nothing was ever written.
        self._prefix: Final[_Words] = np.zeros(num_slots, np.uint64)
        self._token: Final = np.zeros(num_slots, np.int32)
        self._position: Final = np.zeros(num_slots, np.int32)
        self._step: Final = np.zeros(num_slots, np.int64)
        # Tables that contain the block now.
        self._num_holders: Final = np.zeros(num_blocks, np.int32)
        # Newest step in which a row computed that had the block and is gone.
        self._last_used: Final = np.zeros(num_blocks, np.int64)
        self._offsets: Final[_Indices] = np.arange(block_size, dtype=np.int64)

    def share(self, blocks: Sequence[int]) -> None:
        """Blocks that a row only reads enter its table."""
        if blocks:
            self._num_holders[blocks] += 1

    def claim(self, blocks: Sequence[int], processed_step_seq: int, claimant: str) -> None:
        """Blocks that a row will write enter its table. Raises StepFailed when they still belong to somebody, or when a
        step that used them may still be unacknowledged."""
        if not blocks:
            return
        held = self._num_holders[blocks] > 0
        if held.any():
            block = blocks[int(np.flatnonzero(held)[0])]
            raise StepFailed(f"{claimant}: block {block} is given out for writing, but is in another living table")
        late = self._last_used[blocks] > processed_step_seq
        if self._check_fences and late.any():
            block = blocks[int(np.flatnonzero(late)[0])]
            raise StepFailed(
                f"{claimant}: block {block} was used in step {int(self._last_used[block])} and is given out again, but "
                f"only step {processed_step_seq} is acknowledged (fence; check_fences = false turns this off)"
            )
        self._num_holders[blocks] += 1

    def release(self, blocks: Sequence[int], last_step_seq: int) -> None:
        """A row leaves that last computed in this step."""
        if blocks:
            self._num_holders[blocks] -= 1
            self._last_used[blocks] = np.maximum(self._last_used[blocks], last_step_seq)

    def slots(self, table: Sequence[int], start: int, end: int) -> _Indices:
        """Slot numbers of positions start to end - 1."""
        first, last = start // self.block_size, -(-end // self.block_size)
        blocks = np.asarray(table[first:last], np.int64)
        every: _Indices = (blocks[:, None] * self.block_size + self._offsets).reshape(-1)
        return every[start - first * self.block_size : end - first * self.block_size]

    def write(
        self, slots: _Indices, prefixes: _Words, tokens: npt.ArrayLike, positions: npt.ArrayLike, step_seq: int
    ) -> list[int]:
        """Store; returns the blocks of which a slot changed under the eyes of a second holder."""
        blocks = slots // self.block_size
        shared = self._num_holders[blocks] > 1
        changed = np.unique(blocks[shared & (self._prefix[slots] != prefixes)]).tolist() if shared.any() else []
        self._prefix[slots] = prefixes
        self._token[slots] = tokens
        self._position[slots] = positions
        self._step[slots] = step_seq
        return [int(block) for block in changed]

    def first_mismatch(self, table: Sequence[int], prefixes: _Words) -> int | None:
        """The first position from 0 on whose slot does not hold this prefix; None when all do."""
        wrong = self._prefix[self.slots(table, 0, len(prefixes))] != prefixes
        return int(wrong.argmax()) if wrong.any() else None

    def at(self, table: Sequence[int], position: int) -> Written | None:
        """What is in the slot of a position; None: nothing was ever written."""
        slot = int(self.slots(table, position, position + 1)[0])
        if not self._prefix[slot]:
            return None
        return Written(int(self._token[slot]), int(self._position[slot]), int(self._step[slot]))


class WriteBatch:
    """The writes of one step, gathered row by row and stored at once (contract rule 11)."""

    def __init__(self) -> None:
        self._slots: Final[list[int]] = []
        self._prefixes: Final[list[int]] = []
        self._tokens: Final[list[int]] = []
        self._positions: Final[list[int]] = []

    def add(self, slots: list[int], prefixes: list[int], tokens: list[int], start: int) -> None:
        """Tokens at positions from `start` on, and the fingerprints that end in them."""
        self._slots.extend(slots)
        self._prefixes.extend(prefixes)
        self._tokens.extend(tokens)
        self._positions.extend(range(start, start + len(slots)))

    def store(self, memory: SlotMemory, step_seq: int) -> list[int]:
        """As SlotMemory.write."""
        if not self._slots:
            return []
        slots, prefixes = np.array(self._slots, np.int64), np.array(self._prefixes, np.uint64)
        return memory.write(slots, prefixes, self._tokens, self._positions, step_seq)
