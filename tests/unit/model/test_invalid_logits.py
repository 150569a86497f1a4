"""F89: logits that are not finite are a row error, and no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.step_loop import StepLoop
from tests.unit.model.tiny import load_runner, tiny_llama
from worker_svc.runner.base import Geometry
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.sampler import INVALID, SamplingRows, sample
from worker_svc.sampling import PARAMETERS, Sampling
from worker_svc.step import AddedRequest, Step, StepOutput

# A token whose embedding is not finite.
POISON = 66


def _rows(num: int, **columns: Any) -> SamplingRows:
    given: dict[str, Any] = {"seed": np.arange(num)} | columns
    parameters = {
        parameter.name: np.broadcast_to(given.get(parameter.name, parameter.default), (num,)).astype(parameter.dtype)
        for parameter in PARAMETERS
    }
    return SamplingRows(parameters, np.zeros(num, np.int64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.7, "min_p": 0.1},
    ],
)
def test_f89_one_value_that_is_not_finite_makes_its_row_invalid_and_no_other(bad: float, how: dict[str, float]) -> None:
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(1))
    clean = sample(logits.clone(), _rows(5, **how))
    logits[2, 17] = bad
    tokens = sample(logits, _rows(5, **how))
    assert tokens[2] == INVALID
    assert [token for row, token in enumerate(tokens) if row != 2] == [t for row, t in enumerate(clean) if row != 2]


def test_f89_a_row_of_nothing_but_minus_infinity_is_invalid() -> None:
    assert sample(torch.full((1, 9), -torch.inf), _rows(1)).tolist() == [INVALID]


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON, 3] = float("nan")
    return load_runner(model, tmp_path)


def _step(seq: int, rows: list[int], num_tokens: list[int], **changes: Any) -> Step:
    facts: dict[str, Any] = {
        "dropped_ids": (),
        "added": (),
        "appended_rows": np.empty(0, np.int32),
        "appended_blocks": np.empty(0, np.int32),
    } | changes
    return Step(1, seq, seq, 0, rows=np.array(rows, np.int32), num_tokens=np.array(num_tokens, np.int32), **facts)


def _added(row: int, tokens: list[int], block: int, sampling: Sampling) -> AddedRequest:
    table = np.array([block, block + 1], np.int32)
    return AddedRequest(f"r{row}", row, np.array(tokens, np.int32), table, 0, len(tokens), sampling)


def _run(runner: ModelRunner, step: Step) -> StepOutput:
    return runner.launch(step).collect()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)])
def test_f89_the_row_fails_alone_and_its_neighbours_have_their_own_tokens(
    runner: ModelRunner, sampling: Sampling
) -> None:
    runner.open(Geometry(16, 8, 64, 128, 2))
    prompts = {0: [5, 77, 30], 1: [9, POISON, 4], 2: [201, 8]}
    added = tuple(_added(row, tokens, 1 + 2 * row, sampling) for row, tokens in prompts.items())
    output = _run(runner, _step(1, [0, 1, 2], [3, 3, 2], added=added))
    assert [failure.row for failure in output.row_errors] == [1]
    assert output.sampled_counts is not None and output.sampled_counts.tolist() == [1, 0, 1]
    # The next step was on its way already: the failed row is in it, and disturbs no other row there.
    second = _run(runner, _step(2, [0, 1, 2], [1, 1, 1]))
    assert [failure.row for failure in second.row_errors] == [1]
    alone = {row: _alone(runner, prompts[row], row, sampling) for row in (0, 2)}
    assert list(zip(output.sampled_token_ids.tolist(), second.sampled_token_ids.tolist(), strict=True)) == [
        alone[0],
        alone[2],
    ]


def _alone(runner: ModelRunner, tokens: list[int], row: int, sampling: Sampling) -> tuple[int, int]:
    runner.open(Geometry(16, 8, 64, 128, 2))
    first = _run(runner, _step(1, [row], [len(tokens)], added=(_added(row, tokens, 1, sampling),)))
    second = _run(runner, _step(2, [row], [1]))
    return int(first.sampled_token_ids[0]), int(second.sampled_token_ids[0])


def test_f89_a_row_with_drafts_fails_as_a_whole(runner: ModelRunner) -> None:
    runner.open(Geometry(16, 8, 64, 128, 2))
    added = (_added(0, [5, 77, 30], 1, Sampling()), _added(1, [9, 4], 3, Sampling()))
    _run(runner, _step(1, [0, 1], [3, 2], added=added))
    drafts = np.array([POISON, POISON, 7, 8], np.int32)
    output = _run(runner, _step(2, [0, 1], [3, 3], num_drafts=np.array([2, 2], np.int32), draft_token_ids=drafts))
    # A backend may mix the values of a row's later positions into its earlier ones, with weight 0. The row fails; its
    # neighbour, in the same call of the attention, does not.
    assert [failure.row for failure in output.row_errors] == [0]
    assert output.sampled_counts is not None and output.sampled_counts[0] == 0 and output.sampled_counts[1] >= 1


def test_f88_what_a_failed_row_has_left_in_its_blocks_spoils_no_other_request(runner: ModelRunner) -> None:
    """The next request in the same blocks, shorter than the one before, beside a longer one."""
    loop = StepLoop(runner, block_size=16, max_model_len=128)
    expected = loop.add([5, 77, 30], 6)
    loop.run()
    runner.open(Geometry(16, 8, 64, 128, 2))
    bad = _added(0, [POISON] * 20, 1, Sampling())
    assert _run(runner, _step(1, [0], [20], added=(bad,))).row_errors
    longer = AddedRequest(
        "long", 1, np.arange(60, 100).astype(np.int32) * 3 % 60, np.arange(3, 7).astype(np.int32), 0, 40, Sampling()
    )
    short = _added(2, [5, 77, 30], 1, Sampling())
    tokens = [
        int(_run(runner, _step(2, [1, 2], [40, 3], added=(longer, short), dropped_ids=("r0",))).sampled_token_ids[1])
    ]
    for seq in range(3, 8):
        output = _run(runner, _step(seq, [1, 2], [1, 1]))
        assert not output.row_errors
        tokens.append(int(output.sampled_token_ids[1]))
    assert tokens == expected.outputs
