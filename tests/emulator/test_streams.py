"""Which stream is told to wait for which, how many kernels run, what is refused; seen through the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pycomm
import pycomm._native as _native
from pycomm import kernels
from tests.kernels.gpus import EMULATED

pytestmark = pytest.mark.skipif(not EMULATED, reason="wants the emulator: .ci/sanitize")

if EMULATED:
    from tests.emulator.arrays import DeviceArray, library, waits


def on_stream(stream: int | None, length: int = 4, device: int = 0) -> Any:
    return DeviceArray(torch.ones(length), device, stream)


def test_one_stream_needs_no_order() -> None:
    waits()
    kernels.pack([on_stream(7), on_stream(7)], on_stream(7, 8))
    assert waits() == []


def test_the_kernel_runs_between_its_producers_and_what_they_do_next() -> None:
    waits()
    kernels.pack([on_stream(9), on_stream(None)], on_stream(7, 8))  # runs on the output's stream
    assert waits() == [(9, 7), (7, 9)]


def test_the_legacy_default_stream() -> None:
    waits()
    kernels.reduce(on_stream(1), [on_stream(1), on_stream(5)])
    assert waits() == [(5, 0), (0, 5)]
    with pytest.raises(ValueError, match="out names stream 0, which the CUDA array interface forbids"):
        kernels.reduce(on_stream(0), [on_stream(0)])


def test_moments_are_asked_and_dropped_on_their_own_device() -> None:
    """On another one, CUDA would make a context there, with hundreds of MiB."""
    before = library().emulator_num_calls_elsewhere()
    moment = _native.CommStream(1).now()
    assert moment.has_passed()
    moment.hold_back(7)
    del moment
    assert library().emulator_num_calls_elsewhere() == before


def test_addresses_are_sent_once() -> None:
    """ResNet-50's number of arrays: one kernel, and one before it that brings the addresses, when they are new."""
    arrays, out, scratch = [on_stream(7, 5) for _ in range(159)], on_stream(7, 795), kernels.Scratch()

    def launches() -> int:
        before = library().emulator_num_launches()
        kernels.pack(arrays, out, scratch=scratch)
        return library().emulator_num_launches() - before

    assert [launches(), launches(), launches()] == [2, 1, 1]
    arrays[80] = on_stream(7, 5)
    assert [launches(), launches()] == [2, 1]


def test_arrays_on_different_devices() -> None:
    with pytest.raises(ValueError, match=r"tensors\[1\] is on cuda:1, out on cuda:0; wanted all arrays on one device"):
        kernels.pack([on_stream(7), on_stream(7, 4, device=1)], on_stream(7, 8))
    with pytest.raises(ValueError, match=r"tensors\[0\] is on cpu, out on cuda:0"):
        kernels.pack([torch.ones(4)], on_stream(7))
    with pytest.raises(ValueError, match="scale is on cuda:1, out on cuda:0"):
        kernels.pack([on_stream(7)], on_stream(7), on_stream(7, 1, device=1))
    with pytest.raises(ValueError, match="scale is on cuda:0, the other arrays on cpu|scale is on cuda:0, out on cpu"):
        kernels.pack([torch.ones(4)], torch.ones(4), on_stream(7, 1))
    kernels.pack([torch.ones(0), on_stream(7)], on_stream(7))  # nothing lies nowhere


def test_arrays_that_are_not_what_they_say() -> None:
    class Liar:
        host = torch.zeros(4)
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (4,),
            "typestr": "<f4",
            "data": (host.data_ptr(), False),
            "version": 3,
        }

    with pytest.raises(ValueError, match=r"tensors\[0\] claims to be in CUDA memory, but is not"):
        kernels.pack([Liar()], on_stream(7))


def test_strided_arrays_are_copied_and_not_written_to() -> None:
    column = DeviceArray(torch.arange(12.0).view(4, 3)[:, 1])
    out = on_stream(None)
    kernels.pack([column], out)
    assert out.host.tolist() == [1.0, 4.0, 7.0, 10.0]
    with pytest.raises(ValueError, match="out is not contiguous, wanted a contiguous array to write to"):
        kernels.pack([on_stream(None)], column)


def test_faults_surface_at_the_call_that_caused_them(monkeypatch: pytest.MonkeyPatch) -> None:
    out, bad = on_stream(None), DeviceArray(torch.tensor([4], dtype=torch.int32))
    kernels.scatter_add(out, bad, on_stream(None, 1))
    with pytest.raises(ValueError, match="in this or an earlier call"):
        kernels.absmax([out])
    monkeypatch.setenv("PYCOMM_SYNC", "1")
    with pytest.raises(ValueError, match=r"scatter_add: indices\[0\] is 4, wanted 0 <= index < 4"):
        kernels.scatter_add(out, bad, on_stream(None, 1))
    kernels.absmax([out])


@pytest.fixture
def alone(fake_nccl: None, one_rank_group: None) -> Iterator[pycomm.Communicator]:
    """A communicator of one rank."""
    with pycomm.Communicator(timeout=20) as communicator:
        yield communicator


def test_collectives_run_between_what_the_array_was_given_and_will_be(alone: pycomm.Communicator) -> None:
    x = on_stream(9)
    waits()
    alone.all_reduce(x, "mean")
    (before, after) = waits()
    ours = before[1]
    assert (before, after) == ((9, ours), (ours, 9))
    assert ours not in (0, 9)
    work = alone.all_reduce(x, async_op=True)
    assert waits() == [(9, ours)]
    assert work is not None
    assert work.is_completed()
    work.wait()
    assert waits() == [(ours, 9)]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch's current stream, a stand-in."""
    now = [9]

    @contextmanager
    def stream(handle: int) -> Iterator[None]:
        before, now[0] = now[0], handle
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, _: handle)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr("pycomm.collectives.transport.gpu.raw_stream", lambda _: now[0])
    return now


def test_a_job_follows_the_current_stream_and_is_waited_for_by_it(alone: pycomm.Communicator, now: list[int]) -> None:
    queue = alone.channel.gpu(0)
    queue._has_torch = True
    used: list[int] = []

    def job() -> None:
        used.append(now[0])
        alone.all_reduce(on_stream(now[0]))

    waits()
    work = queue.call(job)
    ours = used[0]
    assert [(first, then) for first, then in waits() if first != then] == [(9, ours)]
    assert (now, ours in (0, 9)) == ([9], False)
    now[0] = 13
    work.wait()
    assert waits() == [(ours, 13)]


def test_gradients_are_read_between_what_their_streams_had_and_will_have(
    alone: pycomm.Communicator, now: list[int]
) -> None:
    """So their memory may be freed at once. One stream alone, the usual case, waits for nothing."""
    queue = alone.channel.gpu(0)
    waits()
    with queue.reading({9}):
        pass
    assert waits() == []
    with queue.reading({9, 11, 13}):
        before = waits()
    after, marks = waits(), before[0][1]
    assert {marks} & {0, 9, 11, 13} == set()
    assert (set(before[:2]), before[2:]) == ({(11, marks), (13, marks)}, [(marks, now[0])])
    assert (after[:1], set(after[1:])) == ([(9, marks)], {(marks, 11), (marks, 13)})


def test_every_operation(alone: pycomm.Communicator) -> None:
    x, out = DeviceArray(torch.arange(6.0)), on_stream(None, 6)
    alone.all_gather(out, x)
    assert out.host.tolist() == x.host.tolist()
    alone.reduce_scatter(x, out, "max")
    alone.broadcast(x, 0)
    alone.reduce(x, 0)
    alone.all_reduce(x, "sum", algorithm="ring")
    with alone.group(0):
        alone.send(x, 0)
        alone.recv(out, 0)
    assert out.host.tolist() == list(range(6))
    a, b = on_stream(9), on_stream(11)
    waits()
    with alone.group(0):
        alone.send(a, 0)
        alone.recv(b, 0)
        (first, second) = waits()
        ours = first[1]
        assert (first, second) == ((9, ours), (11, ours))  # nobody is told to go on before the group has begun
        with pytest.raises(ValueError, match="async_op=True inside a group"):
            alone.all_reduce(a, async_op=True)
    assert sorted(waits()) == [(ours, 9), (ours, 11)]
    alone.check()
    with pytest.raises(TypeError, match="op 'mean' requires a floating dtype"):
        alone.all_reduce(DeviceArray(torch.ones(3, dtype=torch.int32)), "mean")
    with pytest.raises(ValueError, match="dst is 0, this rank itself"):
        alone.send(torch.ones(3), 0)
