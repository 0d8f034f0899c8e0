"""The flight recorder in forked processes, and of operations on GPUs."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from pycomm.collectives.recorder import DIRECTORY, Recorder, recorders
from pycomm.collectives.recorder.dump import dump
from tests.on_ranks import on_ranks
from tests.recorder.test_recorder import writing_to, written


def test_a_forked_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker of a DataLoader, which has a copy of what its rank had called when it was forked."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    mine = Recorder("the parent's", 0, [0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        os._exit(0 if dump("SIGUSR2") is None and not recorders() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert list(tmp_path.iterdir()) == []
    assert mine in recorders()


class _OnGpu:
    """What a channel makes of NCCL, without a GPU."""

    def __init__(self, rank: int, size: int, *_: Any) -> None:
        self.rank, self.size, self.error = rank, size, ""

    def all_reduce(self, *_: Any) -> None: ...

    def recv(self, *_: Any) -> None: ...

    def check(self) -> None:
        if self.error:
            raise pycomm.CommError(self.error, rank=0, peer=1, operation="all_reduce", elapsed=1.0)


@on_ranks(2)
def test_operations_on_gpus_are_noted(tmp_path: Path) -> None:
    with pycomm.Communicator(timeout=20) as communicator, pytest.MonkeyPatch.context() as patch:
        patch.setattr("pycomm.collectives.transport.nccl.NcclTransport", _OnGpu)
        made: Any = communicator.channel._make_nccl(0, "native", [])
        gc.collect()
        made.all_reduce(torch.ones(3), "sum", 0, 1.0)
        made.recv(torch.ones(3), 1, 0, 1.0)
        assert made.recorder in recorders()
        assert [entry.operation for entry in made.recorder.entries()] == ["all_reduce", "receive"]
        made.check()
        made.error = "rank 1 died"
        with writing_to(tmp_path), pytest.raises(pycomm.CommError, match="rank 1 died"):
            made.check()
        assert "rank 1 died" in written(tmp_path)["reason"]
