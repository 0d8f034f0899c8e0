"""What `.ci/run` leaves out, that its parts are all tests, and what the files of the repository's host call."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of
from tests.docs.shell import check_command, check_shell, commands_of

ROOT = Path(__file__).parent.parent
COMPILED = ROOT / ".ci" / "compiled"
PATHS: tuple[str, ...] = runpy.run_path(str(COMPILED))["PATHS"]
EVERYTHING, LEAVE_OUT, WRONG = 0, 3, 2
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("CI_", "GIT_"))}


class Repository:
    """A repository with `.ci/compiled`, one file of C++ and one of Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir(parents=True)
        shutil.copy(COMPILED, folder / ".ci")
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.email", "x@y.z")
        self.git("config", "user.name", "x")
        self.commit("csrc/a.cpp")
        self.commit("pycomm/a.py")

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.folder, env=PLAIN, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    def write(self, path: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((file.read_text() if file.exists() else "") + "x\n")

    def commit(self, path: str) -> str:
        self.write(path)
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", path)
        return self.git("rev-parse", "HEAD")

    def asked(self, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [self.folder / ".ci" / "compiled"],
            env={**PLAIN, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def landed(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "landed")


@pytest.fixture
def passed(landed: Repository) -> Repository:
    """A repository whose last commit but one has passed."""
    landed.git("update-ref", "refs/ci/passed", "HEAD^")
    return landed


@pytest.fixture
def clone(landed: Repository, tmp_path: Path) -> Repository:
    """A clone of `landed`, which is its remote "origin", with a branch of its own."""
    copy = object.__new__(Repository)
    copy.folder = tmp_path / "clone"
    landed.git("clone", "--quiet", str(landed.folder), str(copy.folder))
    copy.git("config", "user.email", "x@y.z")
    copy.git("config", "user.name", "x")
    copy.git("switch", "--quiet", "-c", "change")
    return copy


def test_the_list_names_what_exists() -> None:
    assert [path for path in PATHS if not (ROOT / path).exists()] == []


def test_all_that_has_passed_is_left_out(passed: Repository) -> None:
    landed = passed
    code, said = landed.asked()
    assert code == LEAVE_OUT
    assert said.startswith("Nothing of .ci, CMakeLists.txt, ")
    assert f"has changed since {landed.git('rev-parse', 'HEAD^')[:10]} (the last that passed .ci/run here)" in said
    code, said = landed.asked(CI_FULL="1")
    assert (code, said) == (EVERYTHING, "CI_FULL is set: everything is built and tested.\n")
    assert landed.asked(CI_FULL="0")[0] == LEAVE_OUT


@pytest.mark.parametrize("how", ["committed", "staged", "edited", "new", "removed", "moved away"])
def test_every_kind_of_change_is_seen(passed: Repository, how: str) -> None:
    landed = passed
    if how == "committed":
        landed.commit("csrc/a.cpp")
    elif how == "removed":
        (landed.folder / "csrc/a.cpp").unlink()
    elif how == "moved away":
        landed.git("mv", "csrc/a.cpp", "a.cpp")
    else:
        landed.write("csrc/b.cpp" if how == "new" else "csrc/a.cpp")
        if how == "staged":
            landed.git("add", "--all")
    code, said = landed.asked()
    assert code == EVERYTHING, said
    assert f"have changed: csrc/{'b' if how == 'new' else 'a'}.cpp. Everything is built and tested." in said


def test_a_branch_is_compared_with_what_has_landed(clone: Repository, landed: Repository) -> None:
    """It may have any number of commits, whatever has landed since. What has landed is itself tested as a whole."""
    assert clone.asked()[0] == EVERYTHING
    clone.commit("csrc/a.cpp")
    last = clone.commit("pycomm/a.py")
    code, said = clone.asked()
    assert code == EVERYTHING
    assert "(the last that origin/HEAD has too) have changed: csrc/a.cpp." in said
    landed.commit("csrc/b.cpp")
    clone.git("fetch", "--quiet")
    clone.git("switch", "--quiet", "-c", "other", f"{last}~2")
    clone.commit("pycomm/a.py")
    assert clone.asked()[0] == LEAVE_OUT
    clone.git("switch", "--quiet", "--detach", "origin/main")
    assert clone.asked()[0] == EVERYTHING


def test_what_has_passed_is_compared_with(landed: Repository) -> None:
    passed = landed.git("rev-parse", "HEAD")
    landed.git("update-ref", "refs/ci/passed", passed)
    landed.commit("csrc/a.cpp")
    landed.commit("pycomm/a.py")
    code, said = landed.asked()
    assert code == EVERYTHING
    assert f"Since {passed[:10]} (the last that passed .ci/run here) have changed: csrc/a.cpp." in said
    landed.git("update-ref", "refs/ci/passed", "HEAD")
    assert landed.asked()[0] == LEAVE_OUT
    landed.git("switch", "--quiet", "--detach", "HEAD^")  # the commit that has passed is not its ancestor
    assert "There is no commit to compare with" in landed.asked()[1]


def test_what_is_named_is_compared_with(landed: Repository) -> None:
    before = landed.git("rev-parse", "HEAD")
    landed.commit("csrc/a.cpp")
    assert landed.asked(CI_BASE=before)[0] == EVERYTHING
    code, said = landed.asked(CI_BASE="HEAD")
    assert (code, "(CI_BASE)" in said) == (LEAVE_OUT, True)
    code, said = landed.asked(CI_BASE="nothing")
    assert (code, said) == (WRONG, "CI_BASE is 'nothing', wanted a commit of this repository\n")


def test_where_it_cannot_be_told_everything_runs(landed: Repository, tmp_path: Path) -> None:
    shallow = object.__new__(Repository)
    shallow.folder = tmp_path / "shallow"
    landed.git("clone", "--quiet", "--depth=1", f"file://{landed.folder}", str(shallow.folder))
    none = "There is no commit to compare with: everything is built and tested.\n"
    assert shallow.asked() == (EVERYTHING, none)
    shutil.rmtree(shallow.folder / ".git")  # as an archive of the sources has none
    assert shallow.asked(GIT_CEILING_DIRECTORIES=str(tmp_path)) == (EVERYTHING, none)


def test_the_parts_together_are_all_tests(tmp_path: Path) -> None:
    """No path is in two parts, and the last part runs all paths that no other part names."""
    (tmp_path / "pytest").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "called"}\n')
    (tmp_path / "pytest").chmod(0o755)
    for part in ("quick", "threads", "rest"):
        environment = {**PLAIN, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(["bash", str(ROOT / ".ci" / "part"), part], env=environment, check=True, timeout=60)
    quick, *named, rest = (line.split() for line in (tmp_path / "called").read_text().splitlines())
    assert quick == ["--durations=10"]  # as the README says
    paths = [word for words in named for word in words if word.startswith("tests/")]
    assert all("--part=rest" in words for words in (*named, rest))
    assert len(set(paths)) == len(paths)
    assert sorted(f"--ignore={path}" for path in paths) == sorted(word for word in rest if "tests/" in word)
    assert [path for path in paths if not (ROOT / path).is_dir()] == []
    cases = set(re.findall(r"^  (\w+)\)", (ROOT / ".ci" / "part").read_text(), re.MULTILINE))
    run = (ROOT / ".ci" / "run").read_text()
    (tests,) = (set(line.split()) for line in re.findall(r"tests=\((.*)\)", run))
    full, short = (set(line.split()) for line in re.findall(r"others=\((.*)\)", run))
    assert tests | full == cases
    assert full - short == {"sanitize", "without_cuda", "threads"}
    assert short < full


WORKFLOWS = {path.stem: path.read_text() for path in sorted((ROOT / ".github" / "workflows").iterdir())}
FORMS = {path.stem: path.read_text() for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()}
PINNED = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def commands_in(workflow: str) -> list[list[str]]:
    lines = re.findall(r"^ *(?:- )?run: (.*)$", WORKFLOWS[workflow], re.MULTILINE)
    return [words for line in lines for words in commands_of(line)]


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_call_what_exists(workflow: str) -> None:
    """Commands, nox sessions, extras; and what pip installs has a version in constraints.txt."""
    assert commands_in(workflow), "each has a command, and none is of several lines"
    for words in commands_in(workflow):
        check_command(words)
        if words[0].startswith(".ci/"):
            assert os.access(ROOT / words[0], os.X_OK)
        if words[0] == "pip":
            assert words[:4] == ["pip", "install", "-c", "constraints.txt"]
            assert {*words[4:]} <= PINNED


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_may_do_little_and_end(workflow: str) -> None:
    text = WORKFLOWS[workflow]
    assert "\npermissions:\n  contents: read\n\n" in text
    assert "\n  cancel-in-progress: true\n" in text
    assert text.count("timeout-minutes: ") == text.count("runs-on: ")


def test_the_hosts_ci_is_ci_run() -> None:
    assert commands_in("ci") == [[".ci/run"]]


def test_linters_have_versions() -> None:
    dev = re.search(r"^dev = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert dev is not None
    assert {*re.findall(r'"([\w-]+)', dev[1])} <= PINNED


def test_forms_ask_what_pycomm_info_prints() -> None:
    assert FORMS.keys() == {"bug", "proposal"}
    assert all("label: What does `pycomm info` print?" in form for form in FORMS.values())


def test_contributing_is_short_and_right() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    blocks = blocks_of("CONTRIBUTING.md")
    assert len(blocks) == 4
    for block in blocks:
        check_shell(block)
    assert [target for target in re.findall(r"\]\(([^)]+)\)", text) if not (ROOT / target).exists()] == []
