"""A front end process in the simulation: the real engine and session, behind them the simulated network."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import grpc.aio
from google.protobuf.message import DecodeError

from scheduler_svc.frontend.engine import FrontEnd
from scheduler_svc.frontend.errors import SessionLost
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.session_client import SessionClient, SessionStream, SessionTiming
from scheduler_svc.frontend.text import Tokenizer, load_tokenizer
from stepfence.v1 import model_pb2
from stepfence.v1 import session_service_pb2 as pb
from tests.simulation.hosts import Process
from tests.simulation.network import Call, Keepalive, Network

# As CHANNEL_OPTIONS of session_transport and SERVER_OPTIONS have it.
_TO_SCHEDULER = Keepalive(client_s=10.0, server_s=20.0)


class SchedulerNetwork:
    """SessionTransport over the simulated network."""

    def __init__(self, network: Network, process: Process, source: str, target: str) -> None:
        self._network = network
        self._process = process
        self._source = source
        self._target = target

    def _call(self, method: str) -> Call:
        return self._network.call(self._process, self._source, self._target, method, _TO_SCHEDULER)

    def attach(self) -> SessionStream:
        return _Stream(self._call("Attach"))

    async def get_model(self) -> model_pb2.ModelInfo | None:
        call = self._call("GetModel")
        try:
            await call.send(pb.SessionServiceGetModelRequest().SerializeToString())
            data = await call.receive()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return None
            raise SessionLost(str(error)) from error
        finally:
            call.cancel()
        assert data is not None
        try:
            return pb.SessionServiceGetModelResponse.FromString(data).model
        except DecodeError as error:
            raise SessionLost("no model") from error

    async def get_tokenizer(self) -> Sequence[model_pb2.TokenizerChunk]:
        call = self._call("GetTokenizer")
        chunks = []
        try:
            await call.send(pb.SessionServiceGetTokenizerRequest().SerializeToString())
            while (data := await call.receive()) is not None:
                chunks.append(pb.SessionServiceGetTokenizerResponse.FromString(data).chunk)
        except (grpc.aio.AioRpcError, DecodeError) as error:
            raise SessionLost(str(error)) from error
        finally:
            call.cancel()
        return chunks


class _Stream:
    def __init__(self, call: Call) -> None:
        self._call = call

    async def send(self, frame: pb.AttachRequest) -> None:
        try:
            await self._call.send(frame.SerializeToString())
        except grpc.aio.AioRpcError as error:
            raise SessionLost(error.details() or "") from error

    async def receive(self) -> pb.AttachResponse:
        try:
            data = await self._call.receive()
        except grpc.aio.AioRpcError as error:
            raise SessionLost(error.details() or "") from error
        if data is None:
            raise SessionLost("the scheduler ended the stream")
        try:
            return pb.AttachResponse.FromString(data)
        except DecodeError as error:
            # As over gRPC, which gives nothing for what it cannot read.
            raise SessionLost("no AttachResponse") from error

    def close(self) -> None:
        self._call.cancel()


async def _load(files: Mapping[str, bytes]) -> Tokenizer:
    return load_tokenizer(files)


class FrontEndProcess:
    """One life of a front end."""

    def __init__(
        self, network: Network, address: str, scheduler: str, *, rng: random.Random, now: Callable[[], float]
    ) -> None:
        self.address = address
        self.process = Process(network.loop, address)
        transport = SchedulerNetwork(network, self.process, address, scheduler)
        self.session = SessionClient(transport, _load, front_end_id=address, rng=rng)
        self.front_end = FrontEnd(self.session, limits=Limits(), rng=rng)
        # When it first had a scheduler; and when it last had none for the whole grace.
        self.first_attach_at: float | None = None
        self.gave_up_at = -1.0
        self._lost_at: float | None = None
        self._now = now
        self.session.on_change = self._changed
        self.process.spawn(self.session.run(), "session")

    def _changed(self) -> None:
        now = self._now()
        if self.session.attached:
            if self.first_attach_at is None:
                self.first_attach_at = now
            if self._lost_at is not None and now - self._lost_at >= SessionTiming().scheduler_grace_s:
                self.gave_up_at = now
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = now

    def gave_up_since(self, moment: float) -> bool:
        """Whether it had no scheduler when asked, or came to have none for as long as requests wait."""
        if self.first_attach_at is None or self.first_attach_at >= moment or self.gave_up_at >= moment:
            return True
        return self._lost_at is not None and self._now() - self._lost_at >= SessionTiming().scheduler_grace_s
