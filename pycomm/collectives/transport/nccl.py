"""Collectives between GPUs by NCCL. The work is done in csrc/transport/nccl/group.h.

NCCL is not a dependency. When it is first needed, pycomm looks for the copy that PyTorch has loaded, then in the
packages ``nvidia-nccl-cu12`` / ``nvidia-nccl-cu13``, then in the system. ``PYCOMM_NCCL_LIBRARY`` names another one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import pycomm._native as _native
from pycomm.collectives.recorder import Recorder
from pycomm.errors import CommError
from pycomm.untrusted import ANYTHING, MapOf, parse

_LOG = logging.getLogger("pycomm")

ALGORITHMS = ("native", "ring")
_SHARED_GPU_VERSION = (2, 30)
_SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_HOST_VARIABLE = "NCCL_HOSTID"
"""Names the host for NCCL, which takes ranks with different names for ranks of different hosts, linked by sockets."""
_REGISTER_VARIABLE = "PYCOMM_NCCL_REGISTER"
_WINDOWS_VARIABLE = "PYCOMM_NCCL_WINDOWS"
_ORDER_VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
_ORDER_DRIVER = 12030


def candidate_paths() -> list[str]:
    """Return the paths at which Python packages have installed NCCL."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError):  # there is no package "nvidia", or it is not a package
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    candidates = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders or ()]
    return [str(path) for path in candidates if path.exists()]


def nccl_version() -> tuple[str, str] | None:
    """Return ``(version, path)`` of the NCCL that would be used; ``None`` without one, or if this build has no CUDA."""
    return _native.nccl_version(candidate_paths()) if hasattr(_native, "nccl_version") else None


def build_info() -> dict[str, Any]:
    """Describe this build.

    Returns:
        ``version``; ``cuda``: the toolkit's version, ``None`` if built without; ``cuda_architectures``: what its
        kernels were compiled for, as CMake names them, with commas between, or ``None``; ``nccl``: version of the NCCL
        that pycomm loads, ``None`` if there is none; ``simd``: the instruction set in use ("avx512", "avx2",
        "baseline"); ``compiler``.
    """
    nccl = nccl_version()
    return {**_native.build_info(), "nccl": None if nccl is None else nccl[0]}


def why_not_registered(*, symmetric: bool = False) -> str:
    """Return why memory on GPUs is not registered with NCCL; "" if it is, provided all ranks can.

    ``symmetric``: as windows, which NCCL's symmetric kernels require.
    """
    for variable in (_REGISTER_VARIABLE, _WINDOWS_VARIABLE)[: 1 + symmetric]:
        if os.environ.get(variable) == "0":
            return f"{variable}=0"
    if not hasattr(_native, "NcclGroup"):
        return "this build has no CUDA"
    try:
        return _native.nccl_why_not_registered(candidate_paths(), symmetric)
    except RuntimeError:
        return "no NCCL was found"


def keep_order() -> None:
    """Let NCCL start the operations of all communicators of this process in the order of the calls.

    Otherwise communicators on one GPU, PyTorch's included, can deadlock. With older drivers NCCL would run all
    communicators' operations one after the other, so there it is not asked to.
    """
    version = _native.cuda_driver_version()
    if _ORDER_VARIABLE in os.environ:
        return
    if version >= _ORDER_DRIVER:
        os.environ[_ORDER_VARIABLE] = "1"
        return
    _LOG.warning(
        "the NVIDIA driver supports CUDA %d.%d, and NCCL requires 12.3 to keep the order of several communicators on a "
        "GPU: %s stays unset; let one communicator's operations end before you use another",
        *(version // 1000, version % 1000 // 10),
        _ORDER_VARIABLE,
    )


def tell_of_late_order() -> None:
    """Log a warning if torch's NCCL has started without the setting that :func:`keep_order` is about to make."""
    if _ORDER_VARIABLE not in os.environ and _native.cuda_driver_version() >= _ORDER_DRIVER:
        _LOG.warning(
            "NCCL has started, for torch, without %s=1: set it where the ranks are started, or torch's operations on a "
            "GPU (SyncBatchNorm, buffers) and pycomm's may wait for each other forever",
            _ORDER_VARIABLE,
        )


class Windows:
    """Symmetric windows of one NCCL communicator, which all ranks make and end in one order.

    NCCL gives a window the same addresses on all ranks, each by its own count of them.

    Args:
        group: the communicator.
        share: see :class:`NcclTransport`.
        timeout: limit for making one, in seconds.
    """

    def __init__(self, group: Any, share: Callable[[bytes], list[bytes]], timeout: float) -> None:
        self._group, self._share, self._timeout = group, share, timeout
        self._made: dict[int, tuple[int, int]] = {}  # address and bytes, by number; the same numbers on all ranks
        self._retired: dict[int, Callable[[], None]] = {}  # what frees their memory
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in windows."""
        return sum(num_bytes for _, num_bytes in self._made.values())

    def make(self, address: int, num_bytes: int) -> None:
        """Make memory a window, and end those that all ranks have retired. Collective, in the order of the operations.

        Raises:
            ValueError: on every rank: the ranks' memories differ in size.
        """
        plans = _exchange(self._share, {"bytes": num_bytes, "retired": list(self._retired)})
        sizes = [plan["bytes"] for plan in plans]
        if len(set(sizes)) > 1:
            raise ValueError(f"symmetric memory has {sizes} bytes on the ranks, wanted the same on all")
        for number in sorted(set.intersection(*(set(plan["retired"]) for plan in plans))):
            self._group.deregister_memory(self._made.pop(number)[0])
            self._retired.pop(number)()
        self._group.register_memory(address, num_bytes, True, self._timeout)
        self._made[self._count] = address, num_bytes
        self._count += 1

    def retire(self, address: int, free: Callable[[], None]) -> bool:
        """Call ``free`` once all ranks have retired the window at ``address``; return false if there is none."""
        number = next((number for number, (begin, _) in self._made.items() if begin == address), None)
        if number is not None:
            self._retired[number] = free
        return number is not None

    def close(self) -> None:
        """Free what is retired: the communicator is closed."""
        self._made.clear()
        while self._retired:
            self._retired.popitem()[1]()


class NcclTransport:
    """NCCL communicator among ``size`` ranks, each on its CUDA device ``device``. Creating one is collective.

    Operations are enqueued on ``stream`` (a ``cudaStream_t`` as an integer) and return at once. Arrays are contiguous
    device arrays that must stay alive until the stream has finished the operation; ``timeout`` limits the seconds from
    the call until then. Wrong arguments are errors only on the rank that passed them.

    Args:
        rank, size: this rank, and the number of ranks.
        device: ordinal of this rank's GPU.
        share: all-gather of bytes over the CPU; returns the bytes of all ranks, in rank order.
        algorithm: "native", which leaves the choice to NCCL, or "ring", for which ``NCCL_ALGO=Ring`` is set in the
            environment while this communicator is made. (NCCL reads the environment of the process: see
            csrc/transport/nccl/init.h.)
        timeout: limit for creating the communicator, in seconds.
        streams: streams of ``device`` for which it is made, none of which may be captured into a CUDA graph now.

    Raises:
        ValueError: on every rank: the ranks' algorithms or versions of NCCL differ, or ranks share a GPU although NCCL
            does not support it.
        RuntimeError: on every rank: some rank has no usable NCCL, or captures one of its ``streams``.
        CommError: NCCL failed on some rank, or a rank did not arrive in time. If raised by an operation later, the
            communicator is unusable, and the results of operations since the failure are invalid.
    """

    name = "nccl"
    recorder: Recorder
    """Set by the owner, as for any transport."""
    registers: bool
    """Whether all ranks can register memory."""
    has_windows: bool
    """Whether all ranks, of which there are several, can make symmetric windows."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: int,
        share: Callable[[bytes], list[bytes]],
        algorithm: str = "native",
        timeout: float = 600.0,
        streams: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        paths = candidate_paths()
        plans = _exchange(share, _plan_of(paths, device, algorithm, streams))
        _require_agreement(plans)
        no_memory, no_windows = (_first_reason(plans, key) for key in ("no_memory", "no_windows"))
        self.registers, self.has_windows = not no_memory, size > 1 and algorithm == "native" and not no_windows
        if rank == 0 and algorithm == "native" and (no_memory or no_windows):
            _LOG.info("%s", _without(no_memory, no_windows))
        self._registered: dict[int, int] = {}  # bytes, by address
        unique_id = _make_unique_id(paths, rank, share)
        outcome: dict[str, str | None] = {"problem": None}
        failure: Exception | None = None
        group: Any = None
        try:
            group = _native.NcclGroup(rank, size, device, unique_id, algorithm == "ring", timeout, paths)
        except Exception as error:
            failure = error
            outcome["problem"] = str(error)
        try:
            outcomes = _exchange(share, outcome)
            if failure is not None:
                raise failure
            _require_success(rank, outcomes)
        except BaseException:
            if group is not None:
                group.close("another rank could not create its communicator")
            raise
        self._group, self._timeout = group, timeout
        self.windows = Windows(group, share, timeout)
        self.all_reduce, self.reduce_scatter, self.all_gather = group.all_reduce, group.reduce_scatter, group.all_gather
        self.broadcast, self.reduce = group.broadcast, group.reduce
        self.send, self.recv, self.check = group.send, group.recv, group.check
        _open.add(self)

    @property
    def registered_bytes(self) -> int:
        """Bytes of memory that are registered."""
        return sum(self._registered.values()) + self.windows.num_bytes

    def register(self, address: int, num_bytes: int) -> bool:
        """Register memory of :mod:`pycomm.collectives.transport.registered`; return whether it was not yet."""
        if address in self._registered:
            return False
        self._group.register_memory(address, num_bytes, False, self._timeout)
        self._registered[address] = num_bytes
        return True

    def deregister(self, address: int, free: Callable[[], None]) -> bool:
        """Deregister memory; return whether it may be freed now. Else it is a window: see :meth:`Windows.retire`."""
        if self._registered.pop(address, None) is not None:
            self._group.deregister_memory(address)
        return not self.windows.retire(address, free)

    @contextlib.contextmanager
    def grouped(self, timeout: float) -> Iterator[None]:
        """Collect the operations called inside and give them to NCCL together at the end, all on one stream.

        This is for sends and receives that need each other, and for collectives that are to begin together. If the
        body raises, none of them is executed on this rank.
        """
        self._group.group_start()
        try:
            yield
        except BaseException:
            self._group.group_abandon()
            raise
        self._group.group_end(timeout)

    def close(self) -> None:
        """Close the communicator, and abort operations that are on the device after another second.

        Idempotent, not collective.
        """
        _open.discard(self)
        self._group.close("it was closed")
        self._registered.clear()
        self.windows.close()


def _plan_of(paths: Sequence[str], device: int, algorithm: str, streams: Sequence[int]) -> dict[str, Any]:
    """Return this rank's settings for the other ranks; ``problem`` is the reason why it cannot take part, if any."""
    plan: dict[str, Any] = {"problem": None, "kind": "RuntimeError", "version": None, "algorithm": algorithm}
    if algorithm not in ALGORITHMS:
        plan |= {"problem": f"algorithm is {algorithm!r}, wanted one of {', '.join(ALGORITHMS)}", "kind": "ValueError"}
        return plan
    if not hasattr(_native, "NcclGroup"):
        plan["problem"] = (
            "this build of pycomm has no CUDA: install it from source again where nvcc is on PATH "
            "(PYCOMM_CUDA=ON pip install --no-cache-dir --force-reinstall --no-deps ...)"
        )
        return plan
    num_gpus, why_none = _native.cuda_devices()
    if num_gpus == 0:
        plan["problem"] = why_none
        return plan
    try:
        plan["version"], plan["path"] = _native.nccl_library(list(paths))
        keep_order()
        plan["gpu"] = _identity_of(device)
        what = f"the first operation of algorithm {algorithm!r} on GPU {device}"
        _native.require_no_capture(device, streams, what, "its communicator is not made yet")
    except Exception as error:  # of any kind: sent to the other ranks
        plan["problem"] = str(error)
    plan["may_share_gpu"] = os.environ.get(_SHARED_GPU_VARIABLE) == "1"
    plan["no_memory"], plan["no_windows"] = why_not_registered(), why_not_registered(symmetric=True)
    plan["host"] = os.environ.get(_HOST_VARIABLE)
    return plan


def _first_reason(plans: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the first reason in the ranks' ``plans``, with its rank; "" if there is none."""
    return next((f"rank {p}: {plan[key]}" for p, plan in enumerate(plans) if plan[key]), "")


def _without(no_memory: str, no_windows: str) -> str:
    """Return the log line about what NCCL is not used for, and what it does instead."""
    if no_memory:
        return f"no memory is registered with NCCL, which copies through buffers of its own ({no_memory})"
    return (
        f"messages are registered with NCCL, but are no symmetric windows: its usual kernels send them ({no_windows})"
    )


def _identity_of(device: int) -> str:
    """Return the identity of a GPU: its UUID if torch knows it, else its ordinal and host."""
    if torch.cuda.is_available():
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if uuid is not None:
            return str(uuid)
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        host = socket.gethostname()
    return f"device {device} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')} on {host}"


def _exchange(share: Callable[[bytes], list[bytes]], mine: dict[str, Any]) -> list[dict[str, Any]]:
    everyones = share(json.dumps(mine).encode())
    return [parse(data, MapOf(ANYTHING), f"rank {rank}'s plan for NCCL") for rank, data in enumerate(everyones)]


def _require_agreement(plans: list[dict[str, Any]]) -> None:
    """Raise ValueError or RuntimeError, the same on all ranks, if the ranks' plans do not match."""
    for p, plan in enumerate(plans):
        if plan["problem"] is not None:
            kind = ValueError if plan["kind"] == "ValueError" else RuntimeError
            raise kind(f"rank {p} cannot use NCCL: {plan['problem']}")
    for p, plan in enumerate(plans):
        if plan["algorithm"] != plans[0]["algorithm"]:
            raise ValueError(
                f"the ranks disagree: rank {p} has algorithm {plan['algorithm']!r}, rank 0 {plans[0]['algorithm']!r}"
            )
        if plan["version"] != plans[0]["version"]:
            raise ValueError(
                f"the ranks have different versions of NCCL: rank {p} {plan['version']} ({plan['path']}), "
                f"rank 0 {plans[0]['version']} ({plans[0]['path']})"
            )
    first_on: dict[tuple[str, str | None], int] = {}
    for p, plan in enumerate(plans):
        other = first_on.setdefault((plan["gpu"], plan["host"]), p)
        if other != p:
            _require_shared_gpu(other, p, plans)


def _require_shared_gpu(first: int, second: int, plans: list[dict[str, Any]]) -> None:
    version = plans[0]["version"]
    able = tuple(int(part) for part in version.split(".")[:2]) >= _SHARED_GPU_VERSION
    without = [p for p, plan in enumerate(plans) if not plan["may_share_gpu"]]
    if able and not without:
        return
    raise ValueError(
        f"ranks {first} and {second} are on the same GPU ({plans[first]['gpu']}), wanted one GPU per rank, or NCCL "
        f"2.30 or newer and {_SHARED_GPU_VARIABLE}=1 in the environment of every rank, or another {_HOST_VARIABLE} for "
        f"each rank, which links them by sockets: NCCL is {version}"
        + (f", and rank {without[0]} has no {_SHARED_GPU_VARIABLE}" if without else "")
    )


def _make_unique_id(paths: Sequence[str], rank: int, share: Callable[[bytes], list[bytes]]) -> bytes:
    """Return the unique id that rank 0 makes, on every rank."""
    mine: dict[str, str] = {}
    if rank == 0:
        try:
            mine["id"] = _native.nccl_unique_id(list(paths)).hex()
        except Exception as error:
            mine["problem"] = str(error)
    first = _exchange(share, mine)[0]
    if "problem" in first:
        raise RuntimeError(f"rank 0 cannot use NCCL: {first['problem']}")
    return bytes.fromhex(first["id"])


def _require_success(rank: int, outcomes: list[dict[str, Any]]) -> None:
    operation = "creating the NCCL communicator"
    for p, outcome in enumerate(outcomes):
        if outcome["problem"] is not None:
            raise CommError.during(operation, f"rank {p} failed ({outcome['problem']})", rank=rank, peer=p)


_open: weakref.WeakSet[NcclTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all transports before the interpreter ends: NCCL and the watchdogs must not outlive what they use."""
    for transport in list(_open):
        transport.close()
