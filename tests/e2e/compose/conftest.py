"""The stack that tests share, and what it said when one of them fails."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.e2e.compose.stack import BUILD_S, Stack

# A scripted step takes so long, so that streams are long enough to be disturbed.
STEP_MS = 15


def _free_ports() -> Iterator[int]:
    """Ports that nothing listens on, below those that the kernel gives to outgoing connections: between two stacks of a
    test none of them may be taken by chance."""
    yield from filter(_is_free, range(21_500, 29_500, 7))


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


@pytest.fixture(scope="session")
def project() -> Iterator[Stack]:
    """The project, its images built from this checkout. Nothing is left of it afterwards."""
    ports = _free_ports()
    stack = Stack(port=next(ports), openai_port=next(ports))
    stack.settings["STEPFENCE_SCRIPT"] = f'{{"delay_ms": {STEP_MS}}}'
    stack.down()
    stack.compose("build", "--quiet", "scheduler", "worker", patience_s=BUILD_S)
    try:
        yield stack
    finally:
        stack.down()
        stack.remove_images()


@pytest.fixture
def bare(project: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The project, nothing of it started."""
    project.down()
    yield from _with_logs(project, request)


@pytest.fixture
def stack(project: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """All of it, healthy, with one worker; as the test before left it, as far as that was so."""
    project.up("--scale", "worker=1")
    yield from _with_logs(project, request)


def _with_logs(project: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    failed_before = request.session.testsfailed
    yield project
    if request.session.testsfailed > failed_before:
        print(project.compose("ps", "--all", check=False).stdout)
        print(project.compose("logs", "--no-color", "--tail", "40", check=False).stdout)
        project.down()
