"""A front end whose event loop is measured: the CPU time that its thread uses in each turn.

    async with MeasuredFrontEnd(scheduler_address) as front_end:
        await front_end.assert_short_turns(work)     # a function that calls front_end.address

It is a process of its own, so nothing but the front end runs on the measured thread. CPU time, not time on the clock:
a busy machine does not change it. This file is also that process: `python -m tests.support.measured_front_end`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from scheduler_svc.config import FrontendSettings
from scheduler_svc.frontend.server import FrontEndProcess

_PATIENCE_S = 60.0
MAX_TURN_MS = 50.0
# The CPU's clock and caches vary, other programs' use of them too, and a virtual machine counts the time that it was
# kept waiting as its own. So the best of several attempts counts, and the later ones come after a pause.
_ATTEMPTS = 8
_PAUSE_S = 0.5


class MeasuredFrontEnd:
    """The process, for the length of the `with`. address: HOST:PORT, ready to be called."""

    module = "tests.support.measured_front_end"

    def __init__(self, scheduler: str, *, max_prompt_bytes: int = 1 << 20) -> None:
        self._arguments: tuple[str, ...] = ("--scheduler", scheduler, "--max-prompt-bytes", str(max_prompt_bytes))
        self.address = ""
        # HOST:PORT of the OpenAI port.
        self.openai_address = ""

    async def reset(self) -> None:
        """Forget the turns so far."""
        await self._ask("reset")

    async def longest_turn_ms(self) -> float:
        """CPU time of the longest turn since the last reset, in milliseconds."""
        return float(await self._ask("longest"))

    async def assert_short_turns(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, again if need be; no turn of the loop may then have taken MAX_TURN_MS of CPU time."""
        turns: list[float] = []
        for attempt in range(_ATTEMPTS):
            await asyncio.sleep(_PAUSE_S * attempt)
            await self.reset()
            await work()
            turns.append(await self.longest_turn_ms())
            if turns[-1] < MAX_TURN_MS:
                break
        print(f"{min(turns):.1f} ms")
        assert min(turns) < MAX_TURN_MS, turns

    async def _ask(self, question: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n".encode())
        async with asyncio.timeout(_PATIENCE_S):
            return (await self._process.stdout.readline()).decode().strip()

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", self.module, *self._arguments)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self.address = await self._ask("address")
        self.openai_address = await self._ask("openai")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Waiting for events takes no CPU time, so what a turn uses is the work of its callbacks."""

    longest_ns = 0

    def _run_once(self) -> None:
        before = time.thread_time_ns()
        super()._run_once()  # type: ignore[misc]
        self.longest_ns = max(self.longest_ns, time.thread_time_ns() - before)


async def _serve(loop: MeasuredLoop, settings: FrontendSettings) -> None:
    process = FrontEndProcess(settings)
    serving = asyncio.create_task(process.serve())
    await process.listening.wait()
    while process.front_end.not_ready_cause is not None:
        await asyncio.sleep(0.01)

    def answer() -> None:
        question = sys.stdin.readline().strip()
        if question == "reset":
            loop.longest_ns = 0
        answers: dict[str, Any] = {"address": f"127.0.0.1:{process.port}", "longest": loop.longest_ns / 1e6}
        answers["openai"] = process.openai_address
        print(answers.get(question, ""), flush=True)

    loop.add_reader(sys.stdin.fileno(), answer)
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
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, MeasuredLoop)
        runner.run(_serve(loop, settings))


if __name__ == "__main__":
    _main()
