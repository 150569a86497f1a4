"""`stepfence generate`: one request, its text on stdout as it comes, its id and its cost on stderr."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from scheduler_svc.cli.rpc_errors import CallFailure, explain, too_large
from scheduler_svc.config import flag
from scheduler_svc.rpc.channels import MAX_MESSAGE_BYTES, blocking_channel
from scheduler_svc.rpc.tls import Tls
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import sampling_pb2, usage_pb2
from stepfence.v1.generation_service_pb2_grpc import GenerationServiceStub


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What the flags say. None and "" leave it to the server."""

    prompt: str
    target: str
    chat: bool = False
    system: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    model: str = ""
    request_id: str = ""
    timeout_s: float | None = None
    json_lines: bool = False
    # Through the proxy that the environment names.
    use_proxy: bool = False
    # File with the token to show.
    token_file: Path | None = None
    # None: in plain text.
    tls: Tls | None = None


def build_request(options: GenerateOptions) -> pb.GenerateRequest:
    """The message for these options. Raises ValueError, naming the option, when a value does not fit its field."""
    sampling = sampling_pb2.SamplingParams(ignore_eos=options.ignore_eos)
    request = pb.GenerateRequest()
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed"):
        if getattr(options, name) is not None:
            _set(sampling, options, name)
    for name in ("request_id", "priority", "cache_salt", "model"):
        _set(request, options, name)
    for text in options.stop:
        sampling.stop.append(_utf8("--stop", text))
    request.sampling.CopyFrom(sampling)
    prompt = _utf8("the prompt", options.prompt)
    if options.chat:
        if options.system:
            request.chat.messages.add(role="system", content=_utf8("--system", options.system))
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    return request


def _credentials(token_file: Path | None) -> tuple[tuple[str, str], ...]:
    """What the call carries. Raises ValueError for a file that holds no token."""
    if token_file is None:
        return ()
    try:
        token = token_file.read_bytes().strip().decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ValueError(f"--token-file: {token_file} cannot be read: {cause}") from None
    if not token or not token.isprintable() or " " in token:
        raise ValueError(f"--token-file: {token_file} must hold one line, the token and nothing else")
    return (("authorization", f"Bearer {token}"),)


def _set(message: Message, options: GenerateOptions, name: str) -> None:
    value = getattr(options, name)
    option = flag(name)
    if isinstance(value, str):
        value = _utf8(option, value)
    try:
        setattr(message, name, value)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _utf8(what: str, text: str) -> str:
    """The same text. Raises ValueError: bytes of the command line that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not UTF-8 text (character {error.start + 1})") from None
    return text


def run(options: GenerateOptions, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Run one request to its end.

    The value is the exit code: 0 ended by itself, 1 failed, 2 the request is wrong, 130 ended by Ctrl-C (the server is
    told).
    """
    printer = _Printer(options.json_lines, out or sys.stdout, err or sys.stderr)
    try:
        request = build_request(options)
    except ValueError as error:
        printer.plain_error(str(error))
        return 2
    if request.ByteSize() > MAX_MESSAGE_BYTES:
        failure = too_large(request.ByteSize())
        printer.failed(failure)
        return failure.exit_code
    try:
        metadata = _credentials(options.token_file)
    except ValueError as error:
        printer.plain_error(str(error))
        return 2
    with blocking_channel(options.target, use_proxy=options.use_proxy, tls=options.tls) as channel:
        call: Any = GenerationServiceStub(channel).Generate(request, timeout=options.timeout_s, metadata=metadata)
        try:
            for response in call:
                printer.show(response)
        except grpc.RpcError as error:
            failure = explain(error, options.target)
            printer.failed(failure)
            return failure.exit_code
        except KeyboardInterrupt:
            call.cancel()
            printer.interrupted()
            return 130
        except BrokenPipeError:
            # The reader of our output is gone (`| head`): end the request, quietly.
            call.cancel()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1
    return 0


class _Printer:
    def __init__(self, json_lines: bool, out: TextIO, err: TextIO) -> None:
        self._json_lines = json_lines
        self._out = out
        self._err = err
        self._line_open = False
        # What the logs know the request by; "" until it is accepted.
        self._request_id = ""

    def show(self, response: pb.GenerateResponse) -> None:
        event = response.WhichOneof("event")
        if event == "accepted":
            self._request_id = response.accepted.request_id
        if self._json_lines:
            self._object(
                MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            )
            return
        if event == "delta" and response.delta.text:
            self._out.write(response.delta.text)
            self._out.flush()
            self._line_open = not response.delta.text.endswith("\n")
        elif event == "finished":
            self._end_line()
            reason = usage_pb2.FinishReason.Name(response.finished.reason).removeprefix("FINISH_REASON_").lower()
            self._cost(reason, response.finished.usage)

    def failed(self, failure: CallFailure) -> None:
        if self._json_lines:
            told: dict[str, object] = {"status": failure.status, "reason": failure.reason, "message": failure.message}
            if failure.usage is not None:
                told["usage"] = MessageToDict(failure.usage, preserving_proto_field_name=True)
            self._object({"error": told})
        self._end_line()
        for line in failure.lines():
            self._err.write(line + "\n")
        if failure.usage is not None or self._request_id:
            self._cost("failed", failure.usage)

    def interrupted(self) -> None:
        self.plain_error("interrupted")
        if self._request_id:
            self._cost("interrupted", None)

    def plain_error(self, message: str) -> None:
        self._end_line()
        self._err.write(f"error: {message}\n")

    def _cost(self, end: str, usage: usage_pb2.Usage | None) -> None:
        told = "its cost is not known" if usage is None else describe_usage(usage)
        self._err.write(f"{self._request_id} [{end}] {told}\n".lstrip())

    def _object(self, value: dict[str, object]) -> None:
        self._out.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._out.flush()

    def _end_line(self) -> None:
        if self._line_open:
            self._out.write("\n")
            self._out.flush()
            self._line_open = False


def describe_usage(usage: usage_pb2.Usage) -> str:
    """One line: tokens, then what waiting and preemption cost, when they cost anything."""
    parts = [
        f"{usage.num_prompt_tokens} prompt tokens"
        + (f" ({usage.num_cached_tokens} cached)" if usage.num_cached_tokens else ""),
        f"{usage.num_completion_tokens} completion tokens",
        f"queued {_seconds(usage.queued)}",
    ]
    if usage.num_preemptions:
        parts.append(
            f"preempted {usage.num_preemptions}x for {_seconds(usage.preempted)}, "
            f"{usage.num_recomputed_tokens} tokens computed again"
        )
    elif usage.num_recomputed_tokens:
        parts.append(f"{usage.num_recomputed_tokens} tokens computed again")
    return ", ".join(parts)


def _seconds(duration: Duration) -> str:
    return f"{duration.ToTimedelta().total_seconds():.3f} s"
