"""How long torch's OpenMP threads spin while they wait for each other. To be settled before torch is loaded."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

# Rounds of GNU's waiting loop, which takes 300,000 by itself: a team of which one thread has lost its core then burns
# the other cores while it waits, at every one of some 200 places of a step. Measured: docs/benchmarks-cpu.md.
SPIN_COUNT: Final = 2000
# Who sets one of these has decided.
SET_BY_PEOPLE: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Let waiting threads go to sleep early, unless the environment already says how they wait.

    `environ` is os.environ of the process in which torch is not loaded yet: GNU's OpenMP library reads it then, once.
    """
    if not any(name in environ for name in SET_BY_PEOPLE):
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
