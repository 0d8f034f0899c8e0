"""Meeting of the ranks of a parameter server in the store of their process group, without a process group.

What is agreed there stays: a process that comes later, or in the place of one that has died, finds it.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.errors import CommError
from pycomm.torch_internals import PrefixStore, Store, root_store, store_of
from pycomm.transport.addresses import address_towards, loopback

_POLL = 0.01  # seconds
_numbers = itertools.count()
"""Of the parameter servers of this process: the n-th call of one rank meets the n-th of the others."""

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


class Meeting:
    """Meeting of the ranks.

    Attributes:
        rank, size: of the process group, or of torchrun's environment variables.
        worker: number of this process if it is a worker: its rank, or a new one if it has none.
        is_late: whether the others have met before, and this process comes later.

    Raises:
        RuntimeError: there is neither a process group nor what torchrun sets.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        number = next(_numbers)
        if dist.is_initialized():
            group = dist.group.WORLD
            assert group is not None
            store, self.rank, self.size = root_store(store_of(group)), dist.get_rank(), dist.get_world_size()
        else:
            store, self.rank, self.size = _from_environment(timeout)
        self._host = str(getattr(store, "host", "")) or loopback()
        self._store: Store = PrefixStore(f"pycomm/server/{number}", store)
        self.is_late = self._store.check(["begun"])
        if 0 <= self.rank < self.size:
            self.worker = self.rank
        else:
            self.worker = self.size + self._store.add("newcomers", 1) - 1

    def compare(self, lines: Sequence[str], problem: str = "") -> None:
        """Raise ValueError on all ranks if their ``lines`` differ, or one of them has a ``problem``.

        Raises:
            ValueError: see above. A process that is late is compared with rank 0.
            CommError: a rank did not come.
        """
        if self.is_late:
            if problem:
                raise ValueError(problem)
            self._compare_with_first(lines)
            return
        self._store.set(f"lines/{self.rank}", json.dumps([problem, list(lines)]))
        everyones = [json.loads(self._get(f"lines/{rank}", rank)) for rank in range(self.size)]
        self._store.set("begun", "")
        for rank, (why, _) in enumerate(everyones):
            if why:
                raise ValueError(why if rank == self.rank else f"rank {rank}: {why}")
        for rank, (_, theirs) in enumerate(everyones):
            _require_same(theirs, everyones[0][1], f"rank {rank}")

    def _compare_with_first(self, lines: Sequence[str]) -> None:
        theirs = json.loads(self._get("lines/0", 0))[1]
        _require_same([line for line in lines if not line.startswith("values")], theirs, "this process")

    def key(self) -> bytes:
        """Return the secret of all ranks."""
        self._store.compare_set("key", "", secrets.token_hex(32))
        return bytes(self._get("key", 0))

    def tell_address(self, server: int, address: tuple[str, int]) -> None:
        """Tell where ``server`` is."""
        self._store.set(f"server/{server}", json.dumps(address))

    def address_of(self, server: int) -> tuple[str, int] | None:
        """Return where ``server`` is, or was last; ``None`` if that is not known yet."""
        try:
            if not self._store.check([f"server/{server}"]):
                return None
            host, port = json.loads(self._store.get(f"server/{server}"))
        except RuntimeError as error:  # torch's DistNetworkError is one
            what = f"the store in which servers say where they are is gone: {error}"
            raise CommError.during("find a server", what, rank=self.worker, peer=server) from error
        return str(host), int(port)

    def own_address(self) -> str:
        """Return this host's address as the others reach it: that from which it reaches the store."""
        return address_towards(self._host)

    def _get(self, key: str, rank: int) -> bytes:
        start = time.monotonic()
        while not self._store.check([key]):
            if time.monotonic() - start > self._timeout:
                what = f"rank {rank} has not called parameter_server()"
                raise CommError.during("meet", what, rank=self.rank, peer=rank, elapsed=self._timeout)
            time.sleep(_POLL)
        return bytes(self._store.get(key))


def _from_environment(timeout: float) -> tuple[Store, int, int]:
    missing = [name for name in _VARIABLES if name not in os.environ and name != "RANK"]
    if missing:
        raise RuntimeError(
            "torch.distributed is not initialised, and the environment does not say where the others are: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        )
    host, port, size = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    return store, int(os.environ.get("RANK", "-1")), size


def _require_same(lines: Sequence[str], first: Sequence[str], who: str) -> None:
    wanted = [line for line in first if len(lines) == len(first) or not line.startswith("values")]
    for i in range(max(len(lines), len(wanted))):
        here = lines[i] if i < len(lines) else "nothing"
        there = wanted[i] if i < len(wanted) else "nothing"
        if here != there:
            raise ValueError(f"the ranks disagree: {here!r} on {who}, {there!r} on rank 0")
