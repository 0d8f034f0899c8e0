"""Ranks of ``bench.between_hosts``: one process on each host, which sums in the ways that it is told to.

    python -m bench.between_hosts.ranks SETUP        (JSON; started by the driver inside a namespace)

Rank 0 prints what was found as one line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.between_hosts.floor import WAYS, Floor, running
from bench.collectives.peers import starting_values, sums
from bench.harness.timing import Samples, interleave
from pycomm.collectives.communicator import Communicator
from pycomm.tools.cli.bench.rank import chunks

AllReduce = Callable[[torch.Tensor], object]

_PATIENCE = timedelta(seconds=120)
_MOST_WARM_UP_CALLS = 10


def congestion_control(address: str) -> str:
    """Return the congestion control of a connection between the first two hosts. Collective.

    Args:
        address: of the first.
    """
    port, names = torch.zeros(1, dtype=torch.int64), [""]
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            listener = stack.enter_context(socket.create_server((address, 0)))
            port[0] = listener.getsockname()[1]
        dist.broadcast(port, 0)
        if dist.get_rank() == 1:
            found = stack.enter_context(socket.create_connection((address, int(port)), _PATIENCE.total_seconds()))
            name = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            names = [name.partition(b"\0")[0].decode()]
        dist.broadcast_object_list(names, 1)
    return names[0]


class Turns:
    """Turns of libraries that sum one array in place.

    Args:
        own: a communicator whose barrier all ranks pass before the clock starts.
        libraries: name -> function that sums.
        most_bytes: of the largest array.
    """

    def __init__(self, own: Communicator, libraries: Mapping[str, AllReduce], most_bytes: int) -> None:
        self._own, self._libraries = own, libraries
        self._memory = torch.empty(most_bytes // 4)

    def verify(self, name: str, num_bytes: int) -> None:
        """Compare every element of one sum. Collective.

        Raises:
            AssertionError: an element is wrong.
        """
        x = self._memory[: num_bytes // 4]
        view, rank, size = x.numpy(), self._own.rank, self._own.size
        for piece, index in chunks(len(view)):
            view[piece] = starting_values(rank, size, index)
        self._libraries[name](x)
        for piece, index in chunks(len(view)):
            if not np.array_equal(view[piece], sums(size, index)):
                raise AssertionError(f"{name}: wrong sums among elements {piece.start} to {piece.stop}")

    def turn(self, name: str, num_bytes: int, calls: int) -> float:
        """Sum ``calls`` times back to back; returns the seconds per call on this rank. Collective."""
        x, all_reduce = self._memory[: num_bytes // 4].zero_(), self._libraries[name]  # sums stay what they are
        for _ in range(min(calls, _MOST_WARM_UP_CALLS)):  # ranks have slept: caches are the others'
            all_reduce(x)
        self._own.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            all_reduce(x)
        seconds = time.perf_counter() - start
        self._own.barrier()
        return seconds / calls


def slowest(samples: Mapping[str, Samples]) -> dict[str, list[float]]:
    """Return each turn's seconds on its slowest rank. Collective."""
    table = torch.tensor([each.seconds for each in samples.values()], dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(samples, table.tolist(), strict=True))


def measure(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Verify and measure everything in turns. Collective."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(Communicator())
        libraries: dict[str, AllReduce] = {"pycomm": own.all_reduce}
        if "gloo" in setup["peers"]:
            libraries["gloo"] = dist.all_reduce
        if "torch" in setup["peers"]:
            libraries["torch"] = stack.enter_context(Communicator(transport="torch")).all_reduce
        floor: Floor | None = None
        if setup["floor"] is not None:
            floor = stack.enter_context(running(setup["floor"], own.rank, setup["addresses"]))
        turns = Turns(own, libraries, max(num_bytes for num_bytes, _ in setup["sizes"]))
        measured = []
        for num_bytes, calls in setup["sizes"]:
            for name in libraries:
                turns.verify(name, num_bytes)
            cases: dict[str, Callable[[], float]] = {
                name: functools.partial(turns.turn, name, num_bytes, calls) for name in libraries
            }
            for way in WAYS:
                if floor is not None and way.takes(num_bytes):
                    cases[way.label] = functools.partial(floor.turn, way, num_bytes, calls)
            taken = slowest(interleave(cases, setup["repeats"]))
            measured.append({"bytes": num_bytes, "calls": calls, "seconds": taken})
        control = congestion_control(setup["addresses"][0])
        return {"transport": own.transport, "congestion_control": control, "measured": measured}


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    found = measure(setup)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()  # what one of them says while the others end would be lost
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in bench.slow_network.ranks


if __name__ == "__main__":
    main()
