"""What a line of shell in the documentation names exists: programs, modules, files, options, extras, sessions."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from unittest.mock import patch

from pycomm.tools.cli.main import build_parser
from tests.docs.pages import ROOT, Block

_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*$")
_OPTION = re.compile(r"--[a-z][\w-]*")


class UnknownError(ValueError):
    """Something that a line names is not there."""


def check_shell(block: Block) -> None:
    """Raise :class:`UnknownError` where a line of ``block`` names what does not exist."""
    for offset, line in enumerate(block.code.splitlines()):
        for words in commands_of(line):
            try:
                check_command(words)
            except UnknownError as error:
                raise UnknownError(f"{block.page}:{block.line + offset}: {error}") from None


def commands_of(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line, without comments and without the variables that are set for them."""
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        command, words = words[:end], words[end + 1 :]
        while command and _ASSIGNMENT.match(command[0]):
            command.pop(0)
        if command:
            yield command


def check_command(words: list[str]) -> None:
    """Raise :class:`UnknownError` if one command, as words, names what does not exist."""
    name, *rest = words
    if name not in _COMMANDS:
        raise UnknownError(f"{name!r} is no command that the tests know")
    _COMMANDS[name](rest)


def _nothing(_: list[str]) -> None:
    pass


def _pip(words: list[str]) -> None:
    for word in words:
        match = re.fullmatch(r"\.\[(.+)\]", word)
        for extra in match[1].split(",") if match else []:
            if not re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE):
                raise UnknownError(f"there is no extra {extra!r}")


def _pycomm(words: list[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            build_parser().parse_args(words)
        except SystemExit:
            raise UnknownError(f"pycomm {' '.join(words)}: {said.getvalue().strip()}") from None


def _python(words: list[str]) -> None:
    if words[:1] == ["-m"]:
        if words[1] == "venv":
            return
        if find_spec(words[1]) is None:
            raise UnknownError(f"there is no module {words[1]!r}")
        commands = tuple(itertools.takewhile(lambda word: not word.startswith("-"), words[2:]))
        _options(words[2:], help_of(words[1], *commands), words[1])
    else:
        _file(words[0])
        _options(words[1:], (ROOT / words[0]).read_text(), words[0])


def _torchrun(words: list[str]) -> None:
    with contextlib.suppress(ValueError):
        return _python(words[words.index("-m") :])
    scripts = [word for word in words if word.endswith(".py")]
    _python(words[words.index(scripts[0]) :])


def _file(path: str) -> None:
    if not (ROOT / path).exists():
        raise UnknownError(f"there is no file {path!r}")


def _pytest(words: list[str]) -> None:
    for word in words:
        if word.startswith("tests"):
            _file(word.partition("::")[0])


def _nox(words: list[str]) -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if words[0] == "-s" and words[1] not in sessions:
        raise UnknownError(f"there is no session {words[1]!r}")


def _options(words: list[str], known: str, whose: str) -> None:
    for word in words:
        option = word.partition("=")[0]
        if _OPTION.fullmatch(option) and not re.search(rf"{re.escape(option)}(?![\w-])", known):
            raise UnknownError(f"{whose} has no option {option}")


@cache
def help_of(module: str, *commands: str) -> str:
    """Return what ``python -m module commands --help`` prints."""
    said = io.StringIO()
    with (
        patch.object(sys, "argv", [module, *commands, "--help"]),
        contextlib.redirect_stdout(said),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # that another test has imported it before
        with contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__")
    return said.getvalue()


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    **dict.fromkeys(
        (".", "cd", "cibuildwheel", "export", "git", "lint-imports", "mkdocs", "mypy", "pre-commit", "ruff", "sudo"),
        _nothing,
    ),
    **dict.fromkeys((".ci/run", ".ci/lint"), _nothing),
    **dict.fromkeys(("python", "python3"), _python),
    "bash": lambda words: _file(words[0]),
    "cp": lambda words: _file(words[0]),
    "nox": _nox,
    "pip": _pip,
    "pycomm": _pycomm,
    "pytest": _pytest,
    "torchrun": _torchrun,
}
