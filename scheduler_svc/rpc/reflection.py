"""grpc.reflection.v1alpha with bounds: the library's servicer takes any number of streams, and each may last for
ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, cast

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

SERVICE_NAME: Final[str] = reflection.SERVICE_NAME
# Streams at once, and seconds that each may be without a request.
MAX_STREAMS: Final = 32
SILENCE_S: Final = 10.0

_LibraryServicer: Any = cast(Any, reflection).aio.ReflectionServicer


class ReflectionServicer(_LibraryServicer):  # type: ignore[misc]
    """What the given services and their messages look like. More than MAX_STREAMS at once get RESOURCE_EXHAUSTED, one
    without a request for SILENCE_S ends DEADLINE_EXCEEDED."""

    def __init__(self, services: Iterable[str]) -> None:
        super().__init__((*services, SERVICE_NAME))
        self._num_streams = 0

    async def ServerReflectionInfo(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """See grpc.reflection.v1alpha."""
        if self._num_streams >= MAX_STREAMS:
            message = f"{MAX_STREAMS} reflection streams are open, the most that are allowed; try again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._num_streams += 1
        try:
            async for response in super().ServerReflectionInfo(self._within_silence(request_iterator), context):
                yield response
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request for {SILENCE_S:g} s")
        finally:
            self._num_streams -= 1

    async def _within_silence(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        iterator = aiter(requests)
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    request = await anext(iterator)
            except StopAsyncIteration:
                return
            yield request


def serve(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Let `server` describe these services, and reflection itself."""
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(ReflectionServicer(services), server)
