"""The page on which ranks of a host write when they are ready: whose size nobody can change."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from pycomm import Communicator
from pycomm.training.elastic import agreement_store
from pycomm.training.elastic.agreement_store import ReadyPage
from tests.on_ranks import on_ranks


@on_ranks(2)
def test_no_rank_can_shrink_the_page_of_the_others() -> None:
    sealed = []

    class Looking(ReadyPage):
        def __init__(self, file: int, rank: int, size: int) -> None:
            with pytest.raises(PermissionError):
                os.ftruncate(file, 0)
            sealed.append(size)
            super().__init__(file, rank, size)

    with Communicator(timeout=20, transport="shared_memory") as communicator:
        page = Looking.shared(communicator, "page", "nothing is written")
        assert page is not None
        assert sealed == [2]
        page.write(1)
        communicator.barrier()
        assert sorted(page.read(1)) == [0, 1]


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`rank ... cannot open a file of rank 0's (...): ...`",
    "The ranks have different users, or `/proc` is hidden. The end says what does not work.",
)
@on_ranks(2)
def test_a_page_that_its_maker_can_shrink_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsealed(num_bytes: int) -> int:
        descriptor = os.memfd_create("unsealed")
        os.ftruncate(descriptor, num_bytes)
        return descriptor

    said: list[str] = []
    monkeypatch.setattr(agreement_store, "anonymous_memory", unsealed)
    monkeypatch.setattr(agreement_store._LOG, "warning", lambda text, *args: said.append(text % args))
    with Communicator(timeout=20, transport="shared_memory") as communicator:
        before = len(os.listdir("/proc/self/fd"))
        assert ReadyPage.shared(communicator, "page", "nothing is written") is None
        assert len(os.listdir("/proc/self/fd")) == before
        communicator.barrier()
    problem = "rank 1 cannot open a file of rank 0's (it is not sealed at 32 bytes): nothing is written"
    assert said == [problem] * (dist.get_rank() == 0)
