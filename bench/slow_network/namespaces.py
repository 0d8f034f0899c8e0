"""Hosts made of network namespaces, with links as slow as one likes: a cluster for those who have none. Linux, root.

    with hosts(2, gigabits=1) as cluster:
        outputs = run_ranks(cluster, "my.script", ["--its", "arguments"])

A host is a namespace with one interface, eth0; two are joined by a cable (a veth pair), more by a switch
(a bridge in a namespace of its own). Everything that leaves a host, and everything that the switch passes
on to one, goes through a token bucket (tc tbf): a full-duplex link of that rate. After a pause the bucket
lets 96 KB pass for nothing, 0.8 ms worth at 1 Gbit/s; with a smaller one, timers that are
late on a busy machine would make the link slower than it says. TCP on these links is Reno that begins with
a large window: what comes out does not depend on what the machine prefers, and no connection has to find
out the rate again after each pause.

The namespace of the caller is not touched. Processes in namespaces share cores and memory: only the
links are slow.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from bench import ROOT
from bench.harness.processes import kill_session
from pycomm.tools.launching import RankError

_DEVICE = "eth0"
_SUBNET = "10.77.0"
_MOST_HOSTS = 250
_PORT = 29500  # nobody else is there
_SEGMENT_BYTES = 32768  # what TCP gives to the device at once
_BURST_BYTES = 98304  # of the bucket: some segments, since timers are late on busy cores
_QUEUE_BYTES = 8 << 20  # before anything is dropped
_WINDOW_PACKETS = 1000  # that TCP begins with
_COMMAND_SECONDS = 20.0
_POLL_SECONDS = 0.02
_numbers = itertools.count()


class NamespaceError(RuntimeError):
    """A namespace, a link or its limit could not be made; says which command failed and how."""


@dataclass(frozen=True)
class Host:
    """A network namespace: its name, for ``ip netns exec``, and its address."""

    name: str
    address: str


@contextlib.contextmanager
def hosts(count: int, gigabits: float | None = 1.0) -> Iterator[list[Host]]:
    """Make ``count`` hosts, each with a full-duplex link of ``gigabits`` Gbit/s; ``None``: as fast as it goes.

    Raises:
        ValueError: no hosts, or too many, or a rate that is not positive.
        NamespaceError: this machine or user cannot; :func:`available` tells beforehand.
    """
    if not 1 <= count <= _MOST_HOSTS:
        raise ValueError(f"count is {count}, wanted 1 to {_MOST_HOSTS} hosts")
    if gigabits is not None and not 1e-4 <= gigabits <= 1e3:
        raise ValueError(f"gigabits is {gigabits}, wanted 0.0001 to 1000, or None")
    prefix = f"pycomm-{os.getpid()}-{next(_numbers)}"
    cluster = [Host(f"{prefix}-{i}", f"{_SUBNET}.{i + 1}") for i in range(count)]
    with contextlib.ExitStack() as made:
        for host in cluster:
            _add_namespace(host.name, made)
        if count == 2:
            _join(cluster[0].name, _DEVICE, cluster[1].name, _DEVICE)
        else:
            switch = f"{prefix}-switch"
            _add_namespace(switch, made)
            _ip(switch, "link", "add", "name", "br0", "type", "bridge")
            _ip(switch, "link", "set", "dev", "br0", "up")
            for i, host in enumerate(cluster):
                _join(host.name, _DEVICE, switch, f"port{i}")
                _ip(switch, "link", "set", "dev", f"port{i}", "master", "br0", "up")
                _limit(switch, f"port{i}", gigabits)
        for host in cluster:
            _bring_up(host)
            _limit(host.name, _DEVICE, gigabits)
        yield cluster


@functools.cache
def available() -> str | None:
    """Return why :func:`hosts` cannot work here; ``None`` if it can, which is tried once."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed (iproute2)"
    try:
        with hosts(2, 1.0) as cluster:
            _command("ip", "netns", "exec", cluster[0].name, "true")
    except NamespaceError as error:
        return str(error)
    return None


def run_ranks(
    cluster: Sequence[Host],
    module: str,
    arguments: Sequence[str] = (),
    per_host: int = 1,
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run ``python -m module arguments`` on each host ``per_host`` times; returns what each rank printed, by rank.

    They find in their environment what ``torch.distributed.init_process_group("gloo")`` wants. Consecutive
    ranks are on one host. None of them is left when this returns or raises.

    Raises:
        RankError: one ended with another status than 0, or was not done after ``timeout`` seconds.
    """
    size = len(cluster) * per_host
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": cluster[0].address,
        "MASTER_PORT": str(_PORT),
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": _DEVICE,
        **(environment or {}),
    }
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(size):
            host = cluster[rank // per_host]
            output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            command = ["ip", "netns", "exec", host.name, sys.executable, "-m", module, *arguments]
            process = subprocess.Popen(
                command,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank % per_host)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches the caller, who ends them
            )
            stack.callback(kill_session, process)
            ranks.append(_Rank(rank, process, output, errors))
        _wait(ranks, time.monotonic() + timeout, timeout)
        return [_read(rank.output) for rank in ranks]


def go_first() -> None:
    """Let this thread of a rank, and those it starts from now on, run before whatever else wants the cores.

    It would otherwise wait milliseconds for a core on a busy machine, at every message. Ranks on slow links hardly
    use any. Nothing happens where that is not allowed.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]


def _wait(ranks: Sequence[_Rank], deadline: float, timeout: float) -> None:
    """Wait until all ranks have ended well."""
    running = list(ranks)
    while running:
        for rank in running:
            if rank.process.poll():
                written = (_read(rank.output) + _read(rank.errors))[-4000:]
                raise RankError(f"rank {rank.number} ended with status {rank.process.returncode}:\n{written}")
        running = [rank for rank in running if rank.process.returncode is None]
        if running and time.monotonic() > deadline:
            numbers = ", ".join(str(rank.number) for rank in running)
            raise RankError(f"not done after {timeout:g} s: rank {numbers}:\n{_read(running[0].errors)[-4000:]}")
        time.sleep(_POLL_SECONDS)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _add_namespace(name: str, made: contextlib.ExitStack) -> None:
    made.callback(_remove_namespace, name)  # first, so that an interrupt in between leaves nothing
    _command("ip", "netns", "add", name)


def _remove_namespace(name: str) -> None:
    """Remove a namespace, which may not have come to be, with its devices."""
    # Not in the terminal's process group: another Ctrl-C must not end it.
    subprocess.run(["ip", "netns", "del", name], capture_output=True, start_new_session=True)


def _join(one: str, device: str, other: str, other_device: str) -> None:
    _ip(one, "link", "add", "name", device, "type", "veth", "peer", "name", other_device, "netns", other)


def _bring_up(host: Host) -> None:
    route = [f"{_SUBNET}.0/24", "dev", _DEVICE, "src", host.address]
    _ip(host.name, "link", "set", "dev", "lo", "up")
    _ip(host.name, "link", "set", "dev", _DEVICE, "addrgenmode", "none")  # one address, an IPv4 one
    _ip(host.name, "link", "set", "dev", _DEVICE, "up")
    _ip(host.name, "address", "add", f"{host.address}/24", "dev", _DEVICE)
    _ip(host.name, "route", "replace", *route, "congctl", "reno", "initcwnd", str(_WINDOW_PACKETS))


def _limit(namespace: str, device: str, gigabits: float | None) -> None:
    """Limit what leaves by ``device``."""
    if gigabits is None:
        return
    _ip(namespace, "link", "set", "dev", device, "gso_max_size", str(_SEGMENT_BYTES))
    rate = ["rate", f"{gigabits * 1e6:.0f}kbit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
    _command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)


def _ip(namespace: str, *arguments: str) -> None:
    _command("ip", "-n", namespace, *arguments)


def _command(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NamespaceError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise NamespaceError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
