"""The cluster secret as the worker sees it: read from a file, and asked of every call of the WorkerService.

The scheduler's side has its own reading and sending of the same file (the services share no code). The secret travels
as a bearer token in the metadata of a call, in plain text without TLS.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from worker_svc.errors import NotLetIn

_KEY: Final = "authorization"
_MAX_FILE_BYTES: Final = 4096
_FORM: Final = re.compile(r"[\x21-\x7e]{16,512}")


class SecretError(Exception):
    """The file cannot be used; the text names it and says what to do."""


def read(path: Path) -> str:
    """The secret in a file: one line of 16 to 512 printable ASCII characters without spaces. Raises SecretError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise SecretError(
            f"the cluster secret {path} cannot be read ({error.strerror or error}): name the file that all parts "
            f"share; `stepfence make-secret {path}` makes one"
        ) from None
    secret = data.decode("ascii", errors="replace").strip()
    if not _FORM.fullmatch(secret):
        raise SecretError(
            f"the cluster secret {path} must hold one line of 16 to 512 printable ASCII characters without spaces; "
            "`stepfence make-secret FILE` makes such a file"
        )
    return secret


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses UNAUTHENTICATED, before the handler sees a message, calls of one service that do not carry the secret."""

    def __init__(self, secret: str, service: str) -> None:
        self._wanted = f"Bearer {secret}".encode()
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        metadata: Any = handler_call_details.invocation_metadata
        given = [value for key, value in metadata or () if key == _KEY]
        return handler if self._is_among(given) else _refusing(handler, is_wrong=bool(given))

    def _is_among(self, given: Iterable[str | bytes]) -> bool:
        # Every value is compared, each in constant time.
        found = False
        for value in given:
            data = value.encode(errors="replace") if isinstance(value, str) else value
            found |= hmac.compare_digest(data, self._wanted)
        return found


def _refusing(handler: grpc.RpcMethodHandler[Any, Any], *, is_wrong: bool) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape that ends every call."""
    refusal = NotLetIn(is_wrong=is_wrong)

    async def refuse(_: Any, context: Any) -> NoReturn:
        await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())
        raise AssertionError("abort returned")

    shapes: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return shapes[bool(handler.request_streaming), bool(handler.response_streaming)](refuse)
