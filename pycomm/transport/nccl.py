"""Collectives between GPUs, by NCCL. The work is done in csrc/transport/nccl_group.h.

NCCL is no dependency: it is looked for when it is first wanted, in the copy that PyTorch has loaded, the packages
``nvidia-nccl-cu12`` / ``nvidia-nccl-cu13``, and the system. ``PYCOMM_NCCL_LIBRARY`` names another one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import pycomm._native as _native
from pycomm.errors import CommError

ALGORITHMS = ("native", "ring")
_SHARED_GPU_VERSION = (2, 30)
_SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def candidate_paths() -> list[str]:
    """Where Python packages have put NCCL."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError):  # there is no package "nvidia", or it is something else
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    candidates = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders or ()]
    return [str(path) for path in candidates if path.exists()]


def nccl_version() -> tuple[str, str] | None:
    """``(version, path)`` of the NCCL that would be used; ``None`` if there is none or this build has no CUDA."""
    return _native.nccl_version(candidate_paths()) if hasattr(_native, "nccl_version") else None


class NcclTransport:
    """NCCL among ``size`` ranks, each on the CUDA device ``device``; creating one is collective.

    Operations are enqueued on ``stream`` (a ``cudaStream_t`` as an integer) and return. Arrays are contiguous device
    arrays that must stay alive until the stream has come past the operation; ``timeout`` is in seconds, from the call
    until then. Wrong arguments are errors on the rank that gave them, and only there.

    Args:
        share: gives all ranks' bytes, in rank order, to every rank; over the CPU.
        algorithm: "native", what NCCL chooses, or "ring", which is ``NCCL_ALGO=Ring`` in the environment while this
            communicator is made. (NCCL reads the environment of the process: see csrc/transport/nccl_init.h.)
        timeout: for creating the communicator, in seconds.

    Raises:
        ValueError: on every rank: ranks differ in what must be equal, or share a GPU where NCCL cannot.
        RuntimeError: on every rank: some rank has no NCCL that can be used.
        CommError: NCCL failed on some rank, or a rank did not come in time. Later from any operation: the communicator
            is of no further use, and what operations since then wrote is not valid.
    """

    name = "nccl"

    def __init__(
        self,
        rank: int,
        size: int,
        device: int,
        share: Callable[[bytes], list[bytes]],
        algorithm: str = "native",
        timeout: float = 600.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        paths = candidate_paths()
        plans = _exchange(share, _plan_of(paths, device, algorithm))
        _require_agreement(plans)
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
        self._group = group
        self.all_reduce = group.all_reduce
        self.reduce_scatter = group.reduce_scatter
        self.all_gather = group.all_gather
        self.broadcast = group.broadcast
        self.send = group.send
        self.recv = group.recv
        self.check = group.check
        _open.add(self)

    @contextlib.contextmanager
    def grouped(self, timeout: float) -> Iterator[None]:
        """Operations called inside are given to NCCL together, at the end: sends and receives that need each other.

        All on one stream. When the body raises, none of them happens on this rank.
        """
        self._group.group_start()
        try:
            yield
        except BaseException:
            self._group.group_abandon()
            raise
        self._group.group_end(timeout)

    def close(self) -> None:
        """Idempotent, not collective. Operations still on the device get a second to end, and are aborted then."""
        _open.discard(self)
        self._group.close("it was closed")


def _plan_of(paths: Sequence[str], device: int, algorithm: str) -> dict[str, Any]:
    """What this rank brings; ``problem`` says why it cannot take part."""
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
        plan["gpu"] = _identity_of(device)
    except Exception as error:  # whatever it is, the others must hear of it
        plan["problem"] = str(error)
    plan["may_share_gpu"] = os.environ.get(_SHARED_GPU_VARIABLE) == "1"
    return plan


def _identity_of(device: int) -> str:
    """Equal for ranks on one GPU: its UUID where torch tells it, else where this process sees it."""
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
    return [json.loads(data) for data in share(json.dumps(mine).encode())]


def _require_agreement(plans: list[dict[str, Any]]) -> None:
    """Every rank looks at the same plans, so all raise the same."""
    for p, plan in enumerate(plans):
        if plan["problem"] is not None:
            kind = ValueError if plan["kind"] == "ValueError" else RuntimeError
            raise kind(f"rank {p} cannot use NCCL: {plan['problem']}")
    for p, plan in enumerate(plans):
        if plan["algorithm"] != plans[0]["algorithm"]:
            raise ValueError(
                f"the ranks disagree: rank {p} wants algorithm {plan['algorithm']!r}, rank 0 {plans[0]['algorithm']!r}"
            )
        if plan["version"] != plans[0]["version"]:
            raise ValueError(
                f"the ranks have different versions of NCCL: rank {p} {plan['version']} ({plan['path']}), "
                f"rank 0 {plans[0]['version']} ({plans[0]['path']})"
            )
    first_on: dict[str, int] = {}
    for p, plan in enumerate(plans):
        other = first_on.setdefault(plan["gpu"], p)
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
        f"2.30 or newer and {_SHARED_GPU_VARIABLE}=1 in the environment of every rank: NCCL is {version}"
        + (f", and rank {without[0]} has no such variable" if without else "")
    )


def _make_unique_id(paths: Sequence[str], rank: int, share: Callable[[bytes], list[bytes]]) -> bytes:
    """Rank 0's, on every rank."""
    mine: dict[str, str] = {}
    if rank == 0:
        try:
            mine["id"] = _native.nccl_unique_id(list(paths)).hex()
        except Exception as error:
            mine["problem"] = str(error)
    theirs = _exchange(share, mine)[0]
    if "problem" in theirs:
        raise RuntimeError(f"rank 0 cannot use NCCL: {theirs['problem']}")
    return bytes.fromhex(theirs["id"])


def _require_success(rank: int, outcomes: list[dict[str, Any]]) -> None:
    operation = "creating the NCCL communicator"
    for p, outcome in enumerate(outcomes):
        if outcome["problem"] is not None:
            raise CommError.during(operation, f"rank {p} failed ({outcome['problem']})", rank=rank, peer=p)


_open: weakref.WeakSet[NcclTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before the interpreter ends: NCCL and the watchdog must not outlive what they use."""
    for transport in list(_open):
        transport.close()
