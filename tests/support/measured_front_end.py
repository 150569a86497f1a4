"""A front end whose event loop is measured; see `measured_loop`.

    async with MeasuredFrontEnd(scheduler_address) as front_end:
        await front_end.assert_short_turns(work)     # a function that calls front_end.address

This file is also that process: `python -m tests.support.measured_front_end`.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Self

from scheduler_svc.config import FrontendSettings
from scheduler_svc.frontend.server import FrontEndProcess
from tests.support.measured_loop import Measured, MeasuredLoop, answer_questions, run


class MeasuredFrontEnd(Measured):
    """openai_address: HOST:PORT of the OpenAI port."""

    module = "tests.support.measured_front_end"

    def __init__(self, scheduler: str, *, max_prompt_bytes: int = 1 << 20) -> None:
        super().__init__("--scheduler", scheduler, "--max-prompt-bytes", str(max_prompt_bytes))
        self.openai_address = ""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.openai_address = await self.ask("openai")
        return self


async def _serve(loop: MeasuredLoop, settings: FrontendSettings) -> None:
    process = FrontEndProcess(settings)
    serving = asyncio.create_task(process.serve())
    await process.listening.wait()
    while process.front_end.not_ready_cause is not None:
        await asyncio.sleep(0.01)
    answer_questions(loop, address=f"127.0.0.1:{process.port}", openai=process.openai_address)
    await serving


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheduler")
    parser.add_argument("--max-prompt-bytes", type=int)
    arguments = parser.parse_args()
    settings = FrontendSettings(
        listen="127.0.0.1:0",
        openai_listen="127.0.0.1:0",
        scheduler=arguments.scheduler,
        max_prompt_bytes=arguments.max_prompt_bytes,
    )
    run(lambda loop: _serve(loop, settings))


if __name__ == "__main__":
    _main()
