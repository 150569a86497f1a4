"""Channels and servers are made in one place, from options that gRPC has."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from scheduler_svc.rpc import channels
from worker_svc.server import server_options

ROOT = Path(__file__).parents[3]
_MAKERS = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
_OPTIONS = {
    "server": channels.SERVER_OPTIONS,
    "to a worker": channels.TO_WORKER,
    "to the scheduler": channels.TO_SCHEDULER,
    "command line": channels.FROM_COMMAND_LINE,
    "worker": server_options(),
}


@cache
def _library() -> bytes:
    # gRPC ignores an option it does not know, without a word. Its library holds the names as constants; there is no
    # other list of them.
    return Path(cygrpc.__file__).read_bytes()


def _is_known(name: str) -> bool:
    return name.encode() + b"\0" in _library()


@pytest.mark.parametrize("place", _OPTIONS)
def test_f59_every_channel_option_is_one_that_grpc_knows(place: str) -> None:
    assert [name for name, _ in _OPTIONS[place] if not _is_known(name)] == []


def test_f59_a_name_that_grpc_does_not_have_is_noticed() -> None:
    # As an engine once shipped it.
    assert not _is_known("grpc.http2.min_recv_ping_interval_without_data_ms")


def channels_made_elsewhere(sources: dict[str, str]) -> list[str]:
    """Places, as FILE:LINE, that make a channel or open a port of a server outside the module that does so."""
    return [
        f"{name}:{node.lineno}"
        for name, source in sources.items()
        if name not in ("scheduler_svc/rpc/channels.py", "worker_svc/server.py")
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in _MAKERS)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in _MAKERS for alias in node.names))
    ]


def test_f86_no_channel_is_made_elsewhere() -> None:
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for service in ("scheduler_svc", "worker_svc")
        for path in (ROOT / service).rglob("*.py")
    }
    assert len(sources) > 100
    assert channels_made_elsewhere(sources) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import grpc\ngrpc.aio.insecure_channel('x:1')",
        "from grpc import insecure_channel",
        "from grpc.aio import secure_channel as s",
        "make = grpc.secure_channel",
    ],
)
def test_f86_a_channel_made_elsewhere_is_noticed(planted: str) -> None:
    assert channels_made_elsewhere({"scheduler_svc/cli/planted.py": planted}) != []
