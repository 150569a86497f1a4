"""The torch runner against transformers: same weights, greedy, float32, token for token."""

from __future__ import annotations

import pytest

from tests.support.oracle import DEFAULT_LENGTH, OracleEntry, OraclePrompt, assert_greedy_equal
from tests.support.step_loop import LoopRequest, StepLoop
from worker_svc.runner.model_runner import ModelRunner

pytestmark = pytest.mark.model

Expected = list[tuple[OraclePrompt, OracleEntry]]


def _check(requests: list[LoopRequest], entries: list[OracleEntry]) -> None:
    for request, entry in zip(requests, entries, strict=True):
        assert len(request.outputs) == DEFAULT_LENGTH
        assert_greedy_equal(request.outputs, entry)


def test_the_comparison_reaches_far(expected: Expected) -> None:
    """Near ties end a comparison early: most prompts must still be compared to the end."""
    reach = [next((i for i, g in enumerate(entry.gaps) if g < 1e-3), DEFAULT_LENGTH) for _, entry in expected]
    assert sum(reach) > 0.8 * DEFAULT_LENGTH * len(reach)


def test_greedy_ids_equal_transformers_alone(float32_runner: ModelRunner, expected: Expected) -> None:
    for prompt, entry in expected:
        loop = StepLoop(float32_runner)
        request = loop.add(prompt.token_ids, DEFAULT_LENGTH)
        loop.run()
        _check([request], [entry])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_greedy_ids_equal_transformers_16_at_once(float32_runner: ModelRunner, expected: Expected, depth: int) -> None:
    loop = StepLoop(float32_runner, depth=depth)
    picked = [expected[i % len(expected)] for i in range(16)]
    requests = [loop.add(prompt.token_ids, DEFAULT_LENGTH) for prompt, _ in picked]
    loop.run()
    assert max(len(step.rows) for step in loop.steps) == 16
    _check(requests, [entry for _, entry in picked])


def test_greedy_ids_equal_transformers_in_chunks_of_16(float32_runner: ModelRunner, expected: Expected) -> None:
    loop = StepLoop(float32_runner, budget=16)
    requests = [loop.add(prompt.token_ids, DEFAULT_LENGTH) for prompt, _ in expected]
    loop.run()
    mixed = [s for s in loop.steps if len(s.rows) > 1 and s.num_tokens.max() > 1 and s.num_tokens.min() == 1]
    assert mixed, "no step held both prefill and decode"
    assert max(int(step.num_tokens.sum()) for step in loop.steps) == 16
    _check(requests, [entry for _, entry in expected])


def test_greedy_ids_equal_transformers_with_cache_hits(float32_runner: ModelRunner, expected: Expected) -> None:
    """The second of each pair finds the first's blocks: computed in the same step (rule 11), or long before."""
    loop = StepLoop(float32_runner, prefix_cache=True)
    twice = [pair for pair in expected for _ in range(2)]
    requests = [loop.add(prompt.token_ids, DEFAULT_LENGTH) for prompt, _ in twice]
    loop.run()
    hits = [r.num_hit for r in requests]
    assert sum(1 for h in hits if h > 0) >= len(expected) - 2
    _check(requests, [entry for _, entry in twice])
    again = [loop.add(prompt.token_ids, DEFAULT_LENGTH) for prompt, _ in expected[-3:]]
    loop.run()
    assert all(r.num_hit > 0 for r in again)
    _check(again, [entry for _, entry in expected[-3:]])


def test_greedy_ids_equal_transformers_across_preemptions(float32_runner: ModelRunner, expected: Expected) -> None:
    loop = StepLoop(float32_runner)
    requests = [loop.add(prompt.token_ids, DEFAULT_LENGTH) for prompt, _ in expected]
    taken: list[str] = []

    def preempt_now_and_then(loop: StepLoop) -> None:
        if len(loop.steps) % 9 == 0 and loop.running:
            victim = loop.running[len(loop.steps) % len(loop.running)]
            taken.append(victim.request_id)
            loop.preempt(victim)

    loop.run(after_step=preempt_now_and_then)
    assert len(set(taken)) >= 3
    _check(requests, [entry for _, entry in expected])


def test_greedy_ids_equal_transformers_with_drafts_right_and_wrong(
    float32_runner: ModelRunner, expected: Expected
) -> None:
    answers = {prompt.token_ids: entry.ids for prompt, entry in expected}

    def propose(request: LoopRequest) -> list[int]:
        known = answers[tuple(request.prompt)]
        at = len(request.outputs)
        drafts = list(known[at : at + 4])
        if at % 3 == 1 and len(drafts) > 2:
            drafts[2] = (drafts[2] + 1) % 40000
        return drafts

    loop = StepLoop(float32_runner, propose=propose)
    requests = [loop.add(prompt.token_ids, DEFAULT_LENGTH) for prompt, _ in expected]
    loop.run()
    assert all(r.num_accepted_drafts > 20 for r in requests)
    assert len(loop.steps) < DEFAULT_LENGTH
    _check(requests, [entry for _, entry in expected])
