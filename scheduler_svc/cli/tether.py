"""Runs a command that must not outlive its parent: `python -m scheduler_svc.cli.tether PARENT_PID COMMAND...`.

`stepfence up` starts its parts through this, so that they end even when `up` itself is killed and cannot tell them. It
is a step of its own between fork and exec because Python code must not run inside fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def tether_to(parent: int) -> bool:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere nothing happens). False: the parent
    has ended already."""
    if sys.platform == "linux":
        # SIGKILL: a part that hangs must go, too.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def main(arguments: list[str]) -> int:
    """Become the command; returns only when there is no parent to serve."""
    if not tether_to(int(arguments[0])):
        return 1
    os.execvp(arguments[1], arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
