"""The definition of attention that the other backends are tested against: one query, one head at a time, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.attention.base import AttentionSpec, Int64Array, RaggedBatch
from worker_svc.attention.paged_kv import BlockMajorKv, KvShape, PagedKv


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: RaggedBatch
    block_size: int


class ReferenceAttention:
    """Obvious and slow. Computes every AttentionSpec."""

    block_size_multiple = 1

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """See AttentionBackend."""
        return None

    def new_kv(self, shape: KvShape, num_blocks: int) -> PagedKv:
        """See AttentionBackend."""
        return BlockMajorKv(shape, num_blocks, torch.device("cpu"))

    def row_order(self, num_computed: Int64Array, num_tokens: Int64Array) -> npt.NDArray[np.intp]:
        """As the step has them."""
        return np.arange(len(num_tokens))

    def plan(self, batch: RaggedBatch, block_size: int) -> _Plan:
        """Nothing to prepare."""
        return _Plan(batch, block_size)

    def write(self, kv: PagedKv, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See AttentionBackend."""
        assert isinstance(kv, BlockMajorKv)
        kv.write(layer, slots, k, v)

    def attend(
        self,
        plan: _Plan,
        spec: AttentionSpec,
        q: torch.Tensor,
        kv: PagedKv,
        layer: int,
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. `fresh` is ignored: the pool is the truth."""
        assert isinstance(kv, BlockMajorKv)
        num_tokens, num_heads, head_dim = q.shape
        group = num_heads // spec.num_kv_heads
        out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
        batch, size = plan.batch, plan.block_size
        for b, seq_len in enumerate(batch.seq_lens.tolist()):
            slots = [(int(batch.block_table[b, p // size]), p % size) for p in range(seq_len)]
            keys = torch.stack([kv.keys[layer][block, offset] for block, offset in slots]).double()
            values = torch.stack([kv.values[layer][block, offset] for block, offset in slots]).double()
            first, end = batch.query_start_loc[b].item(), batch.query_start_loc[b + 1].item()
            for token in range(first, end):
                last = seq_len - (end - 1 - token)
                start = 0 if spec.window is None else max(0, last - spec.window)
                for head in range(num_heads):
                    k, v = keys[start:last, head // group], values[start:last, head // group]
                    scores = (k @ q[token, head].double()) * spec.scale
                    if spec.soft_cap is not None:
                        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
                    out[token, head] = torch.softmax(scores, dim=0) @ v
        return out.to(q.dtype).reshape(num_tokens, num_heads * head_dim)
