"""Shows on the site what docstrings refer to: a role becomes a link where its target has an entry, code elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([\w.]+)`")
_ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
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


class Roles(Extension):
    """Rewrites every docstring that is read."""

    def __init__(self) -> None:
        self._known = entries()

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value, self._known)
