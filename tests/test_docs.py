"""The pages on algorithms say what the tables say, of every algorithm; names of tests, files and objects exist."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pycomm
from pycomm import schedule
from tests.docs.pages import PAGES, ROOT, blocks_of
from tests.docs.scripts import load

DOCS = ROOT / "docs"
GUIDE = (DOCS / "algorithms.md").read_text(encoding="utf-8")
CATALOGUE = (DOCS / "algorithm_catalogue.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_not_stale(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_says_what_is_stale_and_mends_it(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = "# T\n<!-- picture: ring 2 -->\n" + generate.compute("picture", "ring 2") + "<!-- end -->\nand\n"
    document = tmp_path / "algorithms.md"
    monkeypatch.setattr(generate, "DOCUMENTS", [document])
    document.write_text(good.replace("c1 +> 1", "c1 -> 1"))
    assert generate.main(["--check"]) == 1
    assert "picture: ring 2 is stale" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert document.read_text() == good
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("<!-- picture: ring 2 -->\n", "no <!-- end -->"),
        ("<!-- picture: ring 2 -->\n<!-- picture: ring 3 -->\n<!-- end -->", "ring 3"),
        ("<!-- end -->", "<!-- end --> comes where"),
        ("<!-- table: tennis -->\n<!-- end -->", "table is 'tennis', wanted one of summary"),
        ("<!-- picture: rong 2 -->\n<!-- end -->", "algorithm is 'rong', wanted one of ring"),
    ],
)
def test_markers_that_are_wrong(generate: ModuleType, text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        generate.render(text)


def test_prints_a_picture(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--picture", "torus(2,3)", "6"]) == 0
    assert capsys.readouterr().out.startswith("torus(2,3): 6 ranks, 6 chunks\n")


@pytest.mark.parametrize("name", [*schedule.names(), "native"])
def test_every_algorithm_has_its_section(name: str) -> None:
    assert f"\n## {name}\n" in CATALOGUE
    assert name == "native" or f"[`{name}`](algorithm_catalogue.md#{name})" in GUIDE, "the summary leaves it out"
    section = CATALOGUE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert name == "native" or f"<!-- picture: {name}" in section


@pytest.fixture(scope="module")
def behavior() -> ModuleType:
    return load("docs/behavior.py")


MARKED = """
@pytest.mark.behavior("Gradients", "`the gradient of ...`", "Attach again.")
@pytest.mark.behavior(
    "Gradients",
    "keep it",
    "It stays, "
    "as in torch.",
)
@pytest.mark.slow
def test_a(): ...

class TestB:
    @pytest.mark.behavior("Gradients", "keep it", "It stays, as in torch.")
    def test_c(self): ...
"""


def test_the_tables_of_behavior_are_those_of_the_tests(
    behavior: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert behavior.main(["--check"]) == 0, capsys.readouterr().err


def test_behavior_names_tests_that_exist(behavior: ModuleType) -> None:
    text = behavior.PAGE.read_text(encoding="utf-8")
    rows = [
        row for part in re.findall(r"<!-- table: .+? -->\n(.*?)<!-- end -->", text, re.DOTALL) for row in rows_in(part)
    ]
    assert len(rows) > 100
    for row in rows:
        tests = row.rpartition(" | ")[2].removesuffix(" |").split(", ")
        for test in tests:
            found = re.fullmatch(r"`([\w/]*test_\w+\.py)::(?:\w+::)?(test_\w+)`", test)
            assert found is not None, row
            assert f"def {found[2]}(" in (ROOT / "tests" / found[1]).read_text(encoding="utf-8"), row


def rows_in(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| you do")]


def test_a_mark_without_its_row_is_stale_and_mended(
    behavior: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, folder = tmp_path / "behavior.md", tmp_path / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text(MARKED)
    page.write_text("# T\n<!-- table: Gradients -->\n<!-- end -->\nand\n")
    monkeypatch.setattr(behavior, "PAGE", page)
    monkeypatch.setattr(behavior, "TESTS", folder)
    assert behavior.main(["--check"]) == 1
    assert capsys.readouterr().err == "behavior.md is stale; run: python docs/behavior.py\n"
    assert behavior.main([]) == 0
    assert behavior.main(["--check"]) == 0
    assert rows_in(page.read_text()) == [
        "| `the gradient of ...` | Attach again. | `test_x.py::test_a` |",
        "| keep it | It stays, as in torch. | `test_x.py::test_a`, `test_x.py::TestB::test_c` |",
    ]
    assert page.read_text().endswith("|\n<!-- end -->\nand\n")


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ('"Gradients", "`', '"Gradient", "`', "'Gradient' is no section of behavior.md, which has .'Gradients'."),
        ('"Gradients"', '"Steps"', "'Steps' is no section of behavior.md"),
        ("MARK", "", "no test is marked with the section 'Gradients'"),
        (', "Attach again."', "", "wants three texts: section, situation, outcome"),
        ('"Attach again."', "again()", "wants three texts"),
        ("Attach again.", "a | b", "'a | b' does not fit a cell of a table"),
        ('"It stays, as in torch."', '"It goes."', "say different things of 'keep it'"),
    ],
)
def test_marks_that_are_wrong(behavior: ModuleType, tmp_path: Path, old: str, new: str, wrong: str) -> None:
    (tmp_path / "test_x.py").write_text("" if old == "MARK" else MARKED.replace(old, new))
    page = "<!-- table: Gradients -->\n<!-- end -->\n"
    with pytest.raises(ValueError, match=wrong):
        behavior.render(page, behavior.proofs_in(tmp_path))


def test_traps_of_process_groups_name_tests_that_exist() -> None:
    section = (DOCS / "torch_traps.md").read_text(encoding="utf-8").split("\n## Process groups\n")[1].split("\n## ")[0]
    traps = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    assert len(traps) >= 7
    for trap in traps:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", trap)
        assert named, trap
        for file, name in named:
            assert f"\ndef {name}(" in (DOCS.parent / "tests" / "backend" / file).read_text(), trap


_DEVELOP = "(architecture|contributing|glossary|torch_traps|extending/.*|algorithm.*)[.]md"
"""Pages on the code, of which each class and each file must exist. Others also name those of users and libraries."""


@cache
def words_of_the_code() -> frozenset[str]:
    """Return all names of source files, and all words in them but for this one."""
    files = [path for folder in ("pycomm", "csrc", "bench", "docs", "tests") for path in (ROOT / folder).rglob("*.*")]
    files = [path for path in files if path.suffix in (".py", ".h", ".cpp", ".cu") and path != Path(__file__)]
    words = (word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset([*words, *(path.name for path in files)])


def is_found(name: str) -> bool:
    """Return whether ``name``, such as pycomm.optim.LARS, exists."""
    found: Any = pycomm
    at = "pycomm"
    for part in name.split(".")[1:]:
        at = f"{at}.{part}"
        try:
            if hasattr(found, part):
                found = getattr(found, part)
            elif (spec := importlib.util.find_spec(at)) is None or at == name:
                return spec is not None  # a module is not imported: it may require what is not installed
            else:
                found = importlib.import_module(at)
        except ModuleNotFoundError:
            return False
    return True


def wrong_names(page: str, text: str) -> Iterator[str]:
    """Yield what ``text`` of ``page`` names in backticks and does not exist, unless code on a walk-through makes it."""
    code = "\n".join(f"{block.fragment}\n{block.code}" for block in blocks_of(page, text))
    made = set(re.findall(r"\w+", code)) if page.startswith("docs/extending/") else set[str]()
    is_on_code = re.fullmatch(_DEVELOP, page.removeprefix("docs/")) is not None
    prose = re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`([^`]+)`", prose):
        if re.fullmatch(r"(\.ci|bench|csrc|docs|examples|pycomm|tests)/[\w./*-]+", name):
            is_right = Path(name).stem in made or any(ROOT.glob(name.rstrip("/")))
        elif dotted := re.fullmatch(r"(pycomm(?:\.\w+)+)(?:\(.*)?", name):
            is_right = name.rpartition(".")[2] in made or is_found(dotted[1])
        elif re.fullmatch(r"(bench|tests)(\.\w+)+", name):
            place = ROOT / name.replace(".", "/")
            is_right = any(path.exists() for path in (place, place.with_suffix(".py")))
        elif is_on_code and re.fullmatch(r"[A-Z][a-z]+[A-Z]\w+|\w+\.(py|h|cpp|cu)", name):
            is_right = name.partition(".")[0] in made or name in words_of_the_code()
        else:
            continue
        if not is_right:
            yield name


@pytest.mark.parametrize("page", [*PAGES, "SECURITY.md"])
def test_names_in_pages_exist(page: str) -> None:
    assert list(wrong_names(page, (ROOT / page).read_text(encoding="utf-8"))) == []


def test_finds_names_that_do_not_exist() -> None:
    right = "`pycomm.attach(...)`, `pycomm.backend.stats`, `csrc/base`, `docs/*.svg`, `SentBucket`, `topk.h`\n"
    wrong = ["pycomm.Attach", "pycomm.reducer", "pycomm.WarmupLR", "csrc/none.h", "bench.none", "BucketList", "none.py"]
    text = right + ", ".join(f"`{name}`" for name in wrong) + "\n```text\n`pycomm.none`\n```\n"
    assert list(wrong_names("docs/architecture.md", text)) == wrong
    made = "`pycomm/kernels/pear.py`, `pycomm.Pear`\n\n```python\nclass Pear: pear = 1\n```\n"
    assert list(wrong_names("docs/extending/kernel.md", made)) == []
