"""Texts for the terminal of which parts come from files: names of files, what their errors quote."""

from __future__ import annotations

import sys

from pycomm import untrusted


def complain(text: str) -> None:
    """Print ``text`` to the standard error as one line, without the control characters that a terminal would obey."""
    print(untrusted.one_line(text), file=sys.stderr)


def say(text: str) -> None:
    """Print ``text``; characters that the standard output cannot write become escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
