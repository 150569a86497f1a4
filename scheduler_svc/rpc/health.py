"""grpc.health.v1 without anything that a watcher could hold up.

grpcio-health-checking's servicer writes to a watcher while it holds the lock that its `set` needs: a client that does
not read then freezes what all others see, and the process that waits for `set`. Here `set` only notes the status.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NoReturn, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Each may hold a connection and some kilobytes for ever.
MAX_WATCHERS: Final = 100
# Longer than the name of any service.
_MAX_NAME_CHARS: Final = 256

# A write on a call that is over. The stubs do not know it.
_GRPC_ERROR: Final[type[Exception]] = cast(Any, grpc.aio).BaseError
_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The services that were `set`, and "" for the process, which is SERVING from the start.

    Watch sends the status when it begins and after every change. A watcher that does not read misses what lay between,
    and hears the status that holds when it reads again. More than max_watchers at once get RESOURCE_EXHAUSTED.
    """

    def __init__(self, max_watchers: int = MAX_WATCHERS) -> None:
        self._max_watchers = max_watchers
        self._statuses: dict[str, int] = {"": _Status.SERVING}
        # One for each watcher, set when any status has changed.
        self._changes: set[asyncio.Event] = set()

    def set(self, service: str, *, is_serving: bool) -> None:
        """State whether a service is SERVING or NOT_SERVING. Waits for nothing; call it on the event loop."""
        self._statuses[service] = _Status.SERVING if is_serving else _Status.NOT_SERVING
        for changed in self._changes:
            changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """See grpc.health.v1: NOT_FOUND for a service that was never set."""
        status = self._statuses.get(request.service)
        if status is None:
            await _abort(context, grpc.StatusCode.NOT_FOUND, "no such service")
        return _Status(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:
        """See grpc.health.v1."""
        statuses = {name: _Status(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    # It writes instead of yielding, so that the end of the call is noticed where it waits.
    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """See grpc.health.v1: SERVICE_UNKNOWN while a service was not set."""
        service = request.service
        if len(service) > _MAX_NAME_CHARS:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"a name has at most {_MAX_NAME_CHARS} characters")
        if len(self._changes) >= self._max_watchers:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers; Check is always answered")
        changed = asyncio.Event()
        self._changes.add(changed)
        try:
            sent = None
            while True:
                changed.clear()
                status = self._statuses.get(service, _Status.SERVICE_UNKNOWN)
                if status != sent:
                    await context.write(_Status(status=status))
                    sent = status
                await changed.wait()
        except _GRPC_ERROR:
            # The watcher is gone.
            return
        finally:
            self._changes.discard(changed)


async def _abort(context: Any, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort returned")
