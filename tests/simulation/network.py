"""A network between simulated processes: calls of gRPC's kinds, delayed, held up and cut.

A *call* is a pair of pipes between a client's and a server's process. Within a pipe things stay in order, as in TCP;
between pipes there is no order. What can happen to calls is what happens to them in production:

  cut                 both ends learn of it, each in its own time; what was on its way arrives in part
  path blocked        nothing passes from one host to the other; after a while the keepalive of either end gives up
  process killed      the other ends are reset, or (host gone) hear nothing and give up by keepalive
  process frozen      accepts connections and data, answers nothing; the other ends give up by keepalive
  nobody listens      connection refused
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from tests.simulation.hosts import Process, SimulationLoop

# Handles one call: the method's request messages and its context go in.
Handler = Callable[[Any, "ServerContext"], Awaitable[None]]

_STEP_S: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Keepalive:
    """After how many seconds of silence each end of a call gives up."""

    client_s: float
    server_s: float


@dataclass
class Host:
    """An address, and which process listens there now."""

    name: str
    handlers: dict[str, Handler] = field(default_factory=dict)
    process: Process | None = None
    # Gone without a word: new connections hang.
    is_dark: bool = False


class Network:
    """All hosts, paths and calls."""

    def __init__(self, loop: SimulationLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        # Callbacks of the network belong to no process.
        self.context = contextvars.Context()
        self.hosts: dict[str, Host] = {}
        self.num_messages = 0
        self._calls: dict[Call, None] = {}
        self._blocked: Counter[tuple[str, str]] = Counter()
        self._slow_s: dict[tuple[str, str], float] = {}

    # --- hosts ---

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def listen(self, name: str, process: Process, handlers: dict[str, Handler]) -> None:
        """A process serves at this address from now on."""
        host = self.host(name)
        host.process, host.handlers, host.is_dark = process, handlers, False

    def call(self, process: Process, source: str, target: str, method: str, keepalive: Keepalive) -> Call:
        """Start a call; failures show when it is used."""
        self.host(target)
        return Call(self, process, source, target, method, keepalive)

    def sever(self, process: Process, *, is_told: bool) -> None:
        """The process is about to die: its ends of all calls are gone. is_told: the other ends are reset."""
        for host in self.hosts.values():
            if host.process is process:
                host.process, host.handlers, host.is_dark = None, {}, not is_told
        for call in tuple(self._calls):
            if call.client is process or call.server is process:
                call.leave("client" if call.client is process else "server", is_told=is_told)
                if not is_told:
                    self.after(call.keepalive.client_s, partial(call.give_up, "client"))
                    self.after(call.keepalive.server_s, partial(call.give_up, "server"))

    # --- faults ---

    def calls_between(self, one: str, other: str) -> list[Call]:
        return [call for call in self._calls if {call.source, call.target} == {one, other}]

    def cut(self, one: str, other: str) -> None:
        """Every call between the two is lost, at both ends."""
        for call in self.calls_between(one, other):
            call.cut()

    def block(self, source: str, target: str) -> None:
        """Nothing passes from source to target any more. Counted: as many `unblock` open it again."""
        self._blocked[source, target] += 1
        if self._blocked[source, target] == 1:
            for call in self.calls_between(source, target):
                call.expect_silence(partial(self.is_blocked, source, target))

    def unblock(self, source: str, target: str) -> None:
        self._blocked[source, target] -= 1
        if not self._blocked[source, target]:
            for call in self.calls_between(source, target):
                call.kick()

    def freeze(self, process: Process) -> None:
        """Freeze a process; those who talk to it give up in their time."""
        process.freeze()
        for call in tuple(self._calls):
            if process in (call.client, call.server):
                call.expect_silence(lambda: process.is_frozen)

    def slow_down(self, one: str, other: str, seconds: float) -> None:
        """So much more each way, from now on."""
        self._slow_s[one, other] = self._slow_s[other, one] = seconds

    # --- for calls ---

    def is_blocked(self, source: str, target: str) -> bool:
        return self._blocked[source, target] > 0

    def latency_s(self, source: str, target: str) -> float:
        return 0.0002 + self.rng.expovariate(1 / 0.0008) + self._slow_s.get((source, target), 0.0)

    def opened(self, call: Call) -> None:
        self._calls[call] = None
        for path in ((call.source, call.target), (call.target, call.source)):
            if self.is_blocked(*path):
                call.expect_silence(partial(self.is_blocked, *path))

    def closed(self, call: Call) -> None:
        self._calls.pop(call, None)

    def after(self, seconds: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_at(self.loop.time() + seconds, work, context=self.context)

    def at(self, when: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_at(when, work, context=self.context)


class Pipe:
    """One direction of a call."""

    def __init__(self, network: Network, source: str, target: str, deliver: Callable[[Any], None]) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._deliver = deliver
        self._items: deque[tuple[float, Any]] = deque()
        self._last_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, item: Any) -> None:
        network = self._network
        network.num_messages += 1
        at = max(self._last_at + _STEP_S, network.loop.time() + network.latency_s(self._source, self._target))
        self._last_at = at
        self._items.append((at, item))
        if self._timer is None:
            self.kick()

    @property
    def is_empty(self) -> bool:
        return not self._items

    def kick(self) -> None:
        """Let things move (again)."""
        if self._timer is None and self._items and not self._network.is_blocked(self._source, self._target):
            self._timer = self._network.at(max(self._items[0][0], self._network.loop.time()), self._arrive)

    def lose_some(self) -> None:
        """What is on its way arrives up to a point that chance names."""
        keep = self._network.rng.randrange(len(self._items) + 1)
        while len(self._items) > keep:
            self._items.pop()

    def _arrive(self) -> None:
        self._timer = None
        if not self._items or self._network.is_blocked(self._source, self._target):
            return
        _, item = self._items.popleft()
        self._deliver(item)
        self.kick()


# --- what travels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Start:
    pass


@dataclass(frozen=True, slots=True)
class _Data:
    data: bytes


@dataclass(frozen=True, slots=True)
class _Over:
    """The end, as the other side said it (OK, or a status), or as the transport says it."""

    error: grpc.aio.AioRpcError | None


def _error(code: grpc.StatusCode, details: str, trailing: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None)


def _transport_error(details: str) -> _Over:
    return _Over(_error(grpc.StatusCode.UNAVAILABLE, details, grpc.aio.Metadata()))


_LOST = "Stream removed (simulated)"


class Call:
    """Both ends of one call. The client's methods are `send`, `receive`, `cancel`."""

    def __init__(
        self, network: Network, client: Process, source: str, target: str, method: str, keepalive: Keepalive
    ) -> None:
        self.network = network
        self.client = client
        self.server: Process | None = None
        self.source = source
        self.target = target
        self.method = method
        self.keepalive = keepalive
        self._up = Pipe(network, source, target, self._at_server)
        self._down = Pipe(network, target, source, self._at_client)
        self._down_items: deque[_Data] = deque()
        self._down_end: _Over | None = None
        self._news = asyncio.Event()
        self._has_left = {"client": False, "server": False}
        self._requests: Requests | None = None
        self._handling: asyncio.Task[None] | None = None
        network.opened(self)
        self._up.send(_Start())

    # --- the client's end ---

    async def send(self, data: bytes) -> None:
        """Raises the AioRpcError that ended the call."""
        self._raise_if_over()
        self._up.send(_Data(data))

    async def receive(self) -> bytes | None:
        """The next message, None after the last. Raises the AioRpcError that ended the call."""
        while not self._down_items:
            if self._down_end is not None:
                self._raise_if_over()
                return None
            self._news.clear()
            await self._news.wait()
        return self._down_items.popleft().data

    def _raise_if_over(self) -> None:
        if self._down_end is not None and self._down_end.error is not None:
            raise self._down_end.error

    def cancel(self) -> None:
        """Give it up."""
        self.leave("client", is_told=True)

    # --- ends ---

    def leave(self, end: str, *, is_told: bool) -> None:
        """One end is gone. is_told: the other one will hear of it."""
        if self._has_left[end]:
            return
        self._has_left[end] = True
        if end == "client":
            if self._down_end is None:
                self._client_ends(_transport_error("gave up"))
            if is_told:
                self._up.send(_transport_error(_LOST))
        else:
            self._stop_handling()
            if is_told:
                self._down.lose_some()
                self._down.send(_transport_error(_LOST))
        self._forget_if_over()

    def give_up(self, end: str) -> None:
        """Silence for too long."""
        if end == "client" and self._down_end is None:
            self._client_ends(_transport_error("keepalive: no answer to a ping"))
        self.leave(end, is_told=True)

    def cut(self) -> None:
        """The connection broke; each end learns of it."""
        for pipe, end in ((self._up, "server"), (self._down, "client")):
            if not self._has_left[end]:
                pipe.lose_some()
                pipe.send(_transport_error(_LOST))

    def expect_silence(self, is_silent: Callable[[], bool]) -> None:
        """Nothing passes from now on; unless that changes, both ends give up in their time."""

        def judge(end: str) -> None:
            if is_silent():
                self.give_up(end)

        self.network.after(self.keepalive.client_s, partial(judge, "client"))
        self.network.after(self.keepalive.server_s, partial(judge, "server"))

    @property
    def is_quiet(self) -> bool:
        """Both ends are there, nothing is on its way, and all that came has been taken."""
        taken = not self._down_items and (self._requests is None or self._requests.is_empty)
        return taken and not any(self._has_left.values()) and self._up.is_empty and self._down.is_empty

    def kick(self) -> None:
        self._up.kick()
        self._down.kick()

    def _forget_if_over(self) -> None:
        if all(self._has_left.values()):
            self.network.closed(self)

    # --- arrivals ---

    def _at_client(self, item: _Data | _Over) -> None:
        if self._down_end is not None:
            return
        if isinstance(item, _Data):
            self._down_items.append(item)
            self._news.set()
        else:
            self._client_ends(item)
            self._has_left["client"] = True
            self._forget_if_over()

    def _client_ends(self, over: _Over) -> None:
        self._down_end = over
        self._news.set()

    def _at_server(self, item: _Start | _Data | _Over) -> None:
        if isinstance(item, _Start):
            self._arrive_at_host()
        elif self._requests is None:
            # Nobody took the call.
            pass
        elif isinstance(item, _Data):
            self._requests.put(item.data)
        elif not self._has_left["server"]:
            self._has_left["server"] = True
            self._stop_handling()
            self._forget_if_over()

    def _arrive_at_host(self) -> None:
        host = self.network.host(self.target)
        if host.process is None:
            self._has_left["server"] = True
            if not host.is_dark:
                self._down.send(_transport_error("Connection refused"))
            return
        handler = host.handlers[self.method]
        self.server = host.process
        self._requests = Requests()
        context = ServerContext(self)
        self._handling = host.process.spawn(self._handle(handler, self._requests, context), self.method)
        if host.process.is_frozen:
            process = host.process
            self.expect_silence(lambda: process.is_frozen)

    async def _handle(self, handler: Handler, requests: Requests, context: ServerContext) -> None:
        over = _Over(None)
        try:
            await handler(requests, context)
        except grpc.aio.AbortError:
            over = context.over
        if not self._has_left["server"]:
            self._has_left["server"] = True
            self._down.send(over)
            self._forget_if_over()

    def _stop_handling(self) -> None:
        if self._handling is not None:
            self._handling.cancel()

    def respond(self, data: bytes) -> None:
        """The server's end writes."""
        if not self._has_left["server"]:
            self._down.send(_Data(data))


class Requests:
    """The messages of a call, as its handler iterates over them."""

    def __init__(self) -> None:
        self.message_class: type[Message] | None = None
        self._items: deque[bytes] = deque()
        self._news = asyncio.Event()

    def put(self, data: bytes) -> None:
        self._items.append(data)
        self._news.set()

    @property
    def is_empty(self) -> bool:
        return not self._items

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            self._news.clear()
            await self._news.wait()
        assert self.message_class is not None
        return self.message_class.FromString(self._items.popleft())


class ServerContext:
    """What handlers use of grpc.aio.ServicerContext."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.over = _Over(None)

    async def write(self, message: Message) -> None:
        self._call.respond(message.SerializeToString())

    def write_bytes(self, data: bytes) -> None:
        """Whatever that is."""
        self._call.respond(data)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        self.over = _Over(_error(code, details, grpc.aio.Metadata(*trailing_metadata)))
        raise grpc.aio.AbortError

    def done(self) -> bool:
        return self._call.server is None or not self._call.server.is_alive


def streaming(method: Callable[..., Awaitable[None]], request: type[Message]) -> Handler:
    """A method that takes a stream and writes by itself."""

    async def handle(requests: Requests, context: ServerContext) -> None:
        requests.message_class = request
        await method(requests, context)

    return handle


def unary(method: Callable[..., Any], request: type[Message]) -> Handler:
    """A method with one request: it returns its response, writes by itself, or generates its responses."""

    async def handle(requests: Requests, context: ServerContext) -> None:
        requests.message_class = request
        answer = method(await anext(requests), context)
        if hasattr(answer, "__aiter__"):
            async for response in answer:
                await context.write(response)
            return
        response = await answer
        if response is not None:
            await context.write(response)

    return handle
