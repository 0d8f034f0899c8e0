"""Tables as text. Imports nothing of pycomm: benches use this file also where pycomm is not built."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table, the first column left-aligned, the others right-aligned. Header cells may have several lines."""
    body = [list(row) for row in rows]
    names = [name.split("\n") for name in header]
    height = max(map(len, names))
    head = [list(line) for line in zip(*([""] * (height - len(name)) + name for name in names), strict=True)]
    widths = [max(len(line[column]) for line in (*head, *body)) for column in range(len(header))]
    lines = []
    for line in (*head, ["-" * width for width in widths], *body):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> None:
    """Print a :func:`table`, each line after ``indent``."""
    print(textwrap.indent(table(header, rows), indent))
