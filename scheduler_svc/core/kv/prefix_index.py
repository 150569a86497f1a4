"""Which full blocks hold which tokens: a chain of SHA-256 hashes, and the index from block hash to blocks.

A block hash stands for a block *and everything before it*: hash(i) = SHA-256(hash(i-1) | token ids of block i,
little-endian int32 | extra fields). The root hash hashes typed fields (name, length, value), so that no two
different prefixes can spell the same bytes. What else the contents depend on is an Identity: fields of the whole prompt
go into the root hash, spans into the hashes of the blocks that they overlap.
Nothing depends on the process: two schedulers agree on every block hash."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import sha256

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Identity:
    """What the KV of a prompt depends on beside its token ids.

    fields: (name, value) for the whole prompt. spans: (offset, length, hash) of inputs that stand in place of tokens;
    offset and length in tokens of the prompt."""

    fields: tuple[tuple[bytes, bytes], ...] = ()
    spans: tuple[tuple[int, int, bytes], ...] = ()

    def __add__(self, other: Identity) -> Identity:
        return Identity(self.fields + other.fields, self.spans + other.spans)


NO_IDENTITY = Identity()


def root_hash(block_size: int, cache_salt: str, fields: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    """Parent of a prompt's first block. Requests share blocks only when this is equal."""
    hasher = sha256(b"stepfence.kv.1")
    for name, value in ((b"block_size", str(block_size).encode()), (b"salt", cache_salt.encode()), *fields):
        hasher.update(_typed(name, value))
    return hasher.digest()


def _typed(name: bytes, value: bytes) -> bytes:
    return b"%d:%b%d:%b" % (len(name), name, len(value), value)


class HashChain:
    """Hashes of one request's full blocks, computed only as far as asked for: a look-up stops at its first miss, and
    caching needs what the step computes."""

    __slots__ = ("_root", "_spans", "block_size", "hashes", "first_cache_at")

    def __init__(self, block_size: int, cache_salt: str, *, enabled: bool, identity: Identity = NO_IDENTITY) -> None:
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._root = root_hash(block_size, cache_salt, identity.fields) if enabled else b""
        self._spans = identity.spans
        # Tokens at which the first block is full; never, without a prefix cache.
        self.first_cache_at = block_size if enabled else _NEVER

    def block_hash(self, index: int, tokens: array[int]) -> bytes:
        """Block hash of block `index`, whose tokens must all be known."""
        hashes = self.hashes
        size = self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else self._root
            content = parent + tokens[start : start + size].tobytes()
            if self._spans:
                content += self._inputs_at(start)
            hashes.append(sha256(content).digest())
        return hashes[index]

    def _inputs_at(self, start: int) -> bytes:
        """The spans that overlap the block at position `start`, each with its place relative to the block."""
        end = start + self.block_size
        return b"".join(
            _typed(b"%d" % (offset - start), value)
            for offset, length, value in self._spans
            if offset < end and offset + length > start
        )


class PrefixIndex:
    """Block hash -> blocks of one rank that hold it. Of several, the one cached first is used."""

    __slots__ = ("_blocks", "_first_of", "_hash_of")

    def __init__(self, num_blocks: int) -> None:
        # One block, or a list of two and more in order of caching.
        self._blocks: dict[bytes, int | list[int]] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks
        # Of each block, the hash of the first block of the prompt that it was computed for. Kept when it is forgotten.
        self._first_of: list[bytes] = [b""] * num_blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, block_hash: bytes) -> int | None:
        found = self._blocks.get(block_hash)
        return found[0] if isinstance(found, list) else found

    def find_all(self, block_hash: bytes) -> list[int]:
        """Every block that holds it."""
        found = self._blocks.get(block_hash)
        return [] if found is None else list(found) if isinstance(found, list) else [found]

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of[block]

    def add(self, block: int, block_hash: bytes, first_hash: bytes) -> None:
        """`block` holds what the hash stands for. first_hash: hash of the first block before it, or its own."""
        self._hash_of[block] = block_hash
        self._first_of[block] = first_hash
        blocks = self._blocks
        known = blocks.setdefault(block_hash, block)
        if known is block:
            return
        if isinstance(known, list):
            if block not in known:
                known.append(block)
        elif known != block:
            blocks[block_hash] = [known, block]

    def remove(self, block: int) -> None:
        """Forget `block`; no effect when it holds no block hash."""
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        known = self._blocks[block_hash]
        if isinstance(known, list):
            known.remove(block)
            if len(known) == 1:
                self._blocks[block_hash] = known[0]
        else:
            del self._blocks[block_hash]

    def remove_all_behind(self, first_hash: bytes) -> None:
        """Forget every block of every prompt that begins with this block. Looks at every block of the pool."""
        for block, first in enumerate(self._first_of):
            if first == first_hash:
                self.remove(block)

    def clear(self) -> None:
        self._blocks.clear()
        self._hash_of = [None] * len(self._hash_of)

    def entries(self) -> list[tuple[bytes, list[int]]]:
        """All of it, for the invariants."""
        return [(d, list(b) if isinstance(b, list) else [b]) for d, b in self._blocks.items()]
