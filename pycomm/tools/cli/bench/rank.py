"""Worker of ``pycomm bench`` on one rank: the libraries, their arrays, and the timed turns."""

from __future__ import annotations

import os
import platform
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from pycomm.errors import CommError
from pycomm.tools.cli.bench.libraries import Call, CommunicatorLibrary, Library, UnsupportedError
from pycomm.tools.cli.bench.operations import COMMUNICATOR, Case
from pycomm.tools.cli.bench.values import count_wrong, fill
from pycomm.tools.launching import connect

_NAN = 255  # each byte of a NaN in every floating-point dtype, and of -1 or the largest number in the others


class BenchRank:
    """Worker in one process of a group. All libraries of a group share its processes and arrays.

    Args:
        num_bytes: of the largest array.
        device: "cpu" or "cuda".
        timeout: of every wait for another rank, in seconds.
        registered: whether :class:`pycomm.Communicator` works on memory that it allocated itself.
        port: of the rendezvous, for ranks that the driver has started.
        store: the launcher's store, for ranks that a launcher has started.
    """

    def __init__(
        self,
        num_bytes: int,
        device: str = "cpu",
        timeout: float = 120.0,
        registered: bool = False,
        port: int | None = None,
        store: Store | None = None,
    ) -> None:
        torch.set_num_threads(1)  # ranks may outnumber cores
        self.rank, self._size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._num_bytes, self._registered, self._timeout = num_bytes, registered, timedelta(seconds=timeout)
        self._device = _device_of(device, self.rank)
        self._store = connect(port, self._timeout) if port is not None else store
        self._libraries: dict[str, Library] = {}
        self._memory: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._filled: dict[str, Case] = {}
        self._bound: tuple[Any, Call] | None = None

    def open(self, name: str) -> int:
        """Join the group of the library ``name``; return this process's rank in it."""
        self._libraries[name] = library = self._make(name)
        return library.rank

    def _make(self, name: str) -> Library:
        assert self._store is not None, "torch's libraries require a store"
        place = (PrefixStore(name, self._store), self.rank, self._size, self._device, self._timeout)
        return CommunicatorLibrary(*place, self._registered) if name == COMMUNICATOR else Library(name, *place)

    def describe(self) -> dict[str, Any]:
        """Return where this rank runs, under nccl-tests' keys."""
        index, on_gpu = self._device.index or 0, self._device.type == "cuda"
        gpu = torch.cuda.get_device_properties(index) if on_gpu else None
        return {
            "rank": self.rank,
            "group": 0,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "device": index,
            "device_hex": f"{getattr(gpu, 'pci_domain_id', 0):04x}:{getattr(gpu, 'pci_bus_id', 0):02x}:00",
            "device_info": cpu_model() if gpu is None else gpu.name,
        }

    def verify(self, name: str, case: dict[str, Any], in_place: bool) -> dict[str, Any]:
        """Call once; return the number of "wrong" elements, or under "none" why the library does not support this."""
        described, library = Case(**case), self._libraries[name]
        given, result = self._arrays(name, described, in_place, fresh=True)
        try:
            self._bind(name, described, in_place, given, result)()
            library.synchronize()
        except CommError:
            raise
        except (UnsupportedError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return {"none": (str(error) or type(error).__name__).splitlines()[0]}
        return {"wrong": count_wrong(described, library.rank, result) if described.gets(library.rank) else 0}

    def turn(self, name: str, case: dict[str, Any], in_place: bool, warmups: int, calls: int) -> float:
        """Return seconds per call, of ``calls`` calls back to back after ``warmups`` untimed ones and a barrier."""
        described = Case(**case)
        call = self._bind(name, described, in_place, *self._arrays(name, described, in_place))
        return self._timed(name, call, warmups, calls)

    def turn_copy(self, name: str, num_bytes: int, calls: int) -> float:
        """Return seconds for copying ``num_bytes`` while all ranks do so: the basis of the floor."""
        source, target = (array[:num_bytes] for array in self._two_arrays(name))
        if source.device.type != "cpu":
            return self._timed(name, lambda: target.copy_(source), 1, calls)
        to, what = target.numpy(), source.numpy()
        return self._timed(name, lambda: np.copyto(to, what), 1, calls)

    def close(self) -> None:
        for library in reversed(self._libraries.values()):  # the first one has the default group
            library.close()

    def _timed(self, name: str, call: Call, warmups: int, calls: int) -> float:
        library = self._libraries[name]
        for _ in range(warmups):
            call()
        library.synchronize()
        library.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        library.synchronize()
        return (time.perf_counter() - start) / calls

    def _kind(self, name: str) -> str:
        """Return the key of the memory that library ``name`` works on: "" for the shared one."""
        return name if self._registered and name == COMMUNICATOR else ""

    def _two_arrays(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory for inputs, and that for results."""
        kind = self._kind(name)
        if kind not in self._memory:
            source, target = (self._libraries[name].empty(max(1, self._num_bytes)) for _ in range(2))
            self._memory[kind] = source.fill_(1), target.fill_(1)  # touches every page
        return self._memory[kind]

    def _arrays(self, name: str, case: Case, in_place: bool, fresh: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's input and the array for its result; ``fresh``: overwrite an earlier result with NaN."""
        rank, dtype, kind = self._libraries[name].rank, case.torch_dtype, self._kind(name)
        source, target = (array[: case.size].view(dtype) for array in self._two_arrays(name))
        apart = source[case.input_span(rank, in_place=False)]
        if self._filled.get(kind) != case:
            if case.gives(rank):
                fill(case, rank, apart)
            self._filled[kind] = case
        if fresh:
            target.view(torch.uint8).fill_(_NAN)
        given = apart
        if in_place:
            given = target[case.input_span(rank, in_place=True)]
            given.copy_(apart)
        return given, target[case.output_span(rank, in_place)]

    def _bind(self, name: str, case: Case, in_place: bool, given: torch.Tensor, result: torch.Tensor) -> Call:
        key = name, case, in_place
        if self._bound is None or self._bound[0] != key:
            self._bound = None  # frees its scratch before the next one is allocated
            self._bound = key, self._libraries[name].bind(case, given, result)
        return self._bound[1]


def _device_of(kind: str, rank: int) -> torch.device:
    """Return the device of ``rank``; GPUs go by the rank on this host."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())


def cpu_model() -> str:
    """Return the name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
