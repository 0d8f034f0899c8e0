"""Wrappers of modules that average gradients: DistributedDataParallel, and ``fully_shard``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel


def communication_hooks(ddp_model: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return the communication hooks of ``ddp_model`` with their states; built-in ones are not among them."""
    hooks: list[tuple[Callable[..., Any], Any]] = ddp_model._comm_hooks
    return hooks


class _CommunicationHooks(list[Any]):
    """Communication hooks that a copy or a pickle of their model does not have: torch does not register them there."""

    def __reduce_ex__(self, protocol: Any) -> tuple[type[list[Any]], tuple[()]]:
        return list, ()


def add_communication_hook(ddp_model: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
    """Register ``hook`` of ``ddp_model`` alone, and not of its copies and pickles."""
    ddp_model._comm_hooks = _CommunicationHooks(ddp_model._comm_hooks)
    ddp_model.register_comm_hook(state, hook)


def zero_buckets(ddp_model: DistributedDataParallel) -> list[GradBucket]:
    """Return the buckets of ``ddp_model`` as they are now, with zeros for gradients."""
    buckets: list[GradBucket] = ddp_model.reducer._get_zeros_like_grad_buckets()
    return buckets


def divides_by_active_ranks(ddp_model: DistributedDataParallel) -> bool:
    """Return whether ``join(divide_by_initial_world_size=False)`` is active, so that joined ranks do not count."""
    return bool(ddp_model._join_config.enable) and not ddp_model._divide_by_initial_world_size


# Fully sharded modules (FSDP2).


class ShardedGroup(NamedTuple):
    """Parameters of one ``fully_shard``, whose gradients travel together.

    Attributes:
        params: this rank's parameters, DTensors, in the order of their gradients in the reduced buffer.
        shapes: shapes of their shards in that buffer, the same on all ranks.
        shard_group: the ranks that the parameters are sharded over.
        division: returns torch's divisor after the hook.
        replicates: whether it averages replicas itself.
    """

    params: list[torch.nn.Parameter]
    shapes: list[torch.Size]
    dtype: torch.dtype
    shard_group: dist.ProcessGroup
    division: Callable[[], float]
    replicates: bool
    hook: Callable[[torch.Tensor], None] | None


def sharded_groups(module: Any) -> list[ShardedGroup]:
    """Return the groups of one ``fully_shard`` of ``module``: usually one, none without parameters."""
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
            division=functools.partial(_division_after_hook, group),
            replicates=group._is_hsdp,
            hook=group._all_reduce_hook,
        )
        for group in groups
    ]


def _division_after_hook(group: Any) -> float:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors  # not before 2.6

    given = {
        "reduce_scatter_group": group.mesh_info.shard_process_group,
        "all_reduce_group": None,
        "reduce_dtype": _reduced_dtype(group),
        "device_type": group.device.type,
        "factor": getattr(group, "gradient_divide_factor", None),
        "force_sum_reduction_for_comms": getattr(group, "force_sum_reduction_for_comms", False),
    }
    known = inspect.signature(_get_gradient_divide_factors).parameters
    factors = _get_gradient_divide_factors(**{name: value for name, value in given.items() if name in known})
    return float(factors[1] or 1.0)


def _reduced_dtype(group: Any) -> torch.dtype:
    first = group.fsdp_params[0]
    dtype: torch.dtype = first.mp_policy.reduce_dtype or first.mp_policy.param_dtype or first.sharded_param.dtype
    return dtype
