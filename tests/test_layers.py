"""Layers where import-linter cannot see them: the compiled module, and the C++ directories."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_USED_WHERE_INSTALLED = {"tools/launching/reporting.py": {"rich"}, "tools/launching/serialize.py": {"cloudpickle"}}


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def plain_imports_of(path: Path) -> set[str]:
    """Return the names of ``import name`` statements."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
    return {alias.name for node in nodes for alias in node.names}


def test_only_the_lowest_layers_use_the_extension() -> None:
    users = {
        "/".join(path.relative_to(ROOT / "pycomm").parts[:2])
        for path in (ROOT / "pycomm").rglob("*.py")
        if "pycomm._native" in imports_of(path) and "kernels" not in path.parts
    }
    assert users == {"__init__.py", *(f"collectives/{name}" for name in ("gradients.py", "recorder", "transport"))}


def test_nothing_below_the_command_line_imports_the_package_itself() -> None:
    """What ``pycomm`` offers is made of what is below: see ``ignore_imports`` of import-linter's contracts."""
    packages = {p.name.removesuffix(".py") for p in (ROOT / "pycomm").iterdir()} | {"_native"}
    for path in (ROOT / "pycomm").rglob("*.py"):
        if "cli" not in path.parts:
            for name in imports_of(path) - {"pycomm"}:
                root, _, rest = name.partition(".")
                assert root != "pycomm" or rest.split(".")[0] in packages, f"{path} imports {name}"
            assert "pycomm" not in plain_imports_of(path), path


def test_only_the_demo_needs_its_extra() -> None:
    for path in (ROOT / "pycomm").rglob("*.py"):
        if "cli" not in path.parts and path.name != "live.py":  # which is imported by those who ask for it
            roots = {name.split(".")[0] for name in imports_of(path)}
            allowed = _USED_WHERE_INSTALLED.get(str(path.relative_to(ROOT / "pycomm")), set())
            assert not roots & {"rich", "matplotlib", "cupy", "pytest", "cloudpickle"} - allowed, path


def test_schedules_need_numpy_only() -> None:
    for path in (ROOT / "pycomm" / "schedule").rglob("*.py"):
        foreign = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - {"pycomm"}
        assert foreign <= {"numpy"}, path


def test_cpp_layers() -> None:
    """bindings -> transport -> kernels -> device -> base."""
    order = ["base", "device", "kernels", "transport", "bindings"]
    found = 0
    for path in (ROOT / "csrc").rglob("*.[hc]*"):
        layer = path.relative_to(ROOT / "csrc").parts[0]
        for target in re.findall(r'#include "(\w+)/', path.read_text()):
            found += 1
            assert order.index(target) <= order.index(layer), f"{path} includes {target}/"
    assert found > 30


def test_bindings_hold_no_arithmetic() -> None:
    """A loop over elements in bindings/ would be a kernel in the wrong place."""
    for path in (ROOT / "csrc" / "bindings").glob("*.cpp"):
        assert not re.search(r"\.data\)?\[|\bstd::(fabs|sqrt|accumulate)", path.read_text()), path
