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
from tests.transport.nccl_ranks import NOW, Fake, on_device, on_ranks, requires_emulator, run_ranks
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
    for array in (x[1:], x[:-1], torch.empty(COUNT), on_device(np.zeros(COUNT))):
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
    monkeypatch.setattr(nccl, "why_not_registered", lambda **_: "it is too old" if is_rank(1) else "")
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


def symmetric(count: int = COUNT) -> torch.Tensor:
    return registered.empty((count,), torch.float32, GPU, symmetric=True)


def sum_up(members: list[Any], arrays: list[torch.Tensor]) -> None:
    """Register the arrays, one of each rank, and add them up."""
    from tests.emulator.arrays import DeviceArray  # not without the emulator

    def run(rank: int) -> None:
        registered.register(arrays[rank], members[rank])
        members[rank].all_reduce(DeviceArray(arrays[rank], rank), "sum", **NOW)

    run_ranks(len(members), run)


def test_all_ranks_make_a_window_and_none_ends_it_alone(fake: Fake, waits: list[int]) -> None:
    members = transports(2)
    assert [member.has_windows for member in members] == [True, True]
    first = [symmetric().fill_(rank + 1) for rank in range(2)]
    for rank, member in enumerate(members):
        registered.register(first[rank][:2], member)  # a part, of which each rank may have another
    for _ in range(2):
        sum_up(members, first)
    assert all(bool((x == 6).all()) for x in first)
    assert (calls(fake, "ncclCommWindowRegister"), calls(fake, "ncclCommRegister")) == (2, 0)
    assert [(each.windows.num_bytes, each.registered_bytes) for each in members] == [(BYTES, BYTES)] * 2
    kept = []
    for ended in (0, 2):  # rank 0 drops its first message, then rank 1
        del first[0]
        gc.collect()
        kept.append([symmetric() for _ in members])  # looks for memory that has become free
        sum_up(members, kept[-1])
        assert (calls(fake, "ncclCommWindowDeregister"), calls(fake, "ncclMemFree")) == (ended, ended)
    kept.clear()
    gc.collect()
    registered.reclaim()
    assert calls(fake, "ncclMemFree") == 2
    for member in members:
        member.close()
    assert calls(fake, "ncclMemFree") == 6
    assert fake.misuses() == 0


def test_windows_of_other_sizes_are_an_error_on_all_ranks(fake: Fake, waits: list[int]) -> None:
    members = transports(2)
    arrays = [symmetric(COUNT + rank) for rank in range(2)]
    for error in on_ranks(2, lambda rank: registered.register(arrays[rank], members[rank])):
        assert isinstance(error, ValueError)
        assert str(error) == f"symmetric memory has [{BYTES}, {BYTES + 4}] bytes on the ranks, wanted the same on all"
    assert calls(fake, "ncclCommWindowRegister") == 0
    for member in members:
        member.close()


@pytest.mark.parametrize(
    ("code", "value", "why"),
    [
        (22605, None, "NCCL is 2.26.5, wanted 2.29.7 or newer"),
        (22809, None, "NCCL is 2.28.9, wanted 2.29.7 or newer"),  # its kernels would not end when a rank is lost
        (22907, None, ""),
        (23003, "0", "PYCOMM_NCCL_WINDOWS=0"),
    ],
)
def test_without_windows_each_rank_registers(
    fake_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waits: list[int],
    code: int,
    value: str | None,
    why: str,
) -> None:
    library = in_version(fake_library, code, tmp_path)
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", str(library))
    if value is not None:
        monkeypatch.setenv("PYCOMM_NCCL_WINDOWS", value)
    assert nccl.why_not_registered(symmetric=True) == why
    members, arrays = transports(2), [symmetric() for _ in range(2)]
    sum_up(members, arrays)
    assert [member.windows.num_bytes for member in members] == [0 if why else BYTES] * 2
    assert [member.registered_bytes for member in members] == [BYTES] * 2
    del arrays
    for member in members:
        member.close()


def test_a_rank_that_makes_no_window_is_missed(fake: Fake, waits: list[int]) -> None:
    """The ranks have agreed on it, and one is lost before NCCL hears of it."""
    members = transports(2)
    members[0].windows._timeout = 0.5
    members[1]._group.close("it is lost")
    arrays = [symmetric() for _ in range(2)]
    errors = on_ranks(2, lambda rank: registered.register(arrays[rank], members[rank]))
    assert "register_memory: timed out: NCCL could not start it: a rank is missing" in str(errors[0])
    assert all(isinstance(error, pycomm.CommError) for error in errors)
    for member in members:
        member.close()


@pytest.mark.behavior(
    "Starting and launching",
    "`no memory is registered with NCCL`, `messages are registered with NCCL, but are no symmetric windows`",
    "Same results, slower. The brackets say what is too old or turned off.",
)
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (21805, "no memory is registered with NCCL, which copies through buffers of its own (rank 0: NCCL is 2.18.5, "),
        (
            22809,
            "messages are registered with NCCL, but are no symmetric windows: its usual kernels send them (rank 0: ",
        ),
        (23003, ""),
    ],
)
def test_what_nccl_is_too_old_for_is_in_the_log_once(
    fake_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waits: list[int],
    caplog: pytest.LogCaptureFixture,
    code: int,
    says: str,
) -> None:
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", str(in_version(fake_library, code, tmp_path)))
    with caplog.at_level("INFO", logger="pycomm"):
        members = transports(2)
    lines = [record.getMessage() for record in caplog.records if "registered" in record.getMessage()]
    assert len(lines) == bool(says)
    assert all(says in line for line in lines)
    for member in members:
        member.close()


@pytest.mark.behavior(
    "Starting and launching",
    "`NCCL has started, for torch, without NCCL_LAUNCH_ORDER_IMPLICIT=1`",
    "NCCL reads it once. Write `NCCL_LAUNCH_ORDER_IMPLICIT=1 torchrun ...`.",
)
@pytest.mark.parametrize(
    ("driver", "value", "is_told"), [(12030, None, True), (12020, None, False), (13000, "0", False)]
)
def test_an_order_that_comes_too_late_is_in_the_log(
    driver: int, value: str | None, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pycomm._native.cuda_driver_version", lambda: driver)
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", value)
    nccl.tell_of_late_order()
    assert ("without NCCL_LAUNCH_ORDER_IMPLICIT=1" in caplog.text) == is_told
