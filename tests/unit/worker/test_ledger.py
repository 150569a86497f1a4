"""The ledger refuses what the runner must never see, and nothing that a right scheduler sends."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.worker.builders import BLOCK_SIZE, Steps, added, capabilities, geometry, ints
from worker_svc.errors import MalformedStep, StepRefused
from worker_svc.ledger import DraftedRows, Ledger
from worker_svc.sampling import Sampling
from worker_svc.step import AddedRequest, StepOutput

_NUM_BLOCKS = 40


def _ledger(**changes: int) -> Ledger:
    return Ledger(geometry(**changes), _NUM_BLOCKS, capabilities())


def _refused(ledger: Ledger, steps: Steps, reason: str, **step: object) -> None:
    with pytest.raises((StepRefused, MalformedStep)) as caught:
        ledger.apply(steps.next(**step))  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_prefill_in_chunks_then_decode_one_at_a_time() -> None:
    ledger, steps = _ledger(), Steps()
    ledger.apply(steps.next({0: 4}, new=[added("a", 0, range(9), [1, 2, 3])]))
    ledger.apply(steps.next({0: 5}))
    ledger.apply(steps.next({0: 1}))
    _refused(ledger, steps, "BEYOND_KNOWN", rows={0: 2})


def test_a_prefill_chunk_never_exceeds_what_is_known() -> None:
    ledger, steps = _ledger(), Steps()
    _refused(ledger, steps, "BEYOND_KNOWN", rows={0: 10}, new=[added("a", 0, range(9), [1, 2, 3])])


def test_a_decoding_row_needs_a_slot_for_its_token() -> None:
    ledger, steps = _ledger(), Steps()
    ledger.apply(steps.next({0: 8}, new=[added("a", 0, range(8), [1, 2])]))
    _refused(ledger, steps, "TABLE_TOO_SMALL", rows={0: 1})


def test_an_appended_block_is_there_for_the_same_step() -> None:
    ledger, steps = _ledger(), Steps()
    ledger.apply(steps.next({0: 8}, new=[added("a", 0, range(8), [1, 2])]))
    ledger.apply(steps.next({0: 1}, appended=[(0, 3)]))


def test_tables_never_grow_beyond_the_longest_sequence() -> None:
    ledger, steps = _ledger(max_model_len=10), Steps()
    _refused(ledger, steps, "TABLE_TOO_LONG", new=[added("a", 0, range(8), [1, 2, 3, 4])])
    ledger, steps = _ledger(max_model_len=10), Steps()
    _refused(ledger, steps, "TABLE_TOO_LONG", new=[added("a", 0, range(8), [1, 2, 3])], appended=[(0, 4)])


def test_two_requests_may_swap_rows_in_one_step() -> None:
    ledger, steps = _ledger(), Steps()
    ledger.apply(steps.next(new=[added("a", 0, range(3), [1]), added("b", 1, range(3), [2])]))
    ledger.apply(steps.next({0: 3, 1: 3}, new=[added("a", 1, range(3), [1]), added("b", 0, range(3), [2])]))
    assert ledger.num_rows_held == 2


def test_blocks_may_be_shared_between_rows() -> None:
    ledger, steps = _ledger(), Steps()
    new = [added("a", 0, range(6), [1, 2]), added("b", 1, range(6), [1, 3], num_computed=4)]
    ledger.apply(steps.next({0: 6, 1: 2}, new=new))


def test_drafts_count_as_accepted_until_they_are_judged() -> None:
    ledger, steps = _ledger(), Steps()
    ledger.apply(steps.next({0: 4}, new=[added("a", 0, range(4), [1, 2])]))
    drafted = ledger.apply(steps.next({0: 3}, drafts={0: [65, 66]}))
    assert drafted is not None
    # 7 of 8 slots may be taken by now: one token more fits, two do not.
    _refused(ledger, steps, "TABLE_TOO_SMALL", rows={0: 2}, drafts={0: [65]})


def test_rejected_drafts_give_their_slots_back() -> None:
    ledger, steps = _ledger(), Steps()
    ledger.apply(steps.next({0: 4}, new=[added("a", 0, range(4), [1, 2])]))
    drafted = ledger.apply(steps.next({0: 3}, drafts={0: [65, 66]}))
    assert drafted is not None
    ledger.settle(drafted, StepOutput(ints([70]), None, 1))
    ledger.apply(steps.next({0: 3}, drafts={0: [65, 66]}))
    _refused(ledger, steps, "TABLE_TOO_SMALL", rows={0: 2}, drafts={0: [65]})


def test_a_late_judgement_does_not_touch_the_rows_next_occupant() -> None:
    ledger, steps = _ledger(), Steps()
    ledger.apply(steps.next({0: 4}, new=[added("a", 0, range(4), [1, 2])]))
    drafted = ledger.apply(steps.next({0: 3}, drafts={0: [65, 66]}))
    assert drafted is not None
    ledger.apply(steps.next({0: 8}, dropped=["a"], new=[added("b", 0, range(8), [1, 2])]))
    ledger.settle(drafted, StepOutput(ints([70]), None, 1))
    _refused(ledger, steps, "TABLE_TOO_SMALL", rows={0: 1})


@pytest.mark.parametrize("counts", [ints([]), ints([1]), ints([1, 99]), ints([-5, -5])])
def test_an_output_that_does_not_fit_its_step_cannot_break_the_ledger(counts: object) -> None:
    ledger, steps = _ledger(), Steps()
    new = [added("a", 0, range(4), [1, 2]), added("b", 1, range(4), [3, 4])]
    ledger.apply(steps.next({0: 4, 1: 4}, new=new))
    drafted = ledger.apply(steps.next({0: 1, 1: 3}, drafts={1: [65, 66]}))
    assert drafted is not None
    ledger.settle(drafted, StepOutput(ints([70]), counts, 2))  # type: ignore[arg-type]
    ledger.apply(steps.next({0: 1, 1: 1}))


def test_drafts_of_sampled_rows_need_a_runner_that_verifies_them() -> None:
    ledger = Ledger(geometry(), _NUM_BLOCKS, capabilities(verifies_sampled_drafts=False))
    steps = Steps()
    new = [added("a", 0, range(4), [1, 2], sampling=Sampling(temperature=1.0)), added("b", 1, range(4), [3, 4])]
    ledger.apply(steps.next({0: 4, 1: 4}, new=new))
    ledger.apply(steps.next({0: 1, 1: 2}, drafts={1: [65]}))
    _refused(ledger, steps, "DRAFTS_NOT_VERIFIED", rows={0: 2, 1: 1}, drafts={0: [65]})


def test_drafts_only_behind_everything_that_is_known() -> None:
    ledger, steps = _ledger(), Steps()
    _refused(ledger, steps, "DRAFTS_IN_PREFILL", rows={0: 3}, new=[added("a", 0, range(6), [1, 2])], drafts={0: [65]})


@dataclass(slots=True)
class _Request:
    """What a scheduler believes of one of its requests; drafts count as accepted until their result comes."""

    name: str
    known: int
    computed: int
    blocks: list[int]


class _RightScheduler:
    """Keeps every rule, otherwise does as it likes: admits, computes, drafts, preempts, in chunks of any size."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._num_named = 0
        self.rows: dict[int, _Request] = {}
        self.dropped: list[str] = []
        self.new: list[AddedRequest] = []
        self.appended: list[tuple[int, int]] = []
        self.computing: dict[int, int] = {}
        self.drafts: dict[int, list[int]] = {}

    def plan(self) -> None:
        self.dropped, self.new, self.appended, self.computing, self.drafts = [], [], [], {}, {}
        for row in [row for row in self.rows if self._draw.random() < 0.1]:
            self.dropped.append(self.rows.pop(row).name)
        for row in range(8):
            if row not in self.rows and self._draw.random() < 0.3:
                self._admit(row)
        for row, request in self.rows.items():
            if self._draw.random() < 0.7:
                self._compute(row, request)

    def _admit(self, row: int) -> None:
        self._num_named += 1
        length = self._draw.randint(1, 20)
        hit = self._draw.randrange(length) // BLOCK_SIZE * BLOCK_SIZE
        blocks = self._draw.sample(range(1, _NUM_BLOCKS), -(-length // BLOCK_SIZE))
        self.rows[row] = _Request(f"r{self._num_named}", length, hit, blocks)
        self.new.append(added(f"r{self._num_named}", row, [7] * length, blocks, num_computed=hit))

    def _compute(self, row: int, request: _Request) -> None:
        unseen = request.known - request.computed
        count = self._draw.randint(1, unseen)
        num_drafts = self._draw.randint(0, 3) if count == unseen else 0
        end = request.computed + count + num_drafts
        if end > 64 or sum(self.computing.values()) + count + num_drafts > 64:
            return
        while len(request.blocks) * BLOCK_SIZE < end:
            block = self._draw.choice([block for block in range(1, _NUM_BLOCKS) if block not in request.blocks])
            request.blocks.append(block)
            self.appended.append((row, block))
        self.computing[row] = count + num_drafts
        self.drafts[row] = [65] * num_drafts
        request.computed = end
        if count == unseen:
            request.known = end + 1


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step whose result is still to come."""

    drafted: DraftedRows | None
    requests: list[_Request]
    num_drafts: list[int]

    def settle(self, ledger: Ledger, draw: random.Random) -> None:
        accepted = [draw.randint(0, count) for count in self.num_drafts]
        for request, count, good in zip(self.requests, self.num_drafts, accepted, strict=True):
            request.known -= count - good
            request.computed -= count - good
        if self.drafted is not None:
            counts = ints([1 + good for good in accepted])
            ledger.settle(self.drafted, StepOutput(ints([]), counts, 0))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_scheduler_that_keeps_the_rules_is_never_refused(seed: int, depth: int) -> None:
    draw = random.Random(seed)
    ledger, steps, scheduler = _ledger(max_inflight_steps=depth), Steps(), _RightScheduler(draw)
    in_flight: list[_Sent] = []
    for _ in range(60):
        scheduler.plan()
        drafts = scheduler.drafts if any(scheduler.drafts.values()) else None
        step = steps.next(
            scheduler.computing,
            new=scheduler.new,
            dropped=scheduler.dropped,
            appended=scheduler.appended,
            drafts=drafts,
        )
        requests = [scheduler.rows[row] for row in scheduler.computing]
        counts = [len(scheduler.drafts[row]) for row in scheduler.computing]
        in_flight.append(_Sent(ledger.apply(step), requests, counts))
        while len(in_flight) > draw.randrange(depth + 1):
            in_flight.pop(0).settle(ledger, draw)
        assert ledger.num_rows_held == len(scheduler.rows)
        for row, request in scheduler.rows.items():
            assert ledger.bounds(row) == (request.known, request.computed)
