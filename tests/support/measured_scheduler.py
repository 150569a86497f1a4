"""A scheduler whose event loop is measured; see `measured_loop`.

    async with MeasuredScheduler(worker_address) as scheduler:
        await scheduler.assert_short_turns(work)     # a function that calls scheduler.address

This file is also that process: `python -m tests.support.measured_scheduler`.
"""

from __future__ import annotations

import argparse
import asyncio

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.server import SchedulerProcess
from tests.support.measured_loop import Measured, MeasuredLoop, answer_questions, run


class MeasuredScheduler(Measured):
    """With its worker up."""

    module = "tests.support.measured_scheduler"

    def __init__(self, worker: str) -> None:
        super().__init__("--worker", worker)


async def _serve(loop: MeasuredLoop, settings: SchedulerSettings) -> None:
    process = SchedulerProcess(settings)
    serving = asyncio.create_task(process.serve(owns_process=False))
    await process.started.wait()
    while process.service is None or not process.service.is_ready:
        await asyncio.sleep(0.01)
    answer_questions(loop, address=f"127.0.0.1:{process.port}")
    await serving


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    arguments = parser.parse_args()
    settings = SchedulerSettings(listen="127.0.0.1:0", worker=(arguments.worker,), metrics_listen=None)
    run(lambda loop: _serve(loop, settings))


if __name__ == "__main__":
    _main()
