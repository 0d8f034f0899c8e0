"""What the documentation claims of itself: length, commands, texts of errors."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from types import ModuleType

import pytest

import pycomm
from tests.docs.pages import PAGES, ROOT
from tests.docs.scripts import load

README = (ROOT / "README.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len(README.split()) <= 1000


def test_readme_has_the_commands_that_ci_runs() -> None:
    assert "\npip install -c constraints.txt '.[demo,test]'\npytest\n" in README
    assert "\npip install --quiet -c constraints.txt " in (ROOT / ".ci" / "run").read_text()
    assert "\n    pytest --durations=10\n" in (ROOT / ".ci" / "part").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_exist(page: str) -> None:
    """Of pages among each other mkdocs knows more; of those that lead out of the README it knows nothing."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for page in PAGES[1:]:
        assert f": {page.removeprefix('docs/')}\n" in navigation, page


@cache
def texts_in_the_code() -> str:
    """Every text that pycomm and its extension may say, one a line, with ``\\0`` for what is filled in."""
    texts = []
    for path in (ROOT / "pycomm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    for path in (*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")):
        joined = re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8"))
        texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
    return "\n".join(re.sub(r"%(?:\.\d)?(?:lld|[sdfg])", "\0", text) for text in texts)


def errors_told() -> list[str]:
    return re.findall(r"^### `(.+)`$", TROUBLESHOOTING, re.MULTILINE)


@pytest.mark.parametrize("text", errors_told())
def test_texts_of_errors_are_those_of_the_code(text: str) -> None:
    """A heading has "..." where the code fills something in."""
    pieces = [piece.strip() for piece in text.split("...") if piece.strip(" ,()")]
    found = [line for line in texts_in_the_code().splitlines() if all(piece in line for piece in pieces)]
    assert found, f"no text of the code has {pieces}"


def test_errors_are_told() -> None:
    assert len(errors_told()) > 30
    assert len(set(errors_told())) == len(errors_told())


@pytest.fixture
def hook() -> ModuleType:
    pytest.importorskip("griffe")  # the extra [docs]
    return load("docs/hooks/docstrings.py")


class TestTheSitesHook:
    def test_roles(self, hook: ModuleType) -> None:
        text = "see :class:`Reducer`, :func:`~pycomm.fuse` and :meth:`unpack`"
        assert hook.without_roles(text, {"pycomm.Reducer", "pycomm.fuse"}) == (
            "see [`Reducer`][pycomm.Reducer], [`pycomm.fuse`][pycomm.fuse] and `unpack`"
        )

    def test_lines_that_continue(self, hook: ModuleType) -> None:
        text = (
            "Do.\n\nArgs:\n    x: this. y: that,\n    and more.\n    a, b: those\n        of them.\n\nNote:\n    code"
        )
        assert hook.with_hanging_lines(text) == text.replace("    and more", "        and more")

    def test_pages_that_docstrings_name(self, hook: ModuleType) -> None:
        text = "See ``docs/faq.md`` and docs/survival.md."
        assert (
            hook.with_pages(text) == "See [FAQ](../faq.md) and [Fault tolerance and elastic training](../survival.md)."
        )

    def test_groups_name_every_argument(self, hook: ModuleType) -> None:
        griffe = pytest.importorskip("griffe")
        text = "Do.\n\nArgs:\n    x: this.\n    y: that.\n\nReturns:\n    It."
        sections = griffe.Docstring(text).parse("google")
        grouped = hook.in_groups(sections, {"First": "y", "Second": "x"})
        assert [section.title for section in grouped] == [None, "First", "Second", None]
        with pytest.raises(ValueError, match="groups name .*, wanted "):
            hook.in_groups(sections, {"First": "y"})
        for groups in hook.GROUPS.values():
            named = [name for names in groups.values() for name in names.split()]
            parameters = inspect.signature(pycomm.attach).parameters.values()
            assert set(named) == {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
