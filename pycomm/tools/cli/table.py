"""Tables as text. Imports nothing of pycomm: benches read this file also where pycomm is not built."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table: the first column to the left, the others to the right; cells of the header may have lines."""
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
    """Print :func:`table`, every line behind ``indent``."""
    print(textwrap.indent(table(header, rows), indent))
