"""How many functions of pycomm an array passes on its way to C++."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pycomm import Communicator
from pycomm import __file__ as package
from pycomm.collectives.backend import stats

MOST_STOPS = 5


def stops(call: Callable[[], object]) -> list[str]:
    """Return the functions of pycomm that ``call`` enters, in their order."""
    entered = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(Path(package).parent):
            entered.append(f"{path.stem}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def test_a_small_tensor_has_one(one_rank_group: None) -> None:
    """All the rest, checks and recorder included, is one call of C++, which takes less time than another stop."""
    with Communicator(timeout=20, transport="shared_memory") as communicator:
        assert stops(lambda: communicator.all_reduce(torch.ones(5))) == ["communicator.all_reduce"]
        assert stops(lambda: communicator.all_reduce(torch.ones(64 << 8), "max")) == ["communicator.all_reduce"]
        assert [entry.elements for entry in communicator.channel.recorder.entries()[-2:]] == [5, 64 << 8]


@pytest.mark.skipif(not hasattr(dist.AllreduceOptions(), "asyncOp"), reason="torch does not say whether it waits")
def test_a_small_tensor_has_few_in_the_backend() -> None:
    """Beside torch's own functions, of which there are 10 in torch 2.13."""
    dist.init_process_group("pycomm", store=HashStore(), rank=0, world_size=1)
    try:
        x, before = torch.ones(5), stats()["bytes_small"]
        found = stops(lambda: dist.all_reduce(x))
        assert stats()["bytes_small"] - before == 20
    finally:
        dist.destroy_process_group()
    assert found == ["operations._allreduce_at_once", "calls.seconds", "engine.known_name"]


@pytest.mark.parametrize("array", [torch.ones(64 << 10), np.ones(5)], ids=["tensor", "numpy"])
def test_all_reduce_has_few(one_rank_group: None, array: torch.Tensor | np.ndarray) -> None:
    """The last one calls the transport, which is in C++ over shared memory."""
    with Communicator(timeout=20, transport="shared_memory") as communicator:
        found = stops(lambda: communicator.all_reduce(array))
        assert found[0] == "communicator.all_reduce"
        assert "channel.all_reduce" in found[:MOST_STOPS], found
        assert {name.partition(".")[0] for name in found[found.index("channel.all_reduce") + 1 :]} <= {"ring"}, (
            "after it, the recorder alone, which C++ asks what the array is"
        )
