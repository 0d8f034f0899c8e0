"""The ranks of ``bench.growth``: attach and steps of models that differ in one number, and what they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from bench.harness.memory import give_back, mapped_bytes, memory_file_bytes, usage
from bench.harness.ranks import join_group
from pycomm.collectives.transport import meeting
from pycomm.torch_internals import PrefixStore

_MESSAGE_STEPS = 4
"""Steps whose operations are counted one by one: now and then a step compares replicas too."""


class Noted:
    """A store that notes requests: the same one again, while a rank waits for others, counts once."""

    requests: ClassVar[set[tuple[str, str]]] = set()

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*given: Any) -> Any:
            self.requests.add((name, str(given)))
            return getattr(self._store, name)(*given)

        return ask


class Tensors(nn.Module):
    """``count`` parameters with ``num_bytes`` together, whose gradients cost next to nothing to compute."""

    def __init__(self, count: int, num_bytes: int, dtype: torch.dtype) -> None:
        super().__init__()
        elements = max(1, num_bytes // dtype.itemsize // count)
        self.tensors = nn.ParameterList(torch.zeros(elements, dtype=dtype) for _ in range(count))

    def forward(self) -> list[torch.Tensor]:
        return list(self.tensors)


class GrowthRank:
    """Rank whose :meth:`measure` the driver calls for each point of a curve."""

    def __init__(self, port: int) -> None:
        self.rank, self.size = join_group(port)
        torch.set_num_threads(1)
        vars(meeting)["PrefixStore"] = lambda prefix, store: Noted(PrefixStore(prefix, store))
        self.measure(1, 4, 1, rounds=1, steps=1)  # what the first attach of a process takes once

    def measure(
        self, parameters: int, num_bytes: int, buckets: int, rounds: int, steps: int, dtype: str = "float32"
    ) -> dict[str, float]:
        """Return what a model takes.

        Args:
            parameters: their number.
            num_bytes: of all gradients together.
            buckets: number of buckets that they should go into.
            rounds: number of times that the model is attached, one after the other.
            steps: number of timed steps.
            dtype: of the parameters.

        Returns:
            Medians over the rounds. Seconds: "attach"; "host", of the training thread's processor time in a step,
            and "alone", the same before ``attach``. Per step: "messages", operations of the transport, and bytes
            "sent". "requests" to the store in one attach, without repeated ones, the fewest. What an attach adds:
            "descriptors", bytes of "private" and "shared" memory, and "left" descriptors after it is over.

        Raises:
            AssertionError: a gradient is not the average.
        """
        model = Tensors(parameters, num_bytes, getattr(torch, dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seed = torch.full((1,), float(self.rank + 1), dtype=getattr(torch, dtype))

        def step() -> None:
            optimizer.zero_grad()
            tensors = model()
            torch.autograd.backward(tensors, [seed.expand_as(tensor) for tensor in tensors])
            optimizer.step()

        step()
        alone = self._host(step, steps)
        rows = [self._attached(model, optimizer, step, buckets, steps, num_bytes) for _ in range(rounds)]
        found = {name: median(row[name] for row in rows) for name in rows[0]}
        found["requests"] = min(row["requests"] for row in rows)
        return found | {"alone": alone}

    def _attached(
        self, model: Tensors, optimizer: Any, step: Callable[[], None], buckets: int, steps: int, num_bytes: int
    ) -> dict[str, float]:
        optimizer.zero_grad()
        give_back()
        Noted.requests.clear()
        before, private = usage(), mapped_bytes()
        dist.barrier()
        start = time.perf_counter()
        tuning = pycomm.Tuning(bucket_mb=max(num_bytes / buckets, 1.0) / 2**20, timeout=300)
        reducer = pycomm.attach(optimizer, model, tuning=tuning)
        seconds = time.perf_counter() - start
        asked = len(Noted.requests)
        step()
        wanted = (self.size + 1) / 2
        if not all(bool((p.grad[[0, -1]] == wanted).all()) for p in model.parameters() if p.grad is not None):
            raise AssertionError("a gradient is not the average")
        recorder, sent, operations = reducer._engine.lanes[0].channel.recorder, reducer.stats()["bytes_sent"], []
        for _ in range(_MESSAGE_STEPS):
            count = recorder.count
            step()
            operations.append(recorder.count - count)
        sent = reducer.stats()["bytes_sent"] - sent
        host = self._host(step, steps)
        give_back()
        after, private, shared = usage(), mapped_bytes() - private, sum(memory_file_bytes().values())
        reducer.detach()
        del reducer, recorder
        optimizer.zero_grad()  # gradients keep the memory in which they lie
        dist.barrier()
        give_back()
        return {
            "attach": seconds,
            "host": host,
            "messages": median(operations),
            "sent": sent / _MESSAGE_STEPS,
            "requests": asked,
            "descriptors": after["descriptors"] - before["descriptors"],
            "private": private,
            "shared": shared,
            "left": usage()["descriptors"] - before["descriptors"],
        }

    def _host(self, step: Callable[[], None], steps: int) -> float:
        dist.barrier()
        taken = []
        for _ in range(steps):
            begun = time.thread_time()
            step()
            taken.append(time.thread_time() - begun)
        return median(taken)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
