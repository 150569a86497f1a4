"""The file with the cluster secret: made once, read strictly, never shown."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.rpc import cluster_secret
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from worker_svc import cluster_secret as worker_secret

_ERRORS: tuple[type[Exception], ...] = (cluster_secret.SecretError, worker_secret.SecretError)
# Both services read the same files, each by code of its own.
_READERS: dict[str, Callable[[Path], Any]] = {"scheduler": cluster_secret.read, "worker": worker_secret.read}


def test_it_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "cluster-secret"
    assert cluster_secret.make(path)
    first = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not cluster_secret.make(path)
    assert path.read_text() == first
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster-secret"]


def test_two_deployments_do_not_share_a_drawn_secret(tmp_path: Path) -> None:
    for name in ("a", "b"):
        cluster_secret.make(tmp_path / name)
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


def test_processes_that_start_together_agree_on_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster-secret"
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(lambda _: (cluster_secret.make(path), path.read_text()), range(64)))
    assert sum(was_made for was_made, _ in made) == 1
    assert {text for _, text in made} == {path.read_text()}


@pytest.mark.parametrize("reader", _READERS)
def test_both_sides_read_the_same(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  0123456789abcdef~!\r\n")
    _READERS[reader](path)
    assert worker_secret.read(path) == "0123456789abcdef~!"
    assert cluster_secret.read(path).metadata == (("authorization", "Bearer 0123456789abcdef~!"),)


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"short",
        b"two words are not a secret",
        b"line one is long\nline two is long",
        "ä".encode() * 16,
        b"x" * 513,
        b"\x00" * 32,
        b"0123456789abcdef\x07",
    ],
)
def test_what_cannot_be_a_secret_is_refused_without_being_shown(reader: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(_ERRORS, match="16 to 512 printable ASCII characters") as refused:
        _READERS[reader](path)
    assert str(path) in str(refused.value)
    for word in re.findall(rb"[a-zA-Z0-9]{8,}", content):
        assert word.decode() not in str(refused.value)


@pytest.mark.parametrize("reader", _READERS)
def test_a_file_that_is_not_there_is_named_with_what_makes_one(reader: str, tmp_path: Path) -> None:
    with pytest.raises(_ERRORS, match="make-secret"):
        _READERS[reader](tmp_path / "missing")
    with pytest.raises(_ERRORS, match="Is a directory"):
        _READERS[reader](tmp_path)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(cluster_secret.SecretError, match="cannot be written"):
        cluster_secret.make(tmp_path / "file" / "cluster-secret")


def test_it_is_not_in_its_own_repr() -> None:
    assert "0123456789abcdef" not in repr(ClusterSecret("0123456789abcdef"))


@pytest.mark.parametrize(
    "metadata, let_in",
    [
        ((), False),
        (None, False),
        ((("authorization", "Bearer 0123456789abcdef"),), True),
        ((("authorization", b"Bearer 0123456789abcdef"),), True),
        ((("authorization", "Bearer 0123456789abcdeg"),), False),
        ((("authorization", "0123456789abcdef"),), False),
        ((("authorization", "bearer 0123456789abcdef"),), False),
        ((("authorization", "Bearer ä"),), False),
        ((("x", "Bearer 0123456789abcdef"),), False),
        ((("authorization", "Bearer wrong"), ("authorization", "Bearer 0123456789abcdef")), True),
    ],
)
def test_which_calls_carry_it(metadata: Any, let_in: bool) -> None:
    assert ClusterSecret("0123456789abcdef").is_in(metadata) is let_in


@pytest.mark.parametrize(
    "environ, path",
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/stepfence/cluster-secret"),
        ({"HOME": "/h"}, "/h/.local/state/stepfence/cluster-secret"),
        ({}, None),
    ],
)
def test_where_a_users_secret_is(environ: dict[str, str], path: str | None) -> None:
    assert cluster_secret.default_path(environ) == (None if path is None else Path(path))
