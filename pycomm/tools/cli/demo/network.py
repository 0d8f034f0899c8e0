"""Hosts made of network namespaces, with slow links between them. They leave no files and end with the process.

A host is a namespace with one interface; a switch (a bridge in its own namespace) joins the hosts. A token bucket in
each direction makes a full-duplex link of the given rate. pycomm, too, treats ranks in different namespaces as being on
different hosts: they share no memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DEVICE = "eth0"
PORT = 29500  # always free: nothing else runs on such a host
_CLONE_NEWNET = 0x40000000
_SEGMENT_BYTES = 32768  # the most that TCP gives to the device at once
_BURST_BYTES = 98304  # of the bucket: some segments, since timers are late on busy cores
_QUEUE_BYTES = 8 << 20  # before anything is dropped
_WINDOW_PACKETS = 1000  # initial window of TCP, so that no connection starts slowly after a pause
_AS_ROOT = ("unshare", "--user", "--map-root-user")
_COMMAND_SECONDS = 20.0
# A host has only an IPv4 address, since Gloo takes the first one.
_NO_OWN_ADDRESS = {"attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})]}


def address(rank: int) -> str:
    """Return the address of the host of ``rank``."""
    return f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}"


def become_root() -> str | None:
    """Restart this command in a user namespace in which its user is root; return the reason if that is not allowed.

    Returns ``None`` if the user is root already. The process id stays the same. Call this before printing anything.
    """
    if os.geteuid() == 0:
        return None
    try:
        done = subprocess.run([*_AS_ROOT, "--net", "true"], capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        return done.stderr.strip()
    os.execvp(_AS_ROOT[0], [*_AS_ROOT, sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def hosts(count: int, megabits: float) -> Iterator[list[str]]:
    """Make ``count`` hosts with links of ``megabits`` Mbit/s; yield a path for each, for :func:`move_to`."""
    with contextlib.ExitStack() as made:
        descriptors = []
        for _ in range(1 + count):
            descriptors.append(_in_thread(_new_namespace))
            made.callback(os.close, descriptors[-1])
        switch, *others = descriptors
        _in_thread(_make_switch, switch, others, megabits)
        for rank, descriptor in enumerate(others):
            _in_thread(_make_host, descriptor, address(rank), megabits)
        yield [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in others]


def move_to(path: str) -> None:
    """Move this thread, and the threads that it will start, to the host at ``path``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _move(descriptor)
    finally:
        os.close(descriptor)


def bytes_sent() -> int:
    """Return the bytes that the interface of this process's host has sent, headers included."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if f"{DEVICE}:" in line)
    return int(line.partition(":")[2].split()[8])


def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` in a new thread, so that only that thread changes its namespace."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def _new_namespace() -> int:
    """Move this thread to a new namespace; return a descriptor that keeps the namespace alive while open."""
    _call("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _move(descriptor: int) -> None:
    _call("setns", descriptor, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def _netlink(descriptor: int) -> Iterator[Any]:
    """Move this thread to a namespace, and yield a netlink socket there."""
    from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

    _move(descriptor)
    try:
        with IPRoute() as netlink:
            yield netlink
    except NetlinkError as error:
        raise OSError(error.code, f"netlink: {error}") from None


def _make_switch(switch: int, others: list[int], megabits: float) -> None:
    with _netlink(switch) as netlink:
        netlink.link("add", ifname="br0", kind="bridge")
        (bridge,) = netlink.link_lookup(ifname="br0")
        netlink.link("set", index=bridge, state="up")
        for number, descriptor in enumerate(others):
            name = f"port{number}"
            netlink.link("add", ifname=name, kind="veth", peer={"ifname": DEVICE, "net_ns_fd": descriptor})
            (port,) = netlink.link_lookup(ifname=name)
            netlink.link("set", index=port, state="up", master=bridge)
            _limit(netlink, port, megabits)


def _make_host(descriptor: int, own: str, megabits: float) -> None:
    with _netlink(descriptor) as netlink:
        for name in ("lo", DEVICE):
            (device,) = netlink.link_lookup(ifname=name)
            netlink.link("set", index=device, state="up", IFLA_AF_SPEC=_NO_OWN_ADDRESS)
        netlink.addr("add", index=device, address=own, prefixlen=16)
        metrics = {"attrs": [("RTAX_INITCWND", _WINDOW_PACKETS)]}
        netlink.route("replace", dst="10.77.0.0/16", oif=device, prefsrc=own, scope="link", metrics=metrics)
        _limit(netlink, device, megabits)


def _limit(netlink: Any, device: int, megabits: float) -> None:
    """Limit the rate at which ``device`` sends."""
    netlink.link("set", index=device, gso_max_size=_SEGMENT_BYTES)
    rate = f"{round(1e3 * megabits)}kbit"
    netlink.tc("add", "tbf", device, rate=rate, burst=_BURST_BYTES, limit=_QUEUE_BYTES)
