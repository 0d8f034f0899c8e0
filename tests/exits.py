"""Ranks of tests/test_exits.py: their interpreters end while a thread of pycomm waits.

    python -m tests.exits PORT

Each line of the input asks for runs: which threads wait, how the ranks end, and how many runs. Ranks are forked from
this process, so that they need no imports. They end as scripts do: after the last line, by ``sys.exit`` or by an
exception. They meet in the store that listens at PORT.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import IO, Any

import torch
import torch._dynamo  # which optimizers import
import torch.distributed as dist

import pycomm
import pycomm.horovod as hvd
from pycomm.collectives.transport import late_ranks, rendezvous
from pycomm.tools.launching.processes import connect
from pycomm.torch_internals import PrefixStore, Store
from pycomm.training.asynchronous.wire import WorkerListener, connect_here
from pycomm.training.elastic import join_requests, liveness
from pycomm.worker import Worker
from tests.chaos.ranks import PR_SET_PDEATHSIG
from tests.ranks import SLOWER
from tests.reducer.attaching import grouped

ENDS = {"return": 0, "exit": 3, "raise": 1}
"""Ways to end, and their exit codes."""
BUSY = 0.3
"""Seconds for which a thread polls the store: a single request is too short for the process to end during it."""
LONGEST = 30.0 * SLOWER
"""Seconds after which a rank is killed."""

_kept: list[Any] = []  # closed by the interpreter's end only


@dataclass(frozen=True)
class Request:
    """Runs to do: the ``kind`` of waiting thread, how the ranks ``end``, and how many ``runs``."""

    kind: str
    end: str
    runs: int


@dataclass(frozen=True)
class Ended:
    """How a rank has ended.

    Attributes:
        run: number of the run since the start of this process.
        code: its exit code; the negative number of a signal.
        seconds: from the script's end to the process's.
        errors: its output.
    """

    run: int
    rank: int
    code: int
    seconds: float
    errors: str


@dataclass(frozen=True)
class Here:
    """A rank's place among the others.

    Attributes:
        first_ends: read end of a pipe that ends with the first rank's process.
        port: where the store listens.
    """

    rank: int
    size: int
    first_ends: int
    port: int


def _join(here: Here, backend: str, store: Store) -> None:
    dist.init_process_group(
        backend, store=store, rank=here.rank, world_size=here.size, timeout=timedelta(seconds=LONGEST)
    )
    dist.all_reduce(torch.ones(3))


def _reduce_alone(here: Here) -> None:
    """The communication thread is in a collective that no other rank enters."""
    communicator = pycomm.Communicator()
    communicator.all_reduce(torch.ones(3))
    if here.rank == 0:
        _kept.append(communicator.all_reduce(torch.ones(3), async_op=True))
    _kept.append(communicator)


def _reduce_alone_for_long(here: Here) -> None:
    """The same, and the other ranks stay until the first one has ended."""
    _reduce_alone(here)
    if here.rank > 0:
        os.read(here.first_ends, 1)


def _receive(here: Here, any_source: bool = False) -> None:
    """Threads wait for messages that nobody sends."""
    works = [dist.irecv(torch.ones(3), None if any_source else (here.rank + 1) % here.size, tag=tag) for tag in (0, 1)]
    _kept.extend(work.get_future() for work in works)  # type: ignore[union-attr]


def _ask_one_that_never_answers(here: Here) -> None:
    """A thread waits for a store, which nothing can interrupt."""
    _kept.append(store := Worker("pycomm-store"))
    store.submit(lambda: connect(here.port).get("a key that nobody sets"))


def _receive_from_any(here: Here) -> None:
    _receive(here, any_source=True)


def _receive_for_long(here: Here) -> None:
    _receive(here)
    if here.rank > 0:
        os.read(here.first_ends, 1)


def _wait_in_callbacks(here: Here) -> None:
    """Callbacks of operations start further ones on the communication thread; nobody waits for any."""
    for _ in range(3):
        work: Any = dist.all_reduce(torch.ones(1000), async_op=True)
        _kept.append(work.get_future().then(lambda _: dist.all_reduce(torch.ones(3))))


def _train(attach: Callable[..., Any], steps: int, **options: Any) -> None:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    given = {"timeout": LONGEST, **options}
    _kept.extend([model, attach(optimizer, model, **(grouped(**given) if attach is pycomm.attach else given))])
    dist.barrier()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 512)).sum().backward()
        optimizer.step()


def _heartbeat(_: Here) -> None:
    """The heartbeat of an elastic run looks for calls all the time."""
    liveness._INTERVAL, liveness._LOOKS_PER_SECOND = 0.0, float("inf")
    _train(pycomm.attach, steps=3, on_failure="shrink")


def _join_listener(_: Here) -> None:
    """The listener of an elastic run looks for newcomers all the time."""
    look = join_requests.JoinListener._read

    def look_for_long(self: join_requests.JoinListener) -> join_requests.JoinRequest | None:
        end = time.monotonic() + BUSY
        while time.monotonic() < end:
            look(self)
        return None

    join_requests._INTERVAL = 0.0
    join_requests.JoinListener._read = look_for_long  # type: ignore[method-assign]
    _train(pycomm.attach, steps=3, on_failure="shrink")


def _worker_listener(here: Here) -> None:
    """The first rank's listener admits the others, who connect again and again until that rank has ended."""
    name: list[Any] = [None]
    if here.rank == 0:
        _kept.append(listener := WorkerListener())
        name = [listener.name]
    dist.broadcast_object_list(name)
    with contextlib.suppress(OSError):
        while here.rank > 0:
            connect_here(name[0]).close()
            time.sleep(1e-3)


def _late_ranks(here: Here) -> None:
    """The watch over late ranks asks for them all the time."""
    late_ranks.NAMED_AFTER = late_ranks.NAMED_AGAIN = 1e-3
    _reduce_alone(here)
    time.sleep(0.05)


def _horovod(here: Here) -> None:
    """Horovod's thread waits for a rank that does not come."""
    hvd.init()
    hvd.allreduce(torch.ones(3))
    if here.rank == 0:
        _kept.append(hvd.allreduce_async(torch.ones(3), name="alone"))


@dataclass(frozen=True)
class Kind:
    """Kind of thread: ranks ``prepare`` it, on ``backend``, each on the host of its letter."""

    prepare: Callable[[Here], None]
    backend: str = "gloo"
    hosts: str = "ab"


KINDS = {
    "collective, shared memory": Kind(_reduce_alone, hosts="aa"),
    "collective, torch": Kind(_reduce_alone),
    "collective, hierarchical": Kind(_reduce_alone, hosts="aab"),
    "receive, shared memory": Kind(_receive, "pycomm", "aa"),
    "receive, torch": Kind(_receive, "pycomm"),
    "receive, hierarchical": Kind(_receive, "pycomm", "aab"),
    "receive from any rank": Kind(_receive_from_any, "pycomm", "abc"),
    "callbacks, shared memory": Kind(_wait_in_callbacks, "pycomm", "aa"),
    "callbacks, torch": Kind(_wait_in_callbacks, "pycomm"),
    "heartbeat": Kind(_heartbeat),
    "join listener": Kind(_join_listener),
    "worker listener": Kind(_worker_listener),
    "late ranks": Kind(_late_ranks),
    "horovod, shared memory": Kind(_horovod, hosts="aa"),
    "horovod, torch": Kind(_horovod),
}
"""Threads that come back from their waits while the process ends."""
IN_VAIN = {
    "collective, in vain": Kind(_reduce_alone_for_long),
    "receive, in vain": Kind(_receive_for_long, "pycomm"),
    "store, in vain": Kind(_ask_one_that_never_answers),
}
"""Threads whose waits nothing ends before the process does."""


def _be_rank(here: Here, request: Request, number: int) -> None:
    """Run a rank to the end of its script, however that ends."""
    kind = (KINDS | IN_VAIN)[request.kind]
    torch.set_num_threads(1)
    store = PrefixStore(f"run-{number}", connect(here.port))
    host = f"{kind.hosts[here.rank]}{rendezvous.host_identity()}"
    rendezvous.host_identity = lambda: host
    os.environ["PYCOMM_SECRET"] = "what ranks of different hosts know"
    _join(here, kind.backend, store)
    kind.prepare(here)
    os.write(2, f"\nends {time.monotonic()}\n".encode())  # at once, as other threads log
    if request.end == "exit":
        sys.exit(ENDS["exit"])
    if request.end == "raise":
        raise LookupError("the script's own error")


Process = tuple[int, IO[bytes]]
"""Id of a rank's process, and its output."""


def _fork_ranks(size: int, port: int) -> tuple[Here | None, list[Process]]:
    """Fork the ranks. Return a rank's place in its own process; here, the ranks' processes and output."""
    first_ends, ends_with_first = os.pipe()
    processes: list[Process] = []
    for rank in range(size):
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed when it has been read)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for output in (1, 2):
                os.dup2(errors.fileno(), output)
            if rank > 0:
                os.close(ends_with_first)
            return Here(rank, size, first_ends, port), []
        processes.append((pid, errors))
    os.close(ends_with_first)
    os.close(first_ends)
    return None, processes


def _wait(pid: int, deadline: float) -> tuple[int, float]:
    """Return the exit code and the time of the end; the process is killed at the deadline."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), time.monotonic()
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(2e-3)


def _ended(number: int, rank: int, process: Process, deadline: float) -> Ended:
    """Wait for a rank's end, and return how it ended."""
    pid, errors = process
    code, when = _wait(pid, deadline)
    errors.seek(0)
    text = errors.read().decode(errors="replace")
    marks = [line.split()[1] for line in text.splitlines() if line.startswith("ends ")]
    errors.close()
    return Ended(number, rank, code, when - float(marks[0]) if marks else float("nan"), text)


def _requests() -> Iterator[Request]:
    for line in sys.stdin:
        yield Request(**json.loads(line))


def main() -> None:
    """Do the requested runs; in a rank's process, return or raise as its script does."""
    port, number = int(sys.argv[1]), 0
    gc.collect()
    gc.freeze()  # halves the time of each rank's end: imported objects are not collected
    for request in _requests():
        for _ in range(request.runs):
            number += 1
            here, processes = _fork_ranks(len((KINDS | IN_VAIN)[request.kind].hosts), port)
            if here is not None:
                return _be_rank(here, request, number)
            deadline = time.monotonic() + LONGEST
            for rank, process in enumerate(processes):
                print(json.dumps(asdict(_ended(number, rank, process, deadline))), flush=True)


if __name__ == "__main__":
    main()
