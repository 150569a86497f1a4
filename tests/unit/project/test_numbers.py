"""Numbers that code, tests and documents cite are explained in the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("scheduler_svc", "worker_svc", "tests", "docs", "protos")
# Types of numbers in model files that look like field cases.
NOT_CASES = frozenset({"F16", "F32"})


def _text() -> str:
    """Everything that a person wrote; records of the reference use such names for cases of their own."""
    paths = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".proto")
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if "_pb2" not in path.name)


def _first_columns(document: str, letter: str) -> set[str]:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE)
    return {number for row in rows for number in re.findall(rf"\b{letter}\d+\b", row)}


def test_every_cited_decision_is_listed() -> None:
    cited = set(re.findall(r"\bD(?!0)\d{1,2}\b", _text()))
    assert len(cited) > 10
    assert cited <= _first_columns("docs/decisions/README.md", "D")


def test_every_field_case_in_a_name_of_a_test_is_listed() -> None:
    names = re.findall(r"^ *(?:async )?def (test_\w+)", _text(), re.MULTILINE)
    cited = {f"F{number}" for name in names for number in re.findall(r"_f(\d\d+)(?=_)", name)}
    assert len(cited) > 30
    assert cited <= _first_columns("tests/README.md", "F")


def test_every_field_case_in_a_comment_is_listed() -> None:
    cited = set(re.findall(r"\bF\d\d\d?\b", _text())) - NOT_CASES
    assert cited - _first_columns("tests/README.md", "F") <= {"F43"}, "F43 ends a range"
