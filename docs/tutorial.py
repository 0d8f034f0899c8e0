"""Writes into docs/tutorial.md its first script, and what changes from one script to the next.

    python docs/tutorial.py                # rewrites what stands between the markers
    python docs/tutorial.py --check        # changes nothing; exits with 1 and says that the page is stale

Markers: <!-- script: NAME --> or <!-- diff: OLD NEW -->, and <!-- end -->; names of files in examples/tutorial.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rewriting import rewrite

PAGE = Path(__file__).with_name("tutorial.md")
SCRIPTS = Path(__file__).resolve().parent.parent / "examples" / "tutorial"

_PART = re.compile(r"(<!-- (?:script|diff): (\S+)(?: (\S+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page, or say that it is stale; return the exit code."""
    return rewrite("what changes from script to script in the tutorial", "tutorial.py", _pages, arguments)


def _pages() -> dict[Path, str]:
    text = PAGE.read_text(encoding="utf-8")
    return {PAGE: _PART.sub(lambda match: match[1] + shown(match[2], match[3]) + match[5], text)}


def shown(script: str, changed: str | None) -> str:
    """Return a block for the page: a script, or what changes from it to another one."""
    if changed is None:
        return "\n".join(
            ["<!-- fragment: tests/docs/test_tutorial.py runs it -->", "```python", *_lines(script), "```", ""]
        )
    difference = list(difflib.unified_diff(_lines(script), _lines(changed), n=0, lineterm=""))[3:]
    lines = ["..." if line.startswith("@@") else line for line in difference]
    return "\n".join(["<!-- fragment: a difference -->", "```diff", *lines, "```", ""])


def _lines(script: str) -> list[str]:
    """Return the lines of a script without its docstring, which says what step it is."""
    return (SCRIPTS / script).read_text(encoding="utf-8").partition("\n\n")[2].splitlines()


if __name__ == "__main__":
    sys.exit(main())
