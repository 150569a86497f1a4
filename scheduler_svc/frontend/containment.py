"""Nothing that a tokenizer or a template raises goes further than the call that used it.

Both come with the model and run in libraries that fail in many ways: ValueError, RecursionError for what is nested too
deeply, MemoryError, and pyo3_runtime.PanicException, which is no Exception, for a panic of the Rust code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from scheduler_svc.frontend.errors import TokenizerError

T = TypeVar("T")

# These end a task or the process on purpose.
_NEVER: Final = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
# What a library says may hold a whole file.
_MAX_CHARS: Final = 300


def is_containable(error: BaseException) -> bool:
    """Whether it is a failure of some code, and not the end of a task or of the process."""
    return not isinstance(error, _NEVER)


def contained(work: Callable[[], T], *, kept: tuple[type[Exception], ...] = ()) -> T:
    """work(). Raises TokenizerError for whatever it raises, but `kept`, and what ends a task or the process, as it
    is."""
    try:
        return work()
    except kept:
        raise
    except BaseException as error:
        if not is_containable(error):
            raise
        raise TokenizerError(f"{type(error).__name__}: {str(error)[:_MAX_CHARS]}") from error
