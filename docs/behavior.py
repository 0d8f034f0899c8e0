"""Writes the tables of docs/behavior.md from the tests that prove their rows.

    python docs/behavior.py                # rewrites what stands between the markers
    python docs/behavior.py --check        # changes nothing; exits with 1 and says that the page is stale

Markers in the page: <!-- table: SECTION --> and <!-- end -->. On a test, above its other decorators:

    @pytest.mark.behavior("SECTION", "what you do, or read", "what happens, and what to write instead")

A test may have several. Tests with the same three texts prove one row together. What you read, such as the text of an
error, is in backticks, with "..." for what is filled in, and nothing beside it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rewriting import rewrite

PAGE = Path(__file__).with_name("behavior.md")
TESTS = Path(__file__).resolve().parent.parent / "tests"

_PART = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_MARK = "pytest.mark.behavior"
_HEAD = "| you do, or read | what happens | test |\n|---|---|---|\n"


class Proof(NamedTuple):
    """What a mark on a test says: a row of the table of ``section``."""

    section: str
    situation: str
    outcome: str
    test: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page, or say that it is stale; return the exit code."""
    return rewrite("what happens, by the tests that prove it", "behavior.py", _pages, arguments)


def _pages() -> dict[Path, str]:
    return {PAGE: render(PAGE.read_text(encoding="utf-8"), proofs_in(TESTS))}


def proofs_in(folder: Path) -> list[Proof]:
    """Return what the marks on tests below ``folder`` say, by file and line."""
    paths = sorted(folder.rglob("*.py"))
    return [proof for path in paths for proof in _proofs(path, path.relative_to(folder).as_posix())]


def _proofs(path: Path, name: str) -> Iterator[Proof]:
    text = path.read_text(encoding="utf-8")
    if _MARK not in text:
        return
    for outer in ast.parse(text).body:
        inside = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        prefix = f"{name}::{outer.name}::" if isinstance(outer, ast.ClassDef) else f"{name}::"
        for node in inside:
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == _MARK:
                    assert isinstance(node, ast.FunctionDef)
                    yield Proof(*_texts(decorator, f"{path}:{decorator.lineno}"), f"{prefix}{node.name}")


def _texts(mark: ast.Call, where: str) -> tuple[str, str, str]:
    texts = [arg.value for arg in mark.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if len(texts) != 3 or len(mark.args) != 3 or mark.keywords:
        raise ValueError(f"{where}: {_MARK} wants three texts: section, situation, outcome")
    for text in texts:
        if not text or text != " ".join(text.split()) or "|" in text:
            raise ValueError(f"{where}: {text!r} does not fit a cell of a table")
    section, situation, outcome = texts
    return section, situation, outcome


def render(text: str, proofs: Sequence[Proof]) -> str:
    """Return the page ``text`` with every table as ``proofs`` have it.

    Raises:
        ValueError: a proof of a section that the page has not, a section without proofs, or one situation with two
            outcomes.
    """
    sections = [match[2] for match in _PART.finditer(text)]
    for proof in proofs:
        if proof.section not in sections:
            raise ValueError(f"{proof.test}: {proof.section!r} is no section of {PAGE.name}, which has {sections}")
    return _PART.sub(lambda match: match[1] + _table(match[2], proofs) + match[4], text)


def _table(section: str, proofs: Sequence[Proof]) -> str:
    rows: dict[str, tuple[str, list[str]]] = {}
    for proof in proofs:
        if proof.section == section:
            outcome, tests = rows.setdefault(proof.situation, (proof.outcome, []))
            if outcome != proof.outcome:
                raise ValueError(f"{proof.test} and {tests[0]} say different things of {proof.situation!r}")
            tests.append(f"`{proof.test}`")
    if not rows:
        raise ValueError(f"no test is marked with the section {section!r}")
    lines = (f"| {situation} | {outcome} | {', '.join(tests)} |\n" for situation, (outcome, tests) in rows.items())
    return _HEAD + "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
