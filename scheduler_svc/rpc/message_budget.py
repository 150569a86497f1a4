"""A bound on the work that the messages of one call can cause before anything of them is known.

They are decoded on the event loop's thread. So their fields are counted first (`field_count.py`), and a message with
too many is refused without being decoded; and a call that takes one request gets it in time, or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any, Final, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from scheduler_svc.rpc.field_count import MAX_FIELDS, TooManyFields, Undecodable, check_num_fields

# Seconds that a call may take to bring its request.
REQUEST_TIMEOUT_S: Final = 30.0
# Calls at once whose request is still to come: each may hold as much of it as has come so far. One more takes the place
# of the one that has waited longest.
MAX_WAITING: Final = 512

_DOMAIN: Final = "stepfence"
_DETAILS_KEY: Final = "grpc-status-details-bin"


class NoRequest(Exception):
    """A call that takes one request has brought none; the text says why it was given up."""

    reason: Final = "REQUEST_EXPECTED"
    field = ""


class MessageBudget(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Decodes the messages of every call itself, after counting their fields.

    A unary request that cannot be taken ends the call INVALID_ARGUMENT, with the reason UNDECODABLE, or
    INVALID_PARAMETER and the field; one that does not come, with REQUEST_EXPECTED. On a stream, the handler gets
    Undecodable or TooManyFields from its iterator; if it lets them through, the call ends in the same way.
    """

    def __init__(
        self,
        *,
        max_fields: int = MAX_FIELDS,
        max_list_bytes: int | None = None,
        envelopes: frozenset[str] = frozenset(),
    ) -> None:
        """max_list_bytes: of a packed list of numbers; None: any number. envelopes: names of fields that only wrap a
        message; they are left out of the paths in errors."""
        self._max_fields = max_fields
        self._max_list_bytes = max_list_bytes
        self._envelopes = envelopes
        # Calls without their request, the one that has waited longest first.
        self._waiting: dict[asyncio.Timeout, None] = {}
        self._guarded: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._guarded.get(method)
        if known is None or known[0] is not handler:
            known = self._guarded[method] = (handler, self._guard(handler, method))
        return known[1]

    @property
    def num_waiting(self) -> int:
        """Calls whose one request is still to come."""
        return len(self._waiting)

    def decode(self, data: bytes, kind: Descriptor, parse: Callable[[bytes], Any]) -> Any:
        """The message in `data`. Raises Undecodable or TooManyFields."""
        check_num_fields(data, kind, self._max_fields, self._max_list_bytes)
        try:
            return parse(data)
        except DecodeError:
            raise Undecodable(f"not a {kind.full_name}") from None

    def _guard(self, handler: Any, method: str) -> Any:
        # Without a deserializer, gRPC passes bytes.
        kind = _input_type(method)
        parse = handler.request_deserializer

        def decode(data: bytes) -> Any:
            return self.decode(data, kind, parse)

        work = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        read = _each(decode) if handler.request_streaming else self._only(decode)
        guarded = self._yielding(work, read) if _yields(work) else self._returning(work, read)
        # For gRPC every call is one with a stream of requests: it hands the others to their handler only once the
        # request has come, waits for it without end, and never ends a call whose client has finished without one.
        make: Any = grpc.stream_unary_rpc_method_handler
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler
        return make(guarded, None, handler.response_serializer)

    def _only(self, decode: Callable[[bytes], Any]) -> Callable[[AsyncIterator[bytes]], Awaitable[Any]]:
        async def read(requests: AsyncIterator[bytes]) -> Any:
            return decode(await self._request(requests))

        return read

    async def _request(self, requests: AsyncIterator[bytes]) -> bytes:
        """The one request of a call. Raises NoRequest."""
        loop = asyncio.get_running_loop()
        patience = asyncio.timeout(REQUEST_TIMEOUT_S)
        try:
            async with patience:
                if len(self._waiting) >= MAX_WAITING:
                    longest = next(iter(self._waiting))
                    del self._waiting[longest]
                    longest.reschedule(loop.time())
                self._waiting[patience] = None
                return await anext(aiter(requests))
        except TimeoutError:
            if patience in self._waiting:
                raise NoRequest(f"no request came within {REQUEST_TIMEOUT_S:g} s") from None
            raise NoRequest("no request came, and newer calls needed the place") from None
        except StopAsyncIteration:
            raise NoRequest("the call ended without a request") from None
        finally:
            self._waiting.pop(patience, None)

    def _returning(self, work: Callable[..., Awaitable[Any]], read: Callable[[Any], Any]) -> Callable[..., Any]:
        async def call(requests: Any, context: Any) -> Any:
            try:
                return await work(await _resolved(read(requests)), context)
            except (Undecodable, TooManyFields, NoRequest) as error:
                await self._refuse(context, error)

        return call

    def _yielding(self, work: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
        async def call(requests: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async with contextlib.aclosing(work(await _resolved(read(requests)), context)) as responses:
                    async for response in responses:
                        yield response
            except (Undecodable, TooManyFields, NoRequest) as error:
                await self._refuse(context, error)

        return call

    async def _refuse(self, context: Any, error: Undecodable | TooManyFields | NoRequest) -> NoReturn:
        message = str(error)
        status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=message)
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN))
        if error.field:
            bad_request = error_details_pb2.BadRequest()
            path = ".".join(part for part in error.field.split(".") if part not in self._envelopes)
            bad_request.field_violations.add(field=path, description=message)
            status.details.add().Pack(bad_request)
        details = ((_DETAILS_KEY, status.SerializeToString()),)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message, details)
        raise AssertionError("abort returned")


def _each(decode: Callable[[bytes], Any]) -> Callable[[AsyncIterator[bytes]], AsyncIterator[Any]]:
    async def decoded(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield decode(data)

    return decoded


async def _resolved(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _yields(work: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(work)


@cache
def _input_type(method: str) -> Descriptor:
    """Type of the requests of "/package.Service/Method"."""
    service, _, name = method.removeprefix("/").partition("/")
    found = cast(Any, descriptor_pool.Default()).FindServiceByName(service).methods_by_name[name]
    return cast(Descriptor, found.input_type)
