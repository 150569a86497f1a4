"""Every client channel and every server of this side is made here: what they share stands in one place.

Channels go straight to their address: a proxy that the environment names (http_proxy) would otherwise see, and perhaps
refuse, what the parts send each other. A test refuses channels that are made elsewhere.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from scheduler_svc.rpc import descriptors, status
from scheduler_svc.rpc.cluster_secret import ClusterSecret, carries_any
from scheduler_svc.rpc.message_budget import MessageBudget
from scheduler_svc.rpc.tls import Tls

log = logging.getLogger(__name__)

Options = tuple[tuple[str, int], ...]

MAX_MESSAGE_BYTES: Final = 16 << 20

# Connections at each address a server listens on; those beyond it are closed as soon as they are accepted.
CONNECTION_LIMIT: Final = "grpc.max_allowed_incoming_connections"
# Streams that one connection may have at once. Without a bound, a client that opens streams and resets them at once
# makes a server hold as many calls as it can send.
STREAM_LIMIT: Final = "grpc.max_concurrent_streams"
# Of the scheduler's port: a front end needs three.
MAX_STREAMS: Final = 1024
_MAX_PENDING: Final = 16_384
_RECEIVE_LIMIT: Final = "grpc.max_receive_message_length"

SERVER_OPTIONS: Final[Options] = (
    # A second process that listens on the same port fails to bind.
    ("grpc.so_reuseport", 0),
    (_RECEIVE_LIMIT, MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # Calls that have come and that no handler has taken up yet. From 1,000 of them on gRPC drops calls by chance, and
    # all from 3,000 on, also those that wait for longer than 30 s, CANCELLED without a reason. Handlers refuse what is
    # too much with a reason, so none is dropped before; each takes some 12 KB until then.
    ("grpc.server.max_pending_requests", _MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
    ("grpc.server_max_unrequested_time_in_server", 3_600),
    # A connection that does not begin to speak HTTP/2 is closed after so long.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Clients may ping while their call is silent, as often as they like.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # Notices clients that are gone without a word.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)

# The scheduler's channel to one worker. It has a connection of its own: gRPC would share one, and its back-off, between
# channels to the same address. The pings find a peer that is gone without a word, also while no step is under way; a
# worker whose process stands still does not answer them either, and is then out of reach.
TO_WORKER: Final[Options] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    # Without it a ping without an answer counts for a minute, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    # This client dials again itself, with a new channel.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)

# A front end's channel to its scheduler.
TO_SCHEDULER: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # gRPC's own waiting between attempts must not be longer than ours.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 400),
    # A scheduler that was started anew may have another address behind the same name; gRPC would look again after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    # A scheduler whose host vanished sends nothing, not even the end of the connection.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Other channels of this process do not share its connections and their waiting.
    ("grpc.use_local_subchannel_pool", 1),
)

# The command line's channel: texts up to the largest message a server takes.
FROM_COMMAND_LINE: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

_DIRECT: Final[Options] = (("grpc.enable_http_proxy", 0),)


# --- client channels ------------------------------------------------------------------------------------------------


def channel(address: str, options: Options = (), tls: Tls | None = None) -> grpc.aio.Channel:
    """An asyncio channel to HOST:PORT, never through a proxy; in plain text without `tls`."""
    options = (*options, *_DIRECT)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials, names = tls.channel_credentials()
    return grpc.aio.secure_channel(address, credentials, options=(*options, *names))


def blocking_channel(
    target: str, options: Options = FROM_COMMAND_LINE, *, use_proxy: bool = False, tls: Tls | None = None
) -> grpc.Channel:
    """A channel for commands; in plain text without `tls`. use_proxy: through the proxy that the environment names, if
    any."""
    options = options if use_proxy else (*options, *_DIRECT)
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    credentials, names = tls.channel_credentials()
    return grpc.secure_channel(target, credentials, options=(*options, *names))


# --- servers --------------------------------------------------------------------------------------------------------


def server(
    listen: str,
    *,
    secret: ClusterSecret | None = None,
    guarded: Sequence[str] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_streams: int = MAX_STREAMS,
    budget: MessageBudget | None = None,
) -> grpc.aio.Server:
    """An asyncio server for HOST:PORT (`listen` binds it). It closes new connections when it has as many as descriptors
    allow. Calls of the `guarded` services (full names) must carry `secret`, when there is one. Messages have at most
    `max_message_bytes`, on the wire and again when they are decompressed, and are decoded within the `budget` (None:
    the usual one). A connection has at most `max_streams` calls at once; its client keeps others back."""
    interceptors: list[grpc.aio.ServerInterceptor] = [MessageBudget() if budget is None else budget]  # type: ignore[type-arg]
    if secret is not None:
        interceptors.insert(0, _Guard(secret, guarded))
    options = [(name, max_message_bytes if name == _RECEIVE_LIMIT else value) for name, value in SERVER_OPTIONS]
    options.append((STREAM_LIMIT, max_streams))
    options.append((CONNECTION_LIMIT, descriptors.max_connections(listen)))
    return grpc.aio.server(interceptors=interceptors, options=options)


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses UNAUTHENTICATED, before the handler sees a message, what does not carry the cluster secret."""

    def __init__(self, secret: ClusterSecret, services: Sequence[str]) -> None:
        self._secret = secret
        self._prefixes = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        metadata: Any = handler_call_details.invocation_metadata
        method: Any = handler_call_details.method
        if handler is None or not method.startswith(self._prefixes) or self._secret.is_in(metadata):
            return handler
        return _refusing(handler, status.WRONG_SECRET if carries_any(metadata) else status.NO_SECRET)


def _refusing(handler: grpc.RpcMethodHandler[Any, Any], refusal: status.Refusal) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape that ends every call with the refusal."""

    async def refuse(_: Any, context: Any) -> NoReturn:
        await status.abort(context, refusal)

    shapes: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return shapes[bool(handler.request_streaming), bool(handler.response_streaming)](refuse)


# --- listening ------------------------------------------------------------------------------------------------------


def listen(server: grpc.aio.Server, address: str, tls: Tls | None = None) -> int:
    """Let `server` listen on HOST:PORT; the real port. In plain text without `tls`. Raises OSError whose text is the
    system's reason."""
    # Asked first: gRPC gives the reason only in a line of its own on stderr.
    cause = _bind_error(address)
    if cause is None:
        try:
            if tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, tls.server_credentials())
            if port:
                return port
        except RuntimeError as error:
            cause = str(error)
    raise OSError(cause or "taken, or not of this machine")


def _bind_error(address: str) -> str | None:
    """Why HOST:PORT cannot be listened on, in the system's words; None when it can."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    cause = "no address"
    try:
        # A machine without IPv6 listens on 0.0.0.0 instead.
        hosts = (host, "0.0.0.0") if host == "::" else (host,)
        found = [info for name in hosts for info in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)]
    except OSError as error:
        return error.strerror or str(error)
    for family, kind, _, _, where in found:
        try:
            with socket.socket(family, kind) as probe:
                # As servers do: a port whose last connections linger may be used again.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                return None
        except OSError as error:
            cause = error.strerror or str(error)
    return cause


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def warn_when_exposed(address: str, danger: str | None) -> None:
    """Log a warning when other machines can reach HOST:PORT. danger: what that means there, and what to do; None:
    nothing to warn of."""
    if danger is not None and not is_loopback(address.rpartition(":")[0]):
        log.warning("reachable from other machines: %s", danger, extra={"address": address})


def parts_danger(*, has_secret: bool, has_tls: bool) -> str | None:
    """What `warn_when_exposed` says about a port between the parts; None: nothing."""
    if has_tls:
        # Only programs with a certificate of the deployment's authority get in.
        return None
    return GUARDED if has_secret else UNGUARDED


def clients_danger(*, has_tokens: bool, has_tls: bool) -> str | None:
    """What `warn_when_exposed` says about a port for clients; None: nothing."""
    if not has_tokens:
        return TLS_WITHOUT_TOKENS if has_tls else OPEN_TO_CLIENTS
    return None if has_tls else TOKENS_WITHOUT_TLS


GUARDED: Final = (
    "calls must carry the cluster secret, which travels unencrypted: set --tls-dir for all parts, or keep the port "
    "inside a trusted network"
)
UNGUARDED: Final = (
    "anyone who reaches the port can take the service over: set --cluster-secret-file and --tls-dir for all parts, and "
    "keep the port inside a trusted network"
)
TOKENS_WITHOUT_TLS: Final = (
    "without TLS: tokens of clients travel in plain text; set --client-tls-dir, or keep the port inside a trusted "
    "network"
)
TLS_WITHOUT_TOKENS: Final = "clients are not authenticated: set --client-tokens-file"
OPEN_TO_CLIENTS: Final = "without TLS or authentication of clients: keep the port inside a trusted network"
