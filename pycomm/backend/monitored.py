"""Barrier that names the ranks that did not come: torch's ``monitored_barrier``, by messages to and from rank 0."""

from __future__ import annotations

import time

import torch

from pycomm.backend.engine import Engine
from pycomm.transport.torch_messages import TAG_END

USERS_TAG_END = TAG_END - 2
"""Tags of users' messages are smaller."""
_HERE, _GO_ON = USERS_TAG_END, USERS_TAG_END + 1


def monitored_barrier(engine: Engine, number: int, timeout: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks of ``engine``, for at most ``timeout`` seconds.

    Args:
        engine: the group.
        number: how many of these the group has had before.
        timeout: seconds.
        wait_all_ranks: whether rank 0 names all ranks that did not come, instead of the first of them.

    Raises:
        RuntimeError: on rank 0: ranks did not come; on the others: rank 0 did not let them go on.
    """
    deadline = time.monotonic() + timeout
    if engine.rank != 0:
        engine.transport.send(torch.tensor([number]), 0, _HERE, timeout)
        try:
            _receive(engine, 0, _GO_ON, number, deadline)
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {engine.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank. {error}"
            ) from error
        return
    missing = []
    for peer in range(1, engine.size):
        if not wait_all_ranks and time.monotonic() >= deadline:
            raise RuntimeError(
                f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {round(timeout * 1000)} ms, "
                f"before it could wait for rank {peer}"
            )
        try:
            _receive(engine, peer, _HERE, number, deadline)
        except RuntimeError as error:
            missing.append(peer)
            if not wait_all_ranks:
                raise RuntimeError(
                    f"[Rank 0]: Rank {peer} failed to pass monitoredBarrier in {round(timeout * 1000)} ms. {error}"
                ) from error
    if missing:
        ranks = ", ".join(str(peer) for peer in missing)
        raise RuntimeError(f"[Rank 0]: Ranks {ranks} failed to pass monitoredBarrier in {round(timeout * 1000)} ms")
    for peer in range(1, engine.size):
        engine.transport.send(torch.tensor([number]), peer, _GO_ON, timeout)


def _receive(engine: Engine, peer: int, tag: int, number: int, deadline: float) -> None:
    """Receive the word of ``peer`` that belongs to barrier ``number``; those of barriers that failed are old."""
    word = torch.tensor([-1])
    while word.item() < number:
        receipt = engine.transport.receive(word, peer, tag)
        try:
            receipt.wait(max(0.001, deadline - time.monotonic()))
        except RuntimeError:
            receipt.cancel()  # it must not take the word of a later barrier
            raise
