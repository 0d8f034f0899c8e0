"""Private names of torch: each does what pycomm needs of it, and only one file uses any.

`nox -s newest_torch` runs this on the newest release, to find out early what has changed.
"""

from __future__ import annotations

import ast
import copy
import os
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from pycomm import torch_internals
from pycomm.torch_internals import tensors, wrappers
from tests.on_ranks import on_ranks

PACKAGE = Path(torch_internals.__file__).parents[1]
OURS = re.compile(r"_pycomm|_native$|^__\w+__$")
PRIVATE = {
    "_version",
    "_use_count",
    "_cdata",
    "_is_flat_param",
    "_fsdp_flattened",
    "_in_backward_optimizers",
    "_execution_engine",
    "_post_accumulate_grad_hooks",
    "_modules",
    "_buffers",
    "_parameters",
    "_active_ddp_module",
    "_conv_forward",
    "_comm_hooks",
    "_get_zeros_like_grad_buckets",
    "_join_config",
    "_divide_by_initial_world_size",
    "_get_fsdp_state",
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_all_reduce_hook",
    "_is_hsdp",
    "_opt_called",
    "_wrapped_by_lr_sched",
    "_step_supports_amp_scaling",
    "_is_avx512_bf16_supported",
    "_is_amx_tile_supported",
    "_new_process_group_helper",
    "_get_process_group_store",
    "_world",
    "_PipelineScheduleRuntime",
    "_ComputationType",
    "_Action",
    "_prepare_schedule_with_comms",
    "_loss_fn",
    "_spec",
    "_local_tensor",
    "_forward_hooks",
    "_forward_pre_hooks",
}


def private_names(path: Path) -> set[str]:
    """Return the private names that a file takes from torch: attributes, imports, and names in strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {part for part in parts if part.startswith("_")}
        elif isinstance(node, ast.Attribute):
            root = ast.unparse(node.value).split(".")[0]
            public_operation = node.attr.startswith(("_foreach_", "_fused_"))
            if (node.attr in PRIVATE and root != "self") or (
                node.attr.startswith("_") and root in ("torch", "dist") and not public_operation
            ):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            found.add(str(node.value))
    return {name for name in found if not OURS.search(name)}


def test_only_one_file_uses_private_names() -> None:
    users = {
        path.relative_to(PACKAGE).parts[0]: names for path in PACKAGE.rglob("*.py") if (names := private_names(path))
    }
    assert users.keys() == {"torch_internals"}, users


def test_every_name_is_tested_here() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_torch_*.py"))
    package = torch_internals.__name__
    names = [
        name
        for name, value in vars(torch_internals).items()
        if getattr(value, "__module__", None) and value.__module__.startswith(package) and not name.startswith("_")
    ]
    assert len(names) > 50
    assert [name for name in names if f"torch_internals.{name}" not in source] == []
    names = [name for name, value in vars(wrappers).items() if getattr(value, "__module__", "") == wrappers.__name__]
    assert len(names) > 5
    assert [name for name in names if not name.startswith("_") and f"wrappers.{name}" not in source] == []


def test_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3)
    before = torch_internals.version_of(x)
    x.add_(1.0)
    assert torch_internals.version_of(x) == before + 1
    assert torch_internals.versions_of([x, None]) == [before + 1, 0]
    for notes_many in (True, False):
        monkeypatch.setattr(tensors, "_NOTES_MANY", notes_many)
        torch_internals.note_writes([x, torch.zeros(1)])
    assert torch_internals.version_of(x) == before + 3
    assert torch_internals.uses_outside_python(x) == 1
    kept = x.__dlpack__()
    assert torch_internals.uses_outside_python(x) + torch_internals.storage_uses(x) > 2
    del kept
    uses = torch_internals.storage_uses(x)
    view = x[1:]
    assert torch_internals.storage_uses(x) == uses + 1
    del view
    assert torch_internals.storage_uses(x) == uses


def test_parameters_that_others_own() -> None:
    param = nn.Parameter(torch.zeros(3))
    assert not torch_internals.is_flat_parameter(param)
    assert not torch_internals.is_flattened(param)
    assert not torch_internals.steps_in_backward(param)
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

    assert torch_internals.is_flat_parameter(FlatParameter(torch.zeros(3)))
    _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.1})
    assert torch_internals.steps_in_backward(param)


def test_autograd_tells_what_it_does() -> None:
    assert torch_internals.current_graph_task() == -1
    assert torch_internals.calls_hooks_of_running_nodes(), "it tells when reentrant checkpointing has ended"
    assert torch_internals.current_node() is None
    assert not torch_internals.compiles_autograd()
    param = nn.Parameter(torch.ones(3))
    seen: list[int | str] = []

    def hook(_: torch.Tensor) -> None:
        seen.append(torch_internals.current_graph_task())
        assert torch_internals.current_node() is not None
        torch_internals.queue_final_callback(lambda: seen.append("end"))

    handle = param.register_post_accumulate_grad_hook(hook)
    assert list(torch_internals.accumulation_hooks(param).values()) == [hook]
    (param * 2).sum().backward()
    assert seen[0] != -1
    assert seen[1:] == ["end"]
    handle.remove()
    assert not torch_internals.accumulation_hooks(param)


def test_the_current_stream() -> None:
    if torch.cuda.is_available():
        assert torch_internals.raw_stream(0) == torch.cuda.current_stream(0).cuda_stream
    else:
        with pytest.raises((AssertionError, RuntimeError)):
            torch_internals.raw_stream(0)


def test_modules() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3))
    half = nn.Module.__new__(nn.Module)
    assert list(torch_internals.parts_of(half)) == [half]
    assert list(torch_internals.parameters_of(half)) == []
    twice = nn.Sequential(module, module)
    assert list(torch_internals.parts_of(twice)) == list(twice.modules())
    assert set(torch_internals.parameters_of(twice)) == set(twice.parameters())
    assert torch_internals.children_of(module)["0"] is module[0]
    assert torch_internals.children_of(nn.Module.__new__(nn.Module)) == {}
    assert torch_internals.uncompiled(torch.compile(module, backend="eager")) is module  # type: ignore[arg-type]
    assert torch_internals.uncompiled(module) is module
    assert set(torch_internals.buffers_of(module[0])) == {"running_mean", "running_var", "num_batches_tracked"}
    layer, x = nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular", bias=False), torch.randn(1, 2, 5)
    torch.testing.assert_close(torch_internals.convolve(layer, x, layer.weight[:2], None), layer(x)[:, :2])


@pytest.mark.usefixtures("one_rank_group")
def test_the_forward_of_ddp() -> None:
    inside = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.append(torch_internals.active_ddp_module())
            return super().forward(x)

    wrapped = DistributedDataParallel(Looks(2, 2))
    wrapped(torch.ones(1, 2))
    assert inside == [wrapped]
    assert torch_internals.active_ddp_module() is None


@pytest.mark.parametrize("under_scheduler", [True, False])
def test_a_step_in_the_place_of_the_optimizers_own(under_scheduler: bool) -> None:
    param, calls = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0) if under_scheduler else None
    assert (torch_internals.wrapped_by_scheduler(optimizer.step) is not None) == under_scheduler
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    torch_internals.replace_step(optimizer, lambda _, closure: calls.append(closure), under_scheduler)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()  # warns, which is an error here, where it does not find its marks
    assert calls == ["hook", None]
    param.grad = torch.ones(1)
    torch_internals.unhooked_step(torch.optim.SGD)(optimizer)
    assert calls == ["hook", None]
    assert param.item() == 0.0


def test_hooks_of_a_step_change_places() -> None:
    optimizer, called = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), list[int]()
    handles = [optimizer.register_step_pre_hook(lambda *_, i=i: called.append(i)) for i in range(3)]
    torch_internals.move_hook(handles[0], last=True)
    torch_internals.move_hook(handles[2], last=False)
    optimizer.step()
    assert called == [2, 1, 0]


@pytest.mark.parametrize("before", [None, True])
def test_grad_scaler_leaves_its_factor_to_the_step(before: bool | None) -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    if before is not None:
        vars(optimizer)["_step_supports_amp_scaling"] = before
    undo = torch_internals.leave_scale_to_step(optimizer)
    taken = []
    torch_internals.replace_step(optimizer, lambda o, _: taken.append(torch_internals.take_scale(o)), False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert [scale.item() for scale, _ in taken if scale is not None] == [8.0]
    assert [found.item() for _, found in taken if found is not None] == [0.0]
    assert param.grad is not None
    assert param.grad.item() == 8.0  # not divided
    assert torch_internals.take_scale(optimizer) == (None, None)
    torch_internals.undo_leave_scale_to_step(optimizer, undo)
    assert vars(optimizer).get("_step_supports_amp_scaling") == before


def test_storages() -> None:
    x = torch.arange(3000.0)
    views, storage = x.split(1000), x.untyped_storage()
    identity, address = torch_internals.storage_identity(storage), x.data_ptr()
    assert identity == torch_internals.storage_identity(views[2].untyped_storage())
    assert identity != torch_internals.storage_identity(torch.zeros(1).untyped_storage())
    watch = torch_internals.StorageWatch(storage)
    with torch_internals.move_to_shared_mapping(storage) as mapped:
        assert mapped == x.data_ptr() != address
        assert mapped % 4096 == 0
    assert views[1].data_ptr() == mapped + 4000  # all views moved along
    assert torch.equal(torch.cat(views), torch.arange(3000.0))
    assert torch_internals.storage_identity(storage) == identity
    descriptor, _ = storage._share_fd_cpu_()
    assert os.fstat(descriptor).st_rdev == os.stat(os.devnull).st_rdev  # nothing for other processes to map
    assert not watch.is_over()
    del x, views, storage
    assert watch.is_over()


def test_works_in_python() -> None:
    class Ended(torch_internals.TorchWork):
        def wait(self, timeout: Any = None) -> bool:
            return True

    assert Ended().wait()


@pytest.mark.usefixtures("one_rank_group")
def test_process_groups() -> None:
    world = dist.group.WORLD
    assert world is not None
    store = torch_internals.store_of(world)
    assert isinstance(store, torch_internals.Store)
    torch_internals.PrefixStore("pycomm", store).set("key", "value")
    assert not isinstance(torch_internals.root_store(store), torch_internals.PrefixStore)
    assert torch_internals.backend_of(world, torch.device("cpu")) is not None
    assert torch_internals.backend_of(world, torch.device("meta")) is None
    assert torch_internals.timeout_of(world) == timedelta(minutes=30)
    assert torch_internals.has_default_group_only(but="/pycomm/")
    made = torch_internals.make_process_group(store, 0, [0], "gloo", "pycomm/test", 10.0, 9.0)
    assert torch_internals.has_default_group_only(but="pycomm/")
    assert not torch_internals.has_default_group_only(but="/pycomm/")
    assert torch_internals.timeout_of(made) == timedelta(seconds=10)
    torch_internals.number_process_group(made, [0])
    assert dist.get_global_rank(made, 0) == 0
    x = torch.ones(2)
    dist.all_reduce(x, group=made)
    assert torch_internals.owns_process_group(made)
    dist.destroy_process_group(made)
    assert not torch_internals.owns_process_group(made)


@pytest.mark.usefixtures("one_rank_group")
def test_monitored_barrier_takes_groups_of_one_more_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Any] = []
    for opened, expected in (("another", 1), ("gloo", 0)):
        for module in (distributed_c10d, dist):
            monkeypatch.setattr(module, "monitored_barrier", lambda *given: refused.append(given))
        torch_internals.open_monitored_barrier(opened)
        assert dist.monitored_barrier is distributed_c10d.monitored_barrier
        dist.monitored_barrier(timeout=timedelta(seconds=5))
        assert len(refused) == expected
        refused.clear()


@pytest.mark.usefixtures("one_rank_group")
def test_buckets_and_hooks_of_ddp() -> None:
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    model = DistributedDataParallel(nn.Linear(3, 2))
    assert all(torch_internals.uses_outside_python(p) > 1 for p in model.parameters())
    assert wrappers.communication_hooks(model) == []
    wrappers.add_communication_hook(model, 7, hook)
    assert wrappers.communication_hooks(model) == [(hook, 7)]
    assert [type(copied._comm_hooks) for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))] == [
        list
    ] * 2
    assert copy.deepcopy(model)._comm_hooks == []
    (bucket,) = wrappers.zero_buckets(model)
    assert isinstance(bucket, torch_internals.GradBucket)
    assert {id(p) for p in bucket.parameters()} == {id(p) for p in model.parameters()}
    assert bucket.is_last()
    assert not bucket.buffer().any()
    assert not wrappers.divides_by_active_ranks(model)
    for divides_by_all in (True, False):
        with model.join(divide_by_initial_world_size=divides_by_all):
            assert wrappers.divides_by_active_ranks(model) is not divides_by_all


@on_ranks(2)
def test_parts_of_dtensors() -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    plain = nn.Parameter(torch.ones(3))
    assert not torch_internals.is_dtensor(plain)
    assert torch_internals.local_of(plain) is plain
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]))
    assert torch_internals.is_dtensor(param)
    assert all(hasattr(param, name) for name in torch_internals.Sharded.__annotations__)
    local = torch_internals.local_of(param)
    assert not local.requires_grad
    assert local.tolist() == ([[0.0, 1.0], [2.0, 3.0]] if dist.get_rank() == 0 else [[4.0, 5.0]])
    assert local.data_ptr() == torch_internals.local_of(param.detach()).data_ptr()
    view = torch.full_like(local, 2.0)
    around: Any = torch_internals.dtensor_around(view, param)
    assert torch_internals.local_of(around) is view
    param.grad = around  # torch takes it for a gradient of this parameter
    assert isinstance(param.grad, DTensor)
    assert around.full_tensor().tolist() == [[2.0, 2.0]] * 3
    wide: Any = torch_internals.dtensor_around(view.double(), param)
    assert (wide.dtype, wide.shape, wide.placements) == (torch.float64, param.shape, param.placements)


def test_addresses_of_gloo_in_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = torch_internals.PrefixStore("some", HashStore())
    assert not torch_internals.has_joined_gloo(store, 0)
    dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
    assert torch_internals.has_joined_gloo(store, 0)
    assert not torch_internals.has_joined_gloo(store, 1)


@pytest.mark.usefixtures("one_rank_group")
def test_groups_of_sharded_modules() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    fully_shard(model, mesh=mesh["shard"])
    (group,) = wrappers.sharded_groups(model)
    assert isinstance(group, wrappers.ShardedGroup)
    assert all(a is b for a, b in zip(group.params, model.parameters(), strict=True))
    assert group.shapes == [torch.Size([2, 3]), torch.Size([2])]
    assert group.dtype == torch.float32
    assert group.shard_group.size() == 1
    assert (group.hook, group.replicates) == (None, False)
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(seen.append)  # type: ignore[operator]
    assert wrappers.sharded_groups(model)[0].hook is not None
    model(torch.ones(1, 3)).sum().backward()
    assert [tensor.numel() for tensor in seen] == [8]
    other = nn.Linear(3, 2)
    fully_shard(other, mesh=mesh)
    assert wrappers.sharded_groups(other)[0].replicates


def test_works_that_python_has_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """DistributedDataParallel, in C++, waits for works whose Python objects pycomm has released."""
    monkeypatch.setattr("pycomm.collectives.backend.calls.keeps_python_works", lambda: True)
    assert torch_internals.keeps_python_works(), "the releases that do not keep them hang below"
    dist.init_process_group("pycomm", store=HashStore(), rank=0, world_size=1)
    try:
        DistributedDataParallel(nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()
