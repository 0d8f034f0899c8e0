"""What code beside pycomm relies on: reads before writes, what Gloo's futures hold, DDP's hooks in C++, devices."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as torch_c10d
from torch.distributed import checkpoint
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.backend.test_errors import on_pycomm
from tests.backend.worlds import BACKEND, on_world, world
from tests.on_ranks import Pools

SIZE = 3

# Tensors that are read and written.


def numbers(count: int = 4 * SIZE) -> torch.Tensor:
    return torch.arange(float(count)) + 100 * dist.get_rank()


def rows_of(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.view(SIZE, -1))


def all_to_all_in_place(x: torch.Tensor) -> None:
    dist.all_to_all_single(x, x)


def all_to_all_of_overlapping_ranges(x: torch.Tensor) -> None:
    dist.all_to_all_single(x[:9], x[2:11])


def all_to_all_in_place_by_sizes(x: torch.Tensor) -> None:
    sizes = [SIZE + 1] * SIZE
    dist.all_to_all_single(x, x, sizes, sizes)


def all_to_all_of_a_list_in_place(x: torch.Tensor) -> None:
    dist.all_to_all(rows_of(x), rows_of(x))


def all_to_all_of_a_list_turned_round(x: torch.Tensor) -> None:
    dist.all_to_all(rows_of(x)[::-1], rows_of(x))


def gather_to_a_list_with_its_own_tensor(x: torch.Tensor) -> None:
    """Everyone gives the first row, which is only rank 0's own part."""
    dist.all_gather(rows_of(x), rows_of(x)[0])


def gather_into_a_tensor_in_place(x: torch.Tensor) -> None:
    dist.all_gather_into_tensor(x, rows_of(x)[dist.get_rank()])


def gather_into_a_tensor_what_lies_elsewhere_in_it(x: torch.Tensor) -> None:
    dist.all_gather_into_tensor(x, x[1:5])


def gather_on_the_root(x: torch.Tensor) -> None:
    dist.gather(rows_of(x)[1], rows_of(x) if dist.get_rank() == 0 else None, dst=0)


def scatter_to_an_other_row(x: torch.Tensor) -> None:
    dist.scatter(rows_of(x)[2], rows_of(x) if dist.get_rank() == 0 else None, src=0)


def reduce_scatter_into_a_row(x: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(rows_of(x)[0], x)


def reduce_scatter_a_list_into_its_first(x: torch.Tensor) -> None:
    dist.reduce_scatter(rows_of(x)[0], rows_of(x))


def reduce_scatter_one_tensor_for_all(x: torch.Tensor) -> None:
    dist.reduce_scatter(rows_of(x)[0], [rows_of(x)[0]] * SIZE)


CALLS = {call.__name__: call for call in vars().copy().values() if getattr(call, "__annotations__", {}).get("x")}
CALLS = {name: call for name, call in CALLS.items() if name != "rows_of"}


class Copying:
    """torch.distributed's functions with inputs that are copies."""

    def __getattr__(self, name: str) -> Any:
        call = getattr(torch.distributed, name)

        def copied(out: Any, x: Any = None, *rest: Any, **options: Any) -> Any:
            if name == "gather":
                return call(out.clone(), x, *rest, **options)
            given = [one.clone() for one in x] if isinstance(x, list) else x if x is None else x.clone()
            return call(out, given, *rest, **options)

        return copied if name in {"all_to_all", "all_to_all_single"} or "gather" in name or "scatter" in name else call


@pytest.mark.parametrize("name", CALLS)
@on_world(SIZE)
def test_what_is_written_may_overlap_what_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, wanted = numbers(), numbers()
    CALLS[name](x)
    monkeypatch.setitem(globals(), "dist", Copying())
    CALLS[name](wanted)
    monkeypatch.undo()
    assert torch.equal(x, wanted)
    assert dist.get_rank() != 0 or not torch.equal(x, numbers())


# Futures.


def shape_of(value: Any) -> Any:
    return [shape_of(each) for each in value] if isinstance(value, (list, tuple)) else tuple(value.shape)


@on_world(2)
def test_futures_of_gathers_hold_a_tensor_of_each_rank() -> None:
    group: Any = dist.group.WORLD
    x, y = torch.full((2,), float(dist.get_rank())), torch.ones(3)
    flat, rows = torch.empty(4), torch.empty(4, 3)
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(2)]
    root = [torch.empty(2) for _ in range(2)] if dist.get_rank() == 0 else None
    works: list[tuple[Any, Any]] = [
        (dist.all_gather([torch.empty(2) for _ in range(2)], x, async_op=True), [(2,), (2,)]),
        (dist.all_gather_into_tensor(flat, x, async_op=True), [(2,), (2,)]),
        (dist.all_gather_into_tensor(rows, torch.ones(2, 3), async_op=True), [(2, 3), (2, 3)]),
        (group.allgather_coalesced(lists, [x, y]), [[(2,), (3,)]] * 2),
        (group.allgather_into_tensor_coalesced([torch.empty(4), torch.empty(6)], [x, y]), [[(2,), (3,)]] * 2),
        (dist.gather(x, root, dst=0, async_op=True), [] if root is None else [(2,), (2,)]),
    ]
    for work, shapes in works:
        work.get_future().wait()
        assert shape_of(work.get_future().value()) == shapes
    assert [part.tolist() for part in works[1][0].get_future().value()] == [[0.0, 0.0], [1.0, 1.0]]
    if BACKEND != "gloo":  # whose sizes must fit along the first dimension
        work = dist.all_gather_into_tensor(torch.empty(1, 4), x, async_op=True)
        work.get_future().wait()
        assert [part.tolist() for part in work.get_future().value()] == [[[0.0, 0.0]], [[1.0, 1.0]]]


# DistributedDataParallel's hooks in C++.


def trained(backend: str, hook: Any) -> list[torch.Tensor]:
    with world(backend):
        torch.manual_seed(0)
        inner = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        model = DistributedDataParallel(inner, bucket_cap_mb=0.001)
        model._register_builtin_comm_hook(hook)
        for step in range(3):
            model.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x).square().sum().backward()
        found = [param.grad.clone() for param in inner.parameters() if param.grad is not None]
        del model
    return found


@pytest.mark.parametrize("hook", ["ALLREDUCE", "FP16_COMPRESS"])
@on_world(2)
def test_hooks_of_ddp_in_cpp(hook: str) -> None:
    kind = getattr(torch_c10d.BuiltinCommHookType, hook)
    found, wanted = trained(BACKEND, kind), trained("gloo", kind)
    assert len(found) == 4
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-3)


def lose_a_rank() -> str:
    on_pycomm()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model._register_builtin_comm_hook(torch_c10d.BuiltinCommHookType.FP16_COMPRESS)
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.CommError, match="rank 1") as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.skipif(BACKEND != "pycomm", reason="its error")
def test_a_rank_that_dies_under_a_hook_in_cpp_is_an_error(new_ranks: Pools) -> None:
    outcome = new_ranks(2).outcomes(lose_a_rank)[0]
    assert outcome.error is None, outcome.trace
    assert "died" in outcome.result


# Devices.


@on_world(2)
def test_sharded_tensors_are_gathered_on_the_cpu_where_there_is_no_gpu() -> None:
    spec: Any = ChunkShardingSpec(dim=0, placements=[f"rank:{p}/cpu" for p in range(2)])
    out = torch.empty(4, 4) if dist.get_rank() == 0 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.cuda.device_count() == 0:
            sharded_tensor.ones(spec, 4, 4).gather(dst=0, out=out)
            assert out is None or out.sum().item() == 16.0


@on_world(2)
def test_sharded_tensors_are_saved_and_loaded_in_other_shards(tmp_path: Path) -> None:
    """What torch's own tests of checkpoints in the file system do."""
    dcp: Any = checkpoint
    plans: list[Any] = [ChunkShardingSpec(dim=0, placements=[f"rank:{p}" for p in order]) for order in ("01", "0110")]
    for saved, loaded in itertools.permutations(plans, 2):
        torch.manual_seed(dist.get_rank())
        before: Any = sharded_tensor.rand(saved, 10, 20)
        after: Any = sharded_tensor.zeros(loaded, 10, 20)
        state: dict[str, Any] = {"plain": torch.ones(3), "text": "some"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"sharded": before, **state}, storage_writer=dcp.FileSystemWriter(tmp_path, overwrite=True))
            state = {"plain": torch.zeros(3), "text": ""}
            dcp.load({"sharded": after, **state}, storage_reader=dcp.FileSystemReader(tmp_path))
            outs: list[Any] = [torch.zeros(10, 20) if dist.get_rank() == 0 else None for _ in range(2)]
            for tensor, out in zip((before, after), outs, strict=True):
                tensor.gather(out=out)
        assert state["plain"].tolist() == [1.0] * 3
        if dist.get_rank() == 0:
            assert outs[0].any()
            assert torch.equal(*outs)


@pytest.mark.skipif(BACKEND != "pycomm", reason="of pycomm's own")
@pytest.mark.parametrize(("count", "wanted"), [(0, ["cpu"]), (2, ["cpu", "cuda"])])
def test_it_serves_cuda_where_there_is_a_gpu(count: int, wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is told when it makes a group: a script may choose its GPUs after its imports."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert list(dist.BackendConfig(dist.Backend("pycomm")).get_device_backend_map()) == wanted
