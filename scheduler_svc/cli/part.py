"""One child process of `stepfence up`: started, its log lines passed on, ended gently and then not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

# A log line longer than this is passed on in pieces.
_MAX_LINE_BYTES: Final = 1 << 20


def tethered(command: Sequence[str]) -> list[str]:
    """The same command, as one that ends when this process ends, however that happens."""
    return [sys.executable, "-m", "scheduler_svc.cli.tether", str(os.getpid()), *command]


class Part:
    """A child process with a name. Starts in a session of its own, so that a Ctrl-C at the terminal reaches only `up`,
    which ends its parts in order. `show` gets its name and each of its lines; without it, the part writes where `up`
    writes (a progress bar needs the terminal)."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        show: Callable[[str, str], None] | None,
    ) -> None:
        self.name = name
        self._command = tethered(command)
        self._environment = environment
        self._show = show
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        # Held while a process is being made, so that `end` does not miss one.
        self._starting = asyncio.Lock()
        self._is_ended = False

    async def start(self) -> bool:
        """Start it, or start it again after its end. False: `end` was called, so it is not started any more."""
        async with self._starting:
            if self._is_ended:
                return False
            await self._start()
            return True

    async def _start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if self._show is None else asyncio.subprocess.PIPE,
            stderr=None if self._show is None else asyncio.subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        self._process = process
        if self._show is not None and process.stdout is not None:
            self._reader = asyncio.create_task(self._pass_on(process.stdout, self._show))

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return None if self._process is None else self._process.returncode

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def wait(self) -> int:
        """Wait for its end, all its output passed on; the value is the exit code."""
        assert self._process is not None
        code = await self._process.wait()
        if self._reader is not None:
            # A grandchild may hold the pipe open: do not wait for that.
            await asyncio.wait({self._reader}, timeout=0.5)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended; SIGKILL also to whatever it has started."""
        if self._process is None or self._process.returncode is not None:
            return
        if number is signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    async def end(self, patience_s: float) -> int | None:
        """SIGTERM, then SIGKILL after `patience_s`; it cannot be started again. The value is the exit code, None when
        there was nothing to end: it never started, or had ended already."""
        async with self._starting:
            self._is_ended = True
        if self._process is None or self._process.returncode is not None:
            return None
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), patience_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.wait()

    async def _pass_on(self, stream: asyncio.StreamReader, show: Callable[[str, str], None]) -> None:
        while True:
            try:
                line = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as ended:
                if ended.partial:
                    show(self.name, ended.partial.decode(errors="replace"))
                return
            except asyncio.LimitOverrunError as overrun:
                line = await stream.readexactly(overrun.consumed)
            show(self.name, line.decode(errors="replace").rstrip("\r\n"))
