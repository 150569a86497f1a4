"""The paged KV pool: one K and one V tensor per layer, [num_blocks, block_size, kv_heads, head_dim]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a block is made of."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block over all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """The pool. Zero at allocation: masked positions are read and multiplied by zero, so they must be finite. Block 0
    is the null block: tables are padded with it and nothing is ever written there."""

    def __init__(self, shape: KvShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.keys = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]
        self.values = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]
        rows = (num_blocks * shape.block_size, shape.num_kv_heads * shape.head_dim)
        self._key_rows = [t.view(rows) for t in self.keys]
        self._value_rows = [t.view(rows) for t in self.values]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, [T, kv_heads * head_dim] each (any row stride), at slots [T] int64 (block id * block size +
        offset)."""
        self._key_rows[layer].index_copy_(0, slots, k)
        self._value_rows[layer].index_copy_(0, slots, v)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU from pages the system hands out zeroed when they are first touched, so that an unused pool costs
    neither time nor memory (torch.zeros writes every byte)."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(size)
