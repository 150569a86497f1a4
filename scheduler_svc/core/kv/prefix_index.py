"""Which full blocks hold which tokens: a chain of SHA-256 digests, and the index from digest to blocks.

A digest stands for a block *and everything before it*: digest(i) = SHA-256(digest(i-1) | token ids of block i,
little-endian int32 | extra fields). The root digest hashes typed fields (name, length, value), so that no two
different prefixes can spell the same bytes; adapters and images will add fields there and to the blocks they overlap.
Nothing depends on the process: two schedulers agree on every digest."""

from __future__ import annotations

from array import array
from hashlib import sha256

_NEVER = 1 << 62


def root_digest(block_size: int, cache_salt: str) -> bytes:
    """Parent of a prompt's first block. Requests share blocks only when this is equal."""
    digest = sha256(b"stepfence.kv.1")
    for name, value in ((b"block_size", str(block_size).encode()), (b"salt", cache_salt.encode())):
        digest.update(b"%d:%b%d:%b" % (len(name), name, len(value), value))
    return digest.digest()


class HashChain:
    """Digests of one request's full blocks, computed only as far as asked for: a look-up stops at its first miss, and
    publishing needs what the step computes."""

    __slots__ = ("_root", "block_size", "digests", "first_publish_at")

    def __init__(self, block_size: int, cache_salt: str, *, enabled: bool) -> None:
        self.block_size = block_size
        self.digests: list[bytes] = []
        self._root = root_digest(block_size, cache_salt) if enabled else b""
        # Tokens at which the first block is full; never, without a prefix cache.
        self.first_publish_at = block_size if enabled else _NEVER

    def digest(self, index: int, tokens: array[int]) -> bytes:
        """Digest of block `index`, whose tokens must all be known."""
        digests = self.digests
        size = self.block_size
        while len(digests) <= index:
            start = len(digests) * size
            parent = digests[-1] if digests else self._root
            digests.append(sha256(parent + tokens[start : start + size].tobytes()).digest())
        return digests[index]


class PrefixIndex:
    """Digest -> blocks of one rank that hold it. Of several, the one published first is used."""

    __slots__ = ("_blocks", "_digest_of")

    def __init__(self, num_blocks: int) -> None:
        # One block, or a list of two and more in order of publishing.
        self._blocks: dict[bytes, int | list[int]] = {}
        self._digest_of: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, digest: bytes) -> int | None:
        found = self._blocks.get(digest)
        return found[0] if isinstance(found, list) else found

    def digest_of(self, block: int) -> bytes | None:
        return self._digest_of[block]

    def add(self, block: int, digest: bytes) -> None:
        self._digest_of[block] = digest
        blocks = self._blocks
        known = blocks.setdefault(digest, block)
        if known is block:
            return
        if isinstance(known, list):
            if block not in known:
                known.append(block)
        elif known != block:
            blocks[digest] = [known, block]

    def remove(self, block: int) -> None:
        """Forget `block`; no effect when it holds no digest."""
        digest = self._digest_of[block]
        if digest is None:
            return
        self._digest_of[block] = None
        known = self._blocks[digest]
        if isinstance(known, list):
            known.remove(block)
            if len(known) == 1:
                self._blocks[digest] = known[0]
        else:
            del self._blocks[digest]

    def clear(self) -> None:
        self._blocks.clear()
        self._digest_of = [None] * len(self._digest_of)

    def entries(self) -> list[tuple[bytes, list[int]]]:
        """All of it, for the invariants."""
        return [(d, list(b) if isinstance(b, list) else [b]) for d, b in self._blocks.items()]
