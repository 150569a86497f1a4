"""Who can reach whom in the compose files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]


def _compose(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_f125_only_the_front_end_and_the_service_that_fetches_the_model_are_on_the_outside_network() -> None:
    file = _compose("compose.yaml")
    assert file["networks"]["inside"] == {"internal": True}
    networks = {name: set(service.get("networks", ())) for name, service in file["services"].items()}
    assert {name for name, on in networks.items() if "outside" in on} == {"frontend", "model"}
    assert {name for name, on in networks.items() if "inside" in on} == {
        "scheduler",
        "frontend",
        "worker",
        "worker-gpu",
    }
    # A service that names no network would be on the project's default one, which leads out.
    assert {name for name, on in networks.items() if not on} == {"secret"}
    assert file["services"]["secret"]["network_mode"] == "none"
    assert [name for name, service in file["services"].items() if "ports" in service] == ["frontend"]


def test_f125_workers_start_when_the_model_is_there() -> None:
    services = _compose("compose.yaml")["services"]
    assert services["model"]["restart"] == "no"
    for name in ("worker", "worker-gpu"):
        assert services[name]["depends_on"]["model"] == {"condition": "service_completed_successfully"}
        (cache,) = [volume for volume in services[name]["volumes"] if volume.startswith("models:")]
        assert cache in services["model"]["volumes"]
    scripted = _compose("compose.scripted.yaml")["services"]
    assert scripted["model"]["entrypoint"] == ["true"]
    assert scripted["model"]["image"] == scripted["worker"]["image"]
