"""Runs chat templates in a process of their own, which is ended when a template takes more than its budget.

The process is started when it is first needed, and again after it was ended. It serves one request at a time; callers
wait for each other, so they call from threads.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGPROF
from typing import IO, Any, Final

from scheduler_svc.frontend.calls import ChatMessage
from scheduler_svc.frontend.template_child import HEADER, LENGTH

# Compiled templates that the process keeps; with more it is started anew.
_MAX_TEMPLATES: Final = 8
_MIB: Final = 1 << 20
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Template:
    """A chat template. variables: what it may refer to besides the messages, by name. control: texts that act in a
    prompt (special tokens) and must not when a client wrote them."""

    source: str
    variables: tuple[tuple[str, str], ...]
    control: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a rendered prompt. Plain: written by a client, so control strings in it are text."""

    text: str
    plain: bool


class TemplateFailed(Exception):
    """The template, or its use of the budget, is at fault. The text completes a sentence that begins with the template:
    "used more than 2 s of CPU time". detail: what was raised within, for the log."""

    def __init__(self, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.detail = detail


class TemplateRefused(Exception):
    """The template refuses this conversation, with this text."""


class TemplateProcessError(Exception):
    """The process cannot be started."""


class TemplateProcess:
    """One process for templates. Thread-safe.

    cpu_s: seconds of CPU time for compiling, and for rendering a conversation, with as much again for each MiB of it.
    memory_bytes: address space of the process, and 32 times the conversation. output_bytes: length of the rendered
    prompt in UTF-8, and four times the conversation. patience_s: how long an answer is waited for; only a machine that
    stands still takes so long.
    """

    command: tuple[str, ...] = (sys.executable, "-m", "scheduler_svc.frontend.template_child")

    def __init__(
        self, *, cpu_s: float = 2.0, memory_bytes: int = 256 * _MIB, output_bytes: int = _MIB, patience_s: float = 60.0
    ) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        # Numbers of the templates that the child has compiled.
        self._compiled: dict[Template, int] = {}

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._child is None else self._child.pid

    def check(self, template: Template) -> None:
        """Compile it. Raises TemplateFailed, TemplateProcessError."""
        with self._lock:
            self._compile(template)

    def render(self, template: Template, messages: Sequence[ChatMessage]) -> list[Piece]:
        """The prompt of a conversation, cut where that is needed to keep control strings in contents from acting as
        such. Raises TemplateFailed, TemplateRefused, TemplateProcessError."""
        conversation = [(message.role, message.content) for message in messages]
        size = sum(len(role.encode()) + len(content.encode()) for role, content in conversation)
        max_bytes = self._output_bytes + 4 * size
        with self._lock:
            number = self._compile(template)
            request = {"template": number, "messages": conversation, "max_bytes": max_bytes}
            answer = self._ask(request, size)
        if answer.get("error") == "output":
            raise TemplateFailed(f"made more than {max_bytes} bytes of a conversation of {size} bytes")
        return [Piece(text, plain) for text, plain in answer["pieces"]]

    def close(self) -> None:
        """End the process. It is started again when it is needed."""
        with self._lock:
            self._end()

    def _compile(self, template: Template) -> int:
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if template not in self._compiled:
            if len(self._compiled) >= _MAX_TEMPLATES:
                self._end()
            number = len(self._compiled)
            request = {
                "template": number,
                "source": template.source,
                "variables": template.variables,
                "control": template.control,
            }
            self._ask(request, 0)
            self._compiled[template] = number
        return self._compiled[template]

    def _ask(self, request: dict[str, Any], conversation_bytes: int) -> dict[str, Any]:
        cpu_s = self._cpu_s * (1 + conversation_bytes / _MIB)
        body = json.dumps(request).encode()
        memory_bytes = self._memory_bytes + 32 * len(body)
        child = self._started()
        try:
            data = self._exchange(child, HEADER.pack(len(body), cpu_s, memory_bytes) + body)
        except TimeoutError:
            self._end()
            raise TemplateFailed(f"did not answer within {self.patience_s:g} s") from None
        except OSError:
            code = self._end()
            if code == -SIGPROF:
                raise TemplateFailed(f"used more than {cpu_s:.3g} s of CPU time") from None
            raise TemplateFailed(f"ended the process that it ran in (exit code {code})") from None
        answer: dict[str, Any] = json.loads(data)
        kind = answer.get("error")
        if kind == "memory":
            # What such a process still holds is not known.
            self._end()
            raise TemplateFailed(f"needs more than {memory_bytes / _MIB:.0f} MiB of memory")
        if kind == "failed":
            raise TemplateFailed("cannot render this conversation", answer["text"])
        if kind == "refused":
            raise TemplateRefused(answer["text"])
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            pipe = subprocess.PIPE
            try:
                # A session of its own: a key that interrupts the front end is not for it. It ends when its input does.
                self._child = subprocess.Popen(
                    self.command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True
                )
            except OSError as error:
                raise TemplateProcessError(f"the process for chat templates cannot be started: {error}") from error
            for stream in (self._child.stdin, self._child.stdout):
                os.set_blocking(_descriptor(stream), False)
        return self._child

    def _end(self) -> int | None:
        """The exit code, when there was a process."""
        child, self._child = self._child, None
        self._compiled.clear()
        if child is None:
            return None
        # Closed output means that it has ended, or will.
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=1.0)
        child.kill()
        return child.wait()

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Send a request, return the answer. Raises TimeoutError, and OSError when the child has ended."""
        to_child, from_child = _descriptor(child.stdin), _descriptor(child.stdout)
        poll = select.poll()
        poll.register(to_child, select.POLLOUT)
        poll.register(from_child, select.POLLIN)
        deadline = time.monotonic() + self.patience_s
        unsent, answer = memoryview(request), bytearray()
        while True:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                raise TimeoutError
            if to_child in ready:
                unsent = unsent[os.write(to_child, unsent[:_READ_BYTES]) :]
                if not unsent:
                    poll.unregister(to_child)
            if from_child in ready:
                part = os.read(from_child, _READ_BYTES)
                if not part:
                    raise BrokenPipeError
                answer += part
                if len(answer) >= LENGTH.size:
                    (size,) = LENGTH.unpack_from(answer)
                    if len(answer) - LENGTH.size >= size:
                        return bytes(answer[LENGTH.size :])


def _descriptor(stream: IO[bytes] | None) -> int:
    assert stream is not None
    return stream.fileno()


SHARED: Final = TemplateProcess()
atexit.register(SHARED.close)
