"""Recordings: everything comes back as it went in, bounds hold, damage is told."""

from __future__ import annotations

import errno
import gzip
import json
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import Event, RankLost, RequestAborted, StepAcked, Tick
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.journal import Recorder, Recording, RecordingError, Scheduled
from tests.unit.journal.examples import filled, optional_fields
from tests.unit.journal.random_run import RandomRun, random_config

CONFIG = SchedulerConfig(block_size=4, policy=Policy.PRIORITY, max_preemptions=None)
EVENT_TYPES: tuple[type[Any], ...] = typing.get_args(Event)


def record(path: Path, *items: Event | Scheduled, config: SchedulerConfig = CONFIG) -> Path:
    recorder = Recorder(path, config)
    for item in items:
        if isinstance(item, Scheduled):
            recorder.scheduled(item.rank, item.output)
        else:
            recorder.event(item)
    recorder.close()
    return path


def read_back(path: Path) -> list[Event | Scheduled]:
    return [line.what for line in Recording(path).lines()]


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_every_event_comes_back_as_it_went_in(tmp_path: Path, event_type: type[Any]) -> None:
    event = filled(event_type)
    without = replace(event, **dict.fromkeys(optional_fields(event_type)))
    assert read_back(record(tmp_path / "r", event, without)) == [event, without]


def test_every_kind_of_event_is_tried() -> None:
    # One that is missing from the union can reach neither the core nor these tests.
    assert len(EVENT_TYPES) == 13


def test_steps_come_back_as_they_went_in_with_whatever_changed_between_them(tmp_path: Path) -> None:
    full: SchedulerOutput = filled(SchedulerOutput)
    steps = [
        Scheduled("a", full),
        Scheduled("a", None),
        Scheduled("b", replace(full, rank="b", num_drafts=None, new_requests=())),
        Scheduled("a", full),
        Scheduled("a", replace(full, step_seq=9, num_drafts=None, appended_rows=full.rows[:0])),
        Scheduled("a", full),
        Scheduled("b", replace(full, rank="b", epoch=3)),
    ]
    assert read_back(record(tmp_path / "r", *steps)) == steps


@pytest.mark.parametrize("config", [CONFIG, SchedulerConfig(), SchedulerConfig.reference(max_num_scheduled_tokens=7)])
def test_the_configuration_comes_back(tmp_path: Path, config: SchedulerConfig) -> None:
    assert Recording(record(tmp_path / "r", config=config)).config == config


def test_token_ids_that_fit_no_column_are_kept(tmp_path: Path) -> None:
    event = StepAcked("a", 1, 1, [-1, 1 << 40], [2])
    assert read_back(record(tmp_path / "r", event)) == [event]


def test_one_line_each_and_a_line_of_a_steady_step_is_short(tmp_path: Path) -> None:
    full: SchedulerOutput = filled(SchedulerOutput)
    path = record(tmp_path / "r", Tick(1.5), Scheduled("a", full), Scheduled("a", replace(full, step_seq=2)))
    lines = path.read_text().splitlines()
    assert lines[1] == '{"event":"Tick","now":1.5}'
    assert lines[3].endswith(',"step":{"step_seq":2}}')
    assert lines[-1] == '{"end":"closed"}'


# --- the file -----------------------------------------------------------------------------------------------------


def test_what_was_recorded_is_in_the_file_when_the_rank_has_nothing_more_to_do(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = Recorder(path, CONFIG)
    recorder.event(Tick(1.0))
    recorder.scheduled("a", None)
    # The process dies here.
    recording = Recording(path)
    assert [line.what for line in recording.lines()] == [Tick(1.0), Scheduled("a", None)]
    assert "killed" in recording.end
    recorder.event(Tick(2.0))
    recorder.event(RankLost("a", "gone"))
    recorder.event(Tick(3.0))
    assert read_back(path)[-1] == RankLost("a", "gone")
    recorder.close()


def test_earlier_recordings_are_kept(tmp_path: Path) -> None:
    for now in (1.0, 2.0, 3.0):
        record(tmp_path / "r", Tick(now))
    assert read_back(tmp_path / "r") == [Tick(3.0)]
    assert read_back(tmp_path / "r.1") == [Tick(1.0)]
    assert read_back(tmp_path / "r.2") == [Tick(2.0)]
    assert len(list(tmp_path.iterdir())) == 3


def test_only_its_user_may_read_a_recording(tmp_path: Path) -> None:
    assert record(tmp_path / "r").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("max_bytes", [2_000, 5_000, 70_000])
def test_a_recording_stops_at_its_limit_and_says_so(tmp_path: Path, max_bytes: int) -> None:
    path = tmp_path / "r"
    recorder = Recorder(path, random_config(1), max_bytes=max_bytes)
    run = RandomRun(1, random_config(1), recorder)
    run.run(600)
    assert not recorder.is_recording
    recorder.close()
    size = path.stat().st_size
    assert max_bytes - 5_000 < size <= max_bytes
    recording = Recording(path)
    assert sum(1 for _ in recording.lines()) > 0
    marker = json.loads(path.read_text().splitlines()[-1])
    assert marker["end"] == "size"
    assert recording.end == f"it reached its size limit after {marker['num_bytes']} bytes"


def test_a_limit_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least"):
        Recorder(tmp_path / "r", CONFIG, max_bytes=100)


class FullDisk:
    """A file on a disk that is full."""

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "r", CONFIG)
    recorder._file.close()  # type: ignore[union-attr]
    recorder._file = FullDisk()  # type: ignore[assignment]
    for _ in range(3):
        recorder.event(Tick(1.0))
        recorder.scheduled("a", None)
    recorder.close()
    assert not recorder.is_recording
    assert [r.message for r in caplog.records] == ["recording failed and ends here"]


# --- reading what is damaged --------------------------------------------------------------------------------------


def test_a_cut_off_file_is_good_up_to_its_last_complete_line(tmp_path: Path) -> None:
    whole = record(tmp_path / "r", Tick(1.0), Tick(2.0), RequestAborted("a", filled(RequestAborted).cause)).read_bytes()
    first = whole.index(b"\n") + 1
    seen = set()
    for length in range(first, len(whole)):
        path = tmp_path / "cut"
        path.write_bytes(whole[:length])
        recording = Recording(path)
        num_lines = len(list(recording.lines()))
        assert num_lines == min(whole[:length].count(b"\n") - 1, 3)
        assert "killed" in recording.end
        seen.add(num_lines)
    assert seen == {0, 1, 2, 3}


def test_compressed_recordings_are_read_too_whole_and_cut_off(tmp_path: Path) -> None:
    ticks = [Tick(float(i)) for i in range(20_000)]
    data = gzip.compress(record(tmp_path / "r", *ticks).read_bytes())
    (tmp_path / "r.gz").write_bytes(data)
    assert read_back(tmp_path / "r.gz") == ticks
    (tmp_path / "r.gz").write_bytes(data[: len(data) // 2])
    part = read_back(tmp_path / "r.gz")
    assert 0 < len(part) < len(ticks)
    assert part == ticks[: len(part)]


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hello\n", b"\x80\xff\n", b"[1]\n", b'{"version": 1}\n', b"\x1f\x8bxx"]
)
def test_other_files_are_not_taken_for_recordings(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"other (is not a recording of Stepfence|cannot be read)"):
        Recording(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(RecordingError, match="cannot be read"):
            Recording(path)


def test_an_unknown_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text('{"recording":"stepfence","version":7,"stepfence":"9.1"}\n')
    with pytest.raises(RecordingError, match=r"format 7, made by Stepfence 9.1; this version reads format 2"):
        Recording(path)


def test_a_setting_that_is_unknown_here_is_named(tmp_path: Path) -> None:
    path = record(tmp_path / "r")
    path.write_text(path.read_text().replace('"block_size"', '"brick_size"'))
    with pytest.raises(RecordingError, match="configuration cannot be used: SchedulerConfig has no field 'brick_size'"):
        Recording(path)


@pytest.mark.parametrize(
    "line,complaint",
    [
        ("nonsense", "line 3"),
        ("[1, 2]", "line 3"),
        ("{}", "line 3"),
        ('{"event":"Surprise"}', "not known"),
        ('{"event":"Tick"}', "Tick lacks its field 'now'"),
        ('{"event":"Tick","now":"late"}', "'late' is not float or int"),
        ('{"event":"Tick","now":1,"then":2}', "Tick has no field 'then'"),
        ('{"event":"RequestAborted","request_id":"a","cause":"boredom"}', "'boredom' is no AbortCause"),
        ('{"event":"RequestArrived","request_id":"a","handle":1,"prompt":"AAAA"}', "3 bytes"),
        ('{"event":"RequestArrived","request_id":"a","handle":1,"prompt":"A"}', "base64 is damaged"),
        ('{"event":"RequestArrived","request_id":"a","handle":1,"prompt":5}', "5 is not base64"),
        ('{"event":"RequestArrived","request_id":"a","handle":true,"prompt":""}', "True is not int"),
        ('{"schedule":"a","step":{"step_seq":4}}', "SchedulerOutput lacks"),
        ('{"schedule":"a"}', "'step'"),
    ],
)
def test_damage_is_told_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "r"
    record(path, Tick(1.0))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:], ""]))
    with pytest.raises(RecordingError, match=complaint) as raised:
        read_back(path)
    assert f"{path}, line 3: " in str(raised.value)
