"""The worker under test and a scheduler connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.scheduler_double import SchedulerDouble
from tests.support.worker_fixtures import Target, own_worker, target_at


@pytest.fixture
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    """The worker at --worker-address, else a scripted one in this process."""
    address = request.config.getoption("--worker-address", default=None)
    if address is not None:
        yield await target_at(address)
        return
    async with own_worker() as mine:
        yield mine.target


@pytest.fixture
async def scheduler(worker: Target) -> AsyncIterator[SchedulerDouble]:
    async with SchedulerDouble(worker.address) as connected:
        yield connected
