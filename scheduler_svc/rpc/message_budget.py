"""A bound on the work that one incoming message can cause before anything of it is known.

protobuf builds every field of a message in one go, on the event loop's thread: 4 MiB of empty chat messages are two
million objects and 70 ms. So the fields are counted first, in the encoded bytes, and a message with too many is refused
without being decoded. A packed list and a text are one field each, whatever their size: those are cheap to decode.
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
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

# Counting so many takes 7 ms, decoding them 2 ms, where 4 MiB of text decode in 6 ms.
MAX_FIELDS: Final = 16_384

# Seconds that a call may take to bring its request.
REQUEST_TIMEOUT_S: Final = 30.0
# Calls at once whose request is still to come: each may hold as much of it as has come so far. One more takes the place
# of the one that has waited longest.
MAX_WAITING: Final = 512

_DOMAIN: Final = "stepfence"
_DETAILS_KEY: Final = "grpc-status-details-bin"
# The least a field takes: its tag and its value.
_MIN_FIELD_BYTES: Final = 2
_MAX_VARINT_BYTES: Final = 10
_VARINT, _FIXED64, _LENGTH_DELIMITED, _START_GROUP, _END_GROUP, _FIXED32 = range(6)


class Undecodable(DecodeError):
    """The bytes are no message of the type that is expected; the text says which."""

    reason: Final = "UNDECODABLE"
    field = ""


class TooManyFields(DecodeError):
    """The message has more fields than anything legal needs.

    field: path of the field at which the count ended, e.g. "chat.messages".
    """

    reason: Final = "INVALID_PARAMETER"

    def __init__(self, field: str, max_fields: int) -> None:
        super().__init__(f"{field}: a message has at most {max_fields} fields, a packed list counting as one")
        self.field = field


def check_num_fields(data: bytes, kind: Descriptor, max_fields: int = MAX_FIELDS) -> None:
    """Count the fields of an encoded message of type `kind`, those of messages within it included. Takes time for
    max_fields at most. Raises TooManyFields, or Undecodable for bytes that no decoder would take."""
    if len(data) <= max_fields * _MIN_FIELD_BYTES:
        return
    try:
        _count(data, kind, max_fields)
    except IndexError:
        raise Undecodable(f"not a {kind.full_name}: it ends within a field") from None


def _count(data: bytes, kind: Descriptor, max_fields: int) -> None:
    left = max_fields
    position, end, fields = 0, len(data), _fields(kind)
    # The messages around the one that is read: where each ends, its fields, and its name in the one around it.
    around: list[tuple[int, dict[int, FieldDescriptor], str]] = []
    while True:
        while position == end:
            if not around:
                return
            end, fields, _ = around.pop()
        tag, position = _varint(data, position)
        field = fields.get(tag >> 3)
        left -= 1
        if left < 0:
            name = f"field {tag >> 3}" if field is None else field.name
            raise TooManyFields(".".join((*(outer for _, _, outer in around), name)), max_fields)
        start, after = _value(data, position, tag & 7)
        if after > end:
            raise Undecodable(f"not a {kind.full_name}: a field is longer than its message")
        position = after
        if field is not None and field.message_type is not None and tag & 7 == _LENGTH_DELIMITED and start < after:
            around.append((end, fields, field.name))
            position, end, fields = start, after, _fields(field.message_type)


def _value(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Where the value of a field begins, behind its length if it has one, and where it ends."""
    if wire_type == _VARINT:
        return position, _varint(data, position)[1]
    if wire_type == _LENGTH_DELIMITED:
        length, start = _varint(data, position)
        return start, start + length
    if wire_type == _FIXED64:
        return position, position + 8
    if wire_type == _FIXED32:
        return position, position + 4
    if wire_type in (_START_GROUP, _END_GROUP):
        # What lies between the two is counted as if it stood here: never less than there is.
        return position, position
    raise Undecodable(f"wire type {wire_type} does not exist")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    value = byte & 0x7F
    for index in range(1, _MAX_VARINT_BYTES):
        byte = data[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise Undecodable("a number has more than ten bytes")


@cache
def _fields(kind: Descriptor) -> dict[int, FieldDescriptor]:
    return dict(kind.fields_by_number.items())


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

    def __init__(self, *, max_fields: int = MAX_FIELDS, envelopes: frozenset[str] = frozenset()) -> None:
        """envelopes: names of fields that only wrap a message; they are left out of the paths in errors."""
        self._max_fields = max_fields
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
        check_num_fields(data, kind, self._max_fields)
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
