"""The ASGI application: routes, bodies, and one request from its first byte to its last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Final, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler_svc.frontend.callers import Callers
from scheduler_svc.frontend.calls import Accepted, Finished, GenerateCall
from scheduler_svc.frontend.containment import is_containable
from scheduler_svc.frontend.engine import FrontEnd
from scheduler_svc.frontend.errors import INTERNAL, RequestError, quoted
from scheduler_svc.frontend.gate import CallGate
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.openai import answers, requests
from scheduler_svc.frontend.openai.choices import Choices, Event, started
from scheduler_svc.frontend.openai.requests import Wanted
from scheduler_svc.frontend.prompt_lanes import PromptLanes
from scheduler_svc.frontend.resolve import check_model

# Seconds for the whole body, and between two signs of life of a stream.
BODY_TIMEOUT_S: Final = 30.0
KEEP_ALIVE_S: Final = 15.0

_AMBIGUOUS_LENGTH: Final = "AMBIGUOUS_LENGTH"

T = TypeVar("T")
Read = Callable[[bytes, Limits], Wanted]

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has closed its connection; it gets no answer."""


class Refused(Exception):
    """An error of HTTP itself, and the answer to it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.problem = answers.problem(status, reason, message)


def application(front_end: FrontEnd, callers: Callers, gate: CallGate, lanes: PromptLanes) -> ASGIApp:
    """What the HTTP server calls. lanes: where long bodies are read."""
    door = Door(front_end, callers, gate, lanes)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", door.endpoint(requests.read_chat, answers.CHAT), methods=["POST"]),
            Route("/v1/completions", door.endpoint(requests.read_completion, answers.COMPLETION), methods=["POST"]),
            Route("/v1/models", door.models, methods=["GET"]),
            Route("/v1/models/{name:path}", door.model, methods=["GET"]),
            Route("/health", door.health, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _not_here},
    )
    # /v1/models/ is not another spelling of /v1/models: a redirect would lose the body of a POST.
    app.router.redirect_slashes = False
    return _Unambiguous(app)


class _Unambiguous:
    """Refuses, for every path, requests whose body a proxy may see end elsewhere: what follows it would be another
    request here and part of the body there, or the other way round."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            message = "send Content-Length or, with HTTP/1.1, Transfer-Encoding: chunked, and not both"
            await _Client(receive, send).fail(answers.problem(400, _AMBIGUOUS_LENGTH, message))
            return
        await self._app(scope, receive, send)


class Door:
    """The endpoints. An endpoint is an ASGI application of its own, since it writes parts of an answer and looks after
    its client meanwhile."""

    def __init__(self, front_end: FrontEnd, callers: Callers, gate: CallGate, lanes: PromptLanes) -> None:
        self._front_end = front_end
        self._callers = callers
        self._gate = gate
        self._lanes = lanes
        self._limits = front_end.limits

    # --- what is served ---

    async def models(self, request: Request) -> Response:
        try:
            self._callers.caller(request.headers.items())
            model = self._front_end.model
            data = [self._model_json(name) for name in (model.name, *model.other_names)]
            return _response(200, {"object": "list", "data": data})
        except RequestError as error:
            return _problem_response(answers.problem_of(error, {}))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            self._callers.caller(request.headers.items())
            check_model(GenerateCall(None, model=name), self._front_end.model)
            return _response(200, self._model_json(name))
        except RequestError as error:
            return _problem_response(answers.problem_of(error, {}))

    def _model_json(self, name: str) -> answers.Json:
        length = self._front_end.model.max_model_len
        return {"id": name, "object": "model", "created": 0, "owned_by": "stepfence", "max_model_len": length}

    async def health(self, _: Request) -> Response:
        cause = self._front_end.not_ready_cause
        return _response(200, {"status": "ready"}) if cause is None else _response(503, {"status": cause})

    # --- generation ---

    def endpoint(self, read: Read, kind: answers.Kind) -> ASGIApp:
        """An endpoint that reads bodies with `read` and answers in this kind."""
        return _Endpoint(self, read, kind)

    async def serve(self, scope: Scope, client: _Client, read: Read, kind: answers.Kind) -> None:
        """One request from its head to the end of its answer."""
        names: dict[str, str] = {}
        try:
            await self._answer(scope, client, read, kind, names)
        except ClientGone:
            return
        except Refused as refused:
            await client.fail(refused.problem)
        except RequestError as error:
            await client.fail(answers.problem_of(error, names))
        except BaseException as error:
            if not is_containable(error):
                raise
            log.exception("call failed")
            await client.fail(answers.problem_of(RequestError(INTERNAL), {}))

    async def _answer(
        self, scope: Scope, client: _Client, read: Read, kind: answers.Kind, names: dict[str, str]
    ) -> None:
        request = Request(scope)
        # Strangers take no place from others.
        caller = self._callers.caller(request.headers.items())
        with self._front_end.stream(), contextlib.ExitStack() as gates:
            peer = _peer(scope)
            gates.enter_context(self._gate.call(peer))
            body = await self._body(request, client)
            wanted = await self._read(read, body)
            del body
            names.update(wanted.names)
            for _ in wanted.calls[1:]:
                gates.enter_context(self._gate.call(peer))
            calls = [replace(call, tenant=caller.tenant, api="openai") for call in wanted.calls]
            async with started(self._front_end, calls) as choices, client.watched(choices):
                # By the name that the client used, as it may look for that one.
                model = calls[0].model or self._front_end.model.name
                answer = answers.Answer(kind, choices.request_id, model, len(calls))
                if wanted.is_stream:
                    await self._stream(client, choices, answer, with_usage=wanted.with_usage)
                else:
                    await self._whole(client, choices, answer)

    async def _stream(self, client: _Client, choices: Choices, answer: answers.Answer, *, with_usage: bool) -> None:
        # The head goes out with the first event, so that what is refused is refused by its status.
        while (happened := await self._next(client, choices)) is not None:
            index, event = happened
            if isinstance(event, Accepted):
                part = answer.first_part(index)
                await client.begin_stream(answer.request_id)
            elif isinstance(event, Finished):
                part = answer.last_part(index, event)
            else:
                part = answer.text_part(index, event)
            if part is not None:
                await client.write(part)
            self._front_end.num_events_taken += 1
        if with_usage:
            await client.write(answer.usage_part())
        await client.end(answers.END_OF_STREAM)

    async def _next(self, client: _Client, choices: Choices) -> tuple[int, Event] | None:
        """As Choices.next; a stream that has begun gets a sign of life when it takes long."""
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S if client.is_streaming else None):
                    return await choices.next()
            except TimeoutError:
                await client.write(answers.KEEP_ALIVE)

    async def _whole(self, client: _Client, choices: Choices, answer: answers.Answer) -> None:
        while (happened := await choices.next()) is not None:
            index, event = happened
            if not isinstance(event, Accepted):
                answer.add(index, event)
            self._front_end.num_events_taken += 1
        pieces = []
        for piece in answer.whole():
            pieces.append(piece)
            await asyncio.sleep(0)
        await client.send_whole(pieces, answer.request_id)

    # --- bodies ---

    async def _body(self, request: Request, client: _Client) -> bytes:
        """Raises Refused, ClientGone."""
        _check_headers(request, self._limits.max_http_body_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in client.body():
                    body += piece
                    if len(body) > self._limits.max_http_body_bytes:
                        raise _too_large(self._limits.max_http_body_bytes)
        except TimeoutError:
            raise Refused(408, "BODY_TIMEOUT", f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
        return bytes(body)

    async def _read(self, read: Read, body: bytes) -> Wanted:
        if len(body) <= self._limits.max_inline_body_bytes:
            return read(body, self._limits)
        lane = self._lanes.lane_for(len(body))
        return await self._lanes.run(lane, len(body), lambda: read(body, self._limits))


class _Endpoint:
    """Starlette takes a function for an endpoint that returns a response; an object, for an ASGI application."""

    def __init__(self, door: Door, read: Read, kind: answers.Kind) -> None:
        self._door = door
        self._read = read
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door.serve(scope, _Client(receive, send), self._read, self._kind)


class _Client:
    """The client of one request: what it sends, what it is sent, and whether it is still there."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.is_streaming = False

    async def body(self) -> AsyncIterator[bytes]:
        """The pieces of the body. Raises ClientGone."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            yield message.get("body", b"")
            more = message.get("more_body", False)

    @contextlib.asynccontextmanager
    async def watched(self, choices: Choices) -> AsyncIterator[None]:
        """After the body: when the client leaves, the choices are interrupted with ClientGone."""
        leaving = asyncio.ensure_future(self._until_gone())
        leaving.add_done_callback(lambda _: choices.interrupt(ClientGone()))
        try:
            yield
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- answers ---

    async def begin_stream(self, request_id: str) -> None:
        """The head of a stream, once."""
        if not self.is_streaming:
            self.is_streaming = True
            # X-Accel-Buffering: nginx keeps parts of a stream back without it.
            headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(200, {**headers, "x-request-id": _for_header(request_id)})

    async def write(self, part: bytes) -> None:
        """Returns when the client's connection takes more."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self, part: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": False})

    async def send_whole(self, pieces: list[bytes], request_id: str) -> None:
        """The answer of a request that has succeeded."""
        headers = {"content-type": "application/json", "content-length": str(sum(map(len, pieces)))}
        await self._start(200, {**headers, "x-request-id": _for_header(request_id)})
        for piece in pieces:
            await self.write(piece)
        await self.end()

    async def fail(self, problem: answers.Problem) -> None:
        """The error as the answer, or as the last event of a stream that has begun."""
        if self.is_streaming:
            await self.write(answers.event(problem.body))
            await self.end()
            return
        body = answers.encoded(problem.body)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **_extra(problem)}
        await self._start(problem.status, headers)
        await self.end(body)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        pairs = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


def _check_headers(request: Request, max_bytes: int) -> None:
    """Raises Refused. A content type other than JSON is refused: a web page may send those to any address without
    asking, and a page that a user looks at should not make the user's own server work."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"send the body as Content-Type: application/json, not {quoted(kind) if kind else 'without one'}"
        raise Refused(415, "UNSUPPORTED_MEDIA_TYPE", message)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, "UNSUPPORTED_MEDIA_TYPE", "compressed bodies are not read here: send it as it is")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> Refused:
    return Refused(413, "BODY_TOO_LARGE", f"the body has more than {max_bytes} bytes, the most that are read")


def _extra(problem: answers.Problem) -> dict[str, str]:
    headers = {} if problem.retry_after_s is None else {"retry-after": str(problem.retry_after_s)}
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    if problem.status in (401, 408, 413) or problem.body["error"]["reason"] == _AMBIGUOUS_LENGTH:
        # The rest of the body is not read.
        headers["connection"] = "close"
    return headers


def _for_header(request_id: str) -> str:
    """The id, percent-encoded when a header cannot carry it: clients choose ids, and may put anything into them."""
    is_plain = request_id.isascii() and request_id.isprintable() and " " not in request_id
    return request_id if is_plain else quote(request_id, safe="")


def _response(status: int, value: answers.Json) -> Response:
    return Response(answers.encoded(value), status, media_type="application/json")


def _problem_response(problem: answers.Problem) -> Response:
    return Response(answers.encoded(problem.body), problem.status, _extra(problem), media_type="application/json")


async def _not_here(request: Request, error: Exception) -> Response:
    """An unknown path or method."""
    assert isinstance(error, HTTPException)
    served = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health"
    said = f"{request.method} {quoted(request.url.path)} is not served here; served: {served}"
    problem = answers.problem(error.status_code, "NOT_SERVED", said)
    headers = dict(error.headers or {})
    return Response(answers.encoded(problem.body), problem.status, headers, media_type="application/json")


def _peer(scope: Scope) -> str:
    """The client's address, as gRPC names a peer."""
    client = scope.get("client")
    if not client:
        return "unix:"
    host, port = client
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
