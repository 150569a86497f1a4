"""The life of a request is a table; nothing changes a status but by it, and the documents show it as it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from scheduler_svc.core.events import GrammarReady
from scheduler_svc.core.request import FINISHED, LIVE, QUEUED, TRANSITIONS, Status, transition
from scheduler_svc.core.resources import ALL_REASONS
from tests.support.core_harness import World
from tests.unit.core.test_queues import request

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("before, after", list(product(Status, Status)), ids=lambda s: s.name)
def test_only_what_the_table_says(before: Status, after: Status) -> None:
    r = request("r")
    r.status = before
    if after in TRANSITIONS[before]:
        transition(r, after)
        assert r.status is after
    else:
        with pytest.raises(AssertionError, match="not in the table"):
            transition(r, after)
        assert r.status is before


def test_the_named_sets() -> None:
    assert set(TRANSITIONS) == set(Status) == LIVE | FINISHED and not LIVE & FINISHED
    not_queued = LIVE - QUEUED
    assert Status.BLOCKED in QUEUED and QUEUED < LIVE and not_queued == {Status.RUNNING}
    assert all(not TRANSITIONS[status] for status in FINISHED)
    for status in LIVE:
        assert Status.FINISHED_ABORTED in TRANSITIONS[status] and Status.FINISHED_ERROR in TRANSITIONS[status]


def test_every_status_can_be_reached_and_left() -> None:
    reached = {Status.WAITING}
    for _ in Status:
        reached |= {to for status in reached for to in TRANSITIONS[status]}
    assert reached == set(Status)


def test_a_status_is_set_in_one_place() -> None:
    """In `transition`, and where the request is made; nowhere else in the core."""
    found = []
    for path in sorted((ROOT / "scheduler_svc" / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            found += [path.name for t in targets if isinstance(t, ast.Attribute) and t.attr == "status"]
    assert found == ["request.py", "request.py"]


def test_a_life_through_every_kind_of_change() -> None:
    world = World()
    world.submit("a", 5, 9, awaits_grammar=True)
    seen = [world.request("a").status]
    world.handle(GrammarReady("a"))
    world.step()
    seen.append(world.request("a").status)
    world.lose("r0")
    seen.append(world.request("a").status)
    world.join("r0", 20)
    world.step()
    seen.append(world.request("a").status)
    assert seen == [Status.BLOCKED, Status.RUNNING, Status.PREEMPTED, Status.RUNNING]
    world.run()
    world.check_texts()


def test_the_diagram_is_up_to_date() -> None:
    command = [sys.executable, "docs/draw_transitions.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_diagram_shows_every_transition() -> None:
    text = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    drawn = text.split("<!-- transitions: begin -->")[1].split("<!-- transitions: end -->")[0]
    everywhere = drawn.split("from any of these also to ")[1].splitlines()[0].split(", ")
    for status, successors in TRANSITIONS.items():
        for to in successors:
            assert to.name in everywhere or f"{status.name} --> {to.name}\n" in drawn


def test_every_reason_is_explained() -> None:
    text = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    who = ("| waiting |", "| running |", "| both |")
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and any(w in line for w in who)]
    assert sorted(rows) == sorted(reason.name for reason in ALL_REASONS)
