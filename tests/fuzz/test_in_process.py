"""Malformed input, in process: decoders and servicers take it or refuse it, and go on. `make fuzz` feeds a million
frames; every test run a part of that."""

from __future__ import annotations

import gc
import time
import tracemalloc
from typing import Final

import pytest

from tests.fuzz.decoders import decoders
from tests.fuzz.servicers import SCENARIOS, run_scenario

# Frames of each decoder; of each scenario. The long forms add up to a million.
_DECODER_FORMS = [
    pytest.param(5_000, id="short"),
    pytest.param(150_000, id="long", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]
_SERVICER_FORMS = [
    pytest.param(1_000, id="short"),
    pytest.param(20_000, id="long", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]
# What may stay after thousands of frames: caches, and what tracemalloc itself counts. A kilobyte a frame would be more.
_MAX_GROWTH_BYTES: Final = 1_000_000
# CPU time of one frame of a few hundred bytes; beyond it something runs on and on.
_MAX_FRAME_S: Final = 2.0


@pytest.mark.parametrize("num_frames", _DECODER_FORMS)
@pytest.mark.parametrize("name", decoders(0))
def test_a_decoder_takes_or_refuses_any_frame(name: str, num_frames: int) -> None:
    mutator, feed = decoders(20_261_130)[name]
    longest = 0.0
    gc.collect()
    tracemalloc.start()
    try:
        before = 0
        for number in range(num_frames):
            if number == num_frames // 5:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
            frame = mutator.next()
            began = time.process_time()
            try:
                feed(frame)
            except Exception as error:
                error.add_note(f"frame {number}: {frame!r}")
                raise
            longest = max(longest, time.process_time() - began)
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth < _MAX_GROWTH_BYTES
    assert longest < _MAX_FRAME_S


@pytest.mark.parametrize("num_frames", _SERVICER_FORMS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_service_goes_on_whatever_its_peer_says(name: str, num_frames: int) -> None:
    run_scenario(name, seed=20_261_130, num_frames=num_frames)
