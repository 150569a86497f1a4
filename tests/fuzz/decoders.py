"""Every decoder, fed bytes: it gives a value or one of the errors it declares."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from google.protobuf.message import DecodeError, Message

from scheduler_svc import codec as scheduler_codec
from scheduler_svc.core.events import WorkerProtocolError
from scheduler_svc.errors import SessionProtocolError, SessionRefused
from scheduler_svc.frontend import codec as front_end_codec
from scheduler_svc.frontend import resolve
from scheduler_svc.frontend.calls import IdsPrompt
from scheduler_svc.frontend.errors import RequestError
from scheduler_svc.frontend.errors import SessionProtocolError as SchedulerBrokeProtocol
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.workers import codec as workers_codec
from stepfence.v1 import generation_service_pb2, session_service_pb2, worker_service_pb2
from tests.fuzz import corpus
from tests.fuzz.mutation import Mutator
from worker_svc import codec as worker_codec
from worker_svc.epoch import Epoch
from worker_svc.errors import ContractError
from worker_svc.runner.scripted import ScriptedRunner

_CAPABILITIES: Final = ScriptedRunner(num_blocks=64, max_model_len=512).capabilities
_VOCAB_SIZE: Final = 260
_MODEL: Final = front_end_codec.decode_model(corpus.MODEL)


class WorkerRequests:
    """What a worker is sent: decoded, judged by the ledger, remembered by the epoch."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._epoch = self._new_epoch()

    def _new_epoch(self) -> Epoch:
        _, _, geometry = worker_codec.decode_open(corpus.opening())
        epoch = Epoch(1, 1, geometry)
        epoch.start(64, _CAPABILITIES)
        # Deep enough into a session that there is something to get wrong.
        steps = [corpus.first_step(), *corpus.later_steps()]
        for step in steps[: self._rng.randrange(3)]:
            epoch.accept(worker_codec.decode_step(step, _VOCAB_SIZE))
        return epoch

    def feed(self, data: bytes) -> None:
        try:
            request = worker_service_pb2.RunStepsRequest.FromString(data)
            if request.WhichOneof("frame") == "open":
                _, _, geometry = worker_codec.decode_open(request.open)
                worker_codec.check_geometry(geometry, _CAPABILITIES)
            else:
                self._epoch.accept(worker_codec.decode_step(request.step, _VOCAB_SIZE))
        except (ContractError, DecodeError):
            if self._epoch.is_over or self._rng.random() < 0.3:
                self._epoch = self._new_epoch()


def feed_worker_frame(data: bytes) -> None:
    """What a scheduler hears from a worker."""
    with suppress(WorkerProtocolError):
        workers_codec.decode_worker_frame(data)


def feed_worker_facts(data: bytes) -> None:
    with suppress(WorkerProtocolError):
        host = workers_codec.decode_capabilities(data).host
        # It goes into logs and onto terminals.
        assert len(host) <= 253 and host.isprintable(), host
    with suppress(WorkerProtocolError):
        workers_codec.decode_tokenizer_piece(data)


def feed_attach_request(data: bytes) -> None:
    """What a scheduler hears from a front end."""
    try:
        frame = scheduler_codec.decode_session_frame(session_service_pb2.AttachRequest.FromString(data))
    except (SessionProtocolError, SessionRefused, DecodeError):
        return
    for submission in frame.submissions:
        scheduler_codec.parameter_problem(submission, _VOCAB_SIZE)


def feed_attach_response(data: bytes) -> None:
    """What a front end hears from a scheduler."""
    try:
        frame = session_service_pb2.AttachResponse.FromString(data)
        list(front_end_codec.decode_tokens(frame.tokens))
        for refused in frame.refused:
            front_end_codec.decode_failure(refused.failure)
        for ended in frame.ended:
            front_end_codec.decode_ended(ended)
        front_end_codec.decode_model(frame.model_changed.model)
    except (SchedulerBrokeProtocol, DecodeError):
        pass


def feed_client_call(data: bytes) -> None:
    """What a front end hears from a client; and how it tells what is wrong with it."""
    try:
        call = front_end_codec.decode_call(generation_service_pb2.GenerateRequest.FromString(data), Limits())
        resolve.check_model(call, _MODEL)
        resolve.check_parameters(call, _MODEL, Limits(), accepts_priority=False)
        if isinstance(call.prompt, IdsPrompt):
            resolve.check_prompt_ids(
                len(call.prompt.token_ids), max(call.prompt.token_ids, default=0), _MODEL, Limits()
            )
        resolve.resolve_sampling(call.sampling, _MODEL, random.Random(1))
    except RequestError as error:
        front_end_codec.encode_error(error).SerializeToString()
    except DecodeError:
        pass


Feed = Callable[[bytes], None]


def decoders(seed: int) -> dict[str, tuple[Mutator, Feed]]:
    """By name: what makes its frames, and what takes them."""
    rng = random.Random(seed)

    def mutator(messages: list[Message]) -> Mutator:
        return Mutator(random.Random(rng.getrandbits(64)), messages)

    return {
        "steps at the worker": (mutator(corpus.run_steps_requests()), WorkerRequests(rng).feed),
        "results at the scheduler": (mutator(corpus.run_steps_responses()), feed_worker_frame),
        "workers' facts at the scheduler": (
            mutator(corpus.capabilities() + corpus.tokenizer_pieces()),
            feed_worker_facts,
        ),
        "session frames at the scheduler": (mutator(corpus.attach_requests()), feed_attach_request),
        "session frames at the front end": (mutator(corpus.attach_responses()), feed_attach_response),
        "calls at the front end": (mutator(corpus.generate_requests()), feed_client_call),
    }
