"""Texts of log lines, warnings and errors, as the source has them."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

GAP = "\0"
"""Stands in a text for what is filled in."""

_PACKAGES = ("collectives", "training")
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
_PLACEHOLDER = re.compile(r"%(?:\.\d)?(?:lld|[sdfgr])")
_MOST = 20  # alternatives of one text
_DEEPEST = 4  # functions, and variables, behind one another


@dataclass(frozen=True)
class Said:
    """A text and the line that says it.

    Attributes:
        kind: class of the error; empty for log lines and warnings.
    """

    text: str
    kind: str
    where: str


class _Reader:
    """Reader of one module: finds what an expression in it may be as a text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = ast.walk(self._tree)
        self._functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def said(self) -> Iterator[Said]:
        """Return the texts of log lines and warnings, and of errors that are raised."""
        for scope in self._scopes():
            for node in _own(scope):
                if isinstance(node, ast.Call) and _is_log(node.func):
                    yield from self._of(node, node.args, scope, "")
                elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    yield from self._of(node, node.exc.args, scope, _class_of(node.exc.func))

    def _scopes(self) -> Iterator[ast.AST]:
        return iter([self._tree, *self._functions])

    def _of(self, node: ast.Call | ast.Raise, args: list[ast.expr], scope: ast.AST, kind: str) -> Iterator[Said]:
        texts = [max(self._texts(arg, scope), key=num_words, default=GAP) for arg in args]
        if texts and not kind and texts[0].count(GAP) == len(texts) - 1:  # a log line and what it fills in
            head, *rest = texts[0].split(GAP)
            texts = ["".join([head, *itertools.chain(*zip(texts[1:], rest, strict=True))])]
        text = next((text for text in texts if num_words(text) > 1), max(texts, key=num_words, default=GAP))
        yield Said(text, kind, f"{self._path.relative_to(ROOT)}:{node.lineno}")

    def _texts(self, node: ast.expr, scope: ast.AST, depth: int = 0) -> list[str]:
        """Return what the expression may be; [GAP] if the source does not say."""
        found: Iterable[str] = [GAP]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [_PLACEHOLDER.sub(GAP, node.value)]
        elif isinstance(node, ast.JoinedStr):
            parts = [self._texts(part, scope, depth) for part in node.values]
            found = map("".join, itertools.islice(itertools.product(*parts), _MOST))
        elif isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name | ast.IfExp):
            found = self._texts(node.value, scope, depth + 1)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = self._texts(node.left, scope, depth), self._texts(node.right, scope, depth)
            found = map("".join, itertools.islice(itertools.product(*sides), _MOST))
        elif isinstance(node, ast.IfExp):
            found = self._texts(node.body, scope, depth) + self._texts(node.orelse, scope, depth)
        elif isinstance(node, ast.Name) and depth < _DEEPEST:
            found = self._assigned(node.id, scope, depth + 1) or self._assigned(node.id, self._tree, depth + 1) or found
        elif isinstance(node, ast.Call) and depth < _DEEPEST:
            found = _returned(_name_of(node.func), depth + 1) or found
        return list(dict.fromkeys(itertools.islice(found, _MOST)))

    def _assigned(self, name: str, scope: ast.AST, depth: int) -> list[str]:
        found: list[str] = []
        for node in _own(scope):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            is_one = isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign)
            if is_one and value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
                found += self._texts(value, scope, depth)
        return found

    def returned(self, function: ast.FunctionDef, depth: int) -> list[str]:
        """Return the texts that ``function`` may return."""
        values = (node.value for node in _own(function) if isinstance(node, ast.Return) and node.value is not None)
        texts = itertools.chain(*(self._texts(value, function, depth) for value in values))
        return [text for text in texts if num_words(text) > 1]

    def functions(self) -> Iterator[ast.FunctionDef]:
        return (node for node in self._scopes() if isinstance(node, ast.FunctionDef))


@cache
def _own(scope: ast.AST) -> list[ast.AST]:
    """Return the nodes of ``scope`` in the order of the source, without nodes of functions inside."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [child, *_own(child)]
    return found


def _name_of(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def _class_of(called: ast.expr) -> str:
    """Return the name of the class in ``Class(...)`` and ``Class.of(...)``, of the function in other calls."""
    owner = called.value if isinstance(called, ast.Attribute) else called
    return owner.id if isinstance(owner, ast.Name) else _name_of(called) or "?"


def _is_log(called: ast.expr) -> bool:
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
        return False
    of = called.value.id.lower().lstrip("_")
    return (of == "warnings" and called.attr == "warn") or (of in ("log", "logger") and called.attr in _LEVELS)


def num_words(text: str) -> int:
    return len(re.findall(r"[A-Za-z]{2,}", text))


@cache
def _readers() -> list[_Reader]:
    return [_Reader(path) for name in _PACKAGES for path in sorted((ROOT / "pycomm" / name).rglob("*.py"))]


@cache
def _returned(name: str, depth: int) -> list[str]:
    """Return the texts that functions of this ``name`` return, in any module."""
    return [text for reader, function in _functions().get(name, []) for text in reader.returned(function, depth)]


@cache
def _functions() -> dict[str, list[tuple[_Reader, ast.FunctionDef]]]:
    """Return the functions that return texts, by their names, in any module."""
    found: dict[str, list[tuple[_Reader, ast.FunctionDef]]] = {}
    for reader in _readers():
        for function in reader.functions():
            if isinstance(function.returns, ast.Name) and function.returns.id == "str":
                found.setdefault(function.name, []).append((reader, function))
    return found


@cache
def texts_said() -> list[Said]:
    """Return the texts that pycomm's collectives and training log, warn of and raise."""
    return list(itertools.chain(*(reader.said() for reader in _readers())))
