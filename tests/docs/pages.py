"""The documentation's pages, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
LANGUAGES = ("python", "sh", "text")
"""What a block may be without a mark: run, looked at, or no code at all."""

_FENCE = re.compile(r"^( *)```(.*)$")
_MARK = re.compile(r"^ *<!-- (fragment: (?P<why>\S.*)|(?P<continued>continued)) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced piece of code.

    Attributes:
        line: number of its first line of code in the page, from 1.
        fragment: why it is not run or looked at; empty if it is.
        continued: whether it goes on with what the block before has defined.
    """

    page: str
    line: int
    language: str
    code: str
    fragment: str = ""
    continued: bool = False

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Return the blocks of ``page``, a path below :data:`ROOT`; of ``text`` in its place, if given.

    Raises:
        ValueError: a fence without its end, or a language that is neither run nor marked as a fragment.
    """
    lines = ((ROOT / page).read_text(encoding="utf-8") if text is None else text).splitlines()
    found: list[Block] = []
    start: tuple[int, str, str] | None = None
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start = number, fence[1], fence[2].strip()
        elif not fence[2]:
            found.append(_block(page, lines, start, number))
            start = None
    if start is not None:
        raise ValueError(f"{page}:{start[0]}: this fence has no end")
    return found


def _block(page: str, lines: list[str], start: tuple[int, str, str], end: int) -> Block:
    begin, indent, language = start
    before = next((line for line in reversed(lines[: begin - 1]) if line.strip()), "")
    mark = _MARK.match(before)
    code = "\n".join(line.removeprefix(indent) for line in lines[begin : end - 1]) + "\n"
    why = (mark["why"] or "") if mark else ""
    if language not in LANGUAGES and not why:
        raise ValueError(
            f"{page}:{begin}: a block in {language or 'no language'!r}, which must be marked as a fragment"
        )
    return Block(page, begin + 1, language, code, why, bool(mark and mark["continued"]))
