"""Threads in which prompts become token ids, beside the event loop.

Prompts of about the same cost share a lane, which has one thread and a bounded queue: a short prompt never waits for a
long one, nor for a chat template.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Final, TypeVar

from scheduler_svc.frontend.errors import Code, Failure, RequestError
from scheduler_svc.frontend.limits import Limits

T = TypeVar("T")

# Seconds until a client that was refused should come again.
_RETRY_AFTER_S: Final = 1.0


class Lane(Enum):
    """What a thread does. The text names it in messages."""

    CHATS = "chats wait to be rendered"
    SHORT = "prompts wait to be tokenized"
    LONG = "long prompts wait to be tokenized"


class PromptLanes:
    """All lanes of a front end. `run` is called on the event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lanes = {lane: _Queue(lane, limits) for lane in Lane}

    def lane_for(self, num_bytes: int) -> Lane:
        """Where a prompt of this size is tokenized."""
        return Lane.SHORT if num_bytes <= self._limits.max_short_prompt_bytes else Lane.LONG

    async def run(self, lane: Lane, num_bytes: int, work: Callable[[], T]) -> T:
        """work(), in the lane's thread. num_bytes: the size of the prompt. Cancelled while it waits, it does not run.
        Raises RequestError QUEUE_FULL when too much waits already, and what work raises."""
        return await asyncio.wrap_future(self._lanes[lane].submit(num_bytes, work))

    def close(self) -> None:
        """Drop what waits. What runs goes on by itself."""
        for queue in self._lanes.values():
            queue.executor.shutdown(wait=False, cancel_futures=True)


class _Queue:
    def __init__(self, lane: Lane, limits: Limits) -> None:
        self._lane = lane
        self._limits = limits
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=f"prompts-{lane.name.lower()}")
        # Have the thread now: later, the machine may have none to give, and a call would fail for it.
        self.executor.submit(int)
        # Guards the two numbers, which count what runs, too.
        self._lock = threading.Lock()
        self._num_prompts = 0
        self._num_bytes = 0

    def submit(self, num_bytes: int, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            # A prompt that would be alone is always taken.
            if self._num_prompts >= self._limits.max_waiting_prompts or (
                self._num_prompts and self._num_bytes + num_bytes > self._limits.max_waiting_prompt_bytes
            ):
                raise RequestError(_queue_full(self._lane))
            self._num_prompts += 1
            self._num_bytes += num_bytes
        try:
            future = self.executor.submit(work)
        except BaseException:
            self._release(num_bytes)
            raise
        future.add_done_callback(lambda _: self._release(num_bytes))
        return future

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._num_prompts -= 1
            self._num_bytes -= num_bytes


def _queue_full(lane: Lane) -> Failure:
    message = f"too many {lane.value} at this front end; try again later"
    return Failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", message, retry_after_s=_RETRY_AFTER_S)
