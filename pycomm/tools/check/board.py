"""Notice board of the ranks of a check, in torch's store; ranks that do not come in time are named."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.torch_internals import PrefixStore, Store
from pycomm.untrusted import ANYTHING, parse

_POLL = 0.02  # seconds between two looks


class AbsentError(Exception):
    """Error of ranks that have not come in time; names them."""


def store_of_job(rank: int, timeout: float) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, where torchrun serves it, or else rank 0.

    Raises:
        AbsentError: nobody serves it.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=timeout)
    try:
        # Not by torch's rendezvous, which waits for all ranks, and does not say who is missing.
        return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=patience, multi_tenant=True)
    except RuntimeError as error:
        first = str(error).splitlines()[0].partition(" (")[0]
        raise AbsentError(
            f"rank {rank} cannot reach the store at {host}:{port} within {timeout:g} s: {first}. Rank 0, or its "
            "torchrun, serves it: start that first, and let the port through the firewall"
        ) from None


class NoticeBoard:
    """Part of a job's store for one check.

    Args:
        timeout: seconds of every wait for other ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.store: Store = PrefixStore("pycomm/check", store)
        self.rank, self.size, self.timeout = rank, size, timeout

    def write(self, what: str, value: Any) -> None:
        """Write a value that JSON can hold, for the others to read."""
        self.store.set(f"{what}/{self.rank}", json.dumps(value))

    def exchange(self, what: str, value: Any, ranks: Collection[int] | None = None) -> list[Any]:
        """Write ``value``, and return the values of ``ranks``, by default all, in their order.

        Raises:
            AbsentError: some have written none within the timeout.
        """
        wanted = list(range(self.size) if ranks is None else ranks)
        absent, until = wanted, time.monotonic() + self.timeout
        try:
            self.write(what, value)
            while absent := [rank for rank in absent if not self.store.check([f"{what}/{rank}"])]:
                if time.monotonic() > until:
                    raise AbsentError(self._absent(what, absent, len(wanted)))
                time.sleep(_POLL)
            return [parse(self.store.get(f"{what}/{rank}"), ANYTHING, f"{what} of rank {rank}") for rank in wanted]
        except RuntimeError as error:
            lost = str(error).splitlines()[0]
            raise AbsentError(f"rank {self.rank} lost the store, which rank 0 or its torchrun serves: {lost}") from None

    def leave(self) -> None:
        """End this rank's part; rank 0, which may serve the store, leaves last."""
        if self.rank == 0:
            self.exchange("the end", None)
        else:
            self.write("the end", None)

    def _absent(self, what: str, absent: list[int], num_wanted: int) -> str:
        names = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        ranks = f"rank{'s' if len(absent) > 1 else ''} {names} of {num_wanted}"
        return f"{ranks} did not come to this step of the check within {self.timeout:g} s: {what}"
