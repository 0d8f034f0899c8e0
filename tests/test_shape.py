"""Sizes that keep the code readable, and imports that go one way."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("pycomm", "pycomm_console", "csrc", "tests", "bench", "examples")
SOURCES = (".py", ".pyi", ".cpp", ".h", ".cu")
LONGEST_FILE = 800
LONGEST_CLASS = 600
LONGEST_FUNCTION = 80

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Definition(NamedTuple):
    """A function or class, with its lines, and those without decorators and its docstring."""

    where: str
    is_class: bool
    lines: int
    code_lines: int


@cache
def sources() -> list[Path]:
    """Return the files that git tracks; others may be left from experiments."""
    listed = subprocess.run(["git", "ls-files", "-z", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not in a git checkout")
    names = [name for name in listed.stdout.split("\0") if name.endswith(SOURCES)]
    return [path for path in map(ROOT.joinpath, names) if path.exists()]


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file of pycomm."""
    return ast.parse(path.read_text())


@cache
def definitions(path: Path) -> list[Definition]:
    """Return all functions and classes of a Python file. Trees of all files would slow down the tests that follow."""
    return [
        Definition(
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", isinstance(node, ast.ClassDef), *lengths(node)
        )
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (*FUNCTIONS, ast.ClassDef))
    ]


def lengths(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[int, int]:
    """Return how many lines ``node`` has, and how many without its docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is None:
        return lines, lines
    text = node.body[0]
    return lines, lines - ((text.end_lineno or text.lineno) - text.lineno + 1)


def all_definitions(*folders: str) -> list[Definition]:
    """Return those of all Python files below ``folders``."""
    python = [path for path in sources() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]
    return [each for path in python for each in definitions(path)]


def test_no_file_is_long() -> None:
    counts = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert len(counts) > 200
    assert not {name: lines for name, lines in counts.items() if lines > LONGEST_FILE}


def test_no_class_is_long() -> None:
    """A docstring is part of a class: a reader has to pass it."""
    found = {each.where: each.lines for each in all_definitions(*FOLDERS) if each.is_class}
    assert len(found) > 100
    assert not {where: lines for where, lines in found.items() if lines > LONGEST_CLASS}


@cache
def classes_of(path: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a file by their names."""
    return {node.name: node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)}


def names_of(path: Path) -> dict[str, str]:
    """Return what a file imports: full names, "pycomm.kernels.topk" or "pycomm.kernels", by the names it uses."""
    names: dict[str, str] = {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return names


def class_graph(files: dict[str, Path]) -> tuple[dict[str, ast.ClassDef], dict[str, set[str]]]:
    """Return the classes of all modules by full name, and the bases of each that are among these."""
    classes = {f"{module}.{name}": node for module, path in files.items() for name, node in classes_of(path).items()}
    exported = {f"{module}.{name}": full for module, path in files.items() for name, full in names_of(path).items()}
    bases: dict[str, set[str]] = {}
    for module, path in files.items():
        names = names_of(path)
        for name, node in classes_of(path).items():
            found = set()
            for base in node.bases:
                first, _, rest = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).partition(".")
                full = names.get(first, f"{module}.{first}") + (f".{rest}" if rest else "")
                while full not in classes and full in exported:  # a package that hands it on
                    full = exported[full]
                found |= {full} & set(classes)
            bases[f"{module}.{name}"] = found
    return classes, bases


def with_bases(name: str, bases: dict[str, set[str]]) -> set[str]:
    """Return a class and all that it inherits from."""
    return {name}.union(*(with_bases(base, bases) for base in bases[name]))


def lengths_with_bases(files: dict[str, Path]) -> dict[str, int]:
    """Return the lines of every class, counting all that it inherits from the others."""
    classes, bases = class_graph(files)
    return {name: sum(lengths(classes[one])[0] for one in with_bases(name, bases)) for name in classes}


def test_no_class_is_long_with_its_bases() -> None:
    """What a class inherits is part of it, so that a chain of bases does not hide its size."""
    found = lengths_with_bases(python_files())
    step = classes_of(ROOT / "pycomm" / "optim" / "fused.py")["FusedStep"]
    assert found["pycomm.optim.fused.FusedStep"] > lengths(step)[0]  # bases are found
    assert not {name: lines for name, lines in found.items() if lines > LONGEST_CLASS}


def test_bases_are_found_through_imports(tmp_path: Path) -> None:
    texts = {
        "a": "class A:\n    def f(self): ...\n    def g(self): ...\n",
        "b": "from a import A as First\n\nclass B(First):\n    def f(self): ...\n",
        "c": "import b as other\n\nclass C(other.B[int], dict):\n    x = 1\n",
    }
    files = {name: tmp_path / f"{name}.py" for name in texts}
    for name, path in files.items():
        path.write_text(texts[name])
    assert lengths_with_bases(files) == {"a.A": 3, "b.B": 5, "c.C": 7}


USED_TWICE = {
    "Compression",
    "Exchange",
    "Pipeline",
    "Proof",
}
"""Names that two classes of pycomm have. Remove each one that no longer is."""


def names_used_twice(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_class_names_are_unique() -> None:
    found = [name for path in python_files().values() for name in classes_of(path)]
    assert len(found) > 250
    assert names_used_twice(found) == USED_TWICE


def test_names_used_twice_are_found() -> None:
    assert names_used_twice(["A", "B", "A", "C"]) == {"A"}


def test_no_function_is_long() -> None:
    found = {each.where: each.code_lines for each in all_definitions(*FOLDERS) if not each.is_class}
    assert not {where: lines for where, lines in found.items() if lines > LONGEST_FUNCTION}


def name_of(path: Path) -> str:
    """Return the name under which a file of pycomm is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, package: str, modules: Collection[str]) -> Iterator[str]:
    """Yield which of ``modules`` are imported anywhere: in functions and for annotations alone too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else origin for name in names if {name, origin} & set(modules))


def import_graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return, for every module, which of the others its file names in imports."""
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        graph[module] = set(imported(parsed(path), package, files)) - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules left after repeatedly removing those that import none of the rest, or that none imports."""
    rest = set(graph)
    while leaves := {module for module in rest if not graph[module] & rest}:
        rest -= leaves
    while roots := {module for module in rest if not any(module in graph[other] for other in rest)}:
        rest -= roots
    return rest


def python_files() -> dict[str, Path]:
    """Return the files of pycomm by the names of their modules."""
    return {name_of(path): path for path in sources() if path.suffix == ".py" and path.is_relative_to(ROOT / "pycomm")}


def test_no_files_import_each_other() -> None:
    files = python_files()
    graph = import_graph(files)
    assert sum(map(len, graph.values())) > 200
    assert not {module: sorted(graph[module] & circles(graph)) for module in circles(graph)}


def users_of_the_reducers_inside(tree: ast.AST) -> Iterator[str]:
    """Yield what is imported of the submodules of ``pycomm.training.reducer``, and private attributes of a Reducer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pycomm.training.reducer."):
            yield str(node.module)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pycomm.training.reducer."))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner.lstrip("_") in ("reducer", "inner", "attached"):
                yield f"{owner}.{node.attr}"


def test_nobody_looks_into_the_reducer() -> None:
    """The reducer declares what the rest of pycomm may use of it: the names of its package, ``Reducer.attached``."""
    found = {}
    for path in sources():
        where = path.relative_to(ROOT)
        inside = where == Path("pycomm/__init__.py") or "reducer" in where.parts
        if path.suffix == ".py" and where.parts[0] == "pycomm" and not inside:
            found[str(where)] = set(users_of_the_reducers_inside(parsed(path)))
    assert len(found) > 250
    assert {where: inside for where, inside in found.items() if inside} == {
        "pycomm/torch_internals/wrappers.py": {"reducer._get_zeros_like_grad_buckets"}  # DistributedDataParallel's
    }


def test_looks_into_the_reducer_are_found() -> None:
    lines = (
        "from pycomm.training.reducer.engine import Engine",
        "import pycomm.training.reducer.passes",
        "self._reducer._table",
    )
    text = "\n".join([*lines, "reducer.attached"])
    assert list(users_of_the_reducers_inside(ast.parse(text))) == [
        "pycomm.training.reducer.engine",
        "pycomm.training.reducer.passes",
        "_reducer._table",
    ]


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_rooms_on_the_ground_floor() -> None:
    """A reader chooses among twelve packages, not thirty."""
    rooms = [path.parent.name for path in sorted((ROOT / "pycomm").glob("*/__init__.py"))]
    assert 8 < len(rooms) <= 12, rooms


QUOTES_AND_KEEPS = {
    "pycomm/parallel/cut.py": "tracing runs the model's code",
    "pycomm/schedule/verify.py": "a schedule's attributes and rounds() are its author's code",
    "pycomm/tools/launching/serialize.py": "pickling runs the code of what is sent",
    "pycomm/training/asynchronous/arguments.py": "outer is the user's function",
    "pycomm/training/asynchronous/core.py": "the optimizer and the scheduler are the user's",
    "pycomm/training/checkpoint/loading.py": "state_dict() and load_state_dict() are the user's",
}
"""Files with errors that quote another and keep its traceback, as it leads to code that is not pycomm's."""


def test_an_error_that_quotes_another_is_raised_from_none() -> None:
    """Otherwise the same sentence is printed twice, with two tracebacks."""
    found = set()
    for path in (path for path in sources() if path.suffix == ".py" and path.is_relative_to(ROOT / "pycomm")):
        for handler in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.ExceptHandler) and node.name):
            for node in (node for node in ast.walk(handler) if isinstance(node, ast.Raise) and node.exc and node.cause):
                parts = [node.exc, node.cause]
                names = [[n.id for n in ast.walk(part) if isinstance(n, ast.Name)] for part in parts if part]
                if isinstance(node.cause, ast.Name) and all(handler.name in each for each in names):
                    found.add(str(path.relative_to(ROOT)))
                    assert found <= QUOTES_AND_KEEPS.keys(), f"{path}:{node.lineno}: raise it from None"
    assert found == QUOTES_AND_KEEPS.keys()
