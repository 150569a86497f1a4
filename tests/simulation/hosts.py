"""Processes on one virtual clock, each of which can be frozen and killed like a real one.

Everything a process does happens in callbacks that carry its context. So the loop knows whose turn it is: callbacks of
a frozen process are kept until it goes on, as those of a stopped process are, and come in the same order then.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.virtual_time import VirtualTimeLoop

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process | None:
    """Whose callback is running."""
    return _PROCESS.get()


class Process:
    """One life of a process. What it can be told from outside (sockets, signals) is the network's business."""

    def __init__(self, loop: SimulationLoop, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self._loop = loop
        self._context = contextvars.Context()
        self._context.run(_PROCESS.set, self)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._waiting: list[_Turn] = []

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Run something in this process."""
        return self._loop.create_task(work, name=name or self.name, context=self._context.copy())

    def freeze(self) -> None:
        """As SIGSTOP: nothing runs here, timers included; time goes on."""
        self.is_frozen = True

    def thaw(self) -> None:
        """As SIGCONT."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            self._loop.run_soon(turn)

    def kill(self) -> None:
        """As SIGKILL; it must have been cut off from the network before. (Its tasks still unwind, where nobody sees
        it.)"""
        self.is_alive = False
        self.thaw()
        for task in tuple(self._tasks):
            task.cancel()

    @property
    def num_tasks(self) -> int:
        """Tasks that have not ended: a measure of leaks."""
        return sum(not task.done() for task in self._tasks)

    def owns(self, task: asyncio.Task[Any]) -> None:
        """A task of this process was made."""
        if len(self._tasks) > 256:
            self._tasks = {each: None for each in self._tasks if not each.done()}
        self._tasks[task] = None

    def wait(self, turn: _Turn) -> None:
        """A callback came due while it is frozen."""
        self._waiting.append(turn)


class _Turn:
    """A callback of a process."""

    __slots__ = ("_arguments", "_callback", "handle", "process")

    def __init__(self, process: Process, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.process = process
        self.handle: asyncio.Handle | None = None
        self._callback = callback
        self._arguments = arguments

    def __call__(self) -> None:
        if self.process.is_frozen:
            self.process.wait(self)
            return
        # It may have been cancelled while it waited.
        if self.handle is not None and self.handle.cancelled():
            return
        self.handle = None
        self._callback(*self._arguments)


class SimulationLoop(VirtualTimeLoop):
    """The clock and the processes on it. What fails unnoticed goes to `failures`."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._note)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Any = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, context=context)
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is not None:
            process.owns(task)
        return task

    def _note(self, loop: asyncio.AbstractEventLoop, facts: dict[str, Any]) -> None:
        self.failures.append(f"{facts.get('message')}: {facts.get('exception')!r}")

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        turn = _Turn(process, callback, args)
        turn.handle = super().call_soon(turn, context=context)
        return turn.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        turn = _Turn(process, callback, args)
        timer = super().call_at(when, turn, context=context)
        turn.handle = timer
        return timer

    def run_soon(self, turn: _Turn) -> None:
        """A callback that waited for its process to go on; it still counts as cancelled when its handle is."""
        assert turn.handle is not None
        super().call_soon(turn, context=turn.handle._context)  # type: ignore[attr-defined]
