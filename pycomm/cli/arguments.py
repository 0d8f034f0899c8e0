"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def integer(smallest: int, *, largest: int | None = None, multiple_of: int = 1) -> Callable[[str], int]:
    """Return a type for argparse: integers within bounds."""

    def integer(text: str) -> int:
        value = int(text)
        if largest is not None and value > largest:
            raise argparse.ArgumentTypeError(f"{value}, wanted at most {largest}")
        if value < smallest or value % multiple_of:
            wanted = f"at least {smallest}" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
            raise argparse.ArgumentTypeError(f"{value}, wanted {wanted}")
        return value

    return integer
