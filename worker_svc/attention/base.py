"""The one attention interface: ragged queries over paged keys and values.

Prefill chunks, decodes and draft verification are the same call; only `query_start_loc` differs. A backend owns the
layout of the KV pool and writes to it, says in which order it likes the rows of a step, looks at the batch once a step
(`plan`) and is then called once a layer (`write`, `attend`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.attention.paged_kv import KvShape, PagedKv

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer computes: softmax(cap(scale * q k^T)) v over the last `window` keys of each query.

    scale: of the scores before the softmax. window: keys that a query sees, itself included; None: all up to itself.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap); None: as they are.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """B sequences of one step, their tokens flat in sequence order. Host arrays, int32.

    query_start_loc [B + 1]: sequence b owns query tokens query_start_loc[b] to query_start_loc[b + 1] - 1, one or more.
    seq_lens [B]: keys of sequence b, its own query tokens included; the last query sees all of them, the one before one
    fewer, and so on (bottom-right causal).
    block_table [B, M]: its blocks, padded with the null block 0; M * block_size >= max(seq_lens).
    """

    query_start_loc: Int32Array
    seq_lens: Int32Array
    block_table: Int32Array

    @property
    def query_lens(self) -> Int32Array:
        """Query tokens per sequence, [B]."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]


class AttentionBackend(Protocol):
    """Computes attention for a RaggedBatch. All KV of the step is written before the first `attend` of a layer (rule
    11). A row's result depends on its own slots only, whatever bits stand in all others. Not thread-safe."""

    @property
    def block_size_multiple(self) -> int:
        """Block sizes must be a multiple of this."""

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """What of a layer this backend cannot compute, for people; None when it can."""

    def new_kv(self, shape: KvShape, num_blocks: int) -> PagedKv:
        """A KV pool in the backend's layout, on its device, zeroed."""

    def row_order(self, num_computed: Int64Array, num_tokens: Int64Array) -> npt.NDArray[np.intp]:
        """The order in which the backend wants a step's rows: a permutation of them. num_computed, num_tokens [B]:
        tokens of each row before the step and in it."""

    def plan(self, batch: RaggedBatch, block_size: int) -> Any:
        """What `attend` needs to know, derived once a step. The plan is valid until the next one is made."""

    def write(self, kv: PagedKv, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, [T, kv_heads * head_dim] each (any row stride), at slots [T] int64 (block id * block size +
        offset)."""

    def attend(
        self,
        plan: Any,
        spec: AttentionSpec,
        q: torch.Tensor,
        kv: PagedKv,
        layer: int,
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """q [T, heads, head_dim] against one layer of the pool; [T, heads * head_dim].

        `fresh` are this step's K and V, [T, kv_heads, head_dim], as just written: a backend may read them instead of
        the pool for sequences without earlier tokens.
        """


def attention(
    backend: AttentionBackend,
    spec: AttentionSpec,
    q: torch.Tensor,
    kv: PagedKv,
    batch: RaggedBatch,
    *,
    layer: int = 0,
) -> torch.Tensor:
    """Plan and attend in one call, for tests and single uses."""
    return backend.attend(backend.plan(batch, kv.shape.block_size), spec, q, kv, layer)
