"""What the documentation claims of itself: length, commands, figures, texts of errors."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import PAGES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmarks() -> ModuleType:
    return load("docs/benchmarks.py")


def test_readme_is_short() -> None:
    assert len(README.split()) <= 900


def test_readme_has_the_commands_that_ci_runs() -> None:
    assert "\npip install -c constraints.txt '.[demo,test]'\npytest\n" in README
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install --quiet -c constraints.txt" in ci
    assert "\npytest " in ci


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_exist(page: str) -> None:
    """Of pages among each other mkdocs knows more; of those that lead out of the README it knows nothing."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for page in PAGES[1:]:
        assert f": {page.removeprefix('docs/')}\n" in navigation, page


class TestBenchmarks:
    def test_not_stale(self, benchmarks: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
        assert benchmarks.main(["--check"]) == 0, capsys.readouterr().err

    def test_says_what_is_stale_and_mends_it(
        self,
        benchmarks: ModuleType,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        page, readme = tmp_path / "benchmarks.md", tmp_path / "README.md"
        monkeypatch.setattr(benchmarks, "PAGE", page)
        monkeypatch.setattr(benchmarks, "README", readme)
        good = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
        page.write_text(good.replace("317 ms", "318 ms"), encoding="utf-8")
        readme.write_text(README, encoding="utf-8")
        assert benchmarks.main(["--check"]) == 1
        assert capsys.readouterr().err == "benchmarks.md is stale; run: python docs/benchmarks.py\n"
        assert benchmarks.main([]) == 0
        assert page.read_text(encoding="utf-8") == good
        assert benchmarks.main(["--check"]) == 0
        readme.write_text(README.replace("| 43", "| 44"), encoding="utf-8")
        assert benchmarks.main(["--check"]) == 1
        assert "README.md is stale" in capsys.readouterr().err

    def test_a_report_that_has_no_section(self, benchmarks: ModuleType, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text('{"bench": "tennis"}')
        with pytest.raises(ValueError, match="x.json is of bench 'tennis', which has no section here"):
            benchmarks.load_reports(tmp_path)

    def test_a_report_of_a_gpu(self, benchmarks: ModuleType) -> None:
        case = {"name": "pack", "elements": 25_600_000, "seconds": {"median": 1e-4}, "peer_seconds": {"median": 3e-4}}
        report = {
            "environment": {"device": "some GPU", "commit": "abc", "cpu": "some CPU", "cores": 8},
            "cases": [{**case, "times_faster": 3.0, "time_over_floor": 1.1}],
        }
        section = benchmarks.SECTIONS["gpu"]("gpu_x.json", report)
        assert "| pack | 25.6 M | 100 µs | 300 µs | 3.00" in section
        assert "some GPU, commit abc" in section

    def test_a_check_on_a_gpu(self, benchmarks: ModuleType) -> None:
        tests = {"passed": 500, "failed": 1, "errors": 0, "skipped": 7}
        row = {"tool": "racecheck", "tests": {}, "summary": "RACECHECK SUMMARY: 0 hazards"}
        found = {"device": "some GPU", "commit": "abc"}
        section = benchmarks.SECTIONS["gpu_check"](
            "gpu_check_x.json", {"environment": found, "tests": tests, "sanitizers": [row]}
        )
        assert "| tests | 500 | 1 | 0 | 7 |  |" in section
        assert "| racecheck | - | - | - | - | RACECHECK SUMMARY: 0 hazards |" in section
        assert "some GPU, commit abc: `bench/results/gpu_check_x.json`" in section

    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [(2.30e-6, "2.3 µs"), (9.996e-4, "1 ms"), (0.00731, "7.31 ms"), (5.2314, "5231 ms"), (12.34, "12.3 s")],
    )
    def test_durations(self, benchmarks: ModuleType, seconds: float, shown: str) -> None:
        assert benchmarks._duration(seconds) == shown


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
