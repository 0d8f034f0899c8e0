"""Double binary tree: two trees reduce and broadcast half of the array each, in a pipeline of pieces.

In a single binary tree half of the ranks are leaves, which have nothing to send down. Here no rank is an
inner node of both trees, and each tree takes half of the array, so all ranks have about the same work.
While a piece comes down, the next ones go up.

Steps: 2h + pieces - 1 with h = floor(lg P). In a step a rank sends and receives up to four pieces of
n / (2 pieces) bytes: up and down, in either tree. As in the source, the edges of both trees have two
colors, and a rank sends at most one message and receives at most one of each color. Taken color by
color, no message waits for a port. On the critical path at most 2n (1 + (2h - 1) / pieces) bytes and
4 (2h + pieces - 1) messages: a ring's bytes with many pieces, a tree's steps with few.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35(12), 2009.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from pycomm.schedule.collective import Schedule
from pycomm.schedule.table import COPY, REDUCE, Ints, Round, concatenate, require_ranks

DEFAULT_PIECES = 16


def double_tree(num_ranks: int, pieces: int = DEFAULT_PIECES) -> Schedule:
    """Make an all-reduce by two trees; each tree's half is cut into ``pieces`` for the pipeline.

    Raises:
        ValueError: ``num_ranks`` or ``pieces`` < 1.
    """
    num_ranks = require_ranks(num_ranks)
    pieces = require_ranks(pieces, "pieces")
    name = "double_tree" if pieces == DEFAULT_PIECES else f"double_tree({pieces})"
    return Schedule(name, num_ranks, 2 * pieces, lambda: _generate(num_ranks, pieces))


def trees_of(num_ranks: int) -> list[Ints]:
    """Return each rank's parent in either tree, -1 for the root. No rank has children in both."""
    parent = np.array([_parent(place, num_ranks) - 1 for place in range(1, num_ranks + 1)])
    # The second tree is the mirror image. Of an odd number the last rank is a leaf and stays where it is.
    paired = num_ranks - num_ranks % 2
    mirror = np.concatenate([np.arange(paired)[::-1], np.arange(paired, num_ranks)])
    mirrored = np.full(num_ranks, -1)
    mirrored[mirror] = np.where(parent < 0, -1, mirror[parent])
    return [parent, mirrored]


def _parent(place: int, num_places: int) -> int:
    """Return the parent of ``place`` in the tree whose nodes are 1 ... ``num_places``, left to right; 0 for the root.

    A node's height is the number of zeros at the end of ``place``: odd places are leaves.
    """
    bit = place & -place
    above = (place ^ bit) | (bit << 1)
    return above if above <= num_places else place ^ bit


def _depths(parent: Ints) -> Ints:
    depth = np.zeros(len(parent), np.int64)
    node = parent.copy()
    while (node >= 0).any():
        depth += node >= 0
        node = np.where(node >= 0, parent[node], -1)
    return depth


def _colors(trees: list[Ints]) -> list[Ints]:
    """Return 0 or 1 by tree and child: different for a rank's two parents, and for its two children in a tree."""
    edges = [(tree, child) for tree, parent in enumerate(trees) for child in np.flatnonzero(parent >= 0).tolist()]
    neighbors: dict[tuple[int, int], list[tuple[int, int]]] = {edge: [] for edge in edges}
    ends: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for tree, child in edges:
        for end in (("sends", child), ("receives", int(trees[tree][child]))):
            for other in ends.setdefault(end, []):
                neighbors[other].append((tree, child))
                neighbors[tree, child].append(other)
            ends[end].append((tree, child))
    # An end has at most two edges, and ends that send and receive alternate: only paths and even cycles.
    color: dict[tuple[int, int], int] = {}
    for edge in edges:
        stack = [(edge, 0)] if edge not in color else []
        while stack:
            at, wanted = stack.pop()
            if at not in color:
                color[at] = wanted
                stack += [(other, 1 - wanted) for other in neighbors[at]]
    return [
        np.array([color.get((tree, child), 0) for child in range(len(parent))]) for tree, parent in enumerate(trees)
    ]


def _generate(num_ranks: int, pieces: int) -> Iterator[Round]:
    trees = trees_of(num_ranks)
    depths = [_depths(parent) for parent in trees]
    colors = _colors(trees)
    height = max(int(depth.max()) for depth in depths)
    for step in range(2 * height + pieces - 1 if height else 0):
        edges = []
        for color, op, number in itertools.product((0, 1), (REDUCE, COPY), (0, 1)):
            parent, depth = trees[number], depths[number]
            child = np.flatnonzero((parent >= 0) & (colors[number] == color))
            piece = step - height + (depth[child] if op == REDUCE else 1 - depth[child])
            active = (piece >= 0) & (piece < pieces)
            below, above = child[active], parent[child[active]]
            src, dst = (below, above) if op == REDUCE else (above, below)
            edges.append(Round.of(src, dst, number * pieces + piece[active], 1, op))
        yield concatenate(edges)
