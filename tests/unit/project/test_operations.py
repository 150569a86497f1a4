"""docs/operations.md names a test for every row of its table, and each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_row_of_what_happens_when_x_dies_is_backed_by_a_test() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    table = text.split("## What happens when X dies")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| what |")]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for path, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), row
