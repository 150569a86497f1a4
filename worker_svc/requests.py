"""Calls with one request, as far as the request itself goes: it comes in time, and it can be decoded.

gRPC hands such a call to its handler only once the request has come. It waits for it without end, never ends a call
whose client has finished without one, and writes a traceback to the log for bytes that are no message. So these calls
are taken as calls with a stream of requests, of which the first is read here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from worker_svc.errors import BadRequest, ContractError

# Seconds that a call may take to bring its request.
REQUEST_TIMEOUT_S: Final = 30.0
# Calls at once whose request is still to come: each may hold as much of it as has come so far. One more takes the place
# of the one that has waited longest.
MAX_WAITING: Final = 128

_EXPECTED: Final = "REQUEST_EXPECTED"


class RequestReader(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Reads and decodes the request of every call that has one. What cannot be taken ends the call INVALID_ARGUMENT,
    with the reason UNDECODABLE or, when nothing comes, REQUEST_EXPECTED. Calls with a stream of requests stay as they
    are."""

    def __init__(self) -> None:
        # Calls without their request, the one that has waited longest first.
        self._waiting: dict[asyncio.Timeout, None] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        work, parse = handler.unary_stream or handler.unary_unary, handler.request_deserializer

        async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
            try:
                request = await self._request(requests, parse)
            except ContractError as error:
                await _refuse(context, error)
            return await work(request, context)

        make: Any = grpc.stream_unary_rpc_method_handler
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler
        return make(call, None, handler.response_serializer)

    async def _request(self, requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> Any:
        """The one request of a call. Raises BadRequest."""
        loop = asyncio.get_running_loop()
        patience = asyncio.timeout(REQUEST_TIMEOUT_S)
        try:
            async with patience:
                if len(self._waiting) >= MAX_WAITING:
                    longest = next(iter(self._waiting))
                    del self._waiting[longest]
                    longest.reschedule(loop.time())
                self._waiting[patience] = None
                return parse(await anext(aiter(requests)))
        except TimeoutError:
            if patience in self._waiting:
                raise BadRequest(_EXPECTED, f"no request came within {REQUEST_TIMEOUT_S:g} s") from None
            raise BadRequest(_EXPECTED, "no request came, and newer calls needed the place") from None
        except StopAsyncIteration:
            raise BadRequest(_EXPECTED, "the call ended without a request") from None
        except DecodeError:
            raise BadRequest("UNDECODABLE", "the request is no message of this call") from None
        finally:
            self._waiting.pop(patience, None)


async def _refuse(context: Any, error: ContractError) -> NoReturn:
    await context.abort(error.code, error.message, error.trailing_metadata())
    raise AssertionError("abort returned")
