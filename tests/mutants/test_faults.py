"""Every planted fault still has its place in the core, so that `make mutants` says what it seems to say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.faults import FAULTS, Fault
from tests.mutants.planting import NotFound, mutated, plant, source_of


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_anchor_stands_exactly_once_and_the_mutation_is_python(fault: Fault) -> None:
    text = (ROOT / source_of(fault)).read_text(encoding="utf-8")
    changed = mutated(fault, text)
    compile(changed, source_of(fault).name, "exec")
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


def test_there_are_enough_and_no_two_are_the_same() -> None:
    assert len(FAULTS) >= 16
    distinct = {(fault.where, fault.anchor, fault.mutation) for fault in FAULTS}
    assert len({fault.name for fault in FAULTS}) == len(distinct) == len(FAULTS)


# --- planting -----------------------------------------------------------------------------------------------------

SOURCE = """
x = 1  # a comment

class Pool:
    def take(self, count):
        if (count > 0 and
                self.free):
            x = 1
            self.count(count)
        return x

def take(count):
    return count > 0
"""


@pytest.mark.parametrize(
    ("where", "anchor", "mutation", "line"),
    [
        ("m:Pool.take", "count > 0", "count >= 0", "        if count >= 0 and self.free:"),
        ("m:take", "count > 0", "True", "    return True"),
        ("m:Pool.take", "self.count(count)", "pass", "            pass"),
        ("m:Pool.take", "x = 1\nself.count(count)", "x = 2", "            x = 2"),
        ("m:Pool.take", "x", "count", "        return count"),
    ],
)
def test_a_fault_is_planted_in_its_function_only(where: str, anchor: str, mutation: str, line: str) -> None:
    """Parentheses, line breaks and comments of the source do not matter."""
    changed = mutated(Fault("f", where, anchor, mutation), SOURCE)
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    assert [new for new in changed.splitlines() if new not in before] == [line]


@pytest.mark.parametrize(
    ("where", "anchor", "problem"),
    [
        ("m:Pool.take", "y = 1", "occurs 0 times"),
        ("m:", "count > 0", "occurs 2 times"),
        ("m:", "x = 1", "occurs 2 times"),
        ("m:Pool.give", "x = 1", "is there 0 times"),
    ],
)
def test_a_fault_without_one_place_is_an_error(where: str, anchor: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / source_of(Fault("gone", where, anchor, "pass"))
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    with pytest.raises(NotFound, match=problem):
        plant(Fault("gone", where, anchor, "pass" if "=" in anchor else "False"), tmp_path)
    assert path.read_text() == SOURCE
