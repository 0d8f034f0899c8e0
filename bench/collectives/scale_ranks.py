"""The ranks of ``bench.collectives.scale``: a Communicator and a Gloo group side by side, made again and again."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.collectives.peers import AllReducePeer
from bench.harness.memory import usage
from bench.harness.ranks import join_group
from pycomm import Communicator

PYCOMM = "pycomm"
GLOO = "Gloo"
_TIMEOUT = 120.0


class ScaleRank(AllReducePeer):
    """Rank with one group of each kind for the turns; its variants are :data:`PYCOMM` and :data:`GLOO`."""

    def __init__(self, port: int, **rest: Any) -> None:
        self._groups: dict[str, Any] = {}
        super().__init__(*join_group(port), **rest)

    def turn_create(self, variant: str) -> float:
        """Return the seconds for making a group of this kind, which is given back at once."""
        self._barrier()
        start = time.perf_counter()
        group = self._make(variant)
        seconds = time.perf_counter() - start
        self._barrier()
        self._destroy(variant, group)
        return seconds

    def open(self, variant: str, sizes: list[int]) -> dict[str, int]:
        """Make the group for the turns; returns the descriptors and bytes it takes after one sum of each size.

        In place of an earlier one, which is given back first.
        """
        if variant in self._groups:
            self._destroy(variant, self._groups.pop(variant))
        before = self._usage()
        self._groups[variant] = self._make(variant)
        for num_elements in sizes:
            self.verify(variant, num_elements)
        after = self._usage()
        return {name: after[name] - before[name] for name in after}

    def close(self) -> None:
        for variant, group in self._groups.items():
            self._destroy(variant, group)
        dist.destroy_process_group()

    def _usage(self) -> dict[str, int]:
        gc.collect()
        self._barrier()  # shared pages count for as many as have looked at them
        found = usage()
        self._barrier()
        return found

    def _make(self, variant: str) -> Any:
        return Communicator(timeout=_TIMEOUT) if variant == PYCOMM else dist.new_group(backend="gloo")

    def _destroy(self, variant: str, group: Any) -> None:
        if variant == PYCOMM:
            group.close()
        else:
            dist.destroy_process_group(group)

    def _allocate(self, variant: str, num_elements: int) -> torch.Tensor:
        return torch.empty(num_elements)

    def _all_reduce(self, array: Any) -> None:
        raise NotImplementedError  # every variant has its own

    def _operation(self, variant: str) -> Callable[[Any], object]:
        group = self._groups[variant]
        if variant == PYCOMM:
            return lambda array: group.all_reduce(array)
        return lambda array: dist.all_reduce(array, group=group)

    def _barrier(self) -> None:
        dist.barrier()
