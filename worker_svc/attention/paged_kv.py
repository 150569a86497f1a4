"""A paged KV pool: per layer one tensor of keys and one of values, [num_blocks, block_size, kv_heads, head_dim].

Backends that keep their blocks differently make pools of their own. `KvShape` says what a block holds in any layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

# Tables are padded with this block, and nothing is ever written to it.
NULL_BLOCK = 0


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


class PagedKv(Protocol):
    """What everything but its backend may know of a pool. Block `NULL_BLOCK` stays zero."""

    @property
    def shape(self) -> KvShape: ...
    @property
    def num_blocks(self) -> int: ...


class BlockMajorKv:
    """[num_blocks, block_size, kv_heads, head_dim] for K and for V of each layer, zero at allocation."""

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
        """See AttentionBackend.write."""
        self._key_rows[layer].index_copy_(0, slots, k)
        self._value_rows[layer].index_copy_(0, slots, v)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU from pages the system hands out zeroed when they are first touched, so that an unused pool costs
    neither time nor memory (torch.zeros writes every byte)."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(size)
