"""Stages: cuts of a row of layers that balance time under a limit of memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def cheapest_cut(costs: Floats, allowed: npt.NDArray[np.bool_]) -> list[int] | None:
    """Return where to cut layers into stages so that the most expensive stage is as cheap as possible.

    Args:
        costs: ``[stages, layers, layers]``: cost of a stage from the layer of the second index to that of the
            third, both included.
        allowed: the same shape: whether there may be such a stage.

    Returns:
        The first layer of each stage; ``None`` if no cut has only stages that are allowed.
    """
    stages, layers, _ = costs.shape
    # The least cost of the most expensive stage among the first so many, of the layers before an index.
    best = np.full(layers + 1, np.inf)
    best[0] = -np.inf
    origins = []
    first, last = np.meshgrid(np.arange(layers), np.arange(layers), indexing="ij")
    for stage in range(stages):
        usable = np.where(allowed[stage] & (first <= last), costs[stage], np.inf)
        ends = np.maximum(best[:layers, None], usable)
        origin = ends.argmin(0)
        best = np.concatenate([[np.inf], ends[origin, np.arange(layers)]])
        origins.append(origin)
    if not np.isfinite(best[layers]):
        return None
    cuts, end = [], layers
    for origin in reversed(origins):
        end = int(origin[end - 1])
        cuts.append(end)
    return cuts[::-1]


def sums(values: Floats) -> Floats:
    """Return ``[layers, layers]``: the sum of ``values`` from the first index to the second, both included."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(total[None, 1:] - total[:-1, None])


def maxima(values: Floats) -> Floats:
    """Return ``[layers, layers]``: the largest of ``values`` from the first index to the second; 0 below."""
    count = len(values)
    rows = np.where(np.arange(count)[None, :] >= np.arange(count)[:, None], values[None, :], 0.0)
    return np.asarray(np.maximum.accumulate(rows, axis=1))


def sweeps(kept: Floats, gradients: Floats) -> Floats:
    """Return ``[layers, layers]``: the most that one backward pass through these layers has at once.

    That is, before each layer's turn, what it and the earlier ones keep, and the gradients of it and of the later ones,
    as what a layer keeps is freed when its gradients are there.
    """
    count = len(kept)
    together = sums(kept)
    most = np.zeros((count, count))
    for last in range(count):
        before = np.where(np.arange(count) < last, most[:, last - 1], 0.0)
        most[:, last] = np.maximum(before, together[:, last]) + gradients[last]
    return np.triu(most)
