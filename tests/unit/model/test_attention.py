"""The attention backends against the reference, over random ragged batches on scattered pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker_svc.attention import sdpa
from worker_svc.attention.base import AttentionBackend, AttentionSpec, RaggedBatch, attention
from worker_svc.attention.paged_kv import BlockMajorKv, KvShape
from worker_svc.attention.reference import ReferenceAttention
from worker_svc.attention.sdpa import SdpaAttention
from worker_svc.attention.select import BACKENDS, NoBackend, select_backend


@dataclass(frozen=True)
class Case:
    """Sequences as (query tokens, earlier tokens), and the shape of everything."""

    sequences: tuple[tuple[int, int], ...]
    block_size: int
    kv_heads: int
    group: int
    head_dim: int
    seed: int
    window: int | None = None
    soft_cap: float | None = None

    def batch(self, ahead: int = 0) -> RaggedBatch:
        """Tables of distinct blocks in random order, padded with block 0. `ahead`: blocks that every sequence holds
        behind those it uses."""
        rng = np.random.default_rng(self.seed)
        q_len = np.array([q for q, _ in self.sequences], np.int32)
        seq_lens = np.array([q + earlier for q, earlier in self.sequences], np.int32)
        num_blocks = -(-seq_lens // self.block_size) + ahead
        ids = rng.permutation(int(num_blocks.sum())) + 1
        table = np.zeros((len(seq_lens), int(num_blocks.max())), np.int32)
        start = 0
        for b, num in enumerate(num_blocks.tolist()):
            table[b, :num] = ids[start : start + num]
            start += num
        return RaggedBatch(np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32), seq_lens, table)

    def tensors(self, batch: RaggedBatch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random queries and caches; block 0 is zero."""
        generator = torch.Generator().manual_seed(self.seed)
        size = (int(batch.block_table.max()) + 1, self.block_size, self.kv_heads, self.head_dim)
        k, v = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
        k[0] = v[0] = 0
        q = torch.randn(int(batch.query_start_loc[-1]), self.kv_heads * self.group, self.head_dim, generator=generator)
        return q.to(dtype), k, v

    @property
    def spec(self) -> AttentionSpec:
        """One layer of this shape."""
        num_heads, scale = self.kv_heads * self.group, self.head_dim**-0.5
        return AttentionSpec(num_heads, self.kv_heads, self.head_dim, scale, self.window, self.soft_cap)

    def run(
        self, backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch
    ) -> torch.Tensor:
        """Attention over a pool that holds k and v."""
        return attention(backend, self.spec, q, paged(backend, k, v), batch)


def sdpa_in(dtype: torch.dtype) -> SdpaAttention:
    """The backend on the CPU."""
    return SdpaAttention(dtype, torch.device("cpu"))


def paged(backend: AttentionBackend, k: torch.Tensor, v: torch.Tensor) -> BlockMajorKv:
    """A pool of one layer with these contents, [blocks, block_size, kv_heads, head_dim] each."""
    kv = backend.new_kv(KvShape(1, k.shape[1], k.shape[2], k.shape[3], k.dtype), k.shape[0])
    assert isinstance(kv, BlockMajorKv)
    kv.keys[0].copy_(k)
    kv.values[0].copy_(v)
    return kv


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
    window=st.one_of(st.none(), st.integers(1, 70)),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
)


@settings(max_examples=80, deadline=None)
@given(case=cases)
def test_sdpa_agrees_with_the_reference(case: Case) -> None:
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    expected = case.run(ReferenceAttention(), q, k, v, batch)
    assert torch.allclose(case.run(sdpa_in(torch.float32), q, k, v, batch), expected, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_sdpa_in_tiles_agrees_with_the_reference(case: Case) -> None:
    """Tiles of four queries, so that many begin behind the first and end within a window."""
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    expected = case.run(ReferenceAttention(), q, k, v, batch)
    backend = sdpa_in(torch.float32)
    backend._tiles = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_MIN_TILE", 4)
        patch.setattr(sdpa, "_MAX_TILE_SCORES", 1)
        assert torch.allclose(case.run(backend, q, k, v, batch), expected, atol=2e-5)


@pytest.mark.parametrize("window", [1, 8, 9, 30, 200])
def test_blocks_that_no_window_reaches_are_not_read(window: int) -> None:
    """A long sequence, a decode and a decode with drafts: NaN in every block before the first one that is needed."""
    case = Case(((40, 60), (1, 99), (3, 97)), 4, 2, 3, 8, seed=5, window=window)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    expected = case.run(ReferenceAttention(), q, k, v, batch)
    for b, (num_queries, earlier) in enumerate(case.sequences):
        first_key = max(0, earlier + 1 - window)
        unreachable = batch.block_table[b, : first_key // 4]
        k[unreachable], v[unreachable] = float("nan"), float("nan")
        assert len(unreachable) > 0 or window > earlier + num_queries - 4
    assert torch.allclose(case.run(sdpa_in(torch.float32), q, k, v, batch), expected, atol=2e-5)


@settings(max_examples=20, deadline=None)
@given(case=cases)
def test_sdpa_in_bfloat16_agrees_with_the_reference(case: Case) -> None:
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.bfloat16)
    expected = case.run(ReferenceAttention(), q.float(), k.float(), v.float(), batch)
    got = case.run(sdpa_in(torch.bfloat16), q, k, v, batch)
    assert torch.allclose(got.float(), expected, atol=3e-2)


def test_splitting_into_many_groups_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are cut by padding and by scratch size: force both."""
    case = Case(((1, 3), (1, 200), (1, 40), (1, 41), (1, 0), (1, 170), (3, 5), (3, 90)), 4, 2, 3, 8, seed=5)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    expected = case.run(ReferenceAttention(), q, k, v, batch)
    backend = sdpa_in(torch.float32)
    backend.new_kv(KvShape(1, 4, 2, 8, torch.float32), 2)
    assert len(backend.plan(batch, 4).groups) == 2
    monkeypatch.setattr(sdpa, "_FREE_PADDING", 10)
    assert len(backend.plan(batch, 4).groups) > 3
    assert torch.allclose(case.run(backend, q, k, v, batch), expected, atol=2e-5)
    monkeypatch.setattr(sdpa, "_MAX_GROUP_BYTES", 1)
    assert len(backend.plan(batch, 4).groups) == 8
    assert torch.allclose(case.run(backend, q, k, v, batch), expected, atol=2e-5)


def test_a_long_prompt_reads_the_keys_just_computed_or_the_cache_alike() -> None:
    case = Case(((20, 0), (1, 7), (12, 30)), 4, 2, 3, 8, seed=2)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    backend = sdpa_in(torch.float32)
    fresh_k, fresh_v = (torch.zeros(int(batch.query_start_loc[-1]), 2, 8) for _ in range(2))
    for cache, fresh in ((k, fresh_k), (v, fresh_v)):
        for position in range(20):
            fresh[position] = cache[batch.block_table[0, position // 4], position % 4]
    plan, kv = backend.plan(batch, 4), paged(backend, k, v)
    from_pool = backend.attend(plan, case.spec, q, kv, 0)
    assert torch.equal(backend.attend(plan, case.spec, q, kv, 0, (fresh_k, fresh_v)), from_pool)
    assert not torch.equal(backend.attend(plan, case.spec, q, kv, 0, (fresh_k + 1, fresh_v + 1)), from_pool)


def test_a_sequence_sees_nothing_of_its_neighbours() -> None:
    """Other sequences' tokens may change at will: not a bit of this one's result follows beyond float noise."""
    case = Case(((1, 50), (1, 10), (1, 55), (9, 4)), 4, 2, 3, 8, seed=9)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    before = case.run(sdpa_in(torch.float32), q, k, v, batch)[1].clone()
    others = batch.block_table[[0, 2, 3]].ravel()
    k[others], v[others] = 30.0, -20.0
    assert torch.allclose(case.run(sdpa_in(torch.float32), q, k, v, batch)[1], before, atol=1e-6)


def test_a_query_sees_exactly_up_to_itself_in_a_chunk_behind_a_prefix() -> None:
    """torch's is_causal is aligned to the top left; a chunk behind a prefix must be aligned to the bottom right."""
    case = Case(((12, 5),), 4, 1, 1, 8, seed=3)
    batch = case.batch()
    q, k, v = case.tensors(batch, torch.float32)
    backend = sdpa_in(torch.float32)
    before = case.run(backend, q, k, v, batch)
    last = batch.block_table[0, 16 // 4], 16 % 4
    v[last] += 100.0
    after = case.run(backend, q, k, v, batch)
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
    expected = case.run(ReferenceAttention(), q.float(), k.float(), v.float(), batch)
    backend = sdpa_in(torch.bfloat16)
    backend._tiles = True  # also on a machine with AMX
    got = case.run(backend, q, k, v, batch)
    assert (got.float() - expected).square().mean().sqrt() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e38])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases, ahead=st.integers(0, 2))
def test_f88_what_stands_in_foreign_slots_changes_not_a_bit(
    dtype: torch.dtype, junk: float, case: Case, ahead: int
) -> None:
    """Every slot of the pool that is no sequence's own, the null block's excepted, which is never written."""
    batch = case.batch(ahead)
    q, k, v = case.tensors(batch, dtype)
    expected = case.run(sdpa_in(dtype), q, k, v, batch)
    foreign = torch.ones(k.shape[:2], dtype=torch.bool)
    foreign[0] = False
    for b, seq_len in enumerate(batch.seq_lens.tolist()):
        for position in range(seq_len):
            foreign[batch.block_table[b, position // case.block_size], position % case.block_size] = False
    k[foreign] = v[foreign] = junk
    assert torch.equal(case.run(sdpa_in(dtype), q, k, v, batch), expected)


class _WithoutWindows(ReferenceAttention):
    """A backend that cannot compute everything."""

    def unsupported(self, spec: AttentionSpec) -> str | None:
        return None if spec.window is None else "a sliding window"


def _without_windows(dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    return _WithoutWindows()


def test_a_layer_that_no_backend_can_compute_is_refused_by_name() -> None:
    spec, cpu = AttentionSpec(4, 2, 16, scale=0.25, window=64), torch.device("cpu")
    backends = {"plain": _without_windows}
    with pytest.raises(NoBackend, match="plain: a sliding window"):
        select_backend([replace(spec, window=None), spec], torch.float32, cpu, backends=backends)
    with pytest.raises(NoBackend, match="'flash' is not one of sdpa"):
        select_backend([spec], torch.float32, cpu, name="flash")
    assert isinstance(select_backend([spec], torch.float32, cpu), SdpaAttention)


def test_a_backend_of_its_own_file_is_a_line_in_the_table() -> None:
    """What a further backend needs beside its file: the first that can compute every layer is taken."""
    backends = {"plain": _without_windows, **BACKENDS}
    spec, cpu = AttentionSpec(4, 2, 16, scale=0.25, window=30), torch.device("cpu")
    assert isinstance(select_backend([spec], torch.float32, cpu, backends=backends), SdpaAttention)
    spec = replace(spec, window=None)
    assert isinstance(select_backend([spec], torch.float32, cpu, backends=backends), _WithoutWindows)
