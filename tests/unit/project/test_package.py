"""The distribution, the protos and the documents are what they say."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from scheduler_svc.config import SERVICES, command_variables

ROOT = Path(__file__).parents[3]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_the_wheel_carries_services_and_generated_code(tmp_path: Path) -> None:
    built = _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "stepfence/__init__.py",
        "stepfence/v1/step_pb2.py",
        "stepfence/v1/worker_service_pb2_grpc.py",
        "scheduler_svc/core/scheduler.py",
        "scheduler_svc/cli/up.py",
        "worker_svc/service.py",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "protos/", "docs/"))]
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "stepfence = scheduler_svc.__main__:main" in text


def test_the_scheduler_needs_no_worker_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = " ".join(project["dependencies"])
    assert not re.search(r"\b(torch|safetensors|gguf|transformers)\b", base)
    assert any(spec.startswith("torch>=2.11,<2.14") for spec in project["optional-dependencies"]["worker"])


def test_the_generated_code_is_what_the_protos_give() -> None:
    answer = _run("bash", "-c", f'PATH="{Path(sys.executable).parent}:$PATH" protos/generate.sh --check')
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_a_removed_field_breaks_the_baseline(tmp_path: Path) -> None:
    buf = str(Path(sys.executable).parent / "buf")
    changed = tmp_path / "protos"
    for source in (ROOT / "protos").rglob("*"):
        if source.suffix in (".proto", ".yaml"):
            target = changed / source.relative_to(ROOT / "protos")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    baseline = str(ROOT / "protos" / "baseline.binpb")
    assert _run(buf, "breaking", str(changed), "--against", baseline).returncode == 0
    step = changed / "stepfence" / "v1" / "step.proto"
    step.write_text(step.read_text(encoding="utf-8").replace("  bytes rows = 6;\n", ""), encoding="utf-8")
    broken = _run(buf, "breaking", str(changed), "--against", baseline)
    assert broken.returncode != 0 and '"rows"' in broken.stdout + broken.stderr


_NOT_OURS = frozenset({"build", "dist", "node_modules"})


def _documents() -> list[Path]:
    return [
        path
        for path in sorted(ROOT.rglob("*.md"))
        if not any(part.startswith(".") or part in _NOT_OURS for part in path.relative_to(ROOT).parts)
    ]


@pytest.mark.parametrize("document", [str(path.relative_to(ROOT)) for path in _documents()])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document}: {target}"


def test_decisions_are_short_and_numbered() -> None:
    folder = ROOT / "docs" / "decisions"
    records = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    numbers = [record.name[:5] for record in records]
    assert records and len(set(numbers)) == len(numbers)
    for number, record in zip(numbers, records, strict=True):
        assert re.fullmatch(r"\d{4}-", number), record.name
        assert len(record.read_text(encoding="utf-8").splitlines()) <= 60, record.name


def test_both_sides_know_the_same_environment() -> None:
    from worker_svc.config import COMMAND_VARIABLES, OTHER_SETTINGS

    ours = frozenset().union(*SERVICES.values())
    assert frozenset(OTHER_SETTINGS) == ours - SERVICES["worker"]
    assert frozenset(COMMAND_VARIABLES) == command_variables() - SERVICES["worker"]


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)[0].split())
    told = {line.split()[1] for line in _run("make", "help").stdout.splitlines() if line.strip().startswith("make ")}
    assert told == phony
