"""A scheduler whose event loop is measured, as `measured_front_end` does it for front ends.

async with MeasuredScheduler(worker_address) as scheduler:
    await scheduler.assert_short_turns(work)     # a function that calls scheduler.address
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.server import SchedulerProcess
from tests.support.measured_front_end import MeasuredFrontEnd, MeasuredLoop


class MeasuredScheduler(MeasuredFrontEnd):
    """The process, for the length of the `with`. address: HOST:PORT, with its worker up."""

    module = "tests.support.measured_scheduler"

    def __init__(self, worker: str) -> None:
        super().__init__("")
        self._arguments = ("--worker", worker)


async def _serve(loop: MeasuredLoop, settings: SchedulerSettings) -> None:
    process = SchedulerProcess(settings)
    serving = asyncio.create_task(process.serve(owns_process=False))
    await process.started.wait()
    while process.service is None or not process.service.is_ready:
        await asyncio.sleep(0.01)

    def answer() -> None:
        question = sys.stdin.readline().strip()
        if question == "reset":
            loop.longest_ns = 0
        answers: dict[str, Any] = {"address": f"127.0.0.1:{process.port}", "longest": loop.longest_ns / 1e6}
        print(answers.get(question, ""), flush=True)

    loop.add_reader(sys.stdin.fileno(), answer)
    await serving


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    arguments = parser.parse_args()
    settings = SchedulerSettings(listen="127.0.0.1:0", worker=(arguments.worker,), metrics_listen=None)
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, MeasuredLoop)
        runner.run(_serve(loop, settings))


if __name__ == "__main__":
    _main()
