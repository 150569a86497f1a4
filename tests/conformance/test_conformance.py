"""Recorded truths: every scenario that is within scope decides as the reference did, block ids included, with all
invariants checked after every event; every other one says that it is not supported."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.simulation import scenario
from tests.conformance import compare

Json = dict[str, Any]
HERE = Path(__file__).parent
CASES = {case["name"]: case for case in scenario.read_scenarios(HERE / "cases.json")}
RANDOM = {
    case["name"]: case for name in ("random", "random-2") for case in scenario.read_scenarios(HERE / f"{name}.jsonl.gz")
}
TRUTH = {
    **compare.read_results(str(HERE / "expected.jsonl")),
    **compare.read_results(str(HERE / "random-expected.jsonl.gz")),
    **compare.read_results(str(HERE / "random-2-expected.jsonl.gz")),
}

# Out of scope, each with what the refusal must name. Nothing else may be refused, and all of these must be.
_LOADS, _ENCODER = "kv_connector", "encoder_compute_budget"
UNSUPPORTED: dict[str, str] = {
    "B07": "use_v2_model_runner",  # the older worker protocol, which keeps state of preempted requests
    "E13": "pp_size",  # pacing of pipeline stages
    "L10": "max_loras",  # adapters
    "L19": "max_loras",
    "X20": "max_loras",
    "L11": "pooling",  # models that yield vectors
    "L14": "sliding_window",
    "X14": "eagle",  # a draft head that needs the last matched block computed again
    "M06": "disable_chunked_mm_input",  # images
    **{name: _LOADS for name in CASES if name.startswith("K")},  # KV loaded from elsewhere
    **{name: _ENCODER for name in CASES if name.startswith("M") and name != "M06"},
    **{name: _LOADS for name in RANDOM if name.startswith(("kv-", "kv_async-"))},
    **{name: _ENCODER for name in RANDOM if name.startswith("mm-")},
}
ALL = {**CASES, **RANDOM}
SUPPORTED = [name for name in ALL if name not in UNSUPPORTED]


def test_the_scope_is_what_it_says() -> None:
    """So that no list above can swallow a case unseen."""
    assert (len(CASES), len(RANDOM)) == (95, 144)
    assert set(TRUTH) == set(ALL)
    required = {name for name in CASES if name[0] in "ABPXETLD"} - {
        "X14", "X20", "L10", "L19", "L11", "L14", "B07", "E13",
    }  # fmt: skip
    required |= {
        f"{p}-10{i}" for p in ("basic", "tight", "priority", "prefix", "async", "throttle") for i in range(1, 9)
    }
    required |= {f"async-{number}" for number in range(31337, 31361)}
    assert set(SUPPORTED) == required


@pytest.mark.parametrize("name", SUPPORTED)
def test_decides_as_recorded(name: str) -> None:
    result = scenario.run_scenario(ALL[name], check_invariants=True)
    assert compare.difference(TRUTH[name], result) is None, CASES.get(name, {}).get("why", "")


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_out_of_scope_says_so(name: str) -> None:
    result = scenario.run_scenario(ALL[name])
    assert result["ok"] is False
    assert UNSUPPORTED[name] in result["error"] and "not supported" in result["error"]


def test_the_comparison_sees_every_kind_of_difference() -> None:
    """A comparison that always agrees would prove nothing."""
    truth = TRUTH["B04"]
    changes: list[Callable[[Json], None]] = [
        lambda record: record["state"].update(free_blocks=record["state"]["free_blocks"] + 1),
        lambda record: record["state"].update(waiting=[*record["state"]["waiting"], "x"]),
        lambda record: next(iter(record["state"]["requests"].values())).update(computed=-1),
        lambda record: record["state"].update(capacity_bound=not record["state"]["capacity_bound"]),
        lambda record: record["state"]["deferred"].append([1, [2]]),
        lambda record: record.update(finished=["x"]),
    ]
    for change in changes:
        changed = json.loads(json.dumps(truth))
        change(next(r for r in changed["records"] if r["state"]["requests"]))
        assert compare.difference(truth, changed) is not None
    changed = json.loads(json.dumps(truth))
    request = next(r for record in changed["records"] for r in record["state"]["requests"].values() if r["blocks"])
    request["blocks"][0] += 100
    assert compare.difference(truth, changed) is not None
    assert compare.difference(truth, changed, with_ids=False) is None
    assert compare.difference(truth, {**truth, "records": truth["records"][:-1]}) is not None
    assert compare.difference(truth, None) == "no result"


# --- the runner itself --------------------------------------------------------------------------------------------

ADD: Json = {"op": "add", "id": "a", "prompt_len": 3, "max_tokens": 2}
GOOD: Json = {"name": "good", "title": "ignored", "why": "ignored", "ops": [ADD, {"op": "run", "max_steps": 9}]}


def written(tmp_path: Path, name: str, scenarios: list[Json]) -> Path:
    path = tmp_path / name
    lines = ".jsonl" in name
    text = "\n".join(map(json.dumps, scenarios)) if lines else json.dumps(scenarios)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["s.json", "s.jsonl", "s.json.gz", "s.jsonl.gz"])
def test_every_form_of_file_is_read(tmp_path: Path, name: str) -> None:
    out = io.StringIO()
    assert scenario.main([written(tmp_path, name, [GOOD, {**GOOD, "name": "again"}])], out) == 0
    results = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(r["name"], r["ok"], r["error"]) for r in results] == [("good", True, None), ("again", True, None)]
    assert results[0]["records"] == results[1]["records"]
    assert [record["op"] for record in results[0]["records"]] == [0, 1, 1, 1]


UNKNOWN_KEYS: list[Json] = [
    {**GOOD, "extra": 1},
    {**GOOD, "config": {"blocks": 3}},
    {**GOOD, "ops": [{**ADD, "colour": "red"}]},
    {**GOOD, "ops": [ADD, {"op": "step", "throttled": True}]},
    {**GOOD, "ops": [ADD, {"op": "step", "recving": ["a"]}]},
    {**GOOD, "ops": [ADD, {"op": "dance"}]},
    {**GOOD, "ops": [ADD, {"op": "finish", "ids": ["a"], "status": "FINISHED_IGNORED"}]},
]
CANNOT_BE_RUN: list[Json] = [
    {**GOOD, "config": {"policy": "lifo"}},
    {**GOOD, "config": {"watermark": 1.5}},
    {**GOOD, "ops": [{"op": "add", "id": "a"}]},
    {**GOOD, "ops": [ADD, ADD]},
    {**GOOD, "ops": [ADD, {"op": "update"}]},
    {**GOOD, "ops": [ADD, {"op": "step", "tokens": {"a": [1, 2]}}]},
    {"name": "no ops"},
]


@pytest.mark.parametrize("bad", UNKNOWN_KEYS + CANNOT_BE_RUN)
def test_one_that_cannot_be_run_says_why_and_the_others_go_on(tmp_path: Path, bad: Json) -> None:
    out = io.StringIO()
    assert scenario.main([written(tmp_path, "s.json", [bad, GOOD])], out) == 1
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first["name"] == bad["name"] and first["ok"] is False and first["error"]
    assert second["ok"] is True and second["error"] is None
    if bad in UNKNOWN_KEYS:
        assert first["error"].startswith("ScenarioError")


def test_an_event_after_a_plan_that_preempted_gets_its_own_answer() -> None:
    config = {"block_size": 4, "num_blocks": 5, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 16}
    ops = [
        *({"op": "add", "id": name, "prompt_len": 7, "max_tokens": 8} for name in "ab"),
        *({"op": kind} for kind in ("step", "step", "schedule")),
        {"op": "add", "id": "c", "prompt_len": 2, "max_tokens": 2},
        {"op": "update"},
    ]
    result = scenario.run_scenario({"name": "add", "config": config, "ops": ops}, check_invariants=True)
    assert (result["ok"], result["error"]) == (True, None)
    assert any(record.get("schedule", {}).get("preempted") for record in result["records"])


def test_a_scenario_may_have_more_steps_in_flight_than_any_window() -> None:
    config = {"block_size": 4, "num_blocks": 50, "max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 64}
    ops: list[Json] = []
    for name in "abcdefgh":
        ops += [{"op": "add", "id": name, "prompt_len": 3}, {"op": "schedule"}, {"op": "abort", "ids": [name]}]
    ops += [{"op": "update"}] * 8
    result = scenario.run_scenario({"name": "deep", "config": config, "ops": ops}, check_invariants=True)
    assert (result["ok"], result["error"]) == (True, None)


def test_the_command_prints_each_result_at_once(tmp_path: Path) -> None:
    """A reader of the pipe has the first result while the file of the second does not even exist."""
    second = tmp_path / "second.json"
    command = [sys.executable, "-m", "scheduler_svc", "scenario", "run"]
    bad = {**GOOD, "config": {"blocks": 3}}
    first = written(tmp_path, "first.jsonl.gz", [bad, GOOD])
    # The second file is a pipe: the command waits there until it is written.
    os.mkfifo(second)
    process = subprocess.Popen([*command, str(first), str(second)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [line["ok"] for line in lines] == [False, True] and process.poll() is None
        second.write_text(json.dumps([{**GOOD, "name": "late"}]))
        assert json.loads(process.stdout.readline())["name"] == "late"
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
