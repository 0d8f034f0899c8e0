"""Every block of code in the README and the documentation works, or says that it is a fragment."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pycomm
from tests.docs.pages import PAGES, ROOT, Block, blocks_of
from tests.docs.running import run_blocks
from tests.docs.shell import UnknownError, check_shell
from tests.ranks import RankPool, free_port


def python_in(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python" and not block.fragment]


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if python_in(page)])  # the README's is a script: see below
def test_python_runs_on_two_ranks(page: str, two_ranks: RankPool) -> None:
    two_ranks.run(run_blocks, python_in(page))


@pytest.mark.parametrize("page", PAGES)
def test_python_fragments_are_python(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            try:
                ast.parse(block.code)
            except SyntaxError as error:
                raise AssertionError(f"{block.where}: {error}") from None


@pytest.mark.parametrize("page", [*PAGES, "examples/several_hosts.md"])
def test_shell_names_what_exists(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "sh" and not block.fragment:
            check_shell(block)


@pytest.mark.parametrize("page", ["docs/slow_network.md", "docs/asynchronous_experiment.md"])
def test_commands_of_the_pages_that_benches_write(page: str) -> None:
    lines = Path(page).read_text(encoding="utf-8").splitlines()
    commands = [line.strip() for line in lines if line.startswith("    python")]
    assert commands
    check_shell(Block(page, 1, "sh", "\n".join(commands)))


def command_for_one_host() -> list[str]:
    """Return the words of the README's line that starts its script, ``torchrun ... train.py``."""
    (fragment,) = (each for each in blocks_of("README.md") if each.fragment == "train.py is the script above")
    return shlex.split(fragment.code)


def test_the_readme_to_the_letter(tmp_path: Path) -> None:
    """In the checkout, where its commands leave the shell: the script's folder has a pycomm without the extension."""
    (script,) = python_in("README.md")
    assert len([line for line in script.code.splitlines() if line.strip()]) <= 16
    checkout = tmp_path / "checkout"
    left_out = shutil.ignore_patterns(".*", "build", "site", "*.so", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=left_out)
    (checkout / "train.py").write_text(script.code)
    launcher, *words = command_for_one_host()
    assert (launcher, words[-1]) == ("torchrun", "train.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=checkout,
        # The port is the only thing that tests at the same time may not share.
        env={**os.environ, "PET_MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = r"rank (\d): loss (\d\.\d{3}), (\d+) kB sent"  # unbuffered, both may be on one line
    ranks, losses, sent = zip(*sorted(re.findall(line, done.stdout)), strict=True)
    assert ranks == ("0", "1")
    assert max(map(float, losses)) < 3.5  # ln 64 = 4.16 is a guess
    gradients = 100 * 4 * (64 * 64 + 64) / 1e3
    assert all(gradients <= int(each) < 1.1 * gradients for each in sent)
    imported = rf"^\[pycomm rank 0\] imported from (\S+): {checkout}/pycomm has no compiled extension$"
    (package,) = re.findall(imported, done.stderr, re.MULTILINE)
    assert Path(package) == Path(pycomm.__file__).parent


def test_a_checkout_alone_says_what_to_do(tmp_path: Path) -> None:
    """``-S``: without what is installed, as in an environment to which nothing was added."""
    (tmp_path / "pycomm").mkdir()
    first = shutil.copy(ROOT / "pycomm" / "__init__.py", tmp_path / "pycomm")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pycomm"
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    wanted = f"ModuleNotFoundError: pycomm's compiled extension is not beside {first}, and no other"
    assert wanted in done.stderr
    assert "run `pip install .`" in done.stderr


def block(text: str) -> Block:
    (found,) = blocks_of("page.md", text)
    return found


class TestTheTestsThemselves:
    def test_marks(self) -> None:
        assert block("<!-- fragment: why not -->\n```cpp\nint x;\n```\n").fragment == "why not"
        assert block("<!-- continued -->\n```python\nx = 1\n```\n").continued
        assert block("text\n\n```python\nx = 1\n```\n") == Block("page.md", 4, "python", "x = 1\n")
        assert block("- a\n\n    ```sh\n    pytest\n    ```\n").code == "pytest\n"

    @pytest.mark.parametrize(
        ("text", "wrong"),
        [
            ("```python\nx = 1\n", "page.md:1: this fence has no end"),
            ("```cpp\nint x;\n```\n", "a block in 'cpp', which must be marked"),
            ("```\nint x;\n```\n", "a block in 'no language', which must be marked"),
            ("<!-- fragment: -->\n```cpp\nint x;\n```\n", "a block in 'cpp', which must be marked"),
        ],
    )
    def test_pages_that_are_wrong(self, text: str, wrong: str) -> None:
        with pytest.raises(ValueError, match=wrong):
            blocks_of("page.md", text)

    @pytest.mark.parametrize(
        ("line", "wrong"),
        [
            ("pip install '.[demo,tests]'", "page.md:3: there is no extra 'tests'"),
            ("pycomm plan ranks --ranks 4 --speed 3", "unrecognized arguments: --speed"),
            ("pycomm train", "invalid choice: 'train'"),
            ("python -m bench.kernels --elements 3", "bench.kernels has no option --elements"),
            ("python -m bench.kernel", "there is no module 'bench.kernel'"),
            ("cd x && PYCOMM_SYNC=1 torchrun --nproc-per-node 2 examples/large_batch.py --fast", "no option --fast"),
            ("python docs/gen.py", "there is no file 'docs/gen.py'"),
            ("pytest tests/test_nothing.py::test", "there is no file 'tests/test_nothing.py'"),
            ("nox -s test", "there is no session 'test'"),
            ("make", "'make' is no command that the tests know"),
        ],
    )
    def test_lines_that_are_wrong(self, line: str, wrong: str) -> None:
        with pytest.raises(UnknownError, match=wrong.replace("[", r"\[")):
            check_shell(Block("page.md", 2, "sh", f"# a comment\n{line}\n"))

    def test_code_that_fails_says_where(self, two_ranks: RankPool) -> None:
        errors = two_ranks.errors(run_blocks, [Block("page.md", 7, "python", "x = 1\nassert x == 2\n")])
        assert all(str(error) == "page.md:7: AssertionError: " for error in errors)
