"""Arrays that are neither torch's nor numpy's."""

from __future__ import annotations

import numpy as np

from pycomm import kernels


class OnlyInterface:
    """Has ``__array_interface__`` and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


def test_the_array_interface() -> None:
    out = OnlyInterface(np.zeros(4, np.float32))
    finite = kernels.pack([OnlyInterface(np.arange(4, dtype=np.float64))], out, scale=2.0)
    assert bool(finite)
    assert out.array.tolist() == [0, 2, 4, 6]
    values, indices = kernels.topk(out, 2)
    assert (values.tolist(), indices.tolist()) == ([4, 6], [2, 3])
