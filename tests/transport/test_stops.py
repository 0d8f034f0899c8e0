"""How many functions of pycomm an array passes on its way to C++."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

from pycomm import Communicator
from pycomm import __file__ as package

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


@pytest.mark.parametrize("array", [torch.ones(5), np.ones(5)], ids=["tensor", "numpy"])
def test_all_reduce_has_few(one_rank_group: None, array: torch.Tensor | np.ndarray) -> None:
    """The last one calls the transport, which is in C++ over shared memory."""
    with Communicator(timeout=20, transport="shared_memory") as communicator:
        found = stops(lambda: communicator.all_reduce(array))
        assert found[0] == "communicator.all_reduce"
        assert "channel.all_reduce" in found[:MOST_STOPS], found
        assert {name.partition(".")[0] for name in found[found.index("channel.all_reduce") + 1 :]} <= {"ring"}, (
            "after it, the recorder alone, which C++ asks what the array is"
        )
