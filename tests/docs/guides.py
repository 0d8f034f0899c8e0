"""Does what a page under docs/extending says, in a copy of the project: new files, changes to files, commands.

A block that is marked `<!-- fragment: PATH -->` is that file, or what is added at its end. A block in `diff` has, below
`--- PATH`, lines to find there and lines to put in their place; `@@` stands where lines are left out. `cp FILE NEW` in
a block of shell copies a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pycomm._native as _native
from tests.docs.pages import ROOT, Block, blocks_of

_COPIED = ("CMakeLists.txt", "LICENSE", "NOTICE", "README.md", "constraints.txt", "pyproject.toml")
_FOLDERS = (".ci", "bench", "csrc", "docs", "examples", "pycomm", "pycomm_console", "tests")
_PROGRAMS = {
    "pycomm": ("-m", "pycomm.tools.cli.main"),
    "pytest": ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
    "python": (),
}
_PATH = re.compile(r"[\w/.]+\.\w+")


class Guide:
    """A page, and the copy of the project in which it is followed.

    Args:
        page: path of the page.
        folder: where the copy goes; empty.
        first: file that the page's first block in Python is.
    """

    def __init__(self, page: str, folder: Path, first: str = "") -> None:
        self._page, self._folder = page, folder
        for name in _COPIED:
            shutil.copy(ROOT / name, folder)
        for name in _FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        shutil.copy(_native.__file__, folder / "pycomm")
        self._installed = folder / "installed"  # of the folder that they lie in tests import as little as they can
        self._installed.mkdir()
        for name in ("pycomm", "pycomm_console", "tests"):
            (self._installed / name).symlink_to(folder / name)
        for block in blocks_of(page):
            if first and block.language == "python":
                self._add(block, first)
                first = ""
            elif block.language == "diff":
                self._change(block)
            elif block.language == "sh":
                for line in block.code.splitlines():
                    if line.startswith("cp "):
                        shutil.copy(*(folder / path for path in shlex.split(line)[1:]))
            elif _PATH.fullmatch(block.fragment):
                self._add(block, block.fragment)

    def _add(self, block: Block, path: str) -> None:
        file = self._folder / path
        before = file.read_text(encoding="utf-8").rstrip("\n") + "\n\n\n" if file.exists() else ""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(before + block.code, encoding="utf-8")

    def _change(self, block: Block) -> None:
        for part in re.split(r"^--- ", block.code, flags=re.MULTILINE)[1:]:
            path, _, changes = part.partition("\n")
            file = self._folder / path
            text = file.read_text(encoding="utf-8")
            for change in re.split(r"^@@\n", changes, flags=re.MULTILINE):
                lines = [(line[:1], line[1:] + "\n") for line in change.splitlines()]
                before = "".join(line for sign, line in lines if sign != "+")
                after = "".join(line for sign, line in lines if sign != "-")
                if f"\n{text}".count(f"\n{before}") != 1:
                    raise ValueError(f"{block.where}: {path} has not just once these lines:\n{before}")
                text = f"\n{text}".replace(f"\n{before}", f"\n{after}")[1:]
            file.write_text(text, encoding="utf-8")

    def use_package_in(self, folder: Path) -> None:
        """Have commands import pycomm as it was installed in ``folder``."""
        for name in ("pycomm", "pycomm_console"):
            (self._installed / name).unlink()
            (self._installed / name).symlink_to(folder / name)

    def commands(self, program: str) -> list[str]:
        """Return the page's commands that begin with ``program``."""
        shell = [block.code for block in blocks_of(self._page) if block.language == "sh"]
        return [line for code in shell for line in code.splitlines() if line.startswith(f"{program} ")]

    def run(self, command: str, timeout: float, **variables: str) -> str:
        """Run a command in the copy, by its pycomm, and return what it says.

        Raises:
            AssertionError: it fails.
        """
        program, *arguments = shlex.split(command)
        environment = {**os.environ, "PYTHONPATH": str(self._installed), **variables}
        with subprocess.Popen(
            [sys.executable, *_PROGRAMS[program], *arguments],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                said = f"took more than {timeout:.0f} s"
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)  # pytest ends its ranks
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.communicate(timeout=30)
                    process.kill()
        assert process.returncode == 0, f"{command}\n{said}"
        return said
