"""The definition of attention that the other backends are tested against: one query, one head at a time, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from worker_svc.attention.base import RaggedBatch


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: RaggedBatch
    block_size: int


class ReferenceAttention:
    """Obvious and slow."""

    block_size_multiple = 1

    def plan(self, batch: RaggedBatch, block_size: int) -> _Plan:
        """Nothing to prepare."""
        return _Plan(batch, block_size)

    def attend(
        self,
        plan: _Plan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. `fresh` is ignored: the cache is the truth."""
        num_tokens, num_heads, head_dim = q.shape
        group = num_heads // k_cache.shape[2]
        out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
        for b, kv_len in enumerate(plan.batch.kv_len.tolist()):
            slots = [(int(plan.batch.block_table[b, p // plan.block_size]), p % plan.block_size) for p in range(kv_len)]
            keys = torch.stack([k_cache[block, offset] for block, offset in slots]).double()
            values = torch.stack([v_cache[block, offset] for block, offset in slots]).double()
            first, end = plan.batch.cu_q[b].item(), plan.batch.cu_q[b + 1].item()
            for token in range(first, end):
                visible = kv_len - (end - 1 - token)
                for head in range(num_heads):
                    k, v = keys[:visible, head // group], values[:visible, head // group]
                    weights = torch.softmax(k @ q[token, head].double() / math.sqrt(head_dim), dim=0)
                    out[token, head] = weights @ v
        return out.to(q.dtype).reshape(num_tokens, num_heads * head_dim)
