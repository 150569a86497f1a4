"""Every planted fault still has its place in the core, so that `make mutants` says what it seems to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, plant
from tests.mutants.faults import CORE, FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_anchor_stands_exactly_once_and_the_mutation_is_python(fault: Fault) -> None:
    text = (ROOT / CORE / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.anchor) == 1
    compile(text.replace(fault.anchor, fault.mutation), fault.file, "exec")


def test_there_are_enough_and_no_two_are_the_same() -> None:
    assert len(FAULTS) >= 16
    assert len({fault.name for fault in FAULTS}) == len({(f.file, f.anchor, f.mutation) for f in FAULTS}) == len(FAULTS)


def test_an_anchor_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / CORE).mkdir(parents=True)
    (tmp_path / CORE / "policy.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="occurs 0 times"):
        plant(Fault("gone", "policy.py", "y = 1", "y = 2"), tmp_path)
