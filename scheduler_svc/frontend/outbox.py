"""Frames that wait to be sent to the scheduler."""

from __future__ import annotations

import asyncio
from collections import deque

from scheduler_svc.frontend.limits import Limits
from stepfence.v1 import session_service_pb2
from stepfence.v1.session_service_pb2 import AttachRequest


class Outbox:
    """Frames to send. The scheduler takes the parts of a frame in the order of its fields, so a frame is closed when
    something is put in that must not overtake what is already there."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._frames: deque[AttachRequest] = deque()
        self._num_bytes = 0
        self._frame_bytes = 0
        self.filled = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def full(self) -> bool:
        return self._num_bytes >= self._limits.max_outbox_bytes

    def put_submit(self, submit: session_service_pb2.Submit) -> None:
        size = submit.ByteSize()
        last = self._frames[-1] if self._frames else None
        if (
            last is None
            or last.cancels
            or last.text_ended
            or last.resubmits_done
            or len(last.submits) >= self._limits.max_frame_items
            or self._frame_bytes + size > self._limits.max_frame_bytes
        ):
            last = self._open()
        last.submits.append(submit)
        self._frame_bytes += size
        self._num_bytes += size
        if self.full:
            self._has_room.clear()
        self.filled.set()

    def put_resubmits_done(self) -> None:
        """Every request of an earlier stream is in a frame by now."""
        last = self._frames[-1] if self._frames else self._open()
        last.resubmits_done = True
        self.filled.set()

    async def room(self) -> None:
        """Wait until it is not full."""
        await self._has_room.wait()

    def put_cancel(self, cancel: session_service_pb2.Cancel) -> None:
        last = self._frames[-1] if self._frames else None
        if last is None or last.text_ended or len(last.cancels) >= self._limits.max_frame_items:
            last = self._open()
        last.cancels.append(cancel)
        self.filled.set()

    def put_text_ended(self, text_ended: session_service_pb2.TextEnded) -> None:
        last = self._frames[-1] if self._frames else None
        if last is None or len(last.text_ended) >= self._limits.max_frame_items:
            last = self._open()
        last.text_ended.append(text_ended)
        self.filled.set()

    def nudge(self) -> None:
        """Have a frame sent although there is nothing to put into it."""
        self.filled.set()

    def take(self) -> AttachRequest | None:
        if not self._frames:
            self.filled.clear()
            return None
        frame = self._frames.popleft()
        self._num_bytes -= sum(submit.ByteSize() for submit in frame.submits)
        if not self.full:
            self._has_room.set()
        if not self._frames:
            self.filled.clear()
        return frame

    def clear(self) -> None:
        self._frames.clear()
        self._num_bytes = 0
        self._has_room.set()
        self.filled.clear()

    def _open(self) -> AttachRequest:
        frame = AttachRequest()
        self._frames.append(frame)
        self._frame_bytes = 0
        return frame
