"""Shows docstrings on the site as they are meant.

A role becomes a link where its target has an entry in the reference, code elsewhere; and a line of a section that does not
begin an item continues the one before, whether or not it is indented further.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([\w.]+)`")
_ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_SECTION = re.compile(r"( *)(?:Args|Attributes|Raises):$")
_ITEM = re.compile(r"[\w*.]+(?:, [\w*.]+)*: ")
_REFERENCE = Path(__file__).resolve().parent.parent / "reference"


def entries() -> set[str]:
    """Return the names that have an entry of their own in the reference."""
    return {name for page in _REFERENCE.glob("*.md") for name in _ENTRY.findall(page.read_text(encoding="utf-8"))}


def without_roles(text: str, known: set[str]) -> str:
    """Return ``text`` with a link, or code, for every role."""

    def shown(match: re.Match[str]) -> str:
        name = match[1]
        for full in (name, f"pycomm.{name}"):
            if full in known:
                return f"[`{name}`][{full}]"
        return f"`{name}`"

    return _ROLE.sub(shown, text)


def with_hanging_lines(text: str) -> str:
    """Return ``text`` with the lines of a section indented that continue an item."""
    return "\n".join(_hanging_lines(text.splitlines()))


def _hanging_lines(lines: list[str]) -> Iterator[str]:
    indent: str | None = None  # of the items of the section that this line is in
    for line in lines:
        section = _SECTION.match(line)
        if section is not None:
            indent = section[1] + "    "
        elif line.strip() and (indent is None or not line.startswith(indent)):
            indent = None
        elif indent is not None and line.strip() and line[len(indent)] != " " and not _ITEM.match(line[len(indent) :]):
            line = f"    {line}"
        yield line


class Docstrings(Extension):
    """Rewrites every docstring that is read."""

    def __init__(self) -> None:
        self._known = entries()

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = with_hanging_lines(without_roles(obj.docstring.value, self._known))
