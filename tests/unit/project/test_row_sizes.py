"""How long a row is is decided in `core/rows.py` and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

CORE = Path(__file__).parents[3] / "scheduler_svc" / "core"
# What a length depends on: the settings that cut a row, and the questions to resources that add to it or cut it.
DECIDES = frozenset({"long_prefill_token_threshold", "enable_chunked_prefill", "wants", "clips"})
# Where they are declared and collected.
DECLARES = frozenset({"config.py", "resources/container.py"})


def names_read(source: str) -> set[str]:
    """Attributes that this code looks at."""
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def sizing_modules(folder: Path) -> set[str]:
    """Modules that decide how long a row is."""
    modules = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    return {name for name, source in modules.items() if names_read(source) & DECIDES and name not in DECLARES}


def test_a_row_is_sized_in_one_place() -> None:
    assert sizing_modules(CORE) == {"rows.py"}


def test_a_second_place_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("def size_row(state):\n    return state.config.long_prefill_token_threshold\n")
    assert sizing_modules(tmp_path) == {"rows.py"}
    planted = (
        (CORE / "running.py")
        .read_text(encoding="utf-8")
        .replace(
            "rows.size_row(state, plan, request, start, request.num_tokens + request.awaited, admitting=False)",
            "min(request.num_tokens - start, state.config.long_prefill_token_threshold or plan.tokens_left)",
        )
    )
    (tmp_path / "running.py").write_text(planted, encoding="utf-8")
    assert sizing_modules(tmp_path) == {"rows.py", "running.py"}
