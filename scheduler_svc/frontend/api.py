"""GenerationService: the thin layer between gRPC and the front end's engine. The proto says what each call promises."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeVar, cast

import grpc
import grpc.aio

from scheduler_svc.frontend import codec
from scheduler_svc.frontend.callers import Caller, Callers
from scheduler_svc.frontend.calls import Accepted, Delta, Finished
from scheduler_svc.frontend.containment import is_containable
from scheduler_svc.frontend.engine import FrontEnd
from scheduler_svc.frontend.errors import INTERNAL, RequestError
from scheduler_svc.frontend.gate import CallGate
from stepfence.v1 import generation_service_pb2 as generation_pb2
from stepfence.v1.generation_service_pb2_grpc import GenerationServiceServicer

_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
# UsageError and InternalError. The stubs do not know it.
_GRPC_ERROR: Final[type[Exception]] = cast(Any, grpc.aio).BaseError
_DETAILS_KEY: Final = "grpc-status-details-bin"

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)


class GenerationServicer(GenerationServiceServicer):
    """Handlers are plain coroutines that write, not generators: a cancelled call is cancelled where it waits, so what
    it holds is released at once and not when a generator is collected."""

    def __init__(self, front_end: FrontEnd, callers: Callers | None = None, gate: CallGate | None = None) -> None:
        """callers: who may call; None: everyone. gate: how many Generate and Complete calls are taken; None: any
        number."""
        self._front_end = front_end
        self._gate = gate
        self._callers = callers or Callers(None)

    async def Generate(  # type: ignore[override]
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        async def deliver(event: Accepted | Delta | Finished) -> None:
            await context.write(codec.encode_event(event))
            self._front_end.num_events_taken += 1

        await self._answer(context, lambda: self._run(request, context, deliver))

    async def Complete(
        self, request: generation_pb2.CompleteRequest, context: Context
    ) -> generation_pb2.CompleteResponse:
        answer = codec.CompleteAnswer()

        async def collect(event: Accepted | Delta | Finished) -> None:
            answer.add(event)

        await self._answer(context, lambda: self._run(request.request, context, collect))
        return answer.message()

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        async def abort() -> generation_pb2.AbortResponse:
            self._front_end.abort(request.request_id, self._caller(context))
            return generation_pb2.AbortResponse()

        return await self._answer(context, abort)

    def _caller(self, context: Context) -> Caller:
        """Raises RequestError."""
        return self._callers.caller(context.invocation_metadata())

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: Context
    ) -> generation_pb2.GetModelResponse:
        async def model() -> generation_pb2.GetModelResponse:
            self._caller(context)
            return generation_pb2.GetModelResponse(model=codec.encode_model(self._front_end.model))

        return await self._answer(context, model)

    async def _run(
        self,
        request: generation_pb2.GenerateRequest,
        context: Context,
        deliver: Callable[[Accepted | Delta | Finished], Awaitable[None]],
    ) -> None:
        """Streams and answers are made here, by the same code."""
        # Strangers take no place from others.
        caller = self._caller(context)
        gate = contextlib.nullcontext() if self._gate is None else self._gate.call(context.peer())
        with gate, self._front_end.stream():
            call = replace(codec.decode_call(request, self._front_end.limits), tenant=caller.tenant)
            with await self._front_end.start(call, context.time_remaining) as generation:
                while (event := await generation.next()) is not None:
                    await deliver(event)

    async def _answer(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        """Turns errors into a status with details; what is not foreseen is logged and not told."""
        try:
            return await work()
        except RequestError as error:
            await _abort(context, error)
        except BaseException as error:
            if not is_containable(error):
                raise
            # A write on a call that is over fails in ways that do not matter to anybody; gRPC's own errors mean that it
            # is over, even if the context does not know yet.
            if not context.done() and not isinstance(error, _GRPC_ERROR):
                log.exception("call failed")
            await _abort(context, RequestError(INTERNAL))


async def _abort(context: Context, error: RequestError) -> NoReturn:
    status = codec.encode_error(error)
    code = _STATUS_CODES[status.code]
    await context.abort(code, status.message, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")
