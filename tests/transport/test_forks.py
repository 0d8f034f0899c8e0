"""A forked child, a DataLoader worker say: it writes nothing that its parent sees, and is told what it may not use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from pycomm import CommError, Communicator
from tests.on_ranks import on_ranks

TRANSPORTS = ["shared_memory", "tcp", "torch"]


def fork(job: Callable[[], object]) -> int:
    """Run ``job`` in a forked child; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.behavior(
    "Collectives, messages and pipelines", "write to shared memory in a forked child", "Only its copy changes."
)
@on_ranks(2)
def test_a_childs_writes_are_its_own() -> None:
    with Communicator(timeout=30) as communicator:
        x = communicator.empty(100_000).fill_(3.0)
        communicator.all_reduce(x)
        view = x[500:]

        def scribble() -> None:
            assert (x == 6).all()
            assert fork(lambda: x.add_(1.0)) == 0  # whose copy is its own again
            assert (x == 6).all()
            x.zero_()
            view.fill_(7.0)
            assert x[0] == 0

        assert fork(scribble) == 0
        assert (x == 6).all(), "a child's writes reached its parent"
        communicator.all_reduce(x)
        assert (x == 12).all()


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "use a communicator in a forked child (a DataLoader worker)",
    "`CommError` at once.",
)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_child_is_told_at_once(transport: str) -> None:
    communicator = Communicator(timeout=30, transport=transport)
    work = communicator.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    work.wait()

    def use() -> None:
        pending = communicator.channel.submit(lambda: None)
        for call in (
            lambda: communicator.all_reduce(torch.ones(10)),
            lambda: communicator.all_reduce(torch.ones(10), async_op=True).wait(),  # type: ignore[union-attr]
            communicator.barrier,
            pending.wait,
        ):
            with pytest.raises(CommError, match="inherited by a fork"):
                call()
        if transport == "shared_memory":
            with pytest.raises(CommError, match="inherited by a fork"):
                communicator.empty(10)
        communicator.close()

    assert fork(use) == 0
    communicator.barrier()
    communicator.close()


@on_ranks(2)
def test_work_of_the_parent_does_not_end_in_the_child() -> None:
    with Communicator(timeout=30) as communicator:
        communicator.barrier()
        if communicator.rank == 1:
            time.sleep(1.0)
        work = communicator.all_reduce(torch.ones(10), async_op=True)
        assert work is not None

        def wait() -> None:
            with pytest.raises(CommError, match="inherited by a fork"):
                work.wait()

        assert communicator.rank == 1 or fork(wait) == 0
        work.wait()
