"""New requests wait after a start while front ends come back, and for no other reason."""

from __future__ import annotations

import asyncio

from scheduler_svc.start_gate import StartGate
from tests.support.virtual_time import run_virtually as run


async def passed_after(gate: StartGate) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(10):
        await gate.passed()
    return round(loop.time() - began, 3)


def attach(gate: StartGate, session: int, *, again: bool) -> None:
    gate.attached(session, again=again, now=asyncio.get_running_loop().time())


def test_a_deployment_that_starts_afresh_waits_for_nothing() -> None:
    async def scenario() -> None:
        gate = StartGate()
        attach(gate, 1, again=False)
        attach(gate, 2, again=False)
        assert await passed_after(gate) == 0

    run(scenario())


def test_with_one_that_comes_back_a_second_is_waited_for_others() -> None:
    async def scenario() -> None:
        gate = StartGate()
        attach(gate, 1, again=False)
        await asyncio.sleep(0.2)
        attach(gate, 2, again=True)
        gate.done(2)
        assert await passed_after(gate) == 0.8
        assert await passed_after(gate) == 0

    run(scenario())


def test_one_that_has_not_submitted_everything_is_waited_for_and_two_seconds_at_most() -> None:
    async def scenario() -> None:
        gate = StartGate()
        attach(gate, 1, again=True)
        assert await passed_after(gate) == 2.0

    run(scenario())


def test_it_opens_as_soon_as_the_last_one_is_done_or_has_left() -> None:
    async def scenario() -> None:
        gate = StartGate()
        attach(gate, 1, again=True)
        attach(gate, 2, again=True)
        waiting = asyncio.create_task(passed_after(gate))
        await asyncio.sleep(1.3)
        gate.done(1)
        gate.done(1)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        gate.done(2)
        assert await waiting == 1.5

    run(scenario())


def test_one_that_comes_later_is_not_waited_for() -> None:
    async def scenario() -> None:
        gate = StartGate()
        attach(gate, 1, again=False)
        await asyncio.sleep(1.1)
        attach(gate, 2, again=True)
        assert await passed_after(gate) == 0

    run(scenario())
