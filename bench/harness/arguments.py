"""Arguments that the benches' command lines have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the bench's own docstring and knows ``--json`` and ``--rounds``."""
    parser = plain_parser(module, description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--rounds", type=positive, default=9, help="turns that everything measured gets (default 9)")
    return parser


def plain_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of ``python -m module``'s arguments that shows the module's own docstring."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=description, formatter_class=formatter)


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, wanted at least 1")
    return value


def counts(text: str) -> list[int]:
    """Parse numbers of at least 1, separated by commas."""
    return [positive(word) for word in text.split(",")]


def sizes(text: str) -> list[int]:
    """Parse numbers of bytes, separated by commas, with K, M or G; returns whole float32s, ascending."""
    return sorted(positive(word.rstrip("KMG")) * _UNITS.get(word[-1:], 1) // 4 * 4 for word in text.split(","))


def size_text(num_bytes: int) -> str:
    """Write a number of bytes as :func:`sizes` reads it: "64 KB" are 65536."""
    for unit, factor in reversed(_UNITS.items()):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}B"
    return f"{num_bytes} B"
