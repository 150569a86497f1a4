"""A call that hears nothing for a minute, while its client pings every five seconds."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import grpc.aio
import pytest

from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc as pb_grpc
from tests.e2e.client import sampling
from tests.support.processes import Deployment
from worker_svc.runner.scripted import complete
from worker_svc.sampling import Sampling

_PINGS = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_f59_a_unary_call_that_is_silent_for_a_minute_survives_pings(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.start_worker(script=json.dumps({"delay_ms": 16_000.0}))
        deployment.start_scheduler(step_watchdog_s="60", first_steps_watchdog_s="60")
        deployment.start_frontend()
        await asyncio.to_thread(deployment.wait_ready)
        async with grpc.aio.insecure_channel(deployment.frontend_address, options=_PINGS) as channel:
            began = time.monotonic()
            request = pb.GenerateRequest(text="silence", sampling=sampling(max_tokens=4))
            answer = await pb_grpc.GenerationServiceStub(channel).Complete(
                pb.CompleteRequest(request=request), timeout=240
            )
        assert time.monotonic() - began >= 60.0
        assert list(answer.token_ids) == complete(list(b"silence"), 4, Sampling())
