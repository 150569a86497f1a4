"""Where a fault stands in the core, and how it is planted there.

A fault is found by the syntax tree: in the function that it names, the one expression (or the one run of statements)
that reads like its anchor."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants.faults import Fault

CORE = Path("scheduler_svc/core")


class NotFound(ValueError):
    """The fault has no place, or more than one."""


def plant(fault: Fault, root: Path) -> None:
    """Apply a fault to the core below `root`. Raises NotFound unless its anchor occurs there exactly once."""
    path = root / source_of(fault)
    path.write_text(mutated(fault, path.read_text(encoding="utf-8")), encoding="utf-8")


def source_of(fault: Fault) -> Path:
    """The file that the fault changes, relative to the root of the project."""
    module, _, _ = fault.where.partition(":")
    return CORE / (module.replace(".", "/") + ".py")


def mutated(fault: Fault, source: str) -> str:
    """The source with the fault in it, without comments. Raises NotFound."""
    tree = ast.parse(source)
    scope = _scope(fault, tree)
    anchor, mutation = _expression(fault.anchor), _expression(fault.mutation)
    if anchor is not None and mutation is not None:
        found = _replace_expression(scope, anchor, mutation)
    else:
        found = _replace_statements(scope, ast.parse(fault.anchor).body, ast.parse(fault.mutation).body)
    if found != 1:
        raise NotFound(f"the anchor of {fault.name!r} occurs {found} times in {fault.where}")
    return ast.unparse(ast.fix_missing_locations(tree))


def _scope(fault: Fault, tree: ast.Module) -> ast.AST:
    _, _, qualified = fault.where.partition(":")
    scope: ast.AST = tree
    for name in filter(None, qualified.split(".")):
        inner = [
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        if len(inner) != 1:
            raise NotFound(f"{fault.where}, where {fault.name!r} stands, is there {len(inner)} times")
        scope = inner[0]
    return scope


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _replace_expression(scope: ast.AST, anchor: ast.expr, mutation: ast.expr) -> int:
    """How often the anchor occurs. Every occurrence is replaced."""
    wanted = ast.dump(anchor)
    found = 0
    for node in list(ast.walk(scope)):
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and ast.dump(value) == wanted:
                setattr(node, name, mutation)
                found += 1
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, ast.expr) and ast.dump(item) == wanted:
                        value[index] = mutation
                        found += 1
    return found


def _replace_statements(scope: ast.AST, anchor: list[ast.stmt], mutation: list[ast.stmt]) -> int:
    """How often the anchor occurs as a run of statements. Every occurrence is replaced."""
    wanted = [ast.dump(statement) for statement in anchor]
    found = 0
    for node in list(ast.walk(scope)):
        for _, value in ast.iter_fields(node):
            if not isinstance(value, list) or not all(isinstance(item, ast.stmt) for item in value):
                continue
            for start in range(len(value) - len(wanted), -1, -1):
                if [ast.dump(item) for item in value[start : start + len(wanted)]] == wanted:
                    value[start : start + len(wanted)] = mutation
                    found += 1
    return found
