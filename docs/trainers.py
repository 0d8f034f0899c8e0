"""Writes into docs/trainers.md what pycomm changes in the scripts under examples/trainers.

    python docs/trainers.py                # rewrites what stands between the markers
    python docs/trainers.py --check        # changes nothing; exits with 1 and says that the page is stale

Markers: <!-- diff: SCRIPT --> and <!-- end -->. In a script, a line that ends with `# pycomm` was added, and one that
ends with `# pycomm, instead of: CODE` stands for CODE.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rewriting import rewrite

PAGE = Path(__file__).with_name("trainers.md")
SCRIPTS = Path(__file__).resolve().parent.parent / "examples" / "trainers"

_OURS = re.compile(r"^( *)(.*)  # pycomm(?:, instead of: (.*))?$")
_PART = re.compile(r"(<!-- diff: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page, or say that it is stale; return the exit code."""
    return rewrite("what pycomm changes in scripts of trainers", "trainers.py", _pages, arguments)


def _pages() -> dict[Path, str]:
    text = PAGE.read_text(encoding="utf-8")
    return {PAGE: _PART.sub(lambda match: match[1] + difference(match[2]) + match[4], text)}


def source(script: str) -> str:
    """Return a script of examples/trainers as it is."""
    return (SCRIPTS / script).read_text(encoding="utf-8")


def without_pycomm(script: str) -> str:
    """Return the script as it was before pycomm."""
    lines = []
    for line in source(script).splitlines():
        ours = _OURS.match(line)
        if ours is None:
            lines.append(line)
        elif ours[3]:
            lines.append(ours[1] + ours[3])
    return "\n".join(lines) + "\n"


def num_changed(script: str) -> int:
    """Return how many lines of the script are pycomm's."""
    return sum(_OURS.match(line) is not None for line in source(script).splitlines())


def difference(script: str) -> str:
    """Return what pycomm changes in a script, as a block for the page."""
    ours = [_OURS.sub(r"\1\2", line) for line in source(script).splitlines()]
    lines = list(difflib.unified_diff(without_pycomm(script).splitlines(), ours, n=1, lineterm=""))[2:]
    shown = ["..." if line.startswith("@@") else line for line in lines]
    return "\n".join(["<!-- fragment: a difference -->", "```diff", *shown, "```", ""])


if __name__ == "__main__":
    sys.exit(main())
