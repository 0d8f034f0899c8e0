"""WorkerGroup of ``bench.horovod``."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import pycomm
import pycomm.horovod as hvd
from bench.harness.ranks import join_group

AGREED = "Communicator.all_reduce"
NAMED = "allreduce_, one name"
NEW = "allreduce_, a new name each time"
UNNAMED = "allreduce_, no name"
ASYNC = "allreduce_async_, synchronize"
SHUFFLED = "20 names at once, shuffled"
WAYS = (AGREED, NAMED, UNNAMED, ASYNC, SHUFFLED, NEW)
_TOGETHER = 20
_WARM_UP = 20


class HorovodRank:
    """Rank that reduces in every way, in the same process."""

    def __init__(self, port: int) -> None:
        self.rank, _ = join_group(port)
        self._communicator = pycomm.Communicator()
        hvd.init()
        self._names = itertools.count()
        self._order = random.Random(self.rank)
        self._ways: dict[str, Callable[[list[torch.Tensor]], object]] = {
            AGREED: lambda xs: [self._communicator.all_reduce(x) for x in xs],
            NAMED: lambda xs: [hvd.allreduce_(x, name="x", op=hvd.Sum) for x in xs],
            UNNAMED: lambda xs: [hvd.allreduce_(x, op=hvd.Sum) for x in xs],
            ASYNC: lambda xs: [hvd.synchronize(hvd.allreduce_async_(x, name="a", op=hvd.Sum)) for x in xs],
            NEW: lambda xs: [hvd.allreduce_(x, name=f"n{next(self._names)}", op=hvd.Sum) for x in xs],
            SHUFFLED: self._shuffled,
        }

    def _shuffled(self, xs: list[torch.Tensor]) -> None:
        for start in range(0, len(xs), _TOGETHER):
            some = list(enumerate(xs[start : start + _TOGETHER]))
            self._order.shuffle(some)
            for handle in [hvd.allreduce_async_(x, name=f"s{i}", op=hvd.Sum) for i, x in some]:
                hvd.synchronize(handle)

    def verify(self, num_bytes: int) -> None:
        """Raise AssertionError unless every way has the right sums."""
        for way, run in self._ways.items():
            xs = [torch.arange(num_bytes // 4).remainder(17).float() * (self.rank + 1) + i for i in range(_TOGETHER)]
            run(xs)
            size = dist.get_world_size()
            for i, x in enumerate(xs):
                wanted = torch.arange(num_bytes // 4).remainder(17).float() * (size * (size + 1) // 2) + i * size
                if not torch.equal(x, wanted):
                    raise AssertionError(f"{way}: sum {i} of {num_bytes} bytes is wrong")

    def turn(self, way: str, num_bytes: int, count: int) -> float:
        """Return the seconds of one operation, of ``count``."""
        xs = [torch.zeros(num_bytes // 4) for _ in range(_TOGETHER)]
        run = self._ways[way]
        turns = max(1, count // _TOGETHER)
        for _ in range(_WARM_UP // _TOGETHER + 1):
            run(xs)
        self._communicator.barrier()
        start = time.perf_counter()
        for _ in range(turns):
            run(xs)
        return (time.perf_counter() - start) / (turns * _TOGETHER)

    def close(self) -> None:
        hvd.barrier()
        hvd.shutdown()
        self._communicator.close()
        dist.destroy_process_group()
