"""Memory from NCCL's allocator: registered with its communicators, by all ranks or none, and freed in the end."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from pycomm.collectives.transport import gpu, nccl, registered
from tests.transport.nccl_ranks import NOW, Fake, on_device, requires_emulator
from tests.transport.test_nccl_library import in_version
from tests.transport.test_nccl_transport import is_rank, transports

pytestmark = requires_emulator

GPU = torch.device("cuda", 0)
COUNT = 1 << 18  # of float32: as little as comes from NCCL
BYTES = 4 * COUNT


def storage_on(block: registered.RegisteredBlock) -> torch.UntypedStorage:
    """What torch.as_tensor() makes of it with a GPU."""
    memory = (ctypes.c_uint8 * block.num_bytes).from_address(block.address)
    vars(memory)["block"] = block  # which torch keeps
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


@pytest.fixture
def waits(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The devices that the host waited for."""
    waited: list[int] = []
    monkeypatch.setattr(registered, "_storage_on", storage_on)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    yield waited
    gc.collect()
    registered.reclaim()


def calls(fake: Fake, name: str) -> int:
    return fake.words("calls").count(name)


def test_memory_is_registered_once_and_freed_when_no_tensor_is_there(fake: Fake, waits: list[int]) -> None:
    first, second = transports(2)
    x = registered.empty((2, COUNT // 2), torch.float32, GPU)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((2, COUNT // 2), torch.float32, True)
    for transport in (first, first, second):
        registered.register(x.view(-1), transport)
    assert calls(fake, "ncclCommRegister") == 2
    assert fake.registered_bytes() == first.registered_bytes + second.registered_bytes == 2 * BYTES
    part = x[0]
    del x
    gc.collect()
    registered.reclaim()
    assert waits == []
    assert calls(fake, "ncclMemFree") == 0
    del part
    gc.collect()
    second.close()
    other = registered.empty((COUNT,), torch.float32, GPU)
    assert waits == [0]  # what streams do there has to end first
    assert (calls(fake, "ncclCommDeregister"), calls(fake, "ncclMemFree")) == (1, 1)  # the second has ended
    assert first.registered_bytes == 0
    del other
    first.close()


def test_what_is_not_registered(fake: Fake, waits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = transports(1)
    x = registered.empty((COUNT,), torch.float32, GPU)
    for array in (x[1:], torch.empty(COUNT), on_device(np.zeros(COUNT))):  # parts have other offsets
        registered.register(array, alone)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: (args, options["device"]))
    assert registered.empty((COUNT - 1,), torch.float32, GPU) == (((COUNT - 1,),), GPU)
    monkeypatch.setenv("PYCOMM_NCCL_REGISTER", "0")
    assert nccl.why_not_registered() == "PYCOMM_NCCL_REGISTER=0"
    assert registered.empty((COUNT,), torch.float32, GPU) == (((COUNT,),), GPU)
    assert calls(fake, "ncclCommRegister") == 0
    assert calls(fake, "ncclMemAlloc") == 1
    alone.close()


@pytest.mark.parametrize(
    ("code", "why"), [(21805, "NCCL is 2.18.5, wanted 2.19 or newer"), (21900, ""), (22809, ""), (23003, "")]
)
def test_versions(fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, why: str) -> None:
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", str(in_version(fake_library, code, tmp_path)))
    assert nccl.why_not_registered() == why
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    assert nccl.why_not_registered() == "no NCCL was found"


def test_one_rank_that_cannot(fake: Fake, waits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "why_not_registered", lambda: "it is too old" if is_rank(1) else "")
    members = transports(2)
    monkeypatch.undo()
    monkeypatch.setattr(registered, "_storage_on", storage_on)
    assert [member.registers for member in members] == [False, False]
    x = torch.empty(0)
    registered.register(x, members[0])
    assert calls(fake, "ncclCommRegister") == 0
    for member in members:
        member.close()


def test_failures(fake: Fake, waits: list[int]) -> None:
    (alone,) = transports(1)
    x = registered.empty((COUNT,), torch.float32, GPU)
    fake.fail("ncclMemAlloc", 1)
    with pytest.raises(RuntimeError, match=f"ncclMemAlloc of {BYTES} bytes failed: ncclUnhandledCudaError"):
        registered.empty((COUNT,), torch.float32, GPU)
    fake.fail("ncclCommRegister", 2)
    with pytest.raises(pycomm.CommError, match=r"NCCL 2.30.3 failed: ncclCommRegister: ncclSystemError") as caught:
        registered.register(x, alone)
    with pytest.raises(pycomm.CommError) as again:  # others may have registered: no operation may follow
        alone.all_reduce(on_device(np.ones(3, np.float32)), "sum", **NOW)
    assert str(again.value) == str(caught.value)
    alone.close()


def test_memory_that_a_graph_knows_stays(fake: Fake, waits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = transports(1)
    x = registered.empty((COUNT,), torch.float32, GPU)
    with monkeypatch.context() as context:
        context.setattr(registered, "is_capturing", lambda: True)
        registered.register(x, alone)
    del x
    gc.collect()
    registered.reclaim()
    assert calls(fake, "ncclMemFree") == 0
    registered._in_graphs.clear()
    alone.close()


def test_every_operation_registers(fake: Fake, one_rank_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(gpu, "register", lambda array, transport: seen.append((array, type(transport))))
    x, out = on_device(np.ones(4, np.float32)), on_device(np.ones(4, np.float32))
    with pycomm.Communicator(timeout=20) as communicator:
        communicator.all_reduce(x)
        communicator.all_gather(out, x)
        assert seen == [(array, nccl.NcclTransport) for array in (x, out, x)]
        assert communicator.channel.registered_bytes == 0
