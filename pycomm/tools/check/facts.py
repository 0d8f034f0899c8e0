"""What each rank finds out about itself, and what is wrong with the facts of all ranks."""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import resource
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pycomm.collectives.transport.authentication import address_towards
from pycomm.collectives.transport.nccl import build_info, nccl_version
from pycomm.collectives.transport.rendezvous import host_identity
from pycomm.descriptions import counted, size_text
from pycomm.kernels import cuda_devices
from pycomm.tools.cli.info import has_anonymous_memory

_INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_NOT_COMPARED = {"PYCOMM_SECRET", "PYCOMM_SECRET_FILE", "PYCOMM_FLIGHT_DIR", "PYCOMM_TRACE_DIR"}
_DESCRIPTORS, _DESCRIPTORS_PER_RANK = 128, 8
"""Files that a rank has open anyway, and those for each other rank: sockets of torch's groups and of pycomm's."""
_MEMORY = 2.8
"""Peak memory of a rank in multiples of its parameters, with SGD (``bench.memory``)."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What is wrong, and what to do about it. ``is_fatal``: a job would fail."""

    is_fatal: bool
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{'error' if self.is_fatal else 'warning'}: {self.what}. {self.remedy}"


def facts_of(rank: int, master: str, local_ranks: int) -> Facts:
    """Return what this rank knows about itself, as JSON can hold it.

    Args:
        master: host of the store, the way to which says which address others can use.
        local_ranks: number of ranks that the launcher has started on this host.
    """
    build, (gpus, why_no_gpu) = build_info(), cuda_devices()
    address, problem = _address(master)
    interface = _interface_of(address)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "identity": host_identity(),
        "versions": {
            "pycomm": build["version"],
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "numpy": np.__version__,
            "CUDA toolkit of pycomm": build["cuda"],
        },
        "address": address,
        "problem": problem,
        "interface": interface,
        "mtu": _number_in(f"/sys/class/net/{interface}/mtu"),
        "missing": [name for name in _named_interfaces() if not Path(f"/sys/class/net/{name}").exists()],
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "local_ranks": local_ranks,
        "memory": _available_memory(),
        "shares_memory": has_anonymous_memory(),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": gpus,
        "torch_gpus": torch.cuda.device_count(),
        "why_no_gpu": why_no_gpu,
        "driver": _text_in("/sys/module/nvidia/version"),
        "nccl": (nccl_version() or [None])[0],
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("PYCOMM_", "NCCL_")) and name not in {*_NOT_COMPARED, *_INTERFACES}
        },
    }


def _address(master: str) -> tuple[str, str]:
    """Return this host's address as others can use it, and why there is none."""
    try:
        return address_towards(master), ""
    except OSError as error:
        return "", f"{master} cannot be reached: {error.strerror or error}"


def _named_interfaces() -> Iterable[str]:
    """Return the interfaces that GLOO_SOCKET_IFNAME names; NCCL's variable has prefixes and exceptions."""
    return filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))


def _interface_of(address: str) -> str:
    """Return the name of the interface that has ``address``; "" if that cannot be told."""
    _, _, scope = address.partition("%")
    for _, name in socket.if_nameindex() if not scope else ():
        if address in _addresses_of(name):
            return name
    return scope


def _addresses_of(interface: str) -> set[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            found = fcntl.ioctl(one, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            return set()
    return {socket.inet_ntoa(found[20:24])}


def _text_in(path: str) -> str | None:
    """Return what a file of the kernel holds; ``None`` without it."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _number_in(path: str) -> int | None:
    text = _text_in(path)
    return int(text) if text is not None and text.isdigit() else None


def _available_memory() -> int:
    """Return the bytes that this host's ranks could still use, within the limits of their control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most = _number_in(limit)  # none where it says "max"
        if most is not None:
            found = min(found, most - (_number_in(used) or 0))
    return max(0, found)


def hosts_of(everyones: Sequence[Facts]) -> list[list[Facts]]:
    """Return the ranks of each host, in the order of their first ranks."""
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for facts in everyones:
        hosts[facts["identity"]].append(facts)
    return list(hosts.values())


def with_distinct_hosts(everyones: Sequence[Facts]) -> list[Facts]:
    """Return the facts with the address added to a host's name where two hosts share it, as containers may."""
    counts = Counter(first["host"] for first, *_ in hosts_of(everyones))
    return [
        {**facts, "host": f"{facts['host']} ({facts['address']})" if counts[facts["host"]] > 1 else facts["host"]}
        for facts in everyones
    ]


def name_of(facts: Facts) -> str:
    return f"rank {facts['rank']} on {facts['host']}"


def findings_of(everyones: Sequence[Facts], parameters: float) -> list[Finding]:
    """Return what is wrong with the facts of all ranks, for a model of this many float32 ``parameters``."""
    checks: tuple[Callable[..., list[Finding]], ...] = (
        _versions,
        _addresses,
        _settings,
        _descriptors,
        functools.partial(_memory, num_bytes=4.0 * parameters),
        _cores,
        _gpus,
    )
    return [finding for check in checks for finding in check(everyones)]


def _differing(values: Mapping[str, str]) -> str:
    """Say which ranks have which value: "2.13.0 (rank 0 on a, rank 1 on a), 2.12.0 (rank 2 on b)"."""
    owners: dict[str, list[str]] = defaultdict(list)
    for owner, value in values.items():
        owners[value].append(owner)
    parts = []
    for value, names in owners.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        parts.append(f"{value} ({', '.join(names[:2])}{more})")
    return ", ".join(parts)


def _versions(everyones: Sequence[Facts]) -> list[Finding]:
    found = []
    for what in everyones[0]["versions"]:
        values = {name_of(facts): str(facts["versions"][what]) for facts in everyones}
        if len(set(values.values())) > 1:
            is_fatal = what in ("pycomm", "torch")
            found.append(Finding(is_fatal, f"{what} differs: {_differing(values)}", "Install the same on all hosts."))
    return found


def _addresses(everyones: Sequence[Facts]) -> list[Finding]:
    found, hosts = [], hosts_of(everyones)
    for first, *_ in hosts:
        where = first["host"]
        for name in first["missing"]:
            what = f"GLOO_SOCKET_IFNAME names {name}, which {where} does not have"
            found.append(Finding(True, what, "`ip -brief address` lists a host's interfaces."))
        if first["problem"]:
            found.append(Finding(True, f"{where}: {first['problem']}", "Check MASTER_ADDR and the route to it."))
        elif len(hosts) > 1 and first["address"].startswith(("127.", "::1")):
            what = f"{where} would give others the address {first['address']}, at which they reach themselves"
            found.append(Finding(True, what, "Set MASTER_ADDR to an address of the first host that others can reach."))
    mtus = {facts["host"]: str(facts["mtu"]) for facts, *_ in hosts if facts["mtu"]}
    if len(set(mtus.values())) > 1:
        remedy = "Set the same on all (ip link set dev INTERFACE mtu N): large packets may be lost without an error."
        found.append(Finding(False, f"the MTU differs: {_differing(mtus)}", remedy))
    return found


def _settings(everyones: Sequence[Facts]) -> list[Finding]:
    found = []
    for name in dict.fromkeys(name for facts in everyones for name in facts["settings"]):
        values = {name_of(facts): facts["settings"].get(name, "not set") for facts in everyones}
        if len(set(values.values())) > 1:
            remedy = "Export it on every host, before torchrun."
            found.append(Finding(False, f"{name} differs: {_differing(values)}", remedy))
    return found


def _descriptors(everyones: Sequence[Facts]) -> list[Finding]:
    wanted = _DESCRIPTORS + _DESCRIPTORS_PER_RANK * len(everyones)
    few = [facts for facts in everyones if facts["descriptors"] < wanted]
    if not few:
        return []
    what = f"{name_of(few[0])} may open {few[0]['descriptors']} files, wanted {wanted} for {len(everyones)} ranks"
    return [Finding(True, what, f"`ulimit -n {wanted}` before torchrun, on each host.")]


def _memory(everyones: Sequence[Facts], num_bytes: float) -> list[Finding]:
    found = []
    for ranks in hosts_of(everyones):
        first, wanted = ranks[0], _MEMORY * num_bytes * len(ranks)
        if len(ranks) > 1 and not all(facts["shares_memory"] for facts in ranks):
            what = f"{first['host']} forbids memory that processes share (memfd_create), so its ranks use the network"
            found.append(Finding(False, what, "Allow the call in the sandbox of the container."))
        if first["gpus"] == 0 and first["memory"] < wanted:
            what = (
                f"{first['host']} has {size_text(first['memory'])} of memory left. {counted(len(ranks), 'rank')} of "
                f"this model take about {size_text(wanted)} with SGD, and more for activations"
            )
            found.append(Finding(True, what, "Start fewer ranks on it, or pass --parameters for your model."))
    return found


def _cores(everyones: Sequence[Facts]) -> list[Finding]:
    found = []
    for ranks in hosts_of(everyones):
        cores, threads, where = ranks[0]["cores"], ranks[0]["threads"], ranks[0]["host"]
        if len(ranks) > cores:
            what = f"{counted(len(ranks), 'rank')} of {where} share {counted(cores, 'core')}"
            found.append(Finding(False, what, "Start at most one rank per core."))
        elif len(ranks) > 1 and threads * len(ranks) > cores:
            what = f"{len(ranks)} ranks of {where} compute with {threads} threads each on {cores} cores"
            found.append(Finding(False, what, f"export OMP_NUM_THREADS={cores // len(ranks)}"))
    counts = {len(ranks) for ranks in hosts_of(everyones)}
    if len(counts) > 1:
        what = f"hosts have different numbers of ranks: {', '.join(map(str, sorted(counts)))}"
        found.append(Finding(False, what, "With the same number on each, links carry each part once."))
    return found


def _gpus(everyones: Sequence[Facts]) -> list[Finding]:
    found = []
    for ranks in hosts_of(everyones):
        first = ranks[0]
        if first["torch_gpus"] == 0:
            continue
        if first["torch_gpus"] < len(ranks):
            what = f"{first['host']} has {counted(first['torch_gpus'], 'GPU')} for {counted(len(ranks), 'rank')}"
            found.append(Finding(True, what, "Start a rank per GPU, as NCCL takes one each."))
        if first["gpus"] == 0:
            what = f"pycomm's kernels cannot use the GPUs of {first['host']}: {first['why_no_gpu']}"
            found.append(Finding(True, what, "`pycomm info` says what this build has; install it with nvcc on PATH."))
        if first["nccl"] is None:
            remedy = "`pip install nvidia-nccl-cu13`, or torch's wheel with CUDA."
            found.append(Finding(True, f"{first['host']} has GPUs, and no NCCL was found", remedy))
    for key, what, is_fatal in (("nccl", "NCCL", True), ("driver", "NVIDIA's driver", False)):
        values = {name_of(facts): str(facts[key]) for facts in everyones if facts["torch_gpus"]}
        if len(set(values.values())) > 1:
            found.append(Finding(is_fatal, f"{what} differs: {_differing(values)}", "Install the same on all hosts."))
    return found
