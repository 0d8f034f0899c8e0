"""Barrier that names the ranks that did not come: torch's ``monitored_barrier``, by messages to and from rank 0."""

from __future__ import annotations

import time

import torch

from pycomm.backend.engine import Engine

_HERE, _GO_ON = -101, -102  # tags, which users' are never


def monitored_barrier(engine: Engine, timeout: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks of ``engine``, for at most ``timeout`` seconds.

    Args:
        engine: the group.
        timeout: seconds.
        wait_all_ranks: whether rank 0 names all ranks that did not come, instead of the first of them.

    Raises:
        RuntimeError: on rank 0: ranks did not come; on the others: rank 0 did not let them go on.
    """
    word = torch.zeros(1, dtype=torch.uint8)
    milliseconds = round(timeout * 1000)
    if engine.rank != 0:
        engine.transport.send(word, 0, _HERE, timeout)
        try:
            engine.transport.receive(word, 0, _GO_ON).wait(timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {engine.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank. {error}"
            ) from error
        return
    deadline = time.monotonic() + timeout
    missing = []
    for peer in range(1, engine.size):
        try:
            engine.transport.receive(word, peer, _HERE).wait(max(0.001, deadline - time.monotonic()))
        except RuntimeError as error:
            missing.append(peer)
            if not wait_all_ranks:
                raise RuntimeError(
                    f"[Rank 0]: Rank {peer} failed to pass monitoredBarrier in {milliseconds} ms. {error}"
                ) from error
    if missing:
        ranks = ", ".join(str(peer) for peer in missing)
        raise RuntimeError(f"[Rank 0]: Ranks {ranks} failed to pass monitoredBarrier in {milliseconds} ms")
    for peer in range(1, engine.size):
        engine.transport.send(word, peer, _GO_ON, timeout)
