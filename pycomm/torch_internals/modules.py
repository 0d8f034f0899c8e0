"""Modules, and torch's own wrappers of them."""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel


def children_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """Return the children of ``module`` by name; none if it is only half initialised."""
    children: Mapping[str, torch.nn.Module | None] = vars(module).get("_modules", {})
    return children


def parts_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield ``module`` and all modules inside it, once each, without calling their methods.

    ``modules()`` and ``parameters()`` may be overridden, and fail for a half-initialised module or wrapper (torch's
    OptimizedModule).
    """
    seen, left = {id(module)}, [module]
    while left:
        part = left.pop()
        yield part
        for child in children_of(part).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                left.append(child)


def own_parameters(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the parameters of ``module`` itself by name: torch's own dict, which reflects later changes."""
    parameters: Mapping[str, torch.Tensor | None] = vars(module).get("_parameters", {})
    return parameters


def forward_pre_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """Return the hooks that ``module`` calls before its forward, by id: torch's own dict."""
    hooks: dict[int, Any] = module._forward_pre_hooks
    return hooks


def hooks_of(module: torch.nn.Module) -> list[OrderedDict[int, Any]]:
    """Return torch's own dicts, which take attributes, of the hooks of forward and after ``load_state_dict``.

    There are none if ``module`` is only half initialised.
    """
    names = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
    return [found for name in names if isinstance(found := vars(module).get(name), OrderedDict)]


def parameters_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of ``module`` and of all modules inside it, as :func:`parts_of` finds them."""
    for part in parts_of(module):
        yield from (param for param in own_parameters(part).values() if param is not None)


class Places:
    """Objects in dicts, and whether they are still there. Checked in every forward, so without a Python loop.

    Args:
        dicts: such as :func:`own_parameters` of modules; others than dicts, as in TorchScript's, are left out.
        wanted: returns whether an object counts.
    """

    def __init__(self, dicts: Iterable[Mapping[str, Any]], wanted: Callable[[Any], bool] = lambda _: True) -> None:
        self._dicts = [each for each in dicts if isinstance(each, dict)]
        self._size = sum(map(len, self._dicts))
        found = [(each, key, value) for each in self._dicts for key, value in each.items() if wanted(value)]
        self._holders, self._keys, self._objects = ([entry[i] for entry in found] for i in range(3))

    def are_unchanged(self) -> bool:
        """Return whether each object is where it was, and none was added to the dicts."""
        found = map(dict.get, self._holders, self._keys)
        return not self.has_others_beside() and all(map(operator.is_, found, self._objects))

    def has_others_beside(self) -> bool:
        """Return whether the dicts' sizes have changed."""
        return sum(map(len, self._dicts)) != self._size

    def others(self) -> list[Any]:
        """Return what is in the place of the objects that were replaced."""
        found = zip(map(dict.get, self._holders, self._keys), self._objects, strict=True)
        return [now for now, before in found if now is not before]


def buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the buffers of ``module`` itself, without those of its children, by name."""
    return module._buffers


def keeps_statistics_aside(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a normalisation in training mode, whose backward does not use its buffers.

    It normalises by the batch and only writes running statistics, but autograd saves them and checks their versions.
    """
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` was given to make ``module``, or ``module`` itself."""
    inner = vars(module).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, torch.nn.Module) else module


def compiled_calls(module: torch.nn.Module, begin: Callable[[], None], note: Callable[[Any], None]) -> list[Any]:
    """Call ``begin()`` before each call of ``module`` that torch.compile has compiled, and ``note(output)`` after it.

    Hooks of the module itself are part of the compiled code. Wrappers are found among all objects of the process, which
    takes up to a second: nothing leads from a module to its wrapper.

    Returns:
        Handles with ``remove``; none if the module has not been compiled.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return []
    kind = dynamo.OptimizedModule
    wrappers = [each for each in gc.get_objects() if type(each) is kind and uncompiled(each) is module]
    handles: list[Any] = [each.register_forward_pre_hook(lambda *_: begin()) for each in wrappers]
    handles += [each.register_forward_hook(lambda *given: note(given[-1])) for each in wrappers]
    if module._compiled_call_impl is not None:  # by module.compile()
        handles.append(_NotedCall(module, module._compiled_call_impl, begin, note))
    return handles


class _NotedCall:
    """Call of a module that ``module.compile()`` has compiled, until ``remove()``."""

    def __init__(
        self, module: torch.nn.Module, call: Callable[..., Any], begin: Callable[[], None], note: Callable[[Any], None]
    ) -> None:
        self._module, self._before = module, call

        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            begin()
            output = call(*args, **kwargs)
            note(output)
            return output

        self._call = module._compiled_call_impl = noted

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._call:
            self._module._compiled_call_impl = self._before


def called_parts(module: torch.nn.Module, prefix: str = "") -> list[tuple[str, torch.nn.Module]]:
    """Return the children of ``module`` with their names, and those of its lists and dicts, which nobody calls.

    Modules of TorchScript, which take no hooks, are left out.
    """
    found = []
    for name, child in children_of(module).items():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            found += called_parts(child, f"{prefix}{name}.")
        elif child is not None and not isinstance(child, torch.jit.ScriptModule):
            found.append((f"{prefix}{name}", child))
    return found


def active_ddp_module() -> torch.nn.Module | None:
    """Return the DistributedDataParallel module whose forward is running, or ``None``."""
    return DistributedDataParallel._active_ddp_module


def convolve(
    module: torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return what ``module`` would return for ``x`` if these were its weight and bias."""
    out: torch.Tensor = module._conv_forward(x, weight, bias)
    return out


# DistributedDataParallel.


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
