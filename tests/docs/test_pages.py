"""What the documentation claims of itself: length, commands, texts of errors."""

from __future__ import annotations

import ast
import inspect
import mmap
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pycomm
from tests.docs.pages import PAGES, ROOT
from tests.docs.said import GAP, Said, num_words, texts_said
from tests.docs.scripts import load

README = (ROOT / "README.md").read_text(encoding="utf-8")
BEHAVIOR = (ROOT / "docs" / "behavior.md").read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len(README.split()) <= 850
    assert len(README.partition("\n## Examples\n")[0].split()) <= 600


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


def texts_told() -> list[str]:
    """Texts on the page: a first cell of a row that has texts in backticks, and nothing beside them."""
    cells = re.findall(r"^\| (`[^`]+`(?:, `[^`]+`)*) \|", BEHAVIOR, re.MULTILINE)
    return [text for cell in cells for text in re.findall("`([^`]+)`", cell)]


def errors_told() -> list[str]:
    return [text for text in texts_told() if not text.startswith(OF_TORCH)]


OF_TORCH = (
    "Unknown backend type",
    "Gloo connectFullMesh failed",
    "Unable to find address",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting ...ms",
)
"""Texts on the page that torch and Gloo say."""

EXPLAINED = {
    "the flight recorder could not write to": "names the file and the system's reason",
    "the trace of step": "names the file and the system's reason",
    "an old file could not be removed": "names the file and the system's reason; the new one is written",
    "old checkpoints in": "names the folder and the system's reason; the new checkpoint is written",
    "the checkpoint of step": "says which number it has, and which the last one",
    "set_weight() with accumulate=": "says what must not be done, and why",
    "each keeps its own": "says what makes them equal",
    "checkpoint: ": "the text is that of the error, which is on the page",
    "the optimizer's step is shared out unevenly": "names the figures to look at",
    "each rank kept": "says what was lost and what to do",
    "load inside an accumulation window": "names the calls that end it",
    "save inside an accumulation window": "names the calls that end it",
    "different numbers of steps": "says which ranks are behind, and what a rank without a batch calls",
    "are out of step: calls of step()": "names the optimizer and the counts",
    "ranks are in different meetings": "gives the number of each rank",
    "rank \0: \0": "the text is that of the rank that has the problem",
    "stop_on_signal() got no signals": "an argument's error",
    "numpy's generator is at": 'the end of "the state of generators is malformed", a DamagedError',
    "numpy's generator was a": "says that numpy's generator is of another kind than when it was saved",
    "has format": "says which format this release reads",
    "and the optimizer here is": "says what was saved, and what is here",
    "the optimizer had parameter groups of": "says what was saved, and what is here",
    "of the optimizer was": "says what was saved, and what is here",
    "it is of another model": "says what was saved, and what is here",
    "the checkpoint has": "names what it has, or lacks",
    "loss_scaler, and attach was given": "says what was saved, and what is here",
    "rejects the saved state": "names the object, and quotes its error",
    "values of its own (attach had ignore in its Tuning)": "says how many ranks are wanted",
    "there is no checkpoint in": "names the folder, and the rank that does not see it",
    "has not completed it within": "names the rank; the page has its twin, of a rank that has not written its part",
    "it is the next step that will be left out": "says what happens",
    "there is a new parameter": "names it and the ranks, and says what to do on all of them",
    "is no longer in the optimizer on": "names it and the ranks, and says what to do on all of them",
    "cleared gradients inside an accumulation window": "names the rank and the calls that clear",
    "to gradients that the last optimizer.step() has used": "names the rank and the call that was left out",
    "the ranks' loss scalers differ": "has the scale of each rank, and says how to make them equal",
    "is frozen (requires_grad=False) on": "names it and the ranks, and says what to do on all of them",
    "was exchanged, tied or left out on some ranks only": "names it and the ranks, and says what to do on all of them",
    "cannot listen": "has the system's reason, and says what is used in its place",
    "transport \0 for \0 ranks": "says which transport a communicator uses",
    "worker \0 has not come": "names the worker",
    "the checkpoint was not written within": "the limit is the caller's own",
    "the thread that writes the checkpoint": "says that the process was forked, and has not called save()",
    "a parameter was added to the optimizer, and no": "says that a backward() comes first",
    "detach() and attach() again make them equal": 'the end of "the replicas differ", which is on the page',
    "has no others": "an argument's error",
    "is a file, wanted the folder": "names what it is, and what is wanted",
    "there is no \0": "names the path that does not exist",
    "of their elements": 'the end of "the replicas differ", which is on the page',
}
"""Parts of texts that are not on the page, and why their readers need no more."""

BETWEEN_RANKS = "pycomm/training/reductions/(differences|fields|record|replicas|requests).py"
OF_STATE_FILES = "pycomm/training/checkpoint/"


def needs_telling(said: Said) -> bool:
    """Return whether the page must have it: log lines, and errors between ranks and of checkpoints.

    A TypeError is an argument's. A DamagedError is the end of "no checkpoint in ... is whole"; torch_files.py and
    values.py raise others only to make one of them.
    """
    if said.kind in ("", "CommError", "DamageError"):
        return not said.kind or bool(re.match(f"{BETWEEN_RANKS}|{OF_STATE_FILES}", said.where))
    if re.match(BETWEEN_RANKS, said.where):
        return said.kind in ("RuntimeError", "ValueError")
    if not said.where.startswith(OF_STATE_FILES) or re.search("/(torch_files|values).py", said.where):
        return False
    return said.kind not in ("TypeError", "DamagedError") and num_words(said.text) > 1


def is_found(said: Said, text: str) -> bool:
    """Return whether a reader of ``said`` who searches the page finds ``text``."""
    pieces = [re.escape(piece.strip()) for piece in text.split("...") if piece.strip(" ,()")]
    return re.search(".*".join(pieces), said.text, re.DOTALL) is not None


SAID = [said for said in texts_said() if needs_telling(said)]


@pytest.mark.parametrize("text", errors_told())
def test_texts_of_errors_are_those_of_the_code(text: str) -> None:
    """A row has "..." where the code fills something in."""
    pieces = [piece.strip() for piece in text.split("...") if piece.strip(" ,()")]
    lines = [*texts_in_the_code().splitlines(), *(said.text for said in SAID)]
    found = [line for line in lines if all(piece in line for piece in pieces)]
    assert found, f"no text of the code has {pieces}"


@pytest.mark.parametrize("said", SAID, ids=lambda said: said.where.rpartition("/")[2])
def test_log_lines_and_errors_between_ranks_are_told(said: Said) -> None:
    shown = said.text.replace(GAP, "...")
    assert any(is_found(said, text) for text in errors_told()) or any(part in said.text for part in EXPLAINED), (
        f"{said.where} says {shown!r}, which docs/behavior.md does not have. Mark the test that provokes it: "
        '@pytest.mark.behavior("<section>", "`<its first words, with ... for what is filled in>`", '
        '"<what its reader should do>"), and run docs/behavior.py. If the text itself says all of that, add its '
        "first words to EXPLAINED in tests/docs/test_pages.py, with the reason"
    )


def test_what_explains_itself_is_still_said() -> None:
    for part in EXPLAINED:
        assert any(part in said.text for said in SAID), f"nothing says {part!r} any more: remove it from EXPLAINED"


def test_texts_of_torch_are_those_that_it_says() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for text in (
            b"connectFullMesh failed with ",
            b"Connection closed by peer ",
            b"ms for recv operation to complete",
        ):
            assert content.find(text) >= 0, f"torch {torch.__version__} does not say {text!r}"


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

    def test_names_of_attributes_are_no_types(self, hook: ModuleType) -> None:
        text = "Attributes:\n    a, b: those.\n    c: that."
        assert hook.with_hanging_lines(text) == text.replace("a, b", "a,\N{NO-BREAK SPACE}b")

    def test_signatures_as_users_call_them(self, hook: ModuleType) -> None:
        griffe = pytest.importorskip("griffe")
        code = "_A = 3\n_M = TypeVar('_M', bound=Module)\ndef f(x: _M, a=_A, b=0, *, c, **unknown: NoReturn) -> _M: ..."
        function = griffe.visit("m", Path("m.py"), code)["f"]
        hook.as_called(function)
        assert str(function.signature()) == "f(x: Module, a=3, b=0, *, c) -> Module"

    def test_what_is_hidden(self, hook: ModuleType) -> None:
        griffe = pytest.importorskip("griffe")
        code = "class C:\n    def f(self): ...\n    def g(self): 'Internal.'\n    def h(self): 'H.'"
        module = griffe.visit("m", Path("m.py"), code)
        hook.hide(module, {"C": "f"})
        assert list(module["C"].members) == ["h"]
        with pytest.raises(KeyError):
            hook.hide(module, {"C": "f"})

    def test_hidden_names_exist_and_functions_are_no_modules(self, hook: ModuleType) -> None:
        griffe = pytest.importorskip("griffe")
        package = griffe.load("pycomm", search_paths=[ROOT])
        hook.hide(package, hook.HIDDEN)
        hook.shadow_modules(package)
        for name in ("schedule.ring", "schedule.verify", "parallel.mesh", "parallel.split", "kernels.pack"):
            assert package[name].is_function, name

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
