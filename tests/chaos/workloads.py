"""Workloads of ranks that wait for the fault: operations whose results are known, and are all checked."""

from __future__ import annotations

import contextlib
import random
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

import pycomm
from pycomm.worker import Work
from tests.chaos.faults import Fault
from tests.reducer.attaching import over


class WrongResultError(Exception):
    """An operation ended without an error, and not with what it should have."""


class Workload(Protocol):
    """Endless work in step with the other ranks."""

    digests: list[int]
    """By step, of what all ranks should have alike and none can compute alone."""

    def advance(self) -> None:
        """Do the next piece of it, and verify.

        Raises:
            CommError: a peer failed. WrongResultError: a result is not what it should be.
        """

    def again(self) -> None:
        """Do an operation more, after one has failed."""

    def close(self) -> None:
        """Leave the others, as a user would."""

    def closing(self) -> AbstractContextManager[object]:
        """A context at whose end this is closed."""


def make_workload(fault: Fault) -> Workload:
    """This rank's part of ``fault``'s; collective."""
    return Training(fault) if fault.workload == "attach" else Collectives(fault)


_DTYPES = (torch.float32, torch.float32, torch.float64, torch.int32)
_BYTES = (100, 64 << 10, 4 << 20)
_KINDS = ("all_reduce",) * 6 + ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_SCHEDULES = ("ring", "halving_doubling", "double_tree", "recursive_doubling", "direct", "circulant")


@dataclass(frozen=True)
class Step:
    """One operation, the same on all ranks."""

    number: int
    kind: str
    num_bytes: int
    dtype: torch.dtype
    op: str
    algorithm: str
    in_place: bool  # in memory of the communicator's own
    src: int

    @staticmethod
    def draw(rng: random.Random, number: int, size: int) -> Step:
        return Step(
            number,
            rng.choice(_KINDS),
            rng.choice(_BYTES),
            rng.choice(_DTYPES),
            rng.choice(("sum", "sum", "min", "max")),
            rng.choice((*_SCHEDULES, *["native"] * len(_SCHEDULES))),
            rng.random() < 0.5,
            rng.randrange(size),
        )

    def offset(self, rank: int) -> int:
        """Return a number that tells one rank's array from another's, and from those of earlier steps."""
        return (5 * rank + 3 * self.number) % 11


class Running:
    """One step on this rank: its arrays, and what is to be in them."""

    def __init__(self, communicator: pycomm.Communicator, step: Step) -> None:
        self._communicator, self.step = communicator, step
        size, rank = communicator.size, communicator.rank
        part = max(1, step.num_bytes // step.dtype.itemsize // size)
        self._x = self._array(part if step.kind == "all_gather" else part * size)
        pattern = torch.arange(part * size, dtype=step.dtype) % 13
        self._x.copy_(pattern[: len(self._x)] + step.offset(rank))
        self._out = self._x
        if step.kind in ("all_gather", "reduce_scatter", "all_to_all"):
            self._out = self._array(part if step.kind == "reduce_scatter" else part * size)
        self._wanted = self._expected(pattern, part)

    def _array(self, count: int) -> torch.Tensor:
        if self.step.in_place:
            return self._communicator.empty(count, self.step.dtype)
        return torch.empty(count, dtype=self.step.dtype)

    def _expected(self, pattern: torch.Tensor, part: int) -> torch.Tensor:
        step, rank = self.step, self._communicator.rank
        offsets = [step.offset(p) for p in range(self._communicator.size)]
        mine = pattern[rank * part : (rank + 1) * part]
        if step.kind in ("all_gather", "all_to_all"):
            piece = mine if step.kind == "all_to_all" else pattern[:part]
            return torch.cat([piece + offset for offset in offsets])
        if step.kind in ("all_reduce", "reduce_scatter"):
            whole = pattern if step.kind == "all_reduce" else mine
            if step.op == "sum":
                return whole * len(offsets) + sum(offsets)
            return whole + (min(offsets) if step.op == "min" else max(offsets))
        return pattern + offsets[step.src if step.kind == "broadcast" else rank]

    def start(self, async_op: bool) -> Work | None:
        """Call the operation; what it returned."""
        step, on = self.step, self._communicator
        work: object = None
        if step.kind == "all_reduce":
            work = on.all_reduce(self._x, step.op, step.algorithm, async_op)
        elif step.kind == "reduce_scatter":
            work = on.reduce_scatter(self._out, self._x, step.op, async_op)
        elif step.kind == "all_gather":
            work = on.all_gather(self._out, self._x, async_op)
        elif step.kind == "all_to_all":
            work = on.all_to_all(self._out, self._x, async_op)
        elif step.kind == "broadcast":
            work = on.broadcast(self._x, step.src, async_op)
        else:
            on.barrier()
        assert work is None or isinstance(work, Work)
        return work

    def verify(self) -> None:
        if not torch.equal(self._out, self._wanted):
            bad = (self._out != self._wanted).nonzero().view(-1)
            at = int(bad[0])
            raise WrongResultError(
                f"{self.step}: {len(bad)} of {len(self._wanted)} elements are wrong, the first at {at}: "
                f"{self._out[at].item()}, wanted {self._wanted[at].item()}"
            )


class Collectives:
    """A random mixture of a ``Communicator``'s operations."""

    def __init__(self, fault: Fault) -> None:
        self.digests: list[int] = []
        self._rng = random.Random(fault.seed)
        self._communicator = pycomm.Communicator(timeout=fault.timeout, transport=fault.transport)
        self._num_steps = 0

    def _draw(self) -> Running:
        self._num_steps += 1
        return Running(self._communicator, Step.draw(self._rng, self._num_steps, self._communicator.size))

    def advance(self) -> None:
        """One operation; or several at once, of which the last may be one that is waited for at once."""
        how = self._rng.choice(("sync", "sync", "async", "both"))
        running = [self._draw() for _ in range(1 if how == "sync" else self._rng.randint(2, 3))]
        works = [one.start(how == "async" or (how == "both" and one is not running[-1])) for one in running]
        for one, work in zip(running, works, strict=True):
            if work is not None:
                work.wait()
            one.verify()

    def again(self) -> None:
        self._draw().start(async_op=False)

    def close(self) -> None:
        self._communicator.close()

    def closing(self) -> AbstractContextManager[object]:
        return self._communicator


class Weights(torch.nn.Module):
    """Parameters whose gradients are given: the coefficients of a sum of all of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(count) for count in (7, 5_000, 300, 60_000)])

    def forward(self, offset: int) -> torch.Tensor:
        terms = [(weight * coefficients(weight, offset)).sum() for weight in self.weights]
        return torch.stack(terms).sum()


def coefficients(like: torch.Tensor, offset: int) -> torch.Tensor:
    """Small integers, some of them larger by far: what top-k is to find."""
    places = torch.arange(like.numel())
    return (places % 13 + 100 * (places % 37 == 0) + offset).to(like.dtype)


class Training:
    """Steps of an optimizer that is attached: dense ones, or by top-k."""

    def __init__(self, fault: Fault) -> None:
        self.digests: list[int] = []
        self._rank, self._size = torch.distributed.get_rank(), fault.size
        self._model = Weights()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.5)
        self._dense = fault.variant % 2 == 0
        self._average = fault.size != 3  # or sums of integers: what is divided by three is not exact
        with over(fault.transport):
            self._reducer = pycomm.attach(
                self._optimizer,
                self._model,
                compression=None if self._dense else pycomm.TopK(0.1),
                tuning=pycomm.Tuning(
                    bucket_mb=0.02, algorithm="ring" if fault.variant % 3 == 0 else "auto", timeout=fault.timeout
                ),
                average=self._average,
            )

    def _offset(self, rank: int) -> int:
        return (5 * rank + 3 * len(self.digests)) % 11

    def advance(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._offset(self._rank)).backward()
        digest = 0
        for number, weight in enumerate(self._model.weights):
            assert weight.grad is not None
            if self._dense:
                self._verify(number, weight.grad)
            digest = zlib.crc32(weight.grad.numpy().tobytes(), digest)
        self._optimizer.step()
        self.digests.append(digest)

    def _verify(self, number: int, grad: torch.Tensor) -> None:
        wanted = torch.stack([coefficients(grad, self._offset(rank)) for rank in range(self._size)]).sum(0)
        if self._average:
            wanted /= self._size
        if not torch.equal(grad, wanted):
            raise WrongResultError(f"step {len(self.digests)}: the gradient of weights.{number} is wrong")

    def again(self) -> None:
        self._optimizer.zero_grad()
        self._model(0).backward()

    def close(self) -> None:
        self._reducer.detach()

    def closing(self) -> AbstractContextManager[object]:
        return contextlib.closing(self)
