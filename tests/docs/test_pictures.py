"""The pictures of docs/pictures.py are those in the documentation, and pages show them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(DOCS / "pictures.py"), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    shown = set(re.findall(r"!\[.*?\]\((\w+\.svg)\)", pages))
    drawn_here = {path.name for path in tmp_path.iterdir()}
    assert shown == drawn_here | {"layers.svg"} == {path.name for path in DOCS.glob("*.svg")}  # by docs/architecture.py
    for name in drawn_here:
        drawn, committed = (text_of(folder / name) for folder in (tmp_path, DOCS))
        assert drawn == committed, f"{name} is stale: python docs/pictures.py"


def text_of(picture: Path) -> list[str]:
    """The words in a picture: coordinates may differ with the release of matplotlib."""
    return "".join(ElementTree.parse(picture).getroot().itertext()).split()
