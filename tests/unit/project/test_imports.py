"""What `lint-imports` cannot say: that it holds in a running Python, and that the core imports nothing unlisted."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final

import scheduler_svc.core

_IMPORT_EVERYTHING: Final = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

sys.meta_path.insert(0, Absent())
package = importlib.import_module({package!r})
names = [{package!r}, *(found.name for found in pkgutil.walk_packages(package.__path__, {package!r} + "."))]
for name in names:
    if name not in {skipped!r} and not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
# Modules of the standard library that hold data and compute; numpy where a benchmark asks for it.
_CORE_MAY_IMPORT: Final = frozenset(
    {
        "__future__",
        "array",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "numpy",
        "operator",
        "struct",
        "types",
        "typing",
    }
)


def _import_all(package: str, absent: set[str], skipped: tuple[str, ...] = ()) -> int:
    code = _IMPORT_EVERYTHING.format(package=package, absent=absent, skipped=skipped)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert answer.returncode == 0, answer.stderr
    return int(answer.stdout)


def test_every_module_of_the_schedulers_side_imports_without_torch_and_without_the_worker() -> None:
    assert _import_all("scheduler_svc", {"torch", "transformers", "safetensors", "gguf", "worker_svc"}) > 20


def test_the_workers_contract_side_imports_without_torch_and_without_the_scheduler() -> None:
    absent = {"torch", "transformers", "safetensors", "gguf", "tokenizers", "scheduler_svc"}
    code = (
        f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        "import worker_svc.server, worker_svc.service, worker_svc.runner.scripted, worker_svc.__main__\nprint('ok')"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert answer.stdout == "ok\n", answer.stderr


def test_the_core_imports_itself_and_data_modules_only() -> None:
    folder = Path(scheduler_svc.core.__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 15
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}: relative import"
                names = [node.module or ""]
            for name in names:
                allowed = name.startswith("scheduler_svc.core") or name.partition(".")[0] in _CORE_MAY_IMPORT
                assert allowed, f"{file.name} imports {name}"
