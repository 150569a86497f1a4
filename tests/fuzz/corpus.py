"""Valid messages of every kind: where mutation begins."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from google.protobuf import duration_pb2
from google.protobuf.message import Message

from stepfence.v1 import (
    admin_service_pb2,
    generation_service_pb2,
    model_pb2,
    sampling_pb2,
    session_service_pb2,
    step_pb2,
    usage_pb2,
    worker_service_pb2,
)

GREEDY = sampling_pb2.ResolvedSampling(top_p=1.0, max_tokens=8, eos_token_ids=[257])
DRAWN = sampling_pb2.ResolvedSampling(
    temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=4, min_tokens=2, seed=7, stop_token_ids=[65, 66]
)
MODEL = model_pb2.ModelInfo(
    name="scripted",
    vocab_size=260,
    max_model_len=512,
    eos_token_ids=[257],
    generation_defaults=model_pb2.GenerationDefaults(temperature=0.5, top_p=0.9),
)


def column(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()


def opening(incarnation: int = 1, epoch: int = 1) -> worker_service_pb2.Open:
    return worker_service_pb2.Open(
        scheduler_incarnation=incarnation,
        epoch=epoch,
        protocol_revision=2,
        block_size=4,
        num_rows=8,
        max_num_batched_tokens=32,
        max_model_len=64,
        max_inflight_steps=3,
    )


def first_step(epoch: int = 1) -> step_pb2.SchedulerOutput:
    """Admits two requests."""
    return step_pb2.SchedulerOutput(
        epoch=epoch,
        step_seq=1,
        fence_seq=1,
        new_requests=[
            step_pb2.NewRequest(
                request_id="id-1",
                row=0,
                token_ids=column(range(1, 7)),
                block_table=column((1, 2)),
                num_prompt_tokens=6,
                sampling=GREEDY,
            ),
            step_pb2.NewRequest(
                request_id="b",
                row=1,
                token_ids=column(range(9, 14)),
                block_table=column((3, 4)),
                num_prompt_tokens=4,
                sampling=DRAWN,
            ),
        ],
        rows=column((0, 1)),
        num_tokens=column((6, 5)),
    )


def later_steps(epoch: int = 1) -> list[step_pb2.SchedulerOutput]:
    """What may follow: a decode, blocks, an end, a step without tokens."""
    return [
        step_pb2.SchedulerOutput(epoch=epoch, step_seq=2, fence_seq=2, rows=column((0, 1)), num_tokens=column((1, 1))),
        step_pb2.SchedulerOutput(
            epoch=epoch,
            step_seq=3,
            fence_seq=3,
            processed_step_seq=1,
            rows=column((1, 0)),
            num_tokens=column((1, 1)),
            appended_rows=column((0,)),
            appended_blocks=column((5,)),
            finished_request_ids=["nobody"],
        ),
        step_pb2.SchedulerOutput(
            epoch=epoch,
            step_seq=4,
            fence_seq=3,
            processed_step_seq=2,
            preempted_request_ids=["b"],
            deferred_frees=[
                step_pb2.DeferredFree(
                    fence_seq=3, request_id="b", block_ids=column((3, 4)), reason=step_pb2.FREE_REASON_PREEMPTED
                )
            ],
        ),
    ]


def run_steps_requests() -> list[Message]:
    frames = [worker_service_pb2.RunStepsRequest(open=opening())]
    frames += [worker_service_pb2.RunStepsRequest(step=step) for step in (first_step(), *later_steps())]
    return list(frames)


def run_steps_responses() -> list[Message]:
    result = step_pb2.StepResult(
        epoch=1, step_seq=1, sampled_token_ids=column((65, 66)), num_rows_held=2, staged_us=5, executed_us=9
    )
    counted = step_pb2.StepResult(
        epoch=1, step_seq=2, sampled_token_ids=column((65,)), sampled_counts=column((1, 0)), num_rows_held=2
    )
    failed = step_pb2.StepResult(
        epoch=1,
        step_seq=3,
        error=step_pb2.StepError(kind=step_pb2.STEP_ERROR_KIND_EXECUTION, message="broken"),
    )
    return [
        worker_service_pb2.RunStepsResponse(
            opened=worker_service_pb2.Opened(worker_incarnation=3, num_blocks=64, executed_step_seq=0)
        ),
        *(worker_service_pb2.RunStepsResponse(result=each) for each in (result, counted, failed)),
        worker_service_pb2.RunStepsResponse(
            draining=worker_service_pb2.Draining(deadline=duration_pb2.Duration(seconds=3))
        ),
    ]


def capabilities() -> list[Message]:
    return [
        worker_service_pb2.GetCapabilitiesResponse(
            protocol_revision=2,
            worker_incarnation=3,
            model=MODEL,
            block_size_multiple=1,
            max_num_rows=4096,
            max_num_batched_tokens=8192,
            max_message_bytes=1 << 24,
            runner="scripted",
            device="cpu",
            dtype="none",
            host="0123456789ab",
        )
    ]


def tokenizer_pieces() -> list[Message]:
    chunk = model_pb2.TokenizerChunk(file_name="byte_tokenizer.json", data=b"{}")
    return [worker_service_pb2.GetTokenizerResponse(chunk=chunk)]


def submit(handle: int, request_id: str, sampling: sampling_pb2.ResolvedSampling) -> session_service_pb2.Submit:
    return session_service_pb2.Submit(
        handle=handle, request_id=request_id, prompt_token_ids=column(range(1, 9)), sampling=sampling
    )


def hello() -> session_service_pb2.AttachRequest:
    return session_service_pb2.AttachRequest(
        hello=session_service_pb2.Hello(front_end_id="fuzz", protocol_revision=1), num_live_streams=1
    )


def attach_requests() -> list[Message]:
    timed = submit(3, "a", GREEDY)
    timed.timeout.FromMilliseconds(50)
    timed.cache_salt = "salt"
    cancel = session_service_pb2.Cancel(handle=1, reason=session_service_pb2.CANCEL_REASON_ABORTED)
    return [
        hello(),
        session_service_pb2.AttachRequest(submits=[submit(1, "id-1", GREEDY), submit(2, "b", DRAWN), timed]),
        session_service_pb2.AttachRequest(submits=[submit(4, "c", DRAWN)], cancels=[cancel]),
        session_service_pb2.AttachRequest(
            cancels=[cancel],
            text_ended=[session_service_pb2.TextEnded(handle=2, num_tokens=3)],
            num_live_streams=2,
        ),
        session_service_pb2.AttachRequest(num_live_streams=4),
    ]


def attach_responses() -> list[Message]:
    usage = usage_pb2.Usage(num_prompt_tokens=8, num_completion_tokens=2)
    usage.queued.FromMilliseconds(3)
    failure = session_service_pb2.Failure(
        code=14, reason="DRAINING", message="draining", metadata={"needed_tokens": "3"}
    )
    failure.retry_after.FromMilliseconds(500)
    ok = session_service_pb2.EndedOk(reason=usage_pb2.FINISH_REASON_STOP, stop_token_id=65)
    return [
        session_service_pb2.AttachResponse(
            attached=session_service_pb2.Attached(scheduler_incarnation=9, protocol_revision=2)
        ),
        session_service_pb2.AttachResponse(accepted=[session_service_pb2.SubmitAccepted(handle=1, max_tokens=8)]),
        session_service_pb2.AttachResponse(
            tokens=session_service_pb2.TokenColumns(
                handles=column((1, 2)), counts=column((2, 1)), token_ids=column((65, 66, 67))
            )
        ),
        session_service_pb2.AttachResponse(refused=[session_service_pb2.SubmitRefused(handle=2, failure=failure)]),
        session_service_pb2.AttachResponse(
            tokens=session_service_pb2.TokenColumns(handles=column((1, 3)), token_ids=column((65, 206))),
            ended=[
                session_service_pb2.RequestEnded(handle=1, ok=ok, usage=usage),
                session_service_pb2.RequestEnded(handle=3, failure=failure, usage=usage),
            ],
        ),
        session_service_pb2.AttachResponse(model_changed=session_service_pb2.ModelChanged(model=MODEL), draining=True),
    ]


def generate_requests() -> list[Message]:
    pb = generation_service_pb2
    chosen = sampling_pb2.SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        max_tokens=5,
        min_tokens=1,
        seed=3,
        stop=["AB"],
        stop_token_ids=[70],
    )
    chat = pb.Chat(messages=[pb.ChatMessage(role="system", content="be"), pb.ChatMessage(role="user", content="hi")])
    return [
        pb.GenerateRequest(text="hello", sampling=chosen),
        pb.GenerateRequest(request_id="id-1", token_ids=pb.TokenIds(ids=[1, 2, 259]), model="scripted"),
        pb.GenerateRequest(chat=chat, sampling=sampling_pb2.SamplingParams(max_tokens=3, temperature=0.0)),
        pb.GenerateRequest(text="é 🙂", cache_salt="tenant", sampling=sampling_pb2.SamplingParams(max_tokens=2)),
    ]


def complete_requests() -> list[Message]:
    pb = generation_service_pb2
    return [pb.CompleteRequest(request=each) for each in generate_requests() if isinstance(each, pb.GenerateRequest)]


def abort_requests() -> list[Message]:
    return [generation_service_pb2.AbortRequest(request_id="id-1")]


def admin_requests() -> dict[str, list[Message]]:
    """By method; Drain is not among them: it would do what it says."""
    pb = admin_service_pb2
    return {
        "GetStatus": [pb.GetStatusRequest()],
        "AuditKv": [pb.AuditKvRequest()],
        "ResetPrefixCache": [pb.ResetPrefixCacheRequest(preempt_running=True), pb.ResetPrefixCacheRequest()],
    }
