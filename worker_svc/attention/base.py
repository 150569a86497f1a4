"""The one attention interface: ragged queries over paged keys and values.

Prefill chunks, decodes and draft verification are the same call; only `cu_q` differs. A backend looks at the batch once
a step (`plan`) and is then called once a layer (`attend`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """B sequences of one step, their tokens flat in sequence order. Host arrays, int32.

    cu_q [B + 1]: sequence b owns query tokens cu_q[b] .. cu_q[b + 1] - 1, at least one.
    kv_len [B]: keys of sequence b, its own query tokens included; the last query sees all of them, the one before one
    fewer, and so on (bottom-right causal).
    block_table [B, M]: its blocks, padded with the null block 0; M * block_size >= max(kv_len).
    """

    cu_q: Int32Array
    kv_len: Int32Array
    block_table: Int32Array

    @property
    def q_len(self) -> Int32Array:
        """Query tokens per sequence, [B]."""
        return self.cu_q[1:] - self.cu_q[:-1]


class AttentionBackend(Protocol):
    """Computes attention for a RaggedBatch. All KV of the step is written before the first call of a layer (rule
    11)."""

    @property
    def block_size_multiple(self) -> int:
        """Block sizes must be a multiple of this."""

    def plan(self, batch: RaggedBatch, block_size: int) -> Any:
        """What `attend` needs to know, derived once a step."""

    def attend(
        self,
        plan: Any,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """q [T, heads, head_dim] against one layer's cache [blocks, block_size, kv_heads, head_dim]; [T, heads *
        head_dim].

        `fresh` are this step's K and V, [T, kv_heads, head_dim], as just written: a backend may read them instead of
        the cache for sequences without earlier tokens.
        """


def attention(
    backend: AttentionBackend, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: RaggedBatch
) -> torch.Tensor:
    """Plan and attend in one call, for tests and single uses."""
    return backend.attend(backend.plan(batch, k_cache.shape[1]), q, k_cache, v_cache)
