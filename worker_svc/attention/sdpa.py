"""Attention on a CPU (and, as a fallback, on any device) through torch's scaled_dot_product_attention on gathered
pages.

Two shapes of work, chosen per sequence:

* short (decodes, decodes with drafts): sequences of equal query length and similar key length form a group. Their pages
  are gathered into a reused scratch, padded to the longest, and attended in one call. The query heads that share a KV
  head are laid along the query axis, so K and V are never repeated. What a sequence's blocks hold behind its last key
  belongs to an earlier request: those slots are zeroed in the scratch, because a masked NaN would still make the
  product NaN.
* long (prefill chunks): one call a sequence. Without earlier tokens it is plainly causal over the K and V just
  computed; with a prefix, pages are gathered and an explicit bottom-right mask is used, because torch's is_causal is
  top-left aligned.

A layer with a sliding window has a plan of its own, without the blocks that no query's window reaches. The fused kernel
does not know soft caps: short sequences are then computed by plain products, long ones in tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from worker_svc.attention.base import AttentionSpec, Int64Array, RaggedBatch
from worker_svc.attention.paged_kv import NULL_BLOCK, BlockMajorKv, KvShape, PagedKv

_Index = npt.NDArray[np.intp]

# Longest query of the short kind: above this a sequence alone keeps the cores busy.
_MAX_SHORT_QUERY = 8
# Most bytes of K gathered for one group; beyond this fresh pages cost more than the copy. Measured best at 16-24 MiB.
_MAX_GROUP_BYTES = 16 << 20
# A group may waste this many padded keys before it is split by length: a call costs about as much as reading them.
_FREE_PADDING = 4096
# Fewest and most queries of one tile of a long sequence, and scores (queries x heads x keys) that stay in the cache
# between two products.
_MIN_TILE = 32
_MAX_TILE = 128
_MAX_TILE_SCORES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Group:
    """Short sequences attended together. `tokens` are their query tokens, `num * q_len`, sequence by sequence. `mask`
    [num, 1, q_len, max_kv], the same for every head; None when every query sees all `max_kv` keys. `foreign`: slots of
    the gathered blocks, flat, that are behind the last key of their sequence."""

    num: int
    q_len: int
    tokens: slice | torch.Tensor
    blocks: torch.Tensor
    max_kv: int
    mask: torch.Tensor | None
    foreign: torch.Tensor | None
    # `mask` with every query repeated for the heads that share a KV head, by how many they are.
    repeated: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask_for(self, shared: int) -> torch.Tensor | None:
        """The mask of queries laid out as [q_len * shared]."""
        if self.mask is None or self.q_len == 1:
            return self.mask
        if shared not in self.repeated:
            self.repeated[shared] = self.mask.repeat_interleave(shared, dim=2)
        return self.repeated[shared]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A long sequence: q_len queries at the end of kv_len keys, each of which sees the last `window` up to itself."""

    tokens: slice
    q_len: int
    kv_len: int
    blocks: torch.Tensor
    window: int | None
    # The mask [1, 1, q_len, kv_len], made when a layer first needs it.
    masks: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_causal_alone(self) -> bool:
        """Whether plain causal attention is all there is to it."""
        return self.kv_len == self.q_len and (self.window is None or self.window >= self.kv_len)


@dataclass(frozen=True, slots=True)
class _Plan:
    """`windowed`: plans of layers with a window, by its size, made when a layer first asks for one."""

    batch: RaggedBatch
    block_size: int
    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]
    windowed: dict[int, _Plan] = field(default_factory=dict)


class SdpaAttention:
    """AttentionBackend over scaled_dot_product_attention. Not thread-safe: the scratch is shared by all calls."""

    block_size_multiple = 1

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        # Without AMX torch's fused kernel multiplies bfloat16 slowly; plain products are 2-3.5 times as fast (measured
        # on AVX-512 with 150 to 1,024 tokens). With AMX it is the other way round.
        self._tiles = dtype == torch.bfloat16 and device.type == "cpu" and not torch.cpu._is_amx_tile_supported()
        self._corner = torch.full((_MAX_TILE, _MAX_TILE), -torch.inf, dtype=dtype, device=device).triu_(1)
        self._scratch: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        # Bytes of one token's keys in one layer, for the size of groups; known with the pool.
        self._token_bytes = 1

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """See AttentionBackend: it computes every layer."""
        return None

    def new_kv(self, shape: KvShape, num_blocks: int) -> PagedKv:
        """See AttentionBackend."""
        self._token_bytes = shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        return BlockMajorKv(shape, num_blocks, self._device)

    def row_order(self, num_computed: Int64Array, num_tokens: Int64Array) -> npt.NDArray[np.intp]:
        """The fewest tokens first, and longer contexts before shorter ones among equals, so that groups are found in
        contiguous tokens."""
        return np.lexsort((-num_computed, num_tokens))

    def write(self, kv: PagedKv, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See AttentionBackend."""
        assert isinstance(kv, BlockMajorKv)
        kv.write(layer, slots, k, v)

    # -- once a step

    def plan(self, batch: RaggedBatch, block_size: int) -> _Plan:
        """Sort the batch into groups and chunks, with masks and gather indices ready."""
        return self._plan(batch, block_size, None)

    def _plan(self, batch: RaggedBatch, block_size: int, window: int | None) -> _Plan:
        q_len = batch.query_lens
        short = q_len <= _MAX_SHORT_QUERY
        groups: list[_Group] = []
        for width in np.unique(q_len[short]).tolist():
            members = np.flatnonzero(short & (q_len == width))
            # Longest first; stable, so that a batch already in order keeps contiguous tokens.
            members = members[np.argsort(-batch.seq_lens[members], kind="stable")]
            groups += [
                self._plan_group(batch, part, width, block_size, window)
                for part in self._split(batch, members, block_size)
            ]
        chunks = tuple(self._plan_chunk(batch, int(b), block_size, window) for b in np.flatnonzero(~short))
        return _Plan(batch, block_size, tuple(groups), chunks)

    def _plan_for(self, plan: _Plan, window: int | None) -> _Plan:
        """The plan of a layer with that window."""
        if window is None or window >= int(plan.batch.seq_lens.max()):
            return plan
        if window not in plan.windowed:
            batch = _within_window(plan.batch, window, plan.block_size)
            plan.windowed[window] = self._plan(batch, plan.block_size, window)
        return plan.windowed[window]

    def _split(self, batch: RaggedBatch, members: _Index, block_size: int) -> list[_Index]:
        """Cut sequences sorted by length where padding would waste more than another call costs, or the scratch
        overflow."""
        parts: list[_Index] = []
        start, waste = 0, 0
        lengths = batch.seq_lens[members].tolist()
        for i, length in enumerate(lengths):
            longest = -(-lengths[start] // block_size) * block_size
            waste += longest - length
            too_big = (i - start + 1) * longest * self._token_bytes > _MAX_GROUP_BYTES
            if i > start and (too_big or (waste > _FREE_PADDING and 2 * length < longest)):
                parts.append(members[start:i])
                start, waste = i, 0
        parts.append(members[start:])
        return parts

    def _plan_group(
        self, batch: RaggedBatch, members: _Index, q_len: int, block_size: int, window: int | None
    ) -> _Group:
        kv_len = batch.seq_lens[members]
        max_kv = int(kv_len[0])
        num_blocks = -(-max_kv // block_size)
        tokens = (batch.query_start_loc[members][:, None] + np.arange(q_len, dtype=np.int32)).reshape(-1)
        contiguous = bool((np.diff(tokens) == 1).all())
        blocks = batch.block_table[members, :num_blocks].astype(np.int64)
        # A row may hold blocks behind the one its last key is in; what they hold is stale.
        blocks[np.arange(num_blocks) >= -(-kv_len[:, None] // block_size)] = NULL_BLOCK
        table = self._to_device(blocks.reshape(-1))
        mask = foreign = None
        if q_len > 1 or kv_len[-1] != max_kv or (window is not None and window < max_kv):
            # Query i of a sequence sees its first kv_len - (q_len - 1 - i) keys, the same for every head of the group.
            visible = (kv_len[:, None] + np.arange(1 - q_len, 1)).astype(np.int32)
            mask = self._mask(visible, max_kv, window)[:, None]
            if (behind := _behind_the_last_key(kv_len, num_blocks * block_size, block_size)).size:
                foreign = self._to_device(behind)
        where: slice | torch.Tensor = slice(int(tokens[0]), int(tokens[-1]) + 1)
        if not contiguous:
            where = self._to_device(tokens.astype(np.int64))
        return _Group(len(members), q_len, where, table, max_kv, mask, foreign)

    def _plan_chunk(self, batch: RaggedBatch, b: int, block_size: int, window: int | None) -> _Chunk:
        tokens = slice(int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1]))
        kv_len, q_len = int(batch.seq_lens[b]), tokens.stop - tokens.start
        num_blocks = -(-kv_len // block_size)
        blocks = self._to_device(batch.block_table[b, :num_blocks].astype(np.int64))
        return _Chunk(tokens, q_len, kv_len, blocks, window)

    def _mask_of(self, chunk: _Chunk) -> torch.Tensor | None:
        if chunk.is_causal_alone:
            return None
        if not chunk.masks:
            visible = np.arange(chunk.kv_len - chunk.q_len + 1, chunk.kv_len + 1, dtype=np.int32)
            chunk.masks.append(self._mask(visible[None], chunk.kv_len, chunk.window)[:, None])
        return chunk.masks[0]

    def _mask(self, visible: npt.NDArray[np.int32], max_kv: int, window: int | None) -> torch.Tensor:
        """Additive mask [B, Q, max_kv]: 0 for the last `window` of the first visible[b, q] keys, else -inf."""
        ends = self._to_device(visible).unsqueeze(-1)
        keys = torch.arange(max_kv, device=self._device)
        hidden = keys >= ends
        if window is not None:
            hidden |= keys < ends - window
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _to_device(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    # -- once a layer

    def attend(
        self,
        plan: _Plan,
        spec: AttentionSpec,
        q: torch.Tensor,
        kv: PagedKv,
        layer: int,
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(kv, BlockMajorKv)
        k_cache, v_cache = kv.keys[layer], kv.values[layer]
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
        plan = self._plan_for(plan, spec.window)
        for group in plan.groups:
            self._attend_group(group, spec, q, k_cache, v_cache, out)
        for chunk in plan.chunks:
            self._attend_chunk(chunk, spec, q, k_cache, v_cache, fresh, out)
        return out.view(num_tokens, num_heads * head_dim)

    def _attend_group(
        self,
        group: _Group,
        spec: AttentionSpec,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        kv_heads, head_dim, shared = spec.num_kv_heads, spec.head_dim, spec.num_heads // spec.num_kv_heads
        keys, values = self._gather(k_cache, v_cache, group.blocks)
        if group.foreign is not None:
            for pages in (keys, values):
                pages.view(-1, kv_heads * head_dim).index_fill_(0, group.foreign, 0)
        size = (group.num, -1, kv_heads, head_dim)
        keys = keys.view(size)[:, : group.max_kv].transpose(1, 2)
        values = values.view(size)[:, : group.max_kv].transpose(1, 2)
        picked = q[group.tokens] if isinstance(group.tokens, slice) else q.index_select(0, group.tokens)
        split = (group.num, group.q_len, kv_heads, shared, head_dim)
        folded = picked.view(split).transpose(1, 2).reshape(group.num, kv_heads, -1, head_dim)
        mask = group.mask_for(shared)
        if spec.soft_cap is None:
            result = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=spec.scale)
        else:
            scores = _capped(torch.matmul(folded, keys.transpose(2, 3)).mul_(spec.scale), spec.soft_cap)
            result = torch.matmul(torch.softmax(scores if mask is None else scores.add_(mask), dim=-1), values)
        result = result.view(group.num, kv_heads, group.q_len, shared, head_dim).transpose(1, 2)
        if isinstance(group.tokens, slice):
            out[group.tokens].view(split).copy_(result)
        else:
            out.index_copy_(0, group.tokens, result.reshape(-1, *out.shape[1:]))

    def _attend_chunk(
        self,
        chunk: _Chunk,
        spec: AttentionSpec,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
    ) -> None:
        kv_heads, head_dim, group = spec.num_kv_heads, spec.head_dim, spec.num_heads // spec.num_kv_heads
        if fresh is not None and chunk.kv_len == chunk.q_len:
            keys, values = fresh[0][chunk.tokens], fresh[1][chunk.tokens]
        else:
            keys, values = (
                pages.view(-1, kv_heads, head_dim)[: chunk.kv_len]
                for pages in self._gather(k_cache, v_cache, chunk.blocks)
            )
        split = (chunk.q_len, kv_heads, group, head_dim)
        queries, target = q[chunk.tokens].view(split), out[chunk.tokens].view(split)
        if self._tiles or spec.soft_cap is not None:
            self._attend_in_tiles(spec, chunk.window, queries, keys, values, target)
            return
        mask = self._mask_of(chunk)
        # KV heads as the batch axis, the group as heads with stride 0: every head reads the same memory.
        shared = (kv_heads, group, chunk.kv_len, head_dim)
        result = F.scaled_dot_product_attention(
            queries.permute(1, 2, 0, 3),
            keys.transpose(0, 1).unsqueeze(1).expand(shared),
            values.transpose(0, 1).unsqueeze(1).expand(shared),
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scale,
        )
        target.copy_(result.permute(2, 0, 1, 3))

    def _attend_in_tiles(
        self,
        spec: AttentionSpec,
        window: int | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """Causal attention as plain matrix products over tiles of queries: [Q, KV, G, D] against [L, KV, D].

        Softmax does not change when the same vector is taken from every key: taking their mean leaves smaller scores,
        and so smaller rounding errors, to bfloat16. With a soft cap it would change.
        """
        num, kv_heads, group, head_dim = queries.shape
        length = keys.shape[0]
        wide = keys.float()
        if spec.soft_cap is None:
            wide = wide - wide.mean(dim=0)
        scaled = (wide * spec.scale).to(keys.dtype).transpose(0, 1).contiguous()
        transposed, values = scaled.transpose(1, 2), values.transpose(0, 1).contiguous()
        step = max(_MIN_TILE, min(_MAX_TILE, _MAX_TILE_SCORES // (kv_heads * group * length)))
        for start in range(0, num, step):
            end = min(num, start + step)
            # The tile's first query sees keys up to `length - num + start`, itself included from `first` on.
            rows, visible = end - start, length - num + end
            first = 0 if window is None else max(0, length - num + start + 1 - window)
            tile = queries[start:end].permute(1, 2, 0, 3).reshape(kv_heads, group * rows, head_dim)
            scores = torch.bmm(tile, transposed[:, :, first:visible])
            if spec.soft_cap is not None:
                scores = _capped(scores, spec.soft_cap)
            by_row = scores.view(kv_heads, group, rows, visible - first)
            by_row[..., visible - first - rows :].add_(self._corner[:rows, :rows])
            if window is not None:
                by_row.add_(self._behind_window(rows, visible - first, length - num + start + 1 - window - first))
            mixed = torch.bmm(torch.softmax(scores, dim=-1), values[:, first:visible])
            target[start:end].copy_(mixed.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3))

    def _behind_window(self, rows: int, num_keys: int, offset: int) -> torch.Tensor:
        """Additive mask [rows, num_keys] that hides key c from row r where c < r + offset."""
        hidden = torch.ones(rows, num_keys, dtype=torch.bool, device=self._device).tril_(offset - 1)
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _gather(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The named blocks of both caches, one row a block, in scratch that the next gather overwrites."""
        num, width = blocks.shape[0], k_cache[0].numel()
        if self._scratch[0].numel() < num * width or self._scratch[0].dtype != k_cache.dtype:
            self._scratch = (
                torch.empty(num * width, dtype=k_cache.dtype, device=k_cache.device),
                torch.empty(num * width, dtype=k_cache.dtype, device=k_cache.device),
            )
        keys = self._scratch[0][: num * width].view(num, width)
        values = self._scratch[1][: num * width].view(num, width)
        torch.index_select(k_cache.view(-1, width), 0, blocks, out=keys)
        torch.index_select(v_cache.view(-1, width), 0, blocks, out=values)
        return keys, values


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(scores / cap), in place."""
    return scores.div_(cap).tanh_().mul_(cap)


def _within_window(batch: RaggedBatch, window: int, block_size: int) -> RaggedBatch:
    """The batch without the blocks at the beginning of each sequence that no query's window reaches."""
    first_key = np.maximum(batch.seq_lens - batch.query_lens + 1 - window, 0)
    skipped = (first_key // block_size).astype(np.int64)
    seq_lens = (batch.seq_lens - skipped * block_size).astype(np.int32)
    places = skipped[:, None] + np.arange(-(-int(seq_lens.max()) // block_size))
    places = np.minimum(places, batch.block_table.shape[1] - 1)  # behind a sequence's last block anything may stand
    return RaggedBatch(batch.query_start_loc, seq_lens, np.take_along_axis(batch.block_table, places, axis=1))


def _behind_the_last_key(seq_lens: npt.NDArray[np.int32], num_slots: int, block_size: int) -> Int64Array:
    """Slots, flat over sequences of `num_slots` each, that lie behind the last key within the block that holds it.
    `_plan_group` replaces the blocks behind it by the null block, which is never written."""
    first = np.arange(len(seq_lens), dtype=np.int64) * num_slots + seq_lens
    counts = -seq_lens.astype(np.int64) % block_size
    ends = np.cumsum(counts)
    slots: Int64Array = np.arange(int(ends[-1])) + np.repeat(first - (ends - counts), counts)
    return slots
