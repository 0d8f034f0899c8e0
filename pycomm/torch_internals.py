"""Private names of torch that pycomm uses, each behind a function that says what it is used for.

This is the file that a new release of torch may break: tests/test_torch_internals.py checks each name's
behaviour, and that no other file uses any private name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
from torch.autograd import Variable
from torch.autograd.graph import increment_version
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "GradBucket",
    "PrefixStore",
    "ShardedGroup",
    "Store",
    "accumulation_hooks",
    "active_ddp_module",
    "buffers_of",
    "children_of",
    "communication_hooks",
    "compiles_autograd",
    "current_graph_task",
    "current_node",
    "divides_by_active_ranks",
    "has_parts",
    "is_flat_parameter",
    "is_schedulers_wrapper",
    "leave_scale_to_step",
    "make_process_group",
    "note_writes",
    "number_process_group",
    "owns_process_group",
    "queue_final_callback",
    "replace_step",
    "sharded_groups",
    "steps_in_backward",
    "storage_uses",
    "store_of",
    "take_scale",
    "undo_leave_scale_to_step",
    "unhooked_step",
    "uses_outside_python",
    "version_of",
    "zero_buckets",
]

# Tensors.


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of ``tensor``, which every in-place write increments."""
    return tensor._version


_NOTES_MANY = "Iterable" in str(increment_version.__annotations__.get("tensor"))  # torch 2.4 takes one tensor only


def note_writes(tensors: list[torch.Tensor]) -> None:
    """Tell autograd that ``tensors`` were written to, by incrementing their version counters."""
    if _NOTES_MANY:
        increment_version(tensors)
        return
    for tensor in tensors:
        increment_version(tensor)


def uses_outside_python(tensor: torch.Tensor) -> int:
    """Return the number of C++ owners of ``tensor``; a tensor that only Python refers to has one."""
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses


def storage_uses(tensor: torch.Tensor) -> int:
    """Return the number of tensors and other owners that share the storage of ``tensor``."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


def is_flat_parameter(param: torch.Tensor) -> bool:
    """Return whether ``param`` is a flat parameter of FullyShardedDataParallel."""
    return bool(getattr(param, "_is_flat_param", False)) or type(param).__name__ == "FlatParameter"


def steps_in_backward(param: torch.Tensor) -> bool:
    """Return whether an optimizer steps ``param`` as soon as it has its gradient."""
    return hasattr(param, "_in_backward_optimizers")


# Autograd.


def current_graph_task() -> int:
    """Return the id of the backward pass that is running on this thread; -1 outside one."""
    task: int = torch._C._current_graph_task_id()
    return task


def current_node() -> Any:
    """Return the node that autograd is evaluating on this thread; ``None`` outside one."""
    return torch._C._current_autograd_node()


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Queue ``callback``, to be called when the running backward pass has computed everything."""
    Variable._execution_engine.queue_callback(callback)


def accumulation_hooks(param: torch.Tensor) -> MutableMapping[int, Any]:
    """Return the hooks that are called after the gradient of ``param`` was accumulated, by id, in order."""
    hooks: MutableMapping[int, Any] | None = getattr(param, "_post_accumulate_grad_hooks", None)
    return hooks or {}


def compiles_autograd() -> bool:
    """Return whether compiled autograd runs this backward pass."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch.compiler.is_compiling() or bool(getattr(compiled, "in_compiled_autograd_region", False))


# Modules.


def has_parts(module: torch.nn.Module) -> bool:
    """Return whether ``module`` has submodules to list: whether it has been initialised and not torn down."""
    return "_modules" in vars(module)


def children_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """Return the children of ``module`` by name; none if it is only half initialised."""
    children: Mapping[str, torch.nn.Module | None] = vars(module).get("_modules", {})
    return children


def buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the buffers of ``module`` itself, without those of its children, by name."""
    return module._buffers


def active_ddp_module() -> torch.nn.Module | None:
    """Return the DistributedDataParallel module whose forward is running, or ``None``."""
    return DistributedDataParallel._active_ddp_module


# DistributedDataParallel.


def communication_hooks(ddp_model: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return the communication hooks of ``ddp_model`` with their states; built-in ones are not among them."""
    hooks: list[tuple[Callable[..., Any], Any]] = ddp_model._comm_hooks
    return hooks


def zero_buckets(ddp_model: DistributedDataParallel) -> list[GradBucket]:
    """Return the buckets of ``ddp_model`` as they are now, with zeros for gradients."""
    buckets: list[GradBucket] = ddp_model.reducer._get_zeros_like_grad_buckets()
    return buckets


def divides_by_active_ranks(ddp_model: DistributedDataParallel) -> bool:
    """Return whether a ``join(divide_by_initial_world_size=False)`` is in force, so that joined ranks do not count."""
    return bool(ddp_model._join_config.enable) and not ddp_model._divide_by_initial_world_size


# Fully sharded modules (FSDP2).


class ShardedGroup(NamedTuple):
    """Parameters of one ``fully_shard``, whose gradients travel together.

    Attributes:
        params: this rank's parameters, DTensors, in the order in which their gradients lie in what is reduced.
        shapes: shapes of their shards as they lie there, all ranks' alike.
        dtype: dtype in which they are reduced.
        shard_group: the ranks that the parameters are sharded over.
        replicates: whether it averages replicas by itself.
        hook: its all-reduce hook, if it has one.
    """

    params: list[torch.nn.Parameter]
    shapes: list[torch.Size]
    dtype: torch.dtype
    shard_group: dist.ProcessGroup
    replicates: bool
    hook: Callable[[torch.Tensor], None] | None


def sharded_groups(module: Any) -> list[ShardedGroup]:
    """Return what one ``fully_shard`` has made of ``module``: usually one group, none if it has no parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older releases have one at most
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return [
        ShardedGroup(
            params=[each.sharded_param for each in group.fsdp_params],
            shapes=[each.padded_sharded_param_size for each in group.fsdp_params],
            dtype=_reduced_dtype(group),
            shard_group=group.mesh_info.shard_process_group,
            replicates=group._is_hsdp,
            hook=group._all_reduce_hook,
        )
        for group in groups
    ]


def _reduced_dtype(group: Any) -> torch.dtype:
    first = group.fsdp_params[0]
    dtype: torch.dtype = first.mp_policy.reduce_dtype or first.mp_policy.param_dtype or first.sharded_param.dtype
    return dtype


# Optimizers.


def replace_step(
    optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer, Any], Any], under_scheduler: bool
) -> MethodType:
    """Replace the ``step`` of this one object by ``step(optimizer, closure)``, called between the optimizer's hooks.

    Args:
        optimizer: the object to change.
        step: the new step.
        under_scheduler: whether a scheduler has wrapped the old one; it warns if its marks are missing on
            the new one.
    """

    def marked(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if under_scheduler:
            self._opt_called = True  # type: ignore[attr-defined]
        return step(self, closure)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(marked)
    if under_scheduler:
        hooked._wrapped_by_lr_sched = True
    method = vars(optimizer)["step"] = MethodType(hooked, optimizer)
    return method


def is_schedulers_wrapper(step: Any) -> bool:
    """Return whether ``step`` is a learning-rate scheduler's wrapper, by which it notices calls of the original."""
    return hasattr(step, "_wrapped_by_lr_sched")


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``step`` as ``cls`` defines it, without the hooks that torch puts around it."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def leave_scale_to_step(optimizer: torch.optim.Optimizer) -> Any:
    """Make GradScaler hand its factor to ``step`` instead of dividing; return the old mark, to undo this."""
    before = vars(optimizer).get("_step_supports_amp_scaling")
    vars(optimizer)["_step_supports_amp_scaling"] = True
    return before


def undo_leave_scale_to_step(optimizer: torch.optim.Optimizer, before: Any) -> None:
    """Undo :func:`leave_scale_to_step`, which had returned ``before``."""
    del vars(optimizer)["_step_supports_amp_scaling"]
    if before is not None:
        vars(optimizer)["_step_supports_amp_scaling"] = before


def take_scale(optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scale by which GradScaler leaves this step to divide, and a number, not 0 if it found infinities.

    ``None`` where it left none. Both are removed from the optimizer, as torch's own steps would apply them
    again, or refuse them.
    """
    holder: Any = optimizer
    scale, found = getattr(holder, "grad_scale", None), getattr(holder, "found_inf", None)
    if scale is not None:
        holder.grad_scale = None
    if found is not None:
        holder.found_inf = None
    return scale, found


# Process groups.


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the store of ``group``, a part of the one in which its ranks met."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return distributed_c10d._get_process_group_store(group)  # torch < 2.7 has no public function


def make_process_group(
    store: Store, rank: int, ranks: Sequence[int], backend: str, name: str, timeout: float
) -> dist.ProcessGroup:
    """Make a group called ``name`` of the global ``ranks``, which meet in ``store``. Collective among them.

    ``torch.distributed.new_group(..., use_local_synchronization=True)`` is the public function for a group
    that only its members create. It derives the name from the number of groups that the process has: a
    group made after another was destroyed finds the old one's addresses in the store, and members with
    different numbers of groups do not meet. Hence the function beneath it, with a name of our own.
    """
    make: Any = distributed_c10d._new_process_group_helper
    made: dist.ProcessGroup = make(
        len(ranks),
        rank,
        list(ranks) if dist.is_initialized() else [],  # while the default group itself is being made
        dist.Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=timeout),
    )[0]
    return made


def number_process_group(made: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Tell torch the global ranks of the members of ``made``."""
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}


def owns_process_group(group: dist.ProcessGroup) -> bool:
    """Return whether torch still has ``group``: ``destroy_process_group()`` takes all groups with it."""
    return dist.is_initialized() and group in distributed_c10d._world.pg_map
