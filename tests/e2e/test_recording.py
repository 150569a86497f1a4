"""A recording of real processes, with preemptions, a killed worker and a scheduler killed at the end, replays."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from scheduler_svc.simulation.replay import main
from stepfence.v1 import generation_service_pb2 as pb
from tests.e2e.client import connect, generate, sampling
from tests.support.processes import Deployment, wait_until

_POOL = {"num_blocks": "13", "max_model_len": "256"}


def _request(number: int) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=[97 + (number + index) % 26 for index in range(40)])
    return pb.GenerateRequest(
        request_id=f"r{number}", token_ids=ids, sampling=sampling(max_tokens=60, seed=number, ignore_eos=True)
    )


def _replayed(path: Path, explain: str | None = None) -> tuple[int, str]:
    out = io.StringIO()
    return main(path, out=out, explain=explain), out.getvalue()


async def test_what_a_killed_scheduler_recorded_replays_byte_identical(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Deployment(tmp_path) as stepfence:
        worker = stepfence.start_worker(0, **_POOL)
        scheduler = stepfence.start_scheduler(max_num_seqs="8", record=str(path))
        stepfence.start_frontend()
        stepfence.wait_ready()
        async with connect(stepfence.frontend_address) as stub:
            streams = [asyncio.create_task(generate(stub, _request(number))) for number in range(12)]
            await asyncio.to_thread(wait_until, lambda: stepfence.status().num_running > 0, "something runs")
            worker.kill()
            stepfence.start_worker(0, **_POOL)
            told = await asyncio.gather(*streams)
        assert all(len(stream.token_ids) == 60 for stream in told)
        stepfence.wait_idle()
        scheduler.kill()
    code, text = _replayed(path)
    assert code == 0, text
    assert "the process was killed" in text
    assert "12 requests accepted, 0 refused, 12 finished" in text
    assert "1 RankLost" in text
    preempted = [stream for stream in told if stream.usage.num_preemptions]
    assert preempted
    code, text = _replayed(path, explain=preempted[0].request_id)
    assert "was preempted on" in text
    assert "resumed in step" in text
    assert f"ended, length, with 60 tokens: {preempted[0].usage.num_preemptions} preemptions" in text
