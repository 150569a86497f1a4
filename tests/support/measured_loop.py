"""A process whose event loop is measured: the CPU time that its thread uses in each turn.

It is a process of its own, so nothing but the measured part runs on the measured thread. CPU time, not time on the
clock: a busy machine changes it little.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

_PATIENCE_S = 60.0
MAX_TURN_MS = 50.0
# The CPU's clock and caches vary, other programs' use of them too, and a virtual machine counts the time that it was
# kept waiting as its own. So the best of several attempts counts, and the later ones come after a pause.
_ATTEMPTS = 8
_PAUSE_S = 0.5


class Measured:
    """The process, for the length of the `with`. address: HOST:PORT, ready to be called. A subclass names the module
    that is the process, which calls `run`, and its arguments."""

    module = ""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.address = ""

    async def reset(self) -> None:
        """Forget the turns so far."""
        await self.ask("reset")

    async def longest_turn_ms(self) -> float:
        """CPU time of the longest turn since the last reset, in milliseconds."""
        return float(await self.ask("longest"))

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

    async def ask(self, question: str) -> str:
        """What the process answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n".encode())
        async with asyncio.timeout(_PATIENCE_S):
            return (await self._process.stdout.readline()).decode().strip()

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", self.module, *self._arguments)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self.address = await self.ask("address")
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


def run(serve: Callable[[MeasuredLoop], Coroutine[Any, Any, None]]) -> None:
    """The process: serve on a measured loop."""
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, MeasuredLoop)
        runner.run(serve(loop))


def answer_questions(loop: MeasuredLoop, **facts: str) -> None:
    """Answer what `Measured.ask` asks: the facts, the longest turn, or to forget the turns so far."""

    def answer() -> None:
        question = sys.stdin.readline().strip()
        if question == "reset":
            loop.longest_ns = 0
        print({**facts, "longest": loop.longest_ns / 1e6}.get(question, ""), flush=True)

    loop.add_reader(sys.stdin.fileno(), answer)
