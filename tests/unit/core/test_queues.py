"""Lanes and the waiting queue: orders under both policies, and that removing is cheap and complete."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from scheduler_svc.core.events import RequestArrived
from scheduler_svc.core.kv.prefix_index import HashChain
from scheduler_svc.core.policies.fcfs import FcfsLane, FcfsQueue
from scheduler_svc.core.policies.priority import PriorityLane, PriorityQueue
from scheduler_svc.core.policies.queue import WaitingQueue
from scheduler_svc.core.request import Limits, Request, block
from scheduler_svc.core.resources.grammar import GRAMMAR_NOT_READY

_SEQUENCE = iter(range(1 << 30))


def request(
    name: str, *, priority: int = 0, arrival: float | None = None, grammar: bool = False, n: int = 3
) -> Request:
    sequence = next(_SEQUENCE)
    event = RequestArrived(
        name, sequence, array("i", range(n)), max_tokens=4, priority=priority, arrival=arrival, awaits_grammar=grammar
    )
    made = Request(event, Limits(4, 0, n + 4, n + 3), sequence=sequence, now=0.0, chain=HashChain(4, "", enabled=True))
    if grammar:
        block(made, GRAMMAR_NOT_READY)
    return made


def names(requests: Any) -> list[str]:
    return [r.request_id for r in requests]


def drained(queue: WaitingQueue) -> list[str]:
    order = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        order.append(head.request_id)
    return order


def test_fcfs_keeps_the_order_of_entering_whatever_the_time_of_arrival() -> None:
    lane = FcfsLane()
    for name, arrival in (("a", 9.0), ("b", 1.0), ("c", 5.0)):
        lane.append(request(name, arrival=arrival))
    assert names(lane) == ["a", "b", "c"] and len(lane) == 3
    head = lane.head()
    assert head is not None and head.request_id == "a"
    lane.remove(next(r for r in lane if r.request_id == "b"))
    assert names(lane) == ["a", "c"]


def test_fcfs_puts_back_in_the_order_given() -> None:
    lane = FcfsLane()
    a, b, c = (request(name) for name in "abc")
    lane.append(c)
    lane.put_back([a, b])
    assert names(lane) == ["a", "b", "c"]
    assert FcfsLane().head() is None


def test_priority_orders_by_priority_then_arrival_then_id() -> None:
    lane = PriorityLane()
    entries = [("d", 1, 5.0), ("c", 0, 9.0), ("b", 1, 5.0), ("a", 1, 2.0), ("e", 0, 8.0)]
    for name, priority, arrival in entries:
        lane.append(request(name, priority=priority, arrival=arrival))
    assert names(lane) == ["e", "c", "a", "b", "d"]


def test_entries_that_left_do_not_come_back_and_do_not_pile_up() -> None:
    lane = PriorityLane()
    requests = [request(f"r{i}", priority=i % 5) for i in range(1000)]
    for r in requests:
        lane.append(r)
    for r in requests[:990]:
        lane.remove(r)
    assert len(lane) == 10 and set(names(lane)) == {f"r{i}" for i in range(990, 1000)}
    assert len(lane._heap) <= 2 * 10 + 65
    again = requests[0]
    lane.append(again)
    lane.remove(again)
    lane.append(again)
    head = lane.head()
    assert head is again and names(lane).count("r0") == 1


@pytest.mark.parametrize("seed", range(10))
def test_the_lazy_heap_against_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    lane = PriorityLane()
    inside: list[Request] = []
    outside = [request(f"r{i}", priority=rng.randrange(3), arrival=float(rng.randrange(4))) for i in range(30)]
    for _ in range(600):
        if outside and rng.random() < 0.5:
            r = outside.pop(rng.randrange(len(outside)))
            lane.put_back([r]) if rng.random() < 0.5 else lane.append(r)
            inside.append(r)
        elif inside:
            r = inside.pop(rng.randrange(len(inside)))
            lane.remove(r)
            outside.append(r)
        order = sorted(inside, key=lambda r: (r.priority, r.arrival, r.request_id, r.sequence))
        assert list(lane) == order and len(lane) == len(inside)
        assert lane.head() is (order[0] if order else None)


def test_blocked_requests_start_in_the_skipped_lane() -> None:
    queue = FcfsQueue()
    queue.append(request("plain"))
    queue.append(request("blocked", grammar=True))
    assert (names(queue.waiting), names(queue.skipped)) == (["plain"], ["blocked"])
    assert names(queue) == ["blocked", "plain"] and len(queue) == 2


def test_fcfs_serves_the_skipped_lane_first() -> None:
    queue = FcfsQueue()
    a, b, c, d = (request(name) for name in "abcd")
    for r in (a, b, c):
        queue.append(r)
    for r in (a, b):
        queue.remove(r)
    queue.put_aside([a, b])
    queue.prepend(d)
    assert (names(queue.skipped), names(queue.waiting)) == (["a", "b"], ["d", "c"])
    assert drained(queue) == ["a", "b", "d", "c"]


def test_who_is_put_aside_again_stays_ahead_of_those_behind() -> None:
    """A pass that ended at the first of the skipped lane: it keeps its place, and who was met after it comes next."""
    queue = FcfsQueue()
    a, b, c = (request(name) for name in "abc")
    for r in (a, b, c):
        queue.append(r)
    for r in (a, b):
        queue.remove(r)
    queue.put_aside([a, b])
    queue.remove(a)
    queue.put_aside([a])
    assert names(queue.skipped) == ["a", "b"]
    queue.remove(a)
    queue.remove(c)
    queue.put_aside([a, c])
    assert names(queue.skipped) == ["a", "c", "b"]


def test_priority_serves_whichever_head_is_smaller() -> None:
    queue = PriorityQueue()
    skipped = [request("s1", priority=1, arrival=1.0), request("s3", priority=3, arrival=0.0)]
    for r in skipped:
        queue.append(r)
        queue.remove(r)
    queue.put_aside(skipped)
    for name, priority in (("w2", 2), ("w0", 0)):
        queue.append(request(name, priority=priority))
    queue.append(request("w1", priority=1, arrival=2.0))
    assert drained(queue) == ["w0", "s1", "w1", "w2", "s3"]


def test_prompt_tokens_are_counted_as_requests_come_and_go() -> None:
    queue = FcfsQueue()
    a, b = request("a", n=5), request("b", n=7)
    queue.append(a)
    queue.append(b)
    assert queue.num_prompt_tokens == 12
    queue.remove(a)
    queue.put_aside([a])
    assert queue.num_prompt_tokens == 12 and a.ticket.skipped and not b.ticket.skipped
    queue.remove(a)
    queue.remove(b)
    assert queue.num_prompt_tokens == 0 and not a.ticket.skipped
