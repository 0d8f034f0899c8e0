"""What SECURITY.md promises of the sources: nothing that a peer or a file holds is unpickled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pycomm"
CHILDREN = {"tools/launching/serialize.py: pickle", "tools/launching/serialize.py: cloudpickle"}
"""``launch`` exchanges these with processes that it has started, through pipes that nobody else has."""
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
    "eval",
    "exec",
}


def forbidden(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        called = name in CALLS and not (isinstance(node, ast.Attribute) and name in ("eval", "exec"))
        if called:
            yield name
        if isinstance(node, ast.keyword) and node.arg in ("weights_only", "allow_pickle"):
            safe = isinstance(node.value, ast.Constant) and node.value.value is (node.arg == "weights_only")
            if not safe:
                yield f"{node.arg}={ast.unparse(node.value)}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func) == "torch.load"
        ) and not any(keyword.arg == "weights_only" for keyword in node.keywords):
            yield "torch.load without weights_only=True"


READERS = {"json", "yaml", "tomllib", "literal_eval", "load", "loads", "raw_decode", "JSONDecoder"}


def read_as_json(tree: ast.AST) -> Iterator[str]:
    """Return the parsers that ``tree`` uses, by any name: ``json.loads``, ``loads``, ``map(json.loads, texts)``."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else ""
        of = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
        if of in ("json", "ast", "tomllib", "yaml") and name in READERS:
            yield f"{of}.{name}"
        if isinstance(node, ast.ImportFrom) and node.module in ("json", "ast", "tomllib", "yaml"):
            yield from (alias.name for alias in node.names if alias.name in READERS)
        if isinstance(node, ast.Import):
            yield from (
                f"{alias.name} as {alias.asname}" for alias in node.names if alias.name == "json" and alias.asname
            )


def test_json_is_read_by_the_one_reader() -> None:
    """It checks the shape, and takes what is nested too deeply: see pycomm/untrusted.py."""
    users = [path for path in PACKAGE.rglob("*.py") if list(read_as_json(ast.parse(path.read_text())))]
    assert users == [PACKAGE / "untrusted.py"]


@pytest.mark.parametrize(
    "text",
    ["json.loads(x)", "map(json.loads, texts)", "from json import loads", "json.JSONDecoder()", "import json as j"],
)
def test_another_reader_would_be_found(text: str) -> None:
    assert list(read_as_json(ast.parse(text)))


def test_nothing_is_unpickled() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {what}"
        for path in PACKAGE.rglob("*.py")
        for what in forbidden(ast.parse(path.read_text()))
    }
    assert found == CHILDREN


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list\nbroadcast_object_list(x)",
        "eval(text)",
    ],
)
def test_it_would_be_found(text: str) -> None:
    assert list(forbidden(ast.parse(text)))


def test_what_is_safe_is_not() -> None:
    assert not list(forbidden(ast.parse("torch.load(path, weights_only=True); model.eval(); numpy.load(path)")))
