"""No module needs itself: import cycles, those for type checking and those inside functions included."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


@pytest.mark.parametrize("package", ["scheduler_svc", "worker_svc"])
def test_imports_have_no_cycle(package: str) -> None:
    graph = grimp.build_graph(package, cache_dir=None)
    sorter = TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
