"""All-reduce algorithms by name. Each has a file that gives its idea, source, steps and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable

from pycomm.schedule.algorithms.binary_blocks import binary_blocks as binary_blocks
from pycomm.schedule.algorithms.circulant import circulant as circulant
from pycomm.schedule.algorithms.direct import direct as direct
from pycomm.schedule.algorithms.double_tree import double_tree as double_tree
from pycomm.schedule.algorithms.halving_doubling import halving_doubling as halving_doubling
from pycomm.schedule.algorithms.hierarchical import hierarchical as hierarchical
from pycomm.schedule.algorithms.recursive_doubling import recursive_doubling as recursive_doubling
from pycomm.schedule.algorithms.ring import ring as ring
from pycomm.schedule.algorithms.torus import torus as torus
from pycomm.schedule.collective import Schedule
from pycomm.schedule.table import require_ranks

_FLAT: dict[str, Callable[..., Schedule]] = {
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "binary_blocks": binary_blocks,
    "circulant": circulant,
    "double_tree": double_tree,
    "direct": direct,
}
"""Algorithms of a number of ranks; a second parameter may follow the name in parentheses."""

_GRID: dict[str, Callable[..., Schedule]] = {"torus": torus, "hierarchical": hierarchical}
"""Algorithms of two factors of the number of ranks."""

_SECOND = ("circulant", "double_tree")
_PATTERN = re.compile(r"(\w+)(?:\((.*)\))?")


def names() -> list[str]:
    """Return the names of the all-reduce algorithms that :func:`by_name` knows."""
    return [*_FLAT, *_GRID]


def by_name(algorithm: str, num_ranks: int, per_host: int | None = None) -> Schedule:
    """Make the all-reduce ``algorithm`` among ``num_ranks`` ranks.

    Parameters may follow in parentheses, as in the names of schedules: "double_tree(64)",
    "circulant(8)", "torus(8,4)", "hierarchical(4,8)", "torus(8,4,ring,circulant)". Without parameters the
    rows or groups of a grid have ``per_host`` ranks or, if that is ``None``, the grid is as square as possible.

    Raises:
        ValueError: there is no such name, ``num_ranks`` < 1, or the ranks do not factor like that.
    """
    num_ranks = require_ranks(num_ranks)
    match = _PATTERN.fullmatch(algorithm.strip()) if isinstance(algorithm, str) else None
    base = match[1] if match else None
    if match is None or base not in names():
        raise ValueError(f"algorithm is {algorithm!r}, wanted one of {', '.join(names())}")
    words = [word.strip() for word in _split(match[2])] if match[2] else []
    if base in _GRID:
        return _grid(base, num_ranks, per_host, words)
    if len(words) > (base in _SECOND):
        raise ValueError(f"algorithm is {algorithm!r}: {base} takes {'one parameter' if base in _SECOND else 'none'}")
    return _FLAT[base](num_ranks, *(_number(word, algorithm) for word in words))


def _grid(base: str, num_ranks: int, per_host: int | None, words: list[str]) -> Schedule:
    if not words:
        size = most_square(num_ranks) if per_host is None else per_host
        size = require_ranks(size, "per_host")
        if num_ranks % size:
            raise ValueError(f"{num_ranks} ranks do not factor into groups of {size}")
        return torus(size, num_ranks // size) if base == "torus" else hierarchical(num_ranks // size, size)
    text = f"{base}({','.join(words)})"
    if len(words) not in (2, 4):
        raise ValueError(f"algorithm is {text!r}, wanted two factors, and after them nothing or two names")
    first, second = (_number(word, text) for word in words[:2])
    if first * second != num_ranks:
        raise ValueError(f"algorithm is {text!r}, but {first} x {second} is not {num_ranks}, the number of ranks")
    if len(words) == 2:
        return _GRID[base](first, second)
    inner = words[3]
    return _GRID[base](first, second, words[2], lambda size: by_name(inner, size))


def most_square(num_ranks: int) -> int:
    """Return the largest divisor of ``num_ranks`` up to its square root."""
    return max(d for d in range(1, int(num_ranks**0.5) + 1) if num_ranks % d == 0)


def _split(text: str) -> list[str]:
    """Split ``text`` at commas outside parentheses."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return words


def _number(word: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", word) or int(word) < 1:
        raise ValueError(f"algorithm is {name!r}: {word!r} is not a whole number of at least 1")
    return int(word)
