"""Seeded sampling with the real model: the same tokens alone, in company, and across recomputation (float32)."""

from __future__ import annotations

import pytest

from tests.support.oracle import OracleEntry, OraclePrompt
from tests.support.step_loop import LoopRequest, StepLoop
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.sampling import Sampling

pytestmark = pytest.mark.model

Expected = list[tuple[OraclePrompt, OracleEntry]]
LENGTH = 48
SAMPLINGS = (
    Sampling(temperature=0.8, top_p=0.95, seed=7),
    Sampling(temperature=1.2, top_k=40, seed=2**63 + 11),
    Sampling(temperature=1.0, min_p=0.05, seed=7),
)


def _alone(runner: ModelRunner, ids: tuple[int, ...], sampling: Sampling) -> list[int]:
    loop = StepLoop(runner)
    request = loop.add(ids, LENGTH, sampling)
    loop.run()
    return request.outputs


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["top_p", "top_k", "min_p"])
def test_a_seeded_request_samples_the_same_alone_in_company_and_after_preemption(
    float32_runner: ModelRunner, expected: Expected, sampling: Sampling
) -> None:
    ids = expected[1][0].token_ids
    alone = _alone(float32_runner, ids, sampling)

    loop = StepLoop(float32_runner, depth=2)
    for i in range(15):
        loop.add(expected[i % len(expected)][0].token_ids, LENGTH - i, Sampling(temperature=1.0, seed=i, top_p=0.9))
    beside = loop.add(ids, LENGTH, sampling)
    loop.run()
    assert beside.outputs == alone

    loop = StepLoop(float32_runner)
    moved = loop.add(ids, LENGTH, sampling)
    preempted_at: list[int] = []

    def preempt(loop: StepLoop) -> None:
        if moved in loop.running and len(moved.outputs) in (5, 23):
            preempted_at.append(len(moved.outputs))
            loop.preempt(moved)

    loop.run(after_step=preempt)
    assert preempted_at == [5, 23]
    assert moved.outputs == alone


def test_seeds_differ(float32_runner: ModelRunner, expected: Expected) -> None:
    ids = expected[1][0].token_ids
    loop = StepLoop(float32_runner)
    requests = [loop.add(ids, 12, Sampling(temperature=1.0, seed=seed)) for seed in range(8)]
    loop.run()
    assert len({tuple(r.outputs) for r in requests}) == 8


def test_drafts_do_not_change_what_is_sampled(float32_runner: ModelRunner, expected: Expected) -> None:
    ids, sampling = expected[1][0].token_ids, SAMPLINGS[0]
    alone = _alone(float32_runner, ids, sampling)

    def propose(request: LoopRequest) -> list[int]:
        at = len(request.outputs)
        drafts = alone[at : at + 3]
        return [*drafts[:1], 17, *drafts[2:]] if at % 4 == 2 else drafts

    loop = StepLoop(float32_runner, propose=propose)
    request = loop.add(ids, LENGTH, sampling)
    loop.run()
    assert request.num_accepted_drafts > LENGTH // 3
    assert request.outputs == alone
