"""The pieces of docs/clients.md run as they stand, against real processes; only the addresses are put in."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_openai import _NODE, OpenAIDeployment

_DOCUMENT = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
# By the words behind the fence: "python sync".
PIECES = dict(re.findall(r"^```(\w+ [^\n]+)\n(.*?)^```", _DOCUMENT, re.MULTILINE | re.DOTALL))
EXPECTED = {
    "python sync": r" 16\n$",
    "python async": r"\n32 tokens, preempted 0 times\n$",
    "python errors": r"^INVALID_ARGUMENT sampling\.temperature: .*\nreason INVALID_PARAMETER\n$",
    "python openai": r"\n32 tokens$",
    "console buf": r'"reason": "FINISH_REASON_LENGTH"',
    "js openai": r"^.{32}$",
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIDeployment]:
    with OpenAIDeployment(tmp_path_factory.mktemp("clients")) as running:
        yield running


def test_every_piece_is_run_or_says_that_it_is_not() -> None:
    assert {name for name in PIECES if "not run here" not in name} == set(EXPECTED)


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.startswith("js")])
def test_a_piece_does_what_it_shows(deployment: OpenAIDeployment, name: str, tmp_path: Path) -> None:
    code = _with_addresses(PIECES[name], deployment)
    if name.startswith("console"):
        command = ["sh", "-c", code.removeprefix("$ ")]
    else:
        command = [sys.executable, "-c", code]
    _run(command, EXPECTED[name], tmp_path)


@pytest.mark.node
def test_the_piece_for_node_does_what_it_shows(deployment: OpenAIDeployment) -> None:
    node = shutil.which("node")
    assert node is not None
    piece = _NODE / "document.js"
    piece.write_text(_with_addresses(PIECES["js openai"], deployment))
    try:
        _run([node, piece.name], EXPECTED["js openai"], _NODE)
    finally:
        piece.unlink()


def _with_addresses(text: str, deployment: OpenAIDeployment) -> str:
    return text.replace("127.0.0.1:50051", deployment.frontend_address).replace(
        "127.0.0.1:8000", deployment.openai_address
    )


def _run(command: list[str], expected: str, folder: Path) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)
    assert run.returncode == 0, run.stderr
    assert re.search(expected, run.stdout, re.DOTALL), run.stdout
