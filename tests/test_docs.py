"""The pages on algorithms say what the tables say, of every algorithm; docs/what_happens.md names tests that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from pycomm import schedule

DOCS = Path(__file__).parent.parent / "docs"
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


def test_what_happens_names_tests_that_exist() -> None:
    text = (DOCS / "what_happens.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| you do")]
    assert len(rows) > 35
    for row in rows:  # each under a headline that names the directory
        directory = re.findall(r"test in `tests/?([\w/]*)`", text[: text.index(row)])[-1]
        found = re.search(r"`([\w/]*test_\w+\.py)::(test_\w+)` \|$", row)
        assert found is not None, row
        file, name = found.groups()
        assert f"\ndef {name}(" in (DOCS.parent / "tests" / directory / file).read_text(), row


def test_traps_of_process_groups_name_tests_that_exist() -> None:
    section = (DOCS / "torch_traps.md").read_text(encoding="utf-8").split("\n## Process groups\n")[1].split("\n## ")[0]
    traps = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    assert len(traps) >= 7
    for trap in traps:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", trap)
        assert named, trap
        for file, name in named:
            assert f"\ndef {name}(" in (DOCS.parent / "tests" / "backend" / file).read_text(), trap
