"""Captures of CUDA graphs, seen through the emulator: nothing of ours spoils one; what cannot be captured says so."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from pycomm import kernels
from pycomm.kernels import arrays
from tests.kernels.gpus import EMULATED
from tests.transport.nccl_ranks import Fake, eventually, stall

pytestmark = pytest.mark.skipif(not EMULATED, reason="wants the emulator: .ci/sanitize")

if EMULATED:
    import pycomm._native as _native
    from tests.emulator.arrays import DeviceArray
    from tests.emulator.graphs import GLOBAL, INVALIDATED, UNJOINED, VALID, capture

WARM_UP = r"is being captured into a CUDA graph, and .*: run it once before the capture \(warm up\)"


def on_stream(values: Any, stream: int | None = 9) -> Any:
    return DeviceArray(torch.as_tensor(values, dtype=torch.float32).clone(), 0, stream)


def ones(length: int = 4) -> Any:
    return on_stream(torch.ones(length))


@pytest.fixture
def fake(fake_nccl_library: Path, fake_nccl: None) -> Iterator[Fake]:
    stand_in = Fake(fake_nccl_library)
    stand_in.reset()
    yield stand_in
    stall(False)
    assert stand_in.misuses() == 0


@pytest.fixture
def alone(fake: Fake, one_rank_group: None) -> Iterator[pycomm.Communicator]:
    """A communicator of one rank."""
    with pycomm.Communicator(timeout=20) as communicator:
        yield communicator


@pytest.fixture
def group(fake: Fake) -> Iterator[Any]:
    """NCCL's communicator alone, of one rank, that has done an all-reduce of four elements."""
    group = _native.NcclGroup(0, 1, 0, _native.nccl_unique_id([]), False, 20.0, [])
    group.all_reduce(ones(), "sum", stream=9, timeout=20.0)
    yield group
    group.close("the test is over")


# The emulator itself: without these, the tests below could not fail.


@pytest.mark.parametrize(
    ("device", "mode", "elsewhere", "state"),  # a device each: no stream lies ready
    [(100, 0, True, 1), (101, 1, True, 0), (102, 1, False, 1), (103, 2, False, 0)],
    ids=["global", "thread-local-elsewhere", "thread-local", "relaxed"],
)
def test_the_emulator_spoils_captures(device: int, mode: int, elsewhere: bool, state: int) -> None:
    """Making a stream is potentially unsafe, as CUDA calls it, and left so on purpose."""
    errors: list[str] = []

    def attempt() -> None:
        try:
            _native.CommStream(device)
        except RuntimeError as error:
            errors.append(str(error))

    with capture(9, mode) as graph:
        if elsewhere:
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()
        else:
            attempt()
    assert graph.state == state
    assert [("cudaErrorStreamCaptureUnsupported" in text) for text in errors] == [True] * (state == INVALIDATED)


def test_the_emulator_minds_what_is_not_joined() -> None:
    ours = _native.CommStream(0)
    with capture() as graph:
        ours.follow(9)
    assert graph.state == UNJOINED
    with capture() as graph:
        ours.follow(9)
        ours.now().hold_back(9)
    assert graph.state == VALID
    before = ours.now()
    with capture() as graph, pytest.raises(RuntimeError, match="cudaErrorStreamCaptureIsolation"):
        before.hold_back(9)
    assert graph.state == INVALIDATED


# Kernels.


def test_a_graph_brings_its_own_table() -> None:
    """Calls between its launches use the same scratch memory for other arrays."""
    scratch, inputs, out = kernels.Scratch(), [on_stream([1.0, 2.0]), on_stream([3.0])], on_stream([0.0, 0.0, 0.0])
    others, other_out = [on_stream([7.0]), on_stream([8.0, 9.0])], on_stream([0.0, 0.0, 0.0])
    kernels.pack(inputs, out, scratch=scratch)
    out.host.zero_()
    with capture() as graph:
        flag = kernels.pack(inputs, out, 2.0, scratch=scratch)  # the graph writes it, too
    assert graph.state == VALID
    assert out.host.tolist() == [0.0, 0.0, 0.0]
    for round in range(3):
        inputs[1].host.fill_(round)
        other_out.host.zero_()
        graph.launch()
        kernels.pack(others, other_out, scratch=scratch)
        assert out.host.tolist() == [2.0, 4.0, 2.0 * round]
        assert other_out.host.tolist() == [7.0, 8.0, 9.0]
    assert bool(flag.host)


def test_scratch_memory_of_a_graph_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it has grown for another call; as long as the Scratch."""
    made: list[weakref.ref[Any]] = []
    allocate = arrays.device_bytes

    def device_bytes(array: Any, num_bytes: int) -> Any:
        memory = allocate(array, num_bytes)
        made.append(weakref.ref(memory))
        return memory

    def alive() -> list[bool]:
        gc.collect()
        return [memory() is not None for memory in made]

    monkeypatch.setattr(arrays, "device_bytes", device_bytes)
    scratch, inputs, out = kernels.Scratch(), [on_stream([1.0]), on_stream([2.0])], on_stream([0.0, 0.0])
    kernels.pack(inputs, out, scratch=scratch)
    kernels.pack([ones() for _ in range(100)], ones(400), scratch=scratch)
    assert alive() == [False, True]
    with capture() as graph:
        flag = kernels.pack(inputs, out, scratch=scratch)
    kernels.pack([ones() for _ in range(300)], ones(1200), scratch=scratch)
    assert alive() == [False, True, True]
    inputs[0].host.fill_(5.0)
    graph.launch()
    assert out.host.tolist() == [5.0, 2.0]
    assert bool(flag.host)
    del scratch
    assert alive() == [False] * 3


def test_scratch_memory_does_not_grow_in_a_capture() -> None:
    scratch, inputs, out = kernels.Scratch(), [ones() for _ in range(50)], ones(200)
    for given, says in ((scratch, r"\d+ bytes are needed, 0 are allocated"), (None, "pass scratch=")):
        with capture() as graph:
            with pytest.raises(RuntimeError, match=f"scratch memory: the stream {WARM_UP}"):
                kernels.pack(inputs, out, scratch=given)
            with pytest.raises(RuntimeError, match=says):
                kernels.pack(inputs, out, scratch=given)
        assert graph.state == VALID
    kernels.pack(inputs, out, scratch=scratch)
    with capture() as graph:
        kernels.pack(inputs, out, scratch=scratch)
    assert graph.state == VALID


def test_cooperative_kernels() -> None:
    """How many blocks they may have is asked in the capture."""
    scratch, x = kernels.Scratch(), on_stream(torch.randn(5000))
    threshold = on_stream([0.0])
    kernels.topk(x, 50, threshold=threshold, scratch=scratch)
    with capture() as graph:
        values, indices = kernels.topk(x, 50, threshold=threshold, scratch=scratch)
    assert graph.state == VALID
    for _ in range(2):
        x.host.copy_(torch.randn(5000))
        graph.launch()
        wanted = x.host.abs().topk(50).indices.sort().values
        assert indices.host.tolist() == wanted.tolist()
        assert torch.equal(values.host, x.host[wanted])


def test_waiting_for_every_kernel_leaves_captures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, x, out = kernels.Scratch(), ones(), ones()
    kernels.pack([x], out, scratch=scratch)
    monkeypatch.setenv("PYCOMM_SYNC", "1")
    with capture() as graph:
        kernels.pack([x], out, scratch=scratch)
    assert graph.state == VALID


FIRST = """
from pycomm import kernels
from pycomm.kernels import arrays
from tests.emulator.graphs import capture
from tests.emulator.test_graphs import on_stream
scratch = kernels.Scratch()
x, out, index = on_stream([1.0]), on_stream([0.0]), None
with capture() as graph:
    try:
        kernels.pack([x], out, scratch=scratch)
    except RuntimeError as error:
        assert "warm up" in str(error), error
print(graph.state)
"""


def test_the_first_kernel_of_a_process() -> None:
    """Memory for faults is allocated then."""
    # The source tree, where the tests are, comes behind the package that is tested.
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", FIRST]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment, cwd="/")
    assert run.stdout.split() == [str(VALID)], run.stderr


# NCCL.


def test_the_watchdog_leaves_captures_alone(group: Any, fake: Fake) -> None:
    """While an operation from before is on the device, it looks every 50 ms."""
    stall(True)
    group.all_reduce(ones(), "sum", stream=7, timeout=20.0)
    with capture(mode=GLOBAL) as graph:
        time.sleep(0.3)
        group.all_reduce(ones(), "sum", stream=7, timeout=20.0)  # this one looks too
        group.check()
    assert graph.state == VALID


def test_a_captured_operation_is_not_looked_after(group: Any, fake: Fake) -> None:
    stall(True)
    with capture() as graph:
        group.all_reduce(ones(), "sum", stream=9, timeout=0.2)
        time.sleep(0.5)
        group.check()
    assert graph.state == VALID
    time.sleep(0.3)
    group.check()
    assert fake.aborts() == 0
    stall(False)
    group.all_reduce(ones(), "sum", stream=9, timeout=20.0)


def test_the_first_operation_of_its_kind(group: Any, fake: Fake) -> None:
    x = ones()
    first: list[Callable[[], None]] = [
        lambda: group.all_reduce(x, "max", stream=9, timeout=20.0),
        lambda: group.all_reduce(ones(400), "sum", stream=9, timeout=20.0),
        lambda: group.broadcast(x, 0, stream=9, timeout=20.0),
    ]
    for call in first:
        with capture() as graph:
            with pytest.raises(RuntimeError, match=f"NCCL has not yet connected for such|{WARM_UP}") as caught:
                call()
            assert not isinstance(caught.value, pycomm.CommError)
        assert graph.state == VALID
        call()
        with capture() as graph:
            call()
        assert graph.state == VALID
    assert fake.aborts() == 0


def test_a_closed_group_whose_graph_lives(group: Any, fake: Fake) -> None:
    """NCCL then waits for the graph: no reason to wait for NCCL."""
    with capture():
        group.all_reduce(ones(), "sum", stream=9, timeout=20.0)
    fake.graph_lives(True)
    started = time.monotonic()
    group.close("")
    assert time.monotonic() - started < 5
    fake.graph_lives(False)
    eventually(lambda: fake.destroys() == 1)
    assert fake.aborts() == 0


def test_a_communicator_is_not_made_in_a_capture(alone: pycomm.Communicator, fake: Fake) -> None:
    x = ones()
    with capture() as graph, pytest.raises(RuntimeError, match=f"first operation of algorithm 'native' .*{WARM_UP}"):
        alone.all_reduce(x)
    assert graph.state == VALID
    assert "ncclCommInitRankConfig" not in fake.words("calls")
    alone.all_reduce(x)
    with capture() as graph, pytest.raises(RuntimeError, match="first operation of algorithm 'ring'"):
        alone.all_reduce(x, algorithm="ring")
    assert graph.state == VALID


def test_collectives_in_a_capture(alone: pycomm.Communicator) -> None:
    x, out = ones(), ones()
    for _ in range(2):
        with alone.group(0):
            alone.send(x, 0)
            alone.recv(out, 0)
        alone.all_reduce(x, "mean")
        alone.all_gather(out, x)
    alone.all_reduce(x, async_op=True)  # nobody waits for it: looked after until it is over
    with capture() as graph:
        alone.all_reduce(x, "mean")
        alone.all_gather(out, x)
        with alone.group(0):
            alone.send(x, 0)
            alone.recv(out, 0)
        work = alone.all_reduce(x, "mean", async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError, match="is_completed: the operation was captured into a CUDA graph"):
            work.is_completed()
        work.wait()
    assert graph.state == VALID
    with capture() as graph:
        work = alone.all_reduce(x, "mean", async_op=True)
    assert graph.state == UNJOINED
    alone.all_reduce(x, "mean")
    alone.check()


def test_schedules_in_a_capture(alone: pycomm.Communicator) -> None:
    """Memory of arrays that are not torch's would be freed before the graph is launched."""
    x = DeviceArray(torch.ones(8, dtype=torch.float16), 0, 9)
    alone.all_reduce(x, "mean", algorithm="halving_doubling")
    with capture() as graph, pytest.raises(RuntimeError, match=f"a schedule: .*wanted a torch tensor|{WARM_UP}"):
        alone.all_reduce(x, "mean", algorithm="halving_doubling")
    assert graph.state == VALID


# What asynchronous operations keep.


def test_arrays_are_kept_until_somebody_waits(alone: pycomm.Communicator) -> None:
    def begin() -> tuple[Any, weakref.ref[Any]]:
        x = ones()
        return alone.all_reduce(x, async_op=True), weakref.ref(x)

    begin()
    stall(True)
    work, array = begin()
    assert array() is not None
    work.wait()
    assert array() is None
    dropped, other = begin()
    del dropped
    assert other() is not None
    begin()
    assert other() is not None
    stall(False)
    begin()
    assert other() is None
