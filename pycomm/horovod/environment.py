"""Environment variables of launchers and Horovod, and the store where the ranks meet.

Launchers set the rank of a process, but not always a meeting place: then rank 0 sends the others its address.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import http.client
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm import checks, threads
from pycomm.collectives.transport.authentication import (
    EXHAUSTED,
    join_address,
    loopback,
    own_folder,
    split_address,
    store_on_loopback,
)
from pycomm.collectives.transport.rendezvous import process_behind
from pycomm.torch_internals import Store

_LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", ("HOROVOD_GLOO_RENDEZVOUS_PORT",)),
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", ()),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("PMI_ID",)),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
"""Variables of the rank, the size, the number of ranks on this host, and the identity of the job.

Only srun sets the number of tasks of a step: a script that a batch job runs without it is one process.
"""
_FIRST_PORT, _PORTS = 20000, 12000
_POLL = 0.02  # seconds
_MOST_SECONDS = 31_536_000  # a year
_TO_ANSWER = 5.0
"""Seconds for a connected process to send its rank, or to receive the address."""
_RANK = struct.Struct("!I")
_KEY = "/pycomm/address"
_RENDEZVOUS = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_LONGEST_ADDRESS = 1024  # bytes


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        raise ValueError(f"{name} is {text!r} in the environment, wanted a number") from None
    if not abs(number) <= _MOST_SECONDS:
        raise ValueError(f"{name} is {text!r} in the environment, wanted a number of at most {_MOST_SECONDS}")
    return number


def timeout() -> timedelta:
    """Return the limit of a wait for a rank, or of an operation: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, or an hour."""
    return timedelta(seconds=_number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or 3600.0)


def stall_check_seconds() -> float:
    """Return the seconds after which a waiting rank logs for whom: HOROVOD_STALL_CHECK_TIME_SECONDS; 0: never."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return 0.0
    return _number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)


def meeting_seconds() -> float:
    """Return how long ranks wait for each other in ``init()``: HOROVOD_GLOO_TIMEOUT_SECONDS, or two minutes."""
    return _number("HOROVOD_GLOO_TIMEOUT_SECONDS", 120.0)


def cycle_seconds() -> float:
    """Return how long operations that nobody waits for are collected: HOROVOD_CYCLE_TIME (in ms), or 1 ms."""
    return max(0.0, _number("HOROVOD_CYCLE_TIME", 1.0)) * 1e-3


USUAL_WAITS = timedelta(hours=1), 60.0, 1e-3
"""Result of :func:`waits` where nothing is set."""


def waits() -> tuple[timedelta, float, float]:
    """Return :func:`timeout`, :func:`stall_check_seconds` and :func:`cycle_seconds`. Raises ValueError."""
    return timeout(), stall_check_seconds(), cycle_seconds()


# Who this process is.


@dataclass(frozen=True)
class Launched:
    """Settings from a launcher: this process's rank, the number of ranks, and a function that opens their store."""

    rank: int
    size: int
    store: Callable[[float], Store | None]


def launched() -> Launched:
    """Return the settings in the environment, by default a world of one. Raises ValueError if they are invalid."""
    for rank_name, size_name, local_name, job in _LAUNCHERS:
        if rank_name in os.environ and size_name in os.environ:
            rank, size = checks.environment_count(rank_name), checks.environment_count(size_name)
            if not 0 <= rank < size:
                raise ValueError(f"{rank_name} is {rank} and {size_name} is {size} in the environment: no such rank")
            is_local = size == 1 or (
                os.environ.get(local_name, "").isdecimal() and checks.environment_count(local_name) == size
            )
            return Launched(rank, size, functools.partial(_store, rank, size, is_local, job))
    return Launched(0, 1, lambda _: None)


def by_mpi(comm: Any) -> Launched:
    """Return the settings of an mpi4py communicator."""
    rank, size = comm.Get_rank(), comm.Get_size()

    def store(patience: float) -> Store | None:
        if size == 1:
            return None
        return _store_by_address(rank, patience, "mpi4py", lambda mine: str(comm.bcast(mine, root=0)))

    return Launched(rank, size, store)


def _store(rank: int, size: int, is_local: bool, job: tuple[str, ...], patience: float) -> Store | None:
    if size == 1:
        return None
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        port = checks.environment_count("MASTER_PORT")
        return _tcp(os.environ["MASTER_ADDR"], port, rank == 0 and not is_served(), patience)
    if all(name in os.environ for name in _RENDEZVOUS):
        server = os.environ[_RENDEZVOUS[0]], checks.environment_count(_RENDEZVOUS[1])
        return _store_by_address(
            rank, patience, _named(server), lambda mine: through_horovodrun(server, mine, patience)
        )
    if is_local:
        name = "/".join(os.environ.get(variable, "") for variable in job) or str(os.getppid())
        return _store_on_this_host(name, rank, size, patience)
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", ""))
    if nodes and "SLURM_JOB_ID" in os.environ:
        port = _FIRST_PORT + checks.environment_count("SLURM_JOB_ID") % _PORTS
        return _tcp(first_node(nodes), port, rank == 0, patience)
    raise ValueError(
        f"the launcher says that this is rank {rank} of {size}, but not where the ranks meet: set MASTER_ADDR to a "
        "name of rank 0's host and MASTER_PORT to a free port of it, on all ranks (mpirun -x ...)"
    )


def is_served() -> bool:
    """Return whether torchrun's agent serves the store, one for all starts of the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"


def _tcp(host: str, port: int, serves: bool, patience: float) -> Store:
    return TCPStore(host, port, None, serves, timedelta(seconds=patience), wait_for_workers=False, multi_tenant=True)


def _store_by_address(rank: int, patience: float, source: str, exchange: Callable[[str | None], str]) -> Store:
    """Return the store that rank 0 serves at a free port; ``exchange`` sends its address to the others."""
    if rank > 0:
        host, port = split_address(exchange(None), f"rank 0's address from {source}", "its store")
        return _tcp(host, port, False, patience)
    store = _tcp(loopback(), 0, True, patience)
    assert isinstance(store, TCPStore)
    exchange(f"{socket.gethostname()}:{store.port}")
    return store


def _store_on_this_host(job: str, rank: int, size: int, patience: float) -> Store:
    """Return the store that rank 0 serves on the loopback device, for the ranks of one host."""
    store = store_on_loopback(timedelta(seconds=patience)) if rank == 0 else None
    port = on_this_host(job, rank, "" if store is None else str(store.port), size, patience)
    return store or _tcp(loopback(), int(port), False, patience)


def first_node(nodes: str) -> str:
    """Return the first of Slurm's list of hosts: "a[03-05,9],b" begins with "a03"."""
    found = re.match(r"([^,\[]*)(?:\[([^\],\-]+)[^\]]*\]([^,]*))?", nodes)
    assert found is not None
    return "".join(part or "" for part in found.groups())


# Exchange of rank 0's address.


def through_horovodrun(server: tuple[str, int], mine: str | None, patience: float) -> str:
    """Return rank 0's address (there: ``mine``), by the key-value store that horovodrun serves over HTTP."""
    deadline = time.monotonic() + patience
    where = _named(server)
    while True:
        try:
            status, answer = _ask(server, "GET" if mine is None else "PUT", mine, deadline)
            text = answer.decode("ascii")
        except (OSError, http.client.HTTPException, UnicodeError, OverflowError) as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{where} has not answered in {patience:g} s") from error
            kind = ConnectionError if isinstance(error, OSError) else ValueError
            raise kind(f"{where} gives no answer that can be used: {error!r}") from None
        if mine is not None and status != http.client.OK:
            raise ValueError(f"{where} has answered with status {status}, wanted {int(http.client.OK)}")
        if status == http.client.OK:
            return text if mine is None else mine
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not told {where} where it is in {patience:g} s")
        time.sleep(_POLL)


def _named(server: tuple[str, int]) -> str:
    return f"horovodrun at {join_address(*server)} (HOROVOD_GLOO_RENDEZVOUS_ADDR, HOROVOD_GLOO_RENDEZVOUS_PORT)"


def _ask(server: tuple[str, int], method: str, content: str | None, deadline: float) -> tuple[int, bytes]:
    """Return status and content of an answer, before the ``deadline`` for all of it: the socket's is for each part."""
    seconds = max(_POLL, deadline - time.monotonic())
    connection = http.client.HTTPConnection(*server, timeout=seconds)
    with contextlib.closing(connection):
        connection.connect()
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _shut, [connection.sock])
        timer.daemon = True
        timer.start()
        try:
            connection.request(method, _KEY, body=content)
            with contextlib.closing(connection.getresponse()) as response:
                answer, missing = response.read(_LONGEST_ADDRESS + 1), response.length
        finally:
            timer.cancel()
        if len(answer) > _LONGEST_ADDRESS:
            raise http.client.HTTPException(f"it has more than {_LONGEST_ADDRESS} bytes")
        if missing or time.monotonic() >= deadline:
            raise http.client.IncompleteRead(answer, missing)
        return response.status, answer


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def on_this_host(job: str, rank: int, mine: str, size: int, patience: float) -> str:
    """Return rank 0's address (there: ``mine``), by a socket in a folder that only this user can access.

    On rank 0 a thread sends the address to the ``size - 1`` other ranks, for at most ``patience`` seconds.

    Args:
        job: identity of this job among this user's jobs on this host.
        rank: rank of this process.
        mine: the address, on rank 0.
        size: number of ranks.
        patience: seconds.
    """
    name = f"pycomm-horovod-{hashlib.sha256(job.encode()).hexdigest()[:32]}"
    with _in_own_folder(name) as path:
        if rank > 0:
            return _ask_rank_0(path, job, rank, patience)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _bind(listener, path, job)
            listener.listen(size)
        except BaseException:
            listener.close()
            raise
    file = own_folder() / name
    remove = functools.partial(file.unlink, missing_ok=True)
    atexit.register(remove)
    until = time.monotonic() + patience
    send = functools.partial(_send_address, listener, mine, size, until, remove)
    threads.start(send, "pycomm-horovod-meeting", functools.partial(listener.shutdown, socket.SHUT_RDWR))
    return mine


@contextlib.contextmanager
def _in_own_folder(name: str) -> Iterator[str]:
    """Yield a path of file ``name`` in :func:`own_folder` that is short enough for a socket."""
    descriptor = os.open(own_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _bind(listener: socket.socket, path: str, job: str) -> None:
    try:
        listener.bind(path)
        return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        if other.connect_ex(path) == 0:
            raise ValueError(f"another process is rank 0 of the job {job!r} on this host")
    os.unlink(path)  # of a job that was killed
    listener.bind(path)


def _ask_rank_0(path: str, job: str, rank: int, patience: float) -> str:
    deadline = time.monotonic() + patience
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(_TO_ANSWER)
            connection.connect(path)
            if process_behind(connection) is not None:
                connection.sendall(_RANK.pack(rank))
                if answer := connection.recv(1024).decode():
                    return answer
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 of the job {job!r} was not found on this host in {patience} s; set MASTER_ADDR and "
                "MASTER_PORT if the ranks have different parents"
            )
        time.sleep(_POLL)


def _send_address(listener: socket.socket, address: str, size: int, until: float, remove: Callable[[], None]) -> None:
    """Send the address to each rank that connects, however often, until all have."""
    left = set(range(1, size))
    with listener:
        while left and (seconds := until - time.monotonic()) > 0:
            listener.settimeout(seconds)
            try:
                connection, _ = listener.accept()
            except OSError as error:  # if not out of descriptors: a timeout, or the process is exiting
                if error.errno not in EXHAUSTED:
                    break
                time.sleep(_POLL)
                continue
            with connection, contextlib.suppress(OSError, struct.error):
                if process_behind(connection) is None:
                    continue
                connection.settimeout(_TO_ANSWER)
                (rank,) = _RANK.unpack(connection.recv(_RANK.size))
                connection.sendall(address.encode())
                left.discard(rank)
        remove()
    atexit.unregister(remove)
