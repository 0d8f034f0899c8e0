"""The picture and the table of docs/architecture.md are those of the code, and show what is wrong in it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT
from tests.docs.scripts import load

LAYERS = [["pycomm.top"], ["pycomm.left", "pycomm.in.right"], ["pycomm.low"]]


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    return load("docs/architecture.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of four components, one of them in a package that is none itself."""
    modules = {
        "__init__": "",
        "top/__init__": '"""Top: ``what`` is above :class:`~pycomm.low.Low`."""\nfrom pycomm import left',
        "top/deep": "def later():\n    from pycomm.low import x",
        "left": '"""Left."""\nimport pycomm.low',
        "in/__init__": "",
        "in/right": '"""Right."""\nfrom pycomm.top import deep',
        "low": '"""Low."""\nimport ast',
    }
    for name, text in modules.items():
        path = tmp_path / "pycomm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path


def test_not_stale(architecture: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert architecture.main(["--check"]) == 0, capsys.readouterr().err


def test_says_what_is_stale_and_mends_it(
    architecture: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture = tmp_path / "architecture.md", tmp_path / "layers.svg"
    good = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    page.write_text(good.replace("| `optim` |", "| `optima` |"), encoding="utf-8")
    monkeypatch.setattr(architecture, "PAGE", page)
    monkeypatch.setattr(architecture, "PICTURE", picture)
    assert architecture.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert said == "".join(f"{name} is stale; run: python docs/architecture.py\n" for name in (page.name, picture.name))
    assert architecture.main([]) == 0
    assert page.read_text(encoding="utf-8") == good
    assert picture.read_bytes() == (ROOT / "docs" / "layers.svg").read_bytes()
    page.write_text("# Architecture\n")
    with pytest.raises(ValueError, match=r"architecture.md has no <!-- components --> \.\.\. <!-- end -->"):
        architecture.main([])


def test_layers_are_those_of_the_first_contract(architecture: ModuleType) -> None:
    text = '[tool.importlinter]\nlayers = [\n  "a",  # highest\n  "b | c",\n]\n[[other]]\nlayers = ["d"]\n'
    assert architecture.layers_in(text) == [["a"], ["b", "c"]]
    with pytest.raises(ValueError, match="has no layers"):
        architecture.layers_in("[tool.ruff]\n")


def test_imports_wherever_they_stand(architecture: ModuleType, tree: Path) -> None:
    assert architecture.imports_in(tree, LAYERS) == {
        "pycomm.top": {"pycomm.left", "pycomm.low"},
        "pycomm.left": {"pycomm.low"},
        "pycomm.in.right": {"pycomm.top"},
        "pycomm.low": set(),
    }


def test_colors_of_dots(architecture: ModuleType, tree: Path) -> None:
    drawn = architecture.picture(LAYERS, architecture.imports_in(tree, LAYERS), [], {})
    dots = re.findall(r'fill="(#\w+)"><title>(.*?)<', drawn)
    assert {title: color for color, title in dots} == {
        "top imports left": architecture._DIRECT,
        "top imports low": architecture._IMPLIED,
        "left imports low": architecture._DIRECT,
        "in.right imports top": architecture._UPWARDS,
    }


def test_rows(architecture: ModuleType, tree: Path) -> None:
    rows = architecture.table(tree, LAYERS).splitlines()
    assert rows[2:] == [
        "| `top` | Top: `what` is above `pycomm.low.Low` |",
        "",
        "Single modules: `left`, `in.right`, `low`.",
    ]
    (tree / "pycomm" / "top" / "__init__.py").write_text(f'"""{"Top " * 40}"""\n')
    with pytest.raises(ValueError, match=r"first line of pycomm/top/__init__.py has \d+ characters, wanted 1 to 130"):
        architecture.table(tree, LAYERS)


def test_a_module_in_no_layer(architecture: ModuleType, tree: Path) -> None:
    (tree / "pycomm" / "new.py").write_text('"""New."""\n')
    with pytest.raises(ValueError, match="pycomm.new is in no layer of pyproject.toml"):
        architecture.imports_in(tree, LAYERS)


def test_every_folder_of_csrc_has_its_row(architecture: ModuleType) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", page.partition("| folder of csrc |")[2], re.MULTILINE))
    assert rows == set(architecture.includes_in(ROOT / "csrc"))


def test_cells_are_one_line() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    cells = [cell.strip() for line in page.splitlines() if line.startswith("|") for cell in line.split("|")[1:-1]]
    assert len(cells) > 50
    assert max(map(len, cells)) <= 130
