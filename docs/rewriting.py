"""Rewriting of pages that scripts beside this one compute, or word of those that are stale."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_WIDTH = 120


def rewrite(
    description: str, script: str, wanted: Callable[[], Mapping[Path, str]], arguments: Sequence[str] | None
) -> int:
    """Write the pages that are not what is ``wanted``; with ``--check`` only say which; return the exit code.

    Args:
        description: what ``--help`` says.
        script: name of the script that computes them.
        wanted: returns the text of each page; called once the arguments are understood.
        arguments: of the command line; ``None``: this process's.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    check = parser.parse_args(arguments).check
    pages = wanted()
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.name} is stale; run: python docs/{script}", file=sys.stderr)
        else:
            path.write_text(pages[path], encoding="utf-8")
            print(f"{path.name}: rewritten")
    return 1 if check and stale else 0


def wrapped(text: str) -> str:
    """Return ``text`` with lines of prose and of lists that are not longer than the others of the documentation."""
    lines, in_code = [], False
    for line in text.split("\n"):
        in_code ^= line.startswith("```")
        if in_code or len(line) <= _WIDTH or line.startswith(("|", "<!--", "#", "!")):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)
