"""Every private name of torch that pycomm uses, and why there is no public one.

This file is what breaks with a release of torch: tests/test_torch_internals.py asks each name for what
it has to do, and sees to it that no other file uses any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "PrefixStore",
    "Store",
    "accumulation_hooks",
    "active_ddp_module",
    "buffers_of",
    "children_of",
    "compiles_autograd",
    "current_graph_task",
    "current_node",
    "has_parts",
    "is_flat_parameter",
    "is_schedulers_wrapper",
    "leave_scale_to_step",
    "make_process_group",
    "number_process_group",
    "owns_process_group",
    "queue_final_callback",
    "replace_step",
    "steps_in_backward",
    "storage_uses",
    "store_of",
    "take_scale",
    "undo_leave_scale_to_step",
    "unhooked_step",
    "uses_outside_python",
    "version_of",
]

# Tensors.


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of ``tensor``, which every write in place increments."""
    return tensor._version


def uses_outside_python(tensor: torch.Tensor) -> int:
    """Return how many C++ owners ``tensor`` has; a tensor that only Python refers to has one."""
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors, and other owners, share the storage of ``tensor``."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


def is_flat_parameter(param: torch.Tensor) -> bool:
    """Return whether ``param`` is a flat parameter of FullyShardedDataParallel."""
    return bool(getattr(param, "_is_flat_param", False)) or type(param).__name__ == "FlatParameter"


def steps_in_backward(param: torch.Tensor) -> bool:
    """Return whether an optimizer steps ``param`` as soon as its gradient is there."""
    return hasattr(param, "_in_backward_optimizers")


# Autograd.


def current_graph_task() -> int:
    """Return the number of the backward pass that is running on this thread; -1 outside one."""
    task: int = torch._C._current_graph_task_id()
    return task


def current_node() -> Any:
    """Return the node that autograd is evaluating on this thread; ``None`` outside one."""
    return torch._C._current_autograd_node()


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Let ``callback`` be called when the backward pass that is running has computed everything."""
    Variable._execution_engine.queue_callback(callback)


def accumulation_hooks(param: torch.Tensor) -> MutableMapping[int, Any]:
    """Return the hooks that are called when the gradient of ``param`` was accumulated, by id, in order."""
    hooks: MutableMapping[int, Any] | None = getattr(param, "_post_accumulate_grad_hooks", None)
    return hooks or {}


def compiles_autograd() -> bool:
    """Return whether compiled autograd runs this backward pass."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch.compiler.is_compiling() or bool(getattr(compiled, "in_compiled_autograd_region", False))


# Modules.


def has_parts(module: torch.nn.Module) -> bool:
    """Return whether ``module`` has been initialised, and not torn down: whether it can be asked for its parts."""
    return "_modules" in vars(module)


def children_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """Return the direct parts of ``module`` by name; none of one that is half made."""
    children: Mapping[str, torch.nn.Module | None] = vars(module).get("_modules", {})
    return children


def buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the buffers that lie in ``module`` itself, by name."""
    return module._buffers


def active_ddp_module() -> torch.nn.Module | None:
    """Return the DistributedDataParallel module whose forward is running."""
    return DistributedDataParallel._active_ddp_module


# Optimizers.


def replace_step(
    optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer, Any], Any], under_scheduler: bool
) -> MethodType:
    """Let ``step(optimizer, closure)`` be the ``step`` of this one object, with the optimizer's own hooks around it.

    Args:
        under_scheduler: whether a scheduler has wrapped the old one: it looks for its marks, and warns
            where they are gone.
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
    """Return whether ``step`` is what a learning-rate scheduler has put around the optimizer's, to see it called."""
    return hasattr(step, "_wrapped_by_lr_sched")


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``step`` as ``cls`` defines it, without the hooks that torch puts around it."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def leave_scale_to_step(optimizer: torch.optim.Optimizer) -> Any:
    """Let GradScaler hand its factor to ``step`` instead of dividing; returns what undoes it."""
    before = vars(optimizer).get("_step_supports_amp_scaling")
    vars(optimizer)["_step_supports_amp_scaling"] = True
    return before


def undo_leave_scale_to_step(optimizer: torch.optim.Optimizer, before: Any) -> None:
    """Undo :func:`leave_scale_to_step`, which returned ``before``."""
    del vars(optimizer)["_step_supports_amp_scaling"]
    if before is not None:
        vars(optimizer)["_step_supports_amp_scaling"] = before


def take_scale(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Return the scale that GradScaler left to this step to divide by, and whether it found infinities.

    Taken away, since torch's own steps would apply it again, or refuse it.
    """
    holder: Any = optimizer
    scale, found = getattr(holder, "grad_scale", None), getattr(holder, "found_inf", None)
    if scale is not None:
        holder.grad_scale = None
    if found is not None:
        holder.found_inf = None
    return 1.0 if scale is None else float(scale), found is not None and bool(found)


# Process groups.


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the part of the store, in which its ranks met, that belongs to ``group``."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return distributed_c10d._get_process_group_store(group)  # torch < 2.7 has no public way


def make_process_group(group: dist.ProcessGroup, backend: str, name: str, timeout: float) -> dist.ProcessGroup:
    """Make another group of the ranks of ``group``, called ``name``, by ``backend``. Collective among them.

    ``torch.distributed.new_group(..., use_local_synchronization=True)`` is the public way for a group
    whose members alone call. It names the group by how many groups the process has; so a group that
    follows another that was destroyed finds that one's addresses in the store, and members that differ
    in how many groups they have do not meet. Hence the function under it, with a name of our own.
    """
    make: Any = distributed_c10d._new_process_group_helper
    made: dist.ProcessGroup = make(
        group.size(),
        group.rank(),
        dist.get_process_group_ranks(group),
        dist.Backend(backend),
        PrefixStore(name, store_of(group)),
        group_name=name,
        timeout=timedelta(seconds=timeout),
    )[0]
    return made


def number_process_group(made: dist.ProcessGroup, ranks: list[int]) -> None:
    """Tell torch which global ranks the members of ``made`` are."""
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}


def owns_process_group(group: dist.ProcessGroup) -> bool:
    """Return whether torch still has ``group``: ``destroy_process_group()`` takes all groups with it."""
    return dist.is_initialized() and group in distributed_c10d._world.pg_map
