"""Replay: byte-identical in another process, first difference told, the story of one request."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    AbortCause,
    Event,
    RankJoined,
    RankLost,
    RequestAborted,
    RequestArrived,
    StepAcked,
    Tick,
    WorkerProtocolError,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal import Recorder
from scheduler_svc.simulation.replay import main
from tests.unit.journal.random_run import RandomRun, random_config

SEEDS = range(40)
_REPLAY_ALL = """
import sys
from pathlib import Path
from scheduler_svc.simulation.replay import main
sys.exit(max(main(Path(name), out=sys.stdout) for name in sys.argv[1:]))
"""


def record_run(path: Path, seed: int, num_turns: int = 150) -> int:
    config = random_config(seed)
    recorder = Recorder(path, config)
    run = RandomRun(seed, config, recorder)
    run.run(num_turns)
    recorder.close()
    return run.num_steps


def replayed(path: Path, *, verify: bool = True, explain: str | None = None) -> tuple[int, str]:
    out = io.StringIO()
    return main(path, out=out, verify=verify, explain=explain), out.getvalue()


def test_random_runs_replay_byte_identical_in_another_process_with_another_hash_seed(tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.jsonl" for seed in SEEDS]
    num_steps = [record_run(path, seed) for seed, path in zip(SEEDS, paths, strict=True)]
    assert min(num_steps) > 20
    for hash_seed in ("1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", _REPLAY_ALL, *map(str, paths)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for count in num_steps:
            assert f"the same: all {count} steps are identical" in done.stdout


def test_random_runs_reach_what_matters(tmp_path: Path) -> None:
    told = ""
    for seed in SEEDS:
        record_run(tmp_path / "r", seed)
        told += replayed(tmp_path / "r")[1]
    for kind in ("StepAcked", "RankLost", "TextEnded", "GrammarReady", "PauseRequested", "PrefixCacheResetRequested"):
        assert kind in told
    assert "answers of workers did not fit" in told
    assert "num_speculative_tokens 3" in told
    assert " 0 preemptions" not in told.splitlines()[4]


def test_recording_the_same_run_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    record_run(tmp_path / "a", 3)
    record_run(tmp_path / "b", 3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# --- a run small enough to read -----------------------------------------------------------------------------------


class Told:
    """A core and its recorder, told the same."""

    def __init__(self, path: Path, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.recorder = Recorder(path, config)
        self.now = 100.0

    def handle(self, *events: Event) -> None:
        self.now += 0.5
        for event in (Tick(self.now), *events):
            self.recorder.event(event)
            self.scheduler.handle(event)

    def schedule(self, rank: str) -> None:
        output = self.scheduler.schedule(rank)
        self.recorder.scheduled(rank, output)


CONFIG = SchedulerConfig(
    block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, max_inflight_steps=1
)


def arrival(name: str, num_prompt: int, max_tokens: int) -> RequestArrived:
    return RequestArrived(name, ord(name), array("i", range(ord(name), ord(name) + num_prompt)), max_tokens=max_tokens)


def small_run(path: Path) -> Path:
    """a and b share 4 blocks; a's growth takes b's."""
    told = Told(path, CONFIG)
    told.handle(RankJoined("w", 1, 5, 64, 1000))
    told.handle(arrival("a", 7, 6), arrival("b", 7, 6))
    told.schedule("w")
    for step_seq in range(1, 9):
        record = told.scheduler.state.ranks["w"].window.oldest
        if record is not None:
            told.handle(StepAcked("w", 1, step_seq, [500 + step_seq] * record.num_sampling))
        told.schedule("w")
    told.handle(RankLost("w", "the worker left"))
    told.handle(RequestAborted("b", AbortCause.CLIENT_GONE))
    told.handle(arrival("c", 70, 6))
    told.recorder.close()
    return path


def test_the_story_of_a_request_has_its_turning_points(tmp_path: Path) -> None:
    path = small_run(tmp_path / "r")
    code, text = replayed(path, explain="b")
    assert code == 0
    story = text.partition("\n\n")[0]
    turns = [
        "arrived with a prompt of 7 tokens, asking for at most 6 tokens",
        "was accepted, with at most 6 tokens",
        "was admitted in step 1 of w: 7 tokens to hold",
        "had its first token",
        "was preempted on w for a: 2 blocks gained, 8 tokens to compute again",
        "waits: too few KV blocks are free",
        "resumed in step 7 of w: 9 tokens to hold, 4 of them cached",
        "was preempted on w (rank_lost)",
        "was to be ended: client_gone",
        "ended, aborted, with",
    ]
    places = [story.index(turn) for turn in turns]
    assert places == sorted(places)
    assert "     0.500 s  arrived" in story


def test_the_beneficiary_and_the_refused_are_told_too(tmp_path: Path) -> None:
    path = small_run(tmp_path / "r")
    assert "needed blocks on w: b was preempted for it" in replayed(path, explain="a")[1]
    assert "was refused, PROMPT_TOO_LONG" in replayed(path, explain="c")[1]
    code, text = replayed(path, explain="z")
    assert (code, "no such request is in the recording" in text) == (1, True)


def story_of(path: Path, request_id: str) -> list[str]:
    """The sentences, without their times."""
    code, text = replayed(path, explain=request_id)
    assert code == 0
    return [line.split(" s  ", 1)[1] for line in text.partition("\n\n")[0].splitlines()[1:]]


def waiting_run(path: Path) -> Path:
    """a runs and holds all blocks but one; the others wait behind each other, and each is given up in its turn."""
    told = Told(path, CONFIG)
    told.handle(RankJoined("w", 1, 5, 64, 1000))
    told.handle(arrival("a", 9, 6), arrival("b", 7, 6), arrival("c", 7, 6), arrival("d", 3, 6))
    told.schedule("w")
    for name in ("b", "c"):
        told.handle(RequestAborted(name, AbortCause.CLIENT_GONE))
        told.handle(StepAcked("w", 1, told.scheduler.state.ranks["w"].window.newest_step, [500]))
        told.schedule("w")
    told.recorder.close()
    return path


def test_f108_the_story_names_each_request_that_one_waits_behind(tmp_path: Path) -> None:
    waits = [sentence for sentence in story_of(waiting_run(tmp_path / "r"), "d") if sentence.startswith("waits: ")]
    assert waits[0].startswith("waits: behind b, which waits: ")
    assert waits[1].startswith("waits: behind c, which waits: ")


def test_f108_an_id_that_is_used_again_waits_for_its_own_reasons(tmp_path: Path) -> None:
    told = Told(tmp_path / "r", CONFIG)
    told.handle(RankJoined("w", 1, 5, 64, 1000))
    told.handle(arrival("a", 9, 6), arrival("b", 7, 6), arrival("c", 3, 6))
    told.schedule("w")
    told.handle(RequestAborted("c", AbortCause.CLIENT_GONE))
    told.handle(arrival("c", 3, 6))
    told.handle(StepAcked("w", 1, 1, [500]))
    told.schedule("w")
    told.recorder.close()
    sentences = story_of(tmp_path / "r", "c")
    assert sum(sentence.startswith("waits: behind b") for sentence in sentences) == 2, sentences


def test_the_summary_counts(tmp_path: Path) -> None:
    code, text = replayed(small_run(tmp_path / "r"))
    assert code == 0
    assert "recording of Stepfence" in text
    assert "block_size 4, max_num_seqs 4, max_num_batched_tokens 64, max_model_len 64, max_inflight_steps 1" in text
    assert "2 requests accepted, 1 refused, 1 finished, 1 aborted, 0 failed, 0 still live" in text
    assert "1 preemptions" in text
    assert "the recording ends: it was closed" in text


# --- differences --------------------------------------------------------------------------------------------------


def edited(path: Path, number: int, **changes: object) -> Path:
    """The recording with fields of one line, or of its step, replaced."""
    lines = path.read_text().splitlines(keepends=True)
    data = json.loads(lines[number - 1])
    (data["step"] if data.get("step") else data).update(changes)
    lines[number - 1] = json.dumps(data) + "\n"
    path.write_text("".join(lines))
    return path


def step_line(path: Path, which: int) -> int:
    """Number of the line of the n-th step."""
    numbers = [n for n, text in enumerate(path.read_text().splitlines(), 1) if '"step":{' in text]
    return numbers[which]


def test_the_first_difference_is_told_with_line_step_and_field(tmp_path: Path) -> None:
    path = small_run(tmp_path / "r")
    number = step_line(path, 2)
    code, text = replayed(edited(path, number, preempted_request_ids=["x"], finished_request_ids=["y"]))
    assert code == 1
    assert f"DIFFERENT at line {number}, after " in text
    assert "step 3 of w: preempted_request_ids\n  recorded ('x',)\n  replayed ('b',)" in text
    assert "identical" not in text


def test_a_step_where_none_was_recorded_is_a_difference_and_the_other_way_round(tmp_path: Path) -> None:
    path = small_run(tmp_path / "r")
    number = step_line(path, 0)
    text = path.read_text().splitlines(keepends=True)
    text[number - 1] = '{"schedule":"w","step":null}\n'
    path.write_text("".join(text))
    code, told = replayed(path)
    assert code == 1
    assert "the recording has no step of w here, the replay step 1" in told

    path = small_run(tmp_path / "r")
    text = path.read_text().splitlines(keepends=True)
    text.insert(number, text[number - 1])
    path.write_text("".join(text))
    code, told = replayed(path)
    assert code == 1
    assert "the recording has a step of w here, the replay none" in told


def test_what_is_not_verified_is_not_compared(tmp_path: Path) -> None:
    path = small_run(tmp_path / "r")
    edited(path, step_line(path, 2), total_num_tokens=77)
    code, text = replayed(path, verify=False)
    assert code == 0
    assert "steps were not compared" in text


def test_a_core_that_raises_is_a_result_with_its_line(tmp_path: Path) -> None:
    path = small_run(tmp_path / "r")
    code, text = replayed(edited(path, 4, now=1.0))
    assert code == 1
    assert "line 4, after 2 events: the core raised AssertionError: time runs backwards" in text


def test_a_wrong_answer_of_a_worker_is_replayed_as_the_nothing_it_was(tmp_path: Path) -> None:
    told = Told(tmp_path / "r", CONFIG)
    told.handle(RankJoined("w", 1, 5, 64, 1000), arrival("a", 7, 6))
    told.schedule("w")
    with pytest.raises(WorkerProtocolError):
        told.handle(StepAcked("w", 1, 1, [1, 2, 3]))
    told.handle(RankLost("w", "wrong answer"), RankJoined("w", 2, 5, 64, 1000))
    told.schedule("w")
    told.recorder.close()
    code, text = replayed(tmp_path / "r")
    assert code == 0
    assert "1 answers of workers did not fit" in text


def test_a_file_that_is_no_recording_ends_with_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r").write_text("hello\n")
    assert replayed(tmp_path / "r") == (2, "")
    assert capsys.readouterr().err == f"error: {tmp_path / 'r'} is not a recording of Stepfence\n"


def test_damage_in_the_middle_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_run(tmp_path / "r")
    lines = path.read_text().splitlines(keepends=True)
    lines[9] = "{broken\n"
    path.write_text("".join(lines))
    assert replayed(path)[0] == 2
    assert "line 10" in capsys.readouterr().err


def test_whatever_bytes_change_the_replay_ends_with_an_answer(tmp_path: Path) -> None:
    whole = small_run(tmp_path / "r").read_bytes()
    rng = random.Random(5)
    codes = set()
    for number in range(600):
        data = bytearray(whole if number % 4 else gzip.compress(whole))
        for _ in range(rng.choice([1, 1, 5])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "changed").write_bytes(data)
        codes.add(replayed(tmp_path / "changed")[0])
    assert codes == {0, 1, 2}
