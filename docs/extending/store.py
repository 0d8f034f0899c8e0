"""Transport by the process group's own store: every rank writes there what it has, and reads what the others have.

Slow, as every byte goes through one process. It shows what is required of a transport.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

import pycomm._native as _native
from pycomm import kernels
from pycomm.collectives.recorder import Recorder
from pycomm.collectives.transport.base import AllReduceApart, HostMemory, OwnShare, Receipt, ReduceScatterApart
from pycomm.collectives.transport.host_tensors import (
    Pair,
    contributions,
    pair_for,
    parts_apart,
    rank_of,
    reducible,
    require,
    tensor_of,
)
from pycomm.errors import CommError
from pycomm.schedule.program import Program

T = TypeVar("T")


class StoreExchange:
    """Exchange of bytes among all ranks, each of which says what it does, and what it has for the others."""

    def __init__(self, rank: int, size: int, store: Store, name: str) -> None:
        self.rank, self.size = rank, size
        self._store = PrefixStore(f"pycomm/store/{name}", store)
        self._number = 0  # of exchanges begun; the same on all ranks

    def share(self, does: str, mine: bytes, timeout: float) -> list[bytes]:
        """Return what every rank has, once all have said that they do the same."""
        number, self._number = self._number, self._number + 1
        operation = does.partition("(")[0]
        self.put(f"{number}/{self.rank}", does.encode() + b"\n" + mine)
        said = [self.take(f"{number}/{p}", p, operation, timeout).partition(b"\n") for p in range(self.size)]
        if number > 0:  # who has come to this exchange has read all of the one before
            self.remove(f"{number - 1}/{self.rank}")
        heads = [head.decode() for head, _, _ in said]
        for p, head in enumerate(heads):
            if head.startswith("gave up: "):
                raise CommError.during(operation, f"rank {p} {head}", rank=self.rank, peer=p)
        if operation == "refused":
            return []  # this rank has its own error to report
        for p, head in enumerate(heads):
            if head.startswith("refused(): "):
                raise ValueError(f"{operation}: rank {p} could not take part: {head.removeprefix('refused(): ')}")
        for p, head in enumerate(heads):
            require(head == heads[0], f"the ranks disagree: rank {p} called {head} where rank 0 called {heads[0]}")
        return [content for _, _, content in said]

    def leave(self, reason: str) -> None:
        """Tell ranks that are in the next exchange, or come to it, that this one is not coming."""
        self.put(f"{self._number}/{self.rank}", f"gave up: {_one_line(reason)}\n".encode())

    def checked(self, timeout: float, look: Callable[[], T]) -> T:
        """Return what ``look`` returns; the others are told before its error leaves."""
        try:
            return look()
        except Exception as error:
            self.share(f"refused(): {_one_line(str(error))}", b"", timeout)
            raise

    def put(self, key: str, content: bytes) -> None:
        self._store.set(key, content)  # type: ignore[arg-type]  # it takes bytes, whatever torch's stub says

    def take(self, key: str, peer: int, operation: str, timeout: float) -> bytes:
        """Return what ``peer`` has written, or will have within ``timeout`` seconds."""
        start = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=timeout))
            return self._store.get(key)
        except RuntimeError as error:
            elapsed = time.monotonic() - start
            what = f"nothing came from rank {peer} for {elapsed:.2f} s"
            raise CommError.during(operation, what, rank=self.rank, peer=peer, elapsed=elapsed) from error

    def remove(self, key: str) -> None:
        self._store.delete_key(key)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _described(x: torch.Tensor, tag: int = 0) -> str:
    """Return what must be equal on all ranks; ``tag`` tells dtypes apart that are only moved, as bytes."""
    return f"{x.numel()} elements of {str(x.dtype).removeprefix('torch.')}{f', dtype {tag:x}' if tag else ''}"


def _bytes_in(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor_in(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


class StoreTransport:
    """Transport of which every operation is one exchange through the store."""

    name = "store"
    interruptible = False
    buffer_limit = 0
    recorder: Recorder
    host_memory: HostMemory | None = None
    own_share: OwnShare | None = None
    all_reduce_apart: AllReduceApart | None = None
    reduce_scatter_apart: ReduceScatterApart | None = None
    skip_checks: bool | Literal["after the next"] = False  # comparing costs nothing here, and goes on

    def __init__(self, rank: int, size: int, store: Store, name: str) -> None:
        self.rank, self.size = rank, size
        self.hosts: Sequence[Sequence[int]] = [(p,) for p in range(size)]
        self._ranks = StoreExchange(rank, size, store, name)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        tensor = self._ranks.checked(timeout, lambda: reducible("x", x, op, writes=True))
        kernels.reduce(tensor, self._everyones(f'all_reduce({_described(tensor)}, op="{op}")', tensor, timeout), op)

    def reduce(self, x: Any, dst: int, op: str, timeout: float) -> None:
        def look() -> tuple[torch.Tensor, int]:
            return reducible("x", x, op, writes=True), rank_of(dst, "dst", self.size)

        tensor, root = self._ranks.checked(timeout, look)
        theirs = self._everyones(f'reduce({_described(tensor)}, dst={root}, op="{op}")', tensor, timeout)
        if self.rank == root:
            kernels.reduce(tensor, theirs, op)

    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None:
        def look() -> Pair:
            return pair_for("reduce_scatter", out, x, self.rank, self.size, (op,))

        target, source, _ = self._ranks.checked(timeout, look)
        theirs = self._everyones(f'reduce_scatter({_described(source)}, op="{op}")', source, timeout)
        kernels.reduce(target, [each.view(self.size, -1)[self.rank] for each in theirs], op)

    def all_gather(self, out: Any, x: Any, timeout: float) -> None:
        target, source, tag = self._ranks.checked(timeout, lambda: pair_for("all_gather", out, x, self.rank, self.size))
        target.copy_(torch.cat(self._everyones(f"all_gather({_described(source, tag)})", source, timeout)))

    def all_to_all(self, out: Any, x: Any, timeout: float) -> None:
        target, source, tag = self._ranks.checked(timeout, lambda: pair_for("all_to_all", out, x, self.rank, self.size))
        theirs = self._everyones(f"all_to_all({_described(source, tag)})", source, timeout)
        target.copy_(torch.cat([each.view(self.size, -1)[self.rank] for each in theirs]))

    def broadcast(self, x: Any, src: int, timeout: float) -> None:
        def look() -> tuple[_native.HostArray, int]:
            return _native.HostArray(x, "x", True, True), rank_of(src, "src", self.size)

        array, root = self._ranks.checked(timeout, look)
        tensor = tensor_of(array)
        does = f"broadcast({_described(tensor, array.tag)}, src={root})"
        mine = _bytes_in(tensor) if self.rank == root else b""
        tensor.copy_(_tensor_in(self._ranks.share(does, mine, timeout)[root], tensor.dtype))

    def barrier(self, timeout: float) -> None:
        self._ranks.share("barrier()", b"", timeout)

    def all_to_all_v(self, outs: Sequence[Any], xs: Sequence[Any], timeout: float) -> None:
        targets, sources = self._ranks.checked(timeout, lambda: parts_apart(outs, xs, self.rank, self.size))
        self._parts("all_to_all_v()", targets, sources, timeout)

    def all_gather_v(self, outs: Sequence[Any], x: Any, timeout: float) -> None:
        xs = [x] * self.size
        targets, sources = self._ranks.checked(timeout, lambda: parts_apart(outs, xs, self.rank, self.size))
        self._parts("all_gather_v()", targets, sources, timeout)

    def reduce_scatter_v(self, out: Any, xs: Sequence[Any], op: str, timeout: float) -> None:
        target, sources = self._ranks.checked(timeout, lambda: contributions(out, xs, op, self.rank, self.size))
        theirs = [torch.empty_like(target) for _ in range(self.size)]
        name, places = str(target.dtype).removeprefix("torch."), [x.view(torch.uint8) for x in theirs]
        self._parts(f'reduce_scatter_v({name}, op="{op}")', places, [x.view(torch.uint8) for x in sources], timeout)
        kernels.reduce(target, theirs, op)

    def run_program(self, program: Program, x: Any, op: str, timeout: float) -> None:
        def look() -> None:
            raise ValueError(f"algorithm is {program.name}, wanted 'native', as transport is 'store'")

        self._ranks.checked(timeout, look)

    def send(self, x: Any, dst: int, tag: int, timeout: float) -> None:
        raise ValueError("transport is 'store', which has no messages, wanted another one")

    def receive(self, x: Any, src: int | None, tag: int) -> Receipt:
        raise ValueError("transport is 'store', which has no messages, wanted another one")

    def refuse(self, reason: str, timeout: float) -> None:
        self._ranks.share(f"refused(): {_one_line(reason)}", b"", timeout)

    def give_up_stopped_after(self, seconds: float) -> None:
        pass  # nothing shows it here

    def hand_over(self, patience: float) -> None:
        pass  # what was sent lies in the store

    def close(self, reason: str) -> None:
        self._ranks.leave(reason)

    def _everyones(self, does: str, x: torch.Tensor, timeout: float) -> list[torch.Tensor]:
        return [_tensor_in(theirs, x.dtype) for theirs in self._ranks.share(does, _bytes_in(x), timeout)]

    def _parts(self, does: str, targets: list[torch.Tensor], sources: list[torch.Tensor], timeout: float) -> None:
        """Send each rank its part, all in bytes; the lengths are compared first."""
        mine = json.dumps([[x.nbytes for x in sources], [x.nbytes for x in targets]])
        lengths = [json.loads(theirs) for theirs in self._ranks.share(does, mine.encode(), timeout)]
        for p, (sent, _) in enumerate(lengths):
            for q, (_, expected) in enumerate(lengths):
                problem = f"rank {p} has {sent[q]} bytes for rank {q}, which expects {expected[p]}"
                require(sent[q] == expected[p], f"{does.partition('(')[0]}: {problem}")
        everyones = self._ranks.share(does, b"".join(map(_bytes_in, sources)), timeout)
        for target, theirs, (sent, _) in zip(targets, everyones, lengths, strict=True):
            begin = sum(sent[: self.rank])
            target.copy_(_tensor_in(theirs[begin : begin + sent[self.rank]], torch.uint8))
