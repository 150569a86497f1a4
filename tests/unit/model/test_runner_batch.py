"""The persistent batch through the runner: rows, feedback, drafts, min_tokens, what the contract's rules ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracle import greedy_entry
from tests.support.step_loop import LoopRequest, StepLoop
from tests.unit.model.tiny import load_runner, tiny_llama
from worker_svc.attention.sdpa import SdpaAttention
from worker_svc.runner.base import Geometry, StepFailed
from worker_svc.runner.input_batch import InputBatch
from worker_svc.runner.inputs import accept_drafts, build_inputs
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.sampling import Sampling
from worker_svc.step import AddedRequest, Step

GEOMETRY = Geometry(block_size=4, num_rows=8, max_num_batched_tokens=64, max_model_len=128, max_inflight_steps=2)
PROMPT = [5, 77, 30, 201, 8, 8, 130]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def runner(model: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_runner(model, tmp_path_factory.mktemp("tiny"))


def _column(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def _added(name: str, row: int, tokens: Sequence[int], blocks: Sequence[int], **changes: Any) -> AddedRequest:
    facts: dict[str, Any] = {
        "num_computed_tokens": 0,
        "num_prompt_tokens": len(tokens),
        "sampling": Sampling(),
    } | changes
    return AddedRequest(name, row, _column(tokens), _column(blocks), **facts)


def _step(seq: int, rows: Sequence[int], num_tokens: Sequence[int], **changes: Any) -> Step:
    facts: dict[str, Any] = {
        "dropped_ids": (),
        "added": (),
        "appended_rows": _column([]),
        "appended_blocks": _column([]),
    }
    return Step(1, seq, seq, 0, rows=_column(rows), num_tokens=_column(num_tokens), **(facts | changes))


def _greedy(model: Any, prompt: Sequence[int], length: int) -> list[int]:
    return list(greedy_entry(model, prompt, length).ids)


def test_tokens_feed_back_without_being_sent(model: Any, runner: ModelRunner) -> None:
    runner.open(GEOMETRY)
    expected = _greedy(model, PROMPT, 4)
    outputs = [runner.launch(_step(1, [3], [7], added=(_added("a", 3, PROMPT, [1, 2, 3]),))).collect()]
    outputs += [runner.launch(_step(seq, [3], [1])).collect() for seq in (2, 3, 4)]
    assert [o.sampled_token_ids.tolist() for o in outputs] == [[t] for t in expected]
    assert all(o.sampled_counts is None and o.num_rows_held == 1 for o in outputs)


def test_a_partial_prefill_has_no_token(model: Any, runner: ModelRunner) -> None:
    runner.open(GEOMETRY)
    expected = _greedy(model, PROMPT, 2)
    added = (_added("a", 0, PROMPT, [1, 2]), _added("b", 5, PROMPT[:3], [3]))
    first = runner.launch(_step(1, [0, 5], [4, 3], added=added)).collect()
    assert first.sampled_counts is not None
    assert first.sampled_counts.tolist() == [0, 1]
    assert first.sampled_token_ids.tolist() == _greedy(model, PROMPT[:3], 1)
    second = runner.launch(_step(2, [0], [3])).collect()
    assert (second.sampled_counts, second.sampled_token_ids.tolist()) == (None, expected[:1])
    third = runner.launch(_step(3, [0], [1])).collect()
    assert third.sampled_token_ids.tolist() == expected[1:]


def test_results_come_in_the_order_of_the_step(model: Any, runner: ModelRunner) -> None:
    """The layout sorts rows by width; the answer must not."""
    runner.open(GEOMETRY)
    prompts = {0: PROMPT, 1: [9], 2: list(range(20, 32)), 3: PROMPT[:5]}
    blocks = {0: [1, 2], 1: [3], 2: [4, 5, 6], 3: [7, 8]}
    order = [2, 1, 0, 3]
    added = tuple(_added(f"r{row}", row, prompts[row], blocks[row]) for row in prompts)
    step = _step(1, order, [len(prompts[row]) for row in order], added=added)
    ids = runner.launch(step).collect().sampled_token_ids.tolist()
    assert ids == [_greedy(model, prompts[row], 1)[0] for row in order]


def test_a_row_is_reused_and_an_id_replaced(model: Any, runner: ModelRunner) -> None:
    runner.open(GEOMETRY)
    other = [33, 44, 55]
    runner.launch(_step(1, [2], [7], added=(_added("a", 2, PROMPT, [1, 2]),))).collect()
    reused = _step(2, [2], [3], dropped_ids=("a", "never heard of"), added=(_added("b", 2, other, [5]),))
    out = runner.launch(reused).collect()
    assert (out.sampled_token_ids.tolist(), out.num_rows_held) == (_greedy(model, other, 1), 1)
    replaced = _step(3, [4], [7], added=(_added("b", 4, PROMPT, [6, 7]),))
    out = runner.launch(replaced).collect()
    assert (out.sampled_token_ids.tolist(), out.num_rows_held) == (_greedy(model, PROMPT, 1), 1)
    out = runner.launch(_step(4, [], [], dropped_ids=("b",))).collect()
    assert (len(out.sampled_token_ids), out.num_rows_held) == (0, 0)


def test_a_resumed_request_continues_from_its_own_tokens(model: Any, runner: ModelRunner) -> None:
    runner.open(GEOMETRY)
    expected = _greedy(model, PROMPT, 6)
    resumed = _added("a", 1, PROMPT + expected[:3], [9, 4, 2], num_prompt_tokens=len(PROMPT))
    ids = runner.launch(_step(1, [1], [10], added=(resumed,))).collect().sampled_token_ids.tolist()
    ids += runner.launch(_step(2, [1], [1])).collect().sampled_token_ids.tolist()
    assert ids == expected[3:5]


def test_blocks_computed_in_a_step_may_be_read_in_the_same_step(model: Any, runner: ModelRunner) -> None:
    """Rule 11: the second request's first block is what the first one computes right now."""
    runner.open(GEOMETRY)
    runner.launch(_step(1, [0], [7], added=(_added("x", 0, [250] * 7, [1, 2]),), dropped_ids=())).collect()
    added = (
        _added("b", 2, PROMPT + [40], [1, 4], num_computed_tokens=4),
        _added("a", 1, PROMPT, [1, 3]),
    )
    step = _step(2, [2, 1], [4, 7], dropped_ids=("x",), added=added)
    ids = runner.launch(step).collect().sampled_token_ids.tolist()
    assert ids == [_greedy(model, PROMPT + [40], 1)[0], _greedy(model, PROMPT, 1)[0]]


def test_several_blocks_may_be_appended_to_a_row_at_once(model: Any, runner: ModelRunner) -> None:
    runner.open(GEOMETRY)
    expected = _greedy(model, PROMPT, 12)
    added = (_added("a", 0, PROMPT, [11, 3]), _added("b", 6, PROMPT, [8, 2]))
    seen = [runner.launch(_step(1, [0, 6], [7, 7], added=added)).collect().sampled_token_ids.tolist()]
    appended = {"appended_rows": _column([6, 0, 6, 0, 6]), "appended_blocks": _column([5, 7, 1, 4, 12])}
    for seq in range(2, 12):
        step = _step(seq, [0, 6], [1, 1], **(appended if seq == 2 else {}))
        seen.append(runner.launch(step).collect().sampled_token_ids.tolist())
    assert seen == [[t, t] for t in expected[:11]]


def test_ends_are_masked_while_the_output_is_shorter_than_min_tokens(model: Any, runner: ModelRunner) -> None:
    free = _greedy(model, PROMPT, 8)
    masked = tuple(set(free[:3]))
    loop = StepLoop(runner, max_model_len=128)
    bounded = loop.add(PROMPT, 8, Sampling(min_tokens=4, masked_token_ids=masked))
    unbounded = loop.add(PROMPT, 8, Sampling(min_tokens=0, masked_token_ids=masked))
    loop.run()
    assert unbounded.outputs == free
    assert not set(bounded.outputs[:4]) & set(masked)
    # From index 4 on they may come again: the same prefix without a mask goes on alike.
    assert bounded.outputs[4:] == _greedy(model, PROMPT + bounded.outputs[:4], 4)


def test_min_tokens_counts_from_the_prompt_also_after_recomputation(model: Any, runner: ModelRunner) -> None:
    masked = tuple(range(150))
    sampling = Sampling(min_tokens=6, masked_token_ids=masked)
    loop = StepLoop(runner, max_model_len=128)
    alone = loop.add(PROMPT, 10, sampling)
    loop.run()
    moved = loop.add(PROMPT, 10, sampling)

    def preempt(loop: StepLoop) -> None:
        if moved in loop.running and len(moved.outputs) == 3:
            loop.preempt(moved)

    loop.run(after_step=preempt)
    assert moved.outputs == alone.outputs
    assert min(alone.outputs[:6]) >= 150


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.1, seed=5, top_p=0.97)], ids=["greedy", "drawn"]
)
def test_drafts_never_change_the_tokens(runner: ModelRunner, sampling: Sampling) -> None:
    """Right, wrong, partly right, at every position, beside rows without drafts."""
    plain = StepLoop(runner, max_model_len=128)
    alone = [plain.add([*PROMPT, i], 24, sampling) for i in range(4)]
    plain.run()
    known = {tuple(r.prompt): r.outputs for r in alone}
    rng = np.random.default_rng(4)

    def propose(request: LoopRequest) -> list[int]:
        at = len(request.outputs)
        drafts = known[tuple(request.prompt)][at : at + int(rng.integers(0, 5))]
        return [d if rng.random() < 0.7 else int(rng.integers(0, 300)) for d in drafts]

    loop = StepLoop(runner, max_model_len=128, block_size=4, propose=propose)
    drafted = [loop.add([*PROMPT, i], 24, sampling) for i in range(4)]
    loop.run()
    assert [r.outputs for r in drafted] == [r.outputs for r in alone]
    assert sum(r.num_accepted_drafts for r in drafted) > 10
    assert len(loop.steps) < len(plain.steps)


def test_min_tokens_holds_at_every_draft_position(runner: ModelRunner) -> None:
    masked = tuple(range(0, 300, 2))
    sampling = Sampling(min_tokens=5, masked_token_ids=masked)
    plain = StepLoop(runner, max_model_len=128)
    alone = plain.add(PROMPT, 10, sampling)
    plain.run()
    loop = StepLoop(runner, max_model_len=128, propose=lambda r: alone.outputs[len(r.outputs) : len(r.outputs) + 4])
    drafted = loop.add(PROMPT, 10, sampling)
    loop.run()
    assert drafted.outputs == alone.outputs
    assert all(token % 2 for token in drafted.outputs[:5])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_accepted_are_the_drafts_before_the_first_wrong_one_and_one_more(rows: list[tuple[int, int]]) -> None:
    sampled: list[int] = []
    drafts: list[int] = []
    expected: list[int] = []
    for num_drafts, wanted_right in rows:
        right = min(num_drafts, wanted_right)
        drafts += [7] * num_drafts
        # Later ones may look right again: they do not count.
        sampled += [7] * right + ([8] + [7] * (num_drafts - right) if right < num_drafts else [9])
        expected.append(right + 1)
    num_logits = np.array([d + 1 for d, _ in rows], np.int64)
    counts, holds = accept_drafts(np.array(sampled), num_logits, np.array(drafts, np.int64))
    assert counts.tolist() == expected
    starts = np.cumsum(num_logits) - num_logits
    assert np.flatnonzero(holds).tolist() == [s + i for s, e in zip(starts, expected, strict=True) for i in range(e)]


def test_a_new_epoch_starts_empty_and_keeps_the_pool(model: Any, runner: ModelRunner) -> None:
    num_blocks = runner.open(GEOMETRY)
    runner.launch(_step(1, [0], [7], added=(_added("a", 0, PROMPT, [1, 2]),))).collect()
    pool = runner._kv
    assert runner.open(GEOMETRY) == num_blocks
    assert runner._kv is pool
    out = runner.launch(_step(1, [0], [3], added=(_added("b", 0, [33, 44, 55], [1]),))).collect()
    assert (out.sampled_token_ids.tolist(), out.num_rows_held) == (_greedy(model, [33, 44, 55], 1), 1)


def test_a_step_before_an_epoch_or_out_of_range_fails_as_a_step(model: Any, tmp_path: Path) -> None:
    runner = load_runner(model, tmp_path)
    with pytest.raises(StepFailed, match="no epoch is open"):
        runner.launch(_step(1, [], []))
    runner.open(GEOMETRY)
    with pytest.raises(StepFailed, match="IndexError"):
        runner.launch(_step(1, [0], [1], added=(_added("a", 0, [9999], [1]),)))
    runner.close()
    with pytest.raises(StepFailed):
        runner.launch(_step(1, [], []))


def test_the_layout_keeps_equal_rows_together_and_the_longest_first() -> None:
    """What the attention backend counts on to find its groups without copying."""
    batch = InputBatch(GEOMETRY)
    given = {0: (12, 0), 1: (9, 8), 2: (12, 3), 3: (33, 32), 4: (20, 19), 5: (7, 0)}
    added = []
    for row, (num, computed) in given.items():
        added.append(_added(f"r{row}", row, range(num), range(1, 10), num_computed_tokens=computed))
    rows = list(given)
    step = _step(1, rows, [num - computed for num, computed in given.values()], added=tuple(added))
    batch.apply(step)
    inputs = build_inputs(batch, step, SdpaAttention(torch.float32, torch.device("cpu")).row_order)
    assert inputs.ragged.query_lens.tolist() == [1, 1, 1, 7, 9, 12]
    assert inputs.ragged.seq_lens.tolist() == [33, 20, 9, 7, 12, 12]
    assert inputs.positions[:3].tolist() == [32, 19, 8]
    # The last token of every row, in the step's order of rows.
    last = [inputs.positions[t] for t in inputs.logit_tokens]
    assert last == [num - 1 for num, _ in given.values()]
