"""`--worker-address HOST:PORT`: run the worker's side of the contract against that worker (README.md beside this
file)."""

from __future__ import annotations

from pathlib import Path

import pytest

_WORKER_TESTS = Path(__file__).parent / "worker"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--worker-address",
        default=None,
        metavar="HOST:PORT",
        help="test this worker instead of a scripted one in the same process",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "own_worker: needs a scripted worker of its own, left out with --worker-address")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--worker-address", default=None) is None:
        return
    wanted = [
        item for item in items if _WORKER_TESTS in item.path.parents and item.get_closest_marker("own_worker") is None
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
