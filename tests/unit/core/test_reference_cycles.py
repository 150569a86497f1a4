"""The core leaves no garbage that only the cycle collector would find: the process hardly ever runs it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from scheduler_svc.facts import NullRecorder
from tests.unit.journal.random_run import RandomRun, random_config


@pytest.fixture
def _collector_off() -> Iterator[None]:
    gc.collect()
    # What exists already is none of this test's business, and looking at it every time takes long.
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.usefixtures("_collector_off")
def test_the_core_makes_no_reference_cycles() -> None:
    # Preemptions, aborts, lost and draining ranks, suspects, drafts, both policies, refused answers.
    for seed in range(40):
        run = RandomRun(seed, random_config(seed), NullRecorder())
        run.run(150)
        assert gc.collect() == 0, f"seed {seed}"
        assert run.num_steps > 20
        # The scheduler itself may be one: it lives as long as its process.
        del run
        gc.collect()
