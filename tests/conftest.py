"""What holds for every test: a clean environment, an order that fails fast, and Hypothesis without time limits."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# The machine may be busy: time is no reason for a property to fail.
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Folders of tests from quick to slow; whatever runs the real model comes after all of them.
_ORDER = ("unit", "conformance", "property", "contract", "simulation", "fuzz", "e2e", "chaos", "bench", "gpu")


def pytest_configure() -> None:
    # Settings of whoever runs the tests are not the tests' settings; the model cache is.
    for name in list(os.environ):
        if name.startswith("STEPFENCE_") and name != "STEPFENCE_CACHE_DIR":
            del os.environ[name]
    # Whoever starts the tests in the background of a shell lets them ignore Ctrl-C, and the processes they start, too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # `stepfence up` keeps its cluster secret there, and commands look for it there.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="stepfence-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
    # No proxy is between these processes.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> tuple[bool, int]:
    folders = item.nodeid.split("/")
    place = _ORDER.index(folders[1]) if len(folders) > 2 and folders[1] in _ORDER else len(_ORDER)
    return item.get_closest_marker("model") is not None, place
