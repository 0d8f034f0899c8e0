"""torch.distributed's backend "pycomm": ``dist.init_process_group("pycomm")``.

With it, DistributedDataParallel, FSDP, DTensor, pipelining and everything else built on torch.distributed use pycomm's
transports without a changed line. An engine runs the operations; a thin adapter is torch's ``ProcessGroup``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm.checks import seconds_of
from pycomm.collectives.transport.own_group import PYCOMM, Place
from pycomm.torch_internals import Store, backend_of, open_monitored_barrier

__all__ = ["make_group", "register", "stats"]


def register() -> None:
    """Register the backend with torch, as ``import pycomm`` does; torch 2.14 and later find it on their own."""
    if not dist.is_available() or hasattr(dist.Backend, PYCOMM.upper()):
        return
    dist.Backend.register_backend(PYCOMM, _make, extended_api=True, devices=_Devices(["cpu", "cuda"]))
    open_monitored_barrier(PYCOMM)


class _Devices(list[str]):
    """Types of devices, for which torch asks when a group is made: CUDA only if there is a GPU then."""

    def __iter__(self) -> Iterator[str]:
        return (kind for kind in super().__iter__() if kind == "cpu" or torch.cuda.device_count() > 0)


def _make(*arguments: Any) -> dist.ProcessGroup:
    """Make a group; imports are local, so that only users of the backend pay for them."""
    from pycomm.collectives.backend.process_group import make

    return make(*arguments)


def make_group(store: Store, rank: int, size: int, timeout: timedelta | float) -> dist.ProcessGroup:
    """Make a group over "pycomm" that torch does not know by name, such as torchft's wrappers take. Collective.

    Its ranks meet at ``store``, which no other group uses. ``timeout`` limits every single wait: seconds or a
    ``timedelta``.
    """
    from pycomm.collectives.backend.process_group import PycommProcessGroup

    place = Place("apart", store, rank, list(range(size)), f"cpu:{PYCOMM}")
    return PycommProcessGroup(place, seconds_of(timeout))


def stats(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return counters of a group over "pycomm", the default group if ``None``, on this rank.

    Returns:
        ``transport``: "shared_memory", "tcp", "hierarchical" or "torch". ``bytes_direct``: bytes of tensors in memory
        that all ranks of the host reach; ``bytes_staged``: of others, which were copied through it;
        ``bytes_small``: of those that travel with their announcement. ``storages_moved``: number of storages
        (buckets of DistributedDataParallel) that were moved to such memory.

    Raises:
        ValueError: the group has another backend, or there is none.
    """
    from pycomm.collectives.backend.process_group import PycommProcessGroup

    found = dist.group.WORLD if group is None else group
    backend = None if found is None else backend_of(found, torch.device("cpu"))
    if not isinstance(backend, PycommProcessGroup):
        what = "there is no group" if found is None else f"group has the backend {dist.get_backend(found)!r}"
        raise ValueError(f"{what}, wanted one with the backend {PYCOMM!r}")
    return backend.engine.stats()
