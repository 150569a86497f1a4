"""The attention backends against the reference, over random ragged batches on scattered pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_svc.attention import cpu
from worker_svc.attention.base import RaggedBatch, attention
from worker_svc.attention.cpu import SdpaAttention
from worker_svc.attention.reference import ReferenceAttention


@dataclass(frozen=True)
class Case:
    """Sequences as (query tokens, earlier tokens), and the shape of everything."""

    sequences: tuple[tuple[int, int], ...]
    block_size: int
    kv_heads: int
    group: int
    head_dim: int
    seed: int

    def batch(self) -> RaggedBatch:
        """Tables of distinct blocks in random order, padded with block 0."""
        rng = np.random.default_rng(self.seed)
        q_len = np.array([q for q, _ in self.sequences], np.int32)
        kv_len = np.array([q + earlier for q, earlier in self.sequences], np.int32)
        num_blocks = -(-kv_len // self.block_size)
        ids = rng.permutation(int(num_blocks.sum())) + 1
        table = np.zeros((len(kv_len), int(num_blocks.max())), np.int32)
        start = 0
        for b, num in enumerate(num_blocks.tolist()):
            table[b, :num] = ids[start : start + num]
            start += num
        return RaggedBatch(np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32), kv_len, table)

    def tensors(self, batch: RaggedBatch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random queries and caches; block 0 is zero."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (int(batch.block_table.max()) + 1, self.block_size, self.kv_heads, self.head_dim)
        k, v = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
        k[0] = v[0] = 0
        q = torch.randn(int(batch.cu_q[-1]), self.kv_heads * self.group, self.head_dim, generator=generator)
        return q.to(dtype), k, v

    def backend(self, dtype: torch.dtype) -> SdpaAttention:
        """The CPU backend for this shape."""
        return SdpaAttention(self.kv_heads * self.group, self.kv_heads, self.head_dim, dtype, torch.device("cpu"))


cases = st.builds(
    Case,
    sequences=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 20)), st.one_of(st.just(0), st.integers(0, 60))),
        min_size=1,
        max_size=7,
    ).map(tuple),
    block_size=st.sampled_from([1, 3, 4, 16]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([8, 16]),
    seed=st.integers(0, 10_000),
)


@settings(max_examples=80, deadline=None)
@given(case=cases)
def test_sdpa_agrees_with_the_reference(case: Case) -> None:
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    expected = attention(ReferenceAttention(), q, k, v, batch)
    assert torch.allclose(attention(case.backend(torch.float32), q, k, v, batch), expected, atol=2e-5)


@settings(max_examples=20, deadline=None)
@given(case=cases)
def test_sdpa_in_bfloat16_agrees_with_the_reference(case: Case) -> None:
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.bfloat16)
    expected = attention(ReferenceAttention(), q.float(), k.float(), v.float(), batch)
    got = attention(case.backend(torch.bfloat16), q, k, v, batch)
    assert torch.allclose(got.float(), expected, atol=3e-2)


def test_splitting_into_many_groups_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are cut by padding and by scratch size: force both."""
    case = Case(((1, 3), (1, 200), (1, 40), (1, 41), (1, 0), (1, 170), (3, 5), (3, 90)), 4, 2, 3, 8, seed=5)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    expected = attention(ReferenceAttention(), q, k, v, batch)
    backend = case.backend(torch.float32)
    assert len(backend.plan(batch, 4).groups) == 2
    monkeypatch.setattr(cpu, "_FREE_PADDING", 10)
    assert len(backend.plan(batch, 4).groups) > 3
    assert torch.allclose(attention(backend, q, k, v, batch), expected, atol=2e-5)
    monkeypatch.setattr(cpu, "_MAX_GROUP_BYTES", 1)
    assert len(backend.plan(batch, 4).groups) == 8
    assert torch.allclose(attention(backend, q, k, v, batch), expected, atol=2e-5)


def test_a_long_prompt_reads_the_keys_just_computed_or_the_cache_alike() -> None:
    case = Case(((20, 0), (1, 7), (12, 30)), 4, 2, 3, 8, seed=2)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    backend = case.backend(torch.float32)
    fresh_k, fresh_v = (torch.zeros(int(batch.cu_q[-1]), 2, 8) for _ in range(2))
    for cache, fresh in ((k, fresh_k), (v, fresh_v)):
        for position in range(20):
            fresh[position] = cache[batch.block_table[0, position // 4], position % 4]
    plan = backend.plan(batch, 4)
    assert torch.equal(backend.attend(plan, q, k, v, (fresh_k, fresh_v)), backend.attend(plan, q, k, v))
    assert not torch.equal(backend.attend(plan, q, k, v, (fresh_k + 1, fresh_v + 1)), backend.attend(plan, q, k, v))


def test_a_sequence_sees_nothing_of_its_neighbours() -> None:
    """Other sequences' tokens may change at will: not a bit of this one's result follows beyond float noise."""
    case = Case(((1, 50), (1, 10), (1, 55), (9, 4)), 4, 2, 3, 8, seed=9)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    before = attention(case.backend(torch.float32), q, k, v, batch)[1].clone()
    others = batch.block_table[[0, 2, 3]].ravel()
    k[others], v[others] = 30.0, -20.0
    assert torch.allclose(attention(case.backend(torch.float32), q, k, v, batch)[1], before, atol=1e-6)


def test_a_query_sees_exactly_up_to_itself_in_a_chunk_behind_a_prefix() -> None:
    """torch's is_causal is aligned to the top left; a chunk behind a prefix must be aligned to the bottom right."""
    case = Case(((12, 5),), 4, 1, 1, 8, seed=3)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    backend = case.backend(torch.float32)
    before = attention(backend, q, k, v, batch)
    last = batch.block_table[0, 16 // 4], 16 % 4
    v[last] += 100.0
    after = attention(backend, q, k, v, batch)
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.allclose(before[-1], after[-1])


def test_what_all_keys_share_costs_bfloat16_no_precision() -> None:
    """A component common to all keys does not change attention, but large scores would be rounded away: real models
    have one, and the tiles take it out first. (The queries are such that the shared part alone gives scores near
    100.)"""
    case = Case(((64, 0),), 16, 1, 1, 64, seed=4)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.bfloat16)
    q += 4.0
    k += 3.0
    expected = attention(ReferenceAttention(), q.float(), k.float(), v.float(), batch)
    backend = case.backend(torch.bfloat16)
    backend._tiles = True  # also on a machine with AMX
    got = attention(backend, q, k, v, batch)
    assert (got.float() - expected).square().mean().sqrt() < 0.02
