"""Shared by all commands: parser, lazy imports, terminal output. Imports no package but pycomm."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pycomm import untrusted

Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Parser of a command. Reports unknown arguments with the command's own usage, not the usage of ``pycomm``.

    Attributes:
        siblings: other commands by name. If an unknown option belongs to one of them, the error says so.
        epilog_later: returns the epilog; called only when help is printed.
    """

    siblings: Mapping[str, argparse.ArgumentParser] = {}
    epilog_later: Callable[[], str] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse ``args``; unknown ones are an error."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._owners_of(rest)}")
        return known, rest

    def format_help(self) -> str:
        if self.epilog_later is not None:
            self.epilog = self.epilog_later()
        return super().format_help()

    def _owners_of(self, words: list[str]) -> str:
        """Say which of the siblings have the options among ``words``."""
        found = []
        for option in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("-")):
            owners = [each.prog for each in self.siblings.values() if option in each._option_string_actions]
            if owners:
                found.append(f"{option} is an option of {', '.join(owners)}")
        return f" ({'; '.join(found)})" if found else ""


def later(module: str, *, whole: bool = False) -> Run:
    """Return a function that imports ``module`` and calls its ``run``; ``whole``: after importing all of pycomm."""

    def call(arguments: argparse.Namespace) -> int:
        if whole:
            load_package()
        code: int = importlib.import_module(module).run(arguments)
        return code

    return call


def load_package() -> None:
    """Run ``pycomm/__init__.py`` if it has not run: the console script loads the package without it."""
    package = sys.modules["pycomm"]
    if not hasattr(package, "__version__"):
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)


def integer(smallest: int, *, largest: int | None = None, multiple_of: int = 1) -> Callable[[str], int]:
    """Return a type for argparse: integers within bounds."""

    def integer(text: str) -> int:
        value = int(text)
        if largest is not None and value > largest:
            raise argparse.ArgumentTypeError(f"{value}, wanted at most {largest}")
        if value < smallest or value % multiple_of:
            wanted = f"at least {smallest}" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
            raise argparse.ArgumentTypeError(f"{value}, wanted {wanted}")
        return value

    return integer


def complain(text: str) -> None:
    """Print ``text`` to standard error as one line without control characters."""
    print(untrusted.one_line(text), file=sys.stderr)


def say(text: str) -> None:
    """Print ``text``; characters that the standard output cannot write become escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
