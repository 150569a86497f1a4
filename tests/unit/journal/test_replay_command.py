"""`stepfence replay` from the command line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scheduler_svc.cli.app import app
from tests.unit.journal.test_replay import edited, small_run, step_line


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return small_run(tmp_path / "run.jsonl")


def test_a_recording_replays(recording: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(recording)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "the same: all 9 steps are identical"


def test_a_compressed_recording_replays_and_explains(recording: Path) -> None:
    packed = recording.with_suffix(".gz")
    packed.write_bytes(gzip.compress(recording.read_bytes()))
    result = CliRunner().invoke(app, ["replay", str(packed), "--explain", "b"])
    assert result.exit_code == 0
    assert result.stdout.startswith("b:\n     0.500 s  arrived")


def test_a_difference_is_exit_code_1_unless_nobody_asks(recording: Path) -> None:
    edited(recording, step_line(recording, 3), total_num_tokens=77)
    assert CliRunner().invoke(app, ["replay", str(recording)]).exit_code == 1
    assert CliRunner().invoke(app, ["replay", str(recording), "--no-verify"]).exit_code == 0


def test_another_file_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello\n")
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "other")])
    assert result.exit_code == 2
    assert "is not a recording of Stepfence" in result.stderr
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "missing")]).exit_code == 2
