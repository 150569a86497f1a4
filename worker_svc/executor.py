"""The thread that drives the runner. It is fed from a bounded queue and waits for nothing else: neither for the event
loop nor for anybody to read an answer.

A runner that launches ahead gets a second thread that collects, so that step N+1 is on its way while N's tokens are
awaited. Everything the runner hands out goes back to the event loop by call_soon_threadsafe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from worker_svc.codec import TokenizerFiles
from worker_svc.epoch import Epoch
from worker_svc.errors import InternalFault, MalformedOpen, NotReady
from worker_svc.limits import MAX_STAGED_COMMANDS
from worker_svc.runner.base import DeviceFailed, Launched, Runner
from worker_svc.step import FailureKind, Step, StepAnswer

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_MESSAGE_CHARS: Final = 1000


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner that is ready to be opened, and what its model brought for front ends."""

    runner: Runner
    tokenizer: TokenizerFiles


@dataclass(frozen=True, slots=True)
class _InFlight:
    epoch: Epoch
    step: Step
    launched: Launched
    received_at_ns: int
    launched_at_ns: int


class Executor:
    """Owns the runner's thread. Public methods are called from the event loop.

    `on_answer` gets one answer for every submitted step of an epoch that is not over, in order, on the event loop.
    After an answer with a failure nothing more comes for that epoch.

    Where there are no threads (a simulation), a subclass replaces `start`, `stop`, `_enqueue` and `_post`; what is done
    to the runner and to epochs stays. `clock_ns` measures what answers say about times.
    """

    def __init__(
        self,
        load: Callable[[], Runner],
        on_answer: Callable[[Epoch, StepAnswer], None],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._load: Final = load
        self._on_answer: Final = on_answer
        self._clock_ns: Final = clock_ns
        self._commands: Final[queue.Queue[Callable[[], None] | None]] = queue.Queue(MAX_STAGED_COMMANDS)
        self._uncollected: Final[queue.Queue[_InFlight | None]] = queue.Queue()
        self._thread: Final = threading.Thread(target=self._run, name="step-executor", daemon=True)
        self._collector: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: Loaded | None = None
        # When the last step ended; by the thread that collects, or by the other one while nothing is left to collect.
        self._last_end_ns = 0
        self._is_stopping = False

    async def start(self) -> Loaded:
        """Start the thread and load the model in it. Raises whatever loading raises."""
        self._loop = asyncio.get_running_loop()
        done: asyncio.Future[Loaded] = self._loop.create_future()
        self._commands.put_nowait(lambda: self._resolve(done, self._load_now))
        self._thread.start()
        return await done

    def open(self, epoch: Epoch) -> asyncio.Future[int]:
        """Give the runner to this epoch; the future gets num_blocks, or the ContractError or DeviceFailed to report."""
        assert self._loop is not None
        done: asyncio.Future[int] = self._loop.create_future()
        self._enqueue(lambda: self._resolve(done, lambda: self._open_now(epoch)))
        return done

    def submit(self, epoch: Epoch, step: Step) -> None:
        """Stage a step that was accepted. Raises NotReady when the queue is full, which a window cannot cause."""
        received_at_ns = self._clock_ns()
        self._enqueue(lambda: self._launch(epoch, step, received_at_ns))

    def stop(self, timeout_s: float) -> bool:
        """Let the threads end and the runner close; False when the runner was still busy after `timeout_s`."""
        self._is_stopping = True
        # Wakes the thread when it waits; with a full queue it does not.
        with contextlib.suppress(queue.Full):
            self._commands.put_nowait(None)
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _enqueue(self, command: Callable[[], None]) -> None:
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            raise NotReady("BUSY", "the runner does not get on; too many commands are staged") from None

    # --- below: the executor thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while (command := self._commands.get()) is not None and not self._is_stopping:
            command()
        if self._collector is not None:
            self._uncollected.put(None)
            self._collector.join()
        if self._loaded is not None:
            self._loaded.runner.close()

    def _load_now(self) -> Loaded:
        runner = self._load()
        self._loaded = Loaded(runner, tuple(runner.tokenizer_files()))
        if runner.capabilities.launches_ahead:
            self._collector = threading.Thread(target=self._collect_all, name="step-collector", daemon=True)
            self._collector.start()
        return self._loaded

    def _open_now(self, epoch: Epoch) -> int:
        # Steps of the epoch before may still be on the device.
        self._uncollected.join()
        if epoch.is_over or self._loaded is None:
            raise NotReady("SUPERSEDED", "a newer open came meanwhile")
        try:
            return self._loaded.runner.open(epoch.geometry)
        except ValueError as error:
            raise MalformedOpen("GEOMETRY", str(error)) from error
        except DeviceFailed:
            raise
        except Exception as error:
            log.exception("the runner could not open an epoch", extra={"epoch": epoch.number})
            raise InternalFault from error

    def _launch(self, epoch: Epoch, step: Step, received_at_ns: int) -> None:
        if epoch.is_over or self._loaded is None:
            return
        launched_at_ns = self._clock_ns()
        try:
            launched = self._loaded.runner.launch(step)
        except Exception as error:
            # Earlier steps answer first.
            self._uncollected.join()
            self._fail(epoch, step, error, received_at_ns, launched_at_ns)
            return
        item = _InFlight(epoch, step, launched, received_at_ns, launched_at_ns)
        if self._collector is None:
            self._collect(item)
        else:
            self._uncollected.put(item)

    def _collect_all(self) -> None:
        while (item := self._uncollected.get()) is not None:
            self._collect(item)
            self._uncollected.task_done()

    def _collect(self, item: _InFlight) -> None:
        try:
            output = item.launched.collect()
        except Exception as error:
            self._fail(item.epoch, item.step, error, item.received_at_ns, item.launched_at_ns)
            return
        staged_us, executed_us = self._times(item.received_at_ns, item.launched_at_ns)
        if item.epoch.is_over:
            return
        answer = StepAnswer(
            epoch=item.step.epoch,
            step_seq=item.step.step_seq,
            output=output,
            staged_us=staged_us,
            executed_us=executed_us,
        )
        self._post(lambda: self._on_answer(item.epoch, answer))

    def _times(self, received_at_ns: int, launched_at_ns: int) -> tuple[int, int]:
        """Of the step that has just ended, in microseconds: from its receipt to the start of its execution, and the
        execution itself. Steps run one after the other, so one that was launched ahead starts when the one before it
        has ended."""
        now_ns = self._clock_ns()
        started_at_ns = max(launched_at_ns, self._last_end_ns)
        self._last_end_ns = now_ns
        return (started_at_ns - received_at_ns) // 1000, (now_ns - started_at_ns) // 1000

    def _fail(self, epoch: Epoch, step: Step, error: Exception, received_at_ns: int, launched_at_ns: int) -> None:
        staged_us, executed_us = self._times(received_at_ns, launched_at_ns)
        if epoch.is_over and not isinstance(error, DeviceFailed):
            return
        kind = FailureKind.DEVICE if isinstance(error, DeviceFailed) else FailureKind.EXECUTION
        log.error(
            "step failed",
            exc_info=error,
            extra={"epoch": step.epoch, "step_seq": step.step_seq, "kind": kind.value},
        )
        # At once, so that later steps already staged are not executed (rule 8).
        epoch.fail(step.step_seq)
        answer = StepAnswer(
            epoch=step.epoch,
            step_seq=step.step_seq,
            failure=kind,
            message=f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS],
            staged_us=staged_us,
            executed_us=executed_us,
        )
        self._post(lambda: self._on_answer(epoch, answer))

    def _resolve(self, done: asyncio.Future[T], work: Callable[[], T]) -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            self._post(lambda: None if done.done() else done.set_exception(failure))
        else:
            self._post(lambda: None if done.done() else done.set_result(result))

    def _post(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody waits any more.
            log.debug("an answer came after the event loop had closed")
