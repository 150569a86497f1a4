"""The process in which chat templates are compiled and rendered: `python -m scheduler_svc.frontend.template_child`.

It reads requests from standard input and writes one answer to each to standard output, until its input ends. A request
is a header (HEADER: bytes of the body, seconds of CPU time, bytes of memory) and a body of JSON; an answer has its
length and JSON. template_process is the other side.

Whatever a template does, the system ends it: a timer of CPU time whose signal is not handled ends the process, also
within one call of the C library, and memory beyond the limit cannot be had.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any, Final

HEADER: Final = struct.Struct(">IdQ")
LENGTH: Final = struct.Struct(">I")

# Longest text of an exception that is passed on.
_MAX_CHARS: Final = 300


def main() -> None:
    """Serve until the input ends."""
    # When memory is short, this is what should go; and what it holds is not written to disk when it crashes.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    templates: dict[int, Any] = {}
    while (header := sys.stdin.buffer.read(HEADER.size)) and len(header) == HEADER.size:
        size, cpu_s, memory_bytes = HEADER.unpack(header)
        body = sys.stdin.buffer.read(size)
        _limit_memory(memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = _answer(templates, body)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(sys.stdout.buffer, answer)


def _limit_memory(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    # Some systems have no such limit.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def _answer(templates: dict[int, Any], body: bytes) -> bytes:
    """{"pieces": ...}, {} for a compiled template, or {"error": kind, "text": ...}."""
    from scheduler_svc.frontend import template_rendering as rendering

    try:
        request = json.loads(body)
        number = request["template"]
        if "source" in request:
            templates[number] = rendering.CompiledTemplate(
                request["source"], dict(request["variables"]), request["control"]
            )
            return b"{}"
        pieces = templates[number].render(request["messages"], request["max_bytes"])
        return json.dumps({"pieces": pieces}).encode()
    except rendering.Refused as error:
        return _error("refused", str(error))
    except rendering.TooMuchOutput:
        return _error("output", "")
    except MemoryError:
        return _error("memory", "")
    except Exception as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f", line {line}"
        return _error("failed", f"{type(error).__name__}: {str(error)[:_MAX_CHARS]}{where}")


def _error(kind: str, text: str) -> bytes:
    return json.dumps({"error": kind, "text": text}).encode()


def _write(out: IO[bytes], answer: bytes) -> None:
    out.write(LENGTH.pack(len(answer)) + answer)
    out.flush()


if __name__ == "__main__":
    main()
