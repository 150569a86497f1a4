"""The scripted runner: the same text whatever happens, and no mistake of a scheduler unnoticed."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.unit.worker.builders import BLOCK_SIZE, Steps, added, geometry, ints
from worker_svc.runner.base import DeviceFailed, Runner, StepFailed
from worker_svc.runner.script import Fault, FaultKind, FaultPlan, Script
from worker_svc.runner.scripted import EOS_TOKEN_ID, VOCAB_SIZE, ScriptedRunner, complete
from worker_svc.runner.slot_memory import Fingerprints
from worker_svc.sampling import Sampling
from worker_svc.step import Step, StepAnswer, StepOutput

_SAMPLED = Sampling(temperature=0.7, seed=11)


def _runner(script: Script | None = None, **changes: int) -> ScriptedRunner:
    runner = ScriptedRunner(script, num_blocks=40, max_model_len=64)
    assert runner.open(geometry(**changes)) == 40
    return runner


def _run(runner: Runner, step: Step) -> list[int]:
    output = runner.launch(step).collect()
    ids: list[int] = output.sampled_token_ids.tolist()
    return ids


def test_the_next_token_is_a_hash_of_the_whole_prefix() -> None:
    prompt = [1, 2, 3]
    digest = hashlib.blake2b(struct.pack("<3i", *prompt) + b"g", digest_size=8).digest()
    assert complete(prompt, 1, Sampling()) == [32 + int.from_bytes(digest, "little") % 95]
    assert complete([0, 2, 3], 8, Sampling()) != complete(prompt, 8, Sampling())


def test_greedy_ignores_the_seed_and_sampling_does_not() -> None:
    assert complete([5], 20, Sampling(seed=1)) == complete([5], 20, Sampling(seed=2))
    seeded = [complete([5], 20, Sampling(temperature=1.0, seed=seed)) for seed in (1, 2)]
    assert seeded[0] != seeded[1] and seeded[0] == complete([5], 20, Sampling(temperature=1.0, seed=1))


def test_text_is_printable_and_never_ends_by_itself() -> None:
    outputs = complete([5], 500, _SAMPLED)
    assert all(32 <= token < 127 for token in outputs) and len(set(outputs)) > 60


def test_an_end_is_sampled_where_the_script_wants_it_unless_masked() -> None:
    assert complete([5], 4, Sampling(), Script(eos_at=2))[2] == EOS_TOKEN_ID
    masked = Sampling(min_tokens=3, masked_token_ids=(EOS_TOKEN_ID,))
    outputs = complete([5], 4, masked, Script(eos_always=True))
    assert EOS_TOKEN_ID not in outputs[:3] and outputs[3] == EOS_TOKEN_ID


def test_masked_characters_are_passed_over() -> None:
    every_printable = tuple(range(32, 127))
    outputs = complete([5], 3, Sampling(min_tokens=2, masked_token_ids=every_printable))
    assert not set(outputs[:2]) & set(every_printable) and outputs[2] in every_printable
    with pytest.raises(StepFailed):
        complete([5], 1, Sampling(min_tokens=1, masked_token_ids=tuple(range(VOCAB_SIZE))))


@pytest.mark.parametrize("sampling", [Sampling(), _SAMPLED])
@pytest.mark.parametrize("verify", ["changed", "full", "off"])
def test_chunks_company_and_preemption_do_not_change_the_text(sampling: Sampling, verify: str) -> None:
    prompt = [10, 20, 30, 40, 50, 60, 70]
    cold = complete(prompt, 6, sampling)
    runner, steps = _runner(Script.model_validate({"verify": verify})), Steps()
    new = [added("a", 0, prompt, [1, 2, 3], sampling=sampling), added("b", 1, [9] * 5, [4, 5])]
    assert len(_run(runner, steps.next({0: 3, 1: 5}, new=new))) == 1
    outputs = [_run(runner, steps.next({1: 1, 0: 4}))[1]]
    outputs += _run(runner, steps.next({0: 1}))
    resumed = added("a", 5, prompt + outputs, [6, 7, 8, 9], num_prompt=7, sampling=sampling)
    assert _run(runner, steps.next({5: 2}, dropped=["a"], new=[resumed])) == []
    outputs += _run(runner, steps.next({5: 7}))
    for _ in range(3):
        outputs += _run(runner, steps.next({5: 1}))
    assert outputs == cold


@pytest.mark.parametrize("sampling", [Sampling(), _SAMPLED])
def test_right_drafts_are_accepted_up_to_the_first_wrong_one(sampling: Sampling) -> None:
    prompt = [10, 20, 30]
    cold = complete(prompt, 10, sampling)
    runner, steps = _runner(), Steps()
    outputs = _run(runner, steps.next({0: 3}, new=[added("a", 0, prompt, [1, 2, 3, 4], sampling=sampling)]))
    drafts = [cold[1], cold[2], 0, cold[4]]
    output = runner.launch(steps.next({0: 5}, drafts={0: drafts})).collect()
    assert output.sampled_counts is not None and output.sampled_counts.tolist() == [3]
    outputs += output.sampled_token_ids.tolist()
    outputs += _run(runner, steps.next({0: 2}, drafts={0: [cold[4]]}))
    outputs += _run(runner, steps.next({0: 1}))
    assert outputs == cold[:7]


def test_all_drafts_right_give_one_token_more() -> None:
    prompt = [10, 20, 30]
    cold = complete(prompt, 5, Sampling())
    runner, steps = _runner(), Steps()
    _run(runner, steps.next({0: 3}, new=[added("a", 0, prompt, [1, 2, 3])]))
    assert _run(runner, steps.next({0: 4}, drafts={0: cold[1:4]})) == cold[1:5]


# --- what a scheduler may not do --------------------------------------------------------------------------------------


def _two_prefixes(runner: ScriptedRunner, steps: Steps) -> None:
    """Request "a" has computed [1..8] in blocks 1 and 2."""
    _run(runner, steps.next({0: 8}, new=[added("a", 0, range(1, 9), [1, 2])]))


def test_a_hit_on_unwritten_blocks_is_noticed() -> None:
    runner, steps = _runner(), Steps()
    with pytest.raises(StepFailed, match=r"row 3 \(b\): position 0 must hold token 1, but block 9 holds nothing"):
        _run(runner, steps.next({3: 1}, new=[added("b", 3, range(1, 6), [9, 10], num_computed=4)]))


def test_a_hit_on_other_tokens_is_noticed() -> None:
    runner, steps = _runner(), Steps()
    _two_prefixes(runner, steps)
    other = [1, 2, 77, 4, 5]
    with pytest.raises(StepFailed, match=r"position 2 must hold token 77, but block 1 holds token 3 of position 2"):
        _run(runner, steps.next({1: 1}, new=[added("b", 1, other, [1, 9], num_computed=4)]))


def test_a_hit_on_the_same_tokens_behind_another_prefix_is_noticed() -> None:
    """F15 and the like: a hash that covers a block's own tokens, but not those before them."""
    runner, steps = _runner(), Steps()
    _two_prefixes(runner, steps)
    tokens = [91, 92, 93, 94, 5, 6, 7, 8, 9]
    _run(runner, steps.next({1: 4}, new=[added("c", 1, tokens, [3, 4, 5])]))
    with pytest.raises(StepFailed, match="position 4 .* behind another prefix"):
        _run(runner, steps.next({2: 1}, new=[added("b", 2, tokens, [3, 2, 6], num_computed=8)]))


def test_blocks_in_the_wrong_order_are_noticed() -> None:
    runner, steps = _runner(), Steps()
    _two_prefixes(runner, steps)
    with pytest.raises(StepFailed, match="position 0"):
        _run(runner, steps.next({1: 1}, new=[added("b", 1, range(1, 10), [2, 1, 3], num_computed=8)]))


def test_rows_of_one_step_may_read_what_it_writes() -> None:
    runner, steps = _runner(), Steps()
    tokens = list(range(1, 10))
    new = [added("b", 1, tokens, [1, 2, 4], num_computed=8), added("a", 0, tokens, [1, 2, 3])]
    assert _run(runner, steps.next({1: 1, 0: 9}, new=new)) == 2 * complete(tokens, 1, Sampling())


def test_rows_of_one_step_may_read_what_it_writes_into_an_appended_block() -> None:
    """Found by the simulation: the chunk that fills an appended block is hit by a request admitted in the same step."""
    runner, steps = _runner(), Steps()
    tokens = list(range(1, 12))
    _run(runner, steps.next({0: 4}, new=[added("a", 0, tokens, [1])]))
    shares = added("b", 1, tokens[:9], [1, 2, 5], num_computed=8)
    step = steps.next({0: 7, 1: 1}, new=[shares], appended=[(0, 2), (0, 3)])
    assert _run(runner, step) == complete(tokens, 1, Sampling()) + complete(tokens[:9], 1, Sampling())


def test_a_block_of_a_living_table_is_not_given_out() -> None:
    runner, steps = _runner(), Steps()
    _two_prefixes(runner, steps)
    with pytest.raises(StepFailed, match="block 2 is given out for writing, but is in another living table"):
        _run(runner, steps.next(new=[added("b", 1, [5, 6], [2])]))


def test_a_block_is_not_given_out_before_its_fence() -> None:
    runner, steps = _runner(), Steps()
    _two_prefixes(runner, steps)
    with pytest.raises(StepFailed, match="block 2 was used in step 1 .* only step 0 is acknowledged"):
        _run(runner, steps.next(dropped=["a"], new=[added("b", 1, [5, 6], [2])], processed=0))


def test_an_appended_block_is_not_given_out_before_its_fence() -> None:
    runner, steps = _runner(), Steps()
    _two_prefixes(runner, steps)
    _run(runner, steps.next(dropped=["a"], new=[added("b", 1, [5, 6], [9])]))
    with pytest.raises(StepFailed, match="fence"):
        _run(runner, steps.next(appended=[(1, 1)], processed=0))


def test_fences_are_not_checked_when_the_script_says_so() -> None:
    runner, steps = _runner(Script(check_fences=False)), Steps()
    _two_prefixes(runner, steps)
    _run(runner, steps.next({1: 2}, dropped=["a"], new=[added("b", 1, [5, 6], [2])], processed=0))


def test_a_hit_on_rejected_drafts_is_noticed_when_they_are_overwritten() -> None:
    """A block published with tokens that were only proposed: right at first sight, wrong a step later."""
    prompt = [1, 2, 3]
    cold = complete(prompt, 1, Sampling())
    runner, steps = _runner(), Steps()
    _run(runner, steps.next({0: 3}, new=[added("a", 0, prompt, [1, 2])]))
    _run(runner, steps.next({0: 5}, drafts={0: [0, 0, 0, 0]}))
    tokens = [*prompt, *cold, 0, 0, 0, 0, 7]
    _run(runner, steps.next({1: 1}, new=[added("b", 1, tokens, [1, 2, 3], num_computed=8)]))
    with pytest.raises(StepFailed, match=r"row 1 \(b\): position 4 must hold token 0, but block 2 holds token \d+"):
        _run(runner, steps.next({0: 1, 1: 1}))


def test_a_new_epoch_starts_with_an_unused_pool() -> None:
    runner, steps = _runner(), Steps()
    _two_prefixes(runner, steps)
    runner.open(geometry())
    with pytest.raises(StepFailed, match="nothing that was ever written"):
        _run(runner, Steps(2).next({0: 1}, new=[added("b", 0, range(1, 6), [1, 2], num_computed=4)]))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60),
    st.integers(0, 2**64 - 1),
)
def test_fingerprints_are_the_same_however_they_are_made(tokens: list[int], before: int) -> None:
    fingerprints = Fingerprints(VOCAB_SIZE, 64)
    one_by_one, value = [], before
    for token in tokens:
        value = fingerprints.append(value, token)
        one_by_one.append(value)
    assert fingerprints.extend(before, tokens).tolist() == one_by_one


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=8).map(tuple), min_size=2, max_size=8, unique=True))
def test_different_prefixes_have_different_fingerprints(prefixes: list[tuple[int, ...]]) -> None:
    fingerprints = Fingerprints(VOCAB_SIZE, 64)
    made = [int(fingerprints.extend(0, prefix)[-1]) if prefix else 0 for prefix in prefixes]
    assert len(set(made)) == len(prefixes)


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_faults_fire_when_their_conditions_hold_and_as_often_as_said() -> None:
    fault = Fault(kind=FaultKind.FAIL, request_id="poison", times=2)
    plan = FaultPlan(Script(faults=(fault,)))
    assert not plan.take(1, 1, ["good"])
    assert [bool(plan.take(1, step, ["good", "poison-1"])) for step in (2, 3, 4)] == [True, True, False]
    always = FaultPlan(Script(faults=(Fault(kind=FaultKind.FAIL, at_step=2, epoch=3, times=0),)))
    assert not always.take(1, 2, []) and all(always.take(3, 2, []) for _ in range(5))


@pytest.mark.parametrize("kind, error", [(FaultKind.FAIL, StepFailed), (FaultKind.DEVICE, DeviceFailed)])
def test_a_step_fails_where_the_script_says(kind: FaultKind, error: type[Exception]) -> None:
    runner, steps = _runner(Script(faults=(Fault(kind=kind, at_step=2),))), Steps()
    _run(runner, steps.next())
    with pytest.raises(error):
        _run(runner, steps.next())


def test_an_exit_is_left_to_the_process() -> None:
    codes: list[int] = []
    script = Script(faults=(Fault(kind=FaultKind.EXIT, at_step=1, exit_code=7),))
    runner = ScriptedRunner(script, leave=codes.append)
    runner.open(geometry())
    _run(runner, Steps().next())
    assert codes == [7]


def test_answers_are_distorted_where_the_script_says() -> None:
    faults = [
        Fault(kind=FaultKind.REPEATED_RESULT, at_step=1),
        Fault(kind=FaultKind.WITHHELD_RESULT, at_step=2),
        Fault(kind=FaultKind.WRONG_STEP_SEQ, at_step=3),
    ]
    runner = ScriptedRunner(Script(faults=tuple(faults)))
    answers = [StepAnswer(1, number, output=StepOutput(ints([]), None, 0)) for number in (1, 2, 3, 4)]
    given = [[answer.step_seq for answer in runner.distort(answer)] for answer in answers]
    assert given == [[1, 1], [], [4], [4]]


def test_delays_are_the_same_for_the_same_seed() -> None:
    script = Script(delay_ms=2, jitter_ms=3, jitter_seed=5)
    delays = [script.delay_s(1, step) for step in range(50)]
    assert delays == [Script(delay_ms=2, jitter_ms=3, jitter_seed=5).delay_s(1, step) for step in range(50)]
    assert all(0.002 <= delay <= 0.005 for delay in delays) and len(set(delays)) > 40


@pytest.mark.parametrize(
    "script",
    [
        {"delay": 5},
        {"faults": [{"kind": "fail"}]},
        {"faults": [{"kind": "explode", "at_step": 1}]},
        {"faults": [{"kind": "repeated_result", "request_id": "a"}]},
        {"delay_ms": -1},
    ],
)
def test_a_script_that_makes_no_sense_is_refused(script: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Script.model_validate(script)


def test_too_small_and_too_large_pools_are_refused_with_what_to_change() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        ScriptedRunner(num_blocks=1).open(geometry())
    with pytest.raises(ValueError, match="--num-blocks"):
        ScriptedRunner(num_blocks=2**20).open(geometry(block_size=4096))


def test_a_decode_step_costs_the_same_at_any_length() -> None:
    """Counted, not timed: a verified row is not looked at again unless somebody else writes into its blocks."""
    runner, steps = ScriptedRunner(num_blocks=200, max_model_len=512), Steps()
    runner.open(geometry(max_model_len=512, max_num_batched_tokens=512))
    _run(runner, steps.next({0: 400}, new=[added("a", 0, [7] * 400, range(1, 120))]))
    looked_at: list[int] = []
    original = Fingerprints.extend

    def counting(self: Fingerprints, before: int, tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        looked_at.append(len(tokens))
        return original(self, before, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fingerprints, "extend", counting)
        for _ in range(20):
            _run(runner, steps.next({0: 1}))
    assert sum(looked_at) <= BLOCK_SIZE
