"""Writes into docs/torch_suite.md what of torch's suite passes: ``python -m tests.torch_suite.page [--check]``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.torch_suite.expected import COUNTS, EXCEPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "torch_suite.md"
_PART = re.compile(r"(<!-- torch's suite -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    text = PAGE.read_text(encoding="utf-8")
    fresh = render(text)
    if parser.parse_args(arguments).check and fresh != text:
        print(f"{PAGE.name} is stale; run: python -m tests.torch_suite.page", file=sys.stderr)
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


def render(text: str) -> str:
    """Return ``text`` with what is generated as it should be."""
    assert _PART.search(text), f"{PAGE.name} has no place for what is generated"
    return _PART.sub(lambda part: part[1] + _generated() + part[3], text)


def _generated() -> str:
    rows = ["| torch | tests | run | pass | excepted |", "| --- | ---: | ---: | ---: | ---: |"]
    for release, counts in COUNTS.items():
        ran = counts.passed + len(EXCEPTIONS)
        rows.append(f"| {release} | {counts.tests} | {ran} | {counts.passed} | {len(EXCEPTIONS)} |")
    excepted = [f"- `{name}`: {reason}" for name, reason in sorted(EXCEPTIONS.items())]
    return "\n".join([*rows, "", "Exceptions:", "", *(excepted or ["- None."])]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
