"""Benchmarks, tools and GPU tests take nothing from the package that it lacks: no run without a GPU would tell."""

from __future__ import annotations

import ast
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "atomr_cutlass"
IMPORT = re.compile(rf"from ({PACKAGE}[.\w]*) import (\w+)")


def _taken(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Each name that a file gives to something of the package, and what it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                yield alias.asname or alias.name, getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == PACKAGE:
                    module = importlib.import_module(alias.name)
                    yield alias.asname or PACKAGE, module if alias.asname else importlib.import_module(PACKAGE)


def _has(owner: Any, name: str) -> bool:
    return hasattr(owner, name) or name in getattr(owner, "__annotations__", {})


@pytest.mark.parametrize(
    "path",
    sorted(path for folder in ("benchmarks", "tools", "tests/gpu") for path in (ROOT / folder).glob("*.py")),
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_the_package_has_what_is_taken_from_it(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    taken = {name: of for name, of in _taken(tree) if name not in own}
    missing = [
        f"line {node.lineno}: {node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in taken
        and isinstance(owner := taken[node.value.id], (type, types.ModuleType)) and not _has(owner, node.attr)
    ]  # fmt: skip
    assert missing == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "gpu").glob("*.py")), ids=lambda path: path.name)
def test_the_package_has_what_programs_of_gpu_tests_import(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, name in IMPORT.findall(node.value):
                if not hasattr(importlib.import_module(module), name):
                    importlib.import_module(f"{module}.{name}")
