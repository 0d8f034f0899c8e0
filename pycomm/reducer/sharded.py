"""Parameters that are DTensors over other ranks than those that gradients are averaged over.

Buckets hold gradients of the *local* parts, which are averaged over the ranks that have the same part; ``.grad`` is a
DTensor around the view. Norms, and verdicts on non-finite gradients, are of the whole parameters: see
:mod:`pycomm.optim.shards`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.optim.shards import dimensions_of, is_split_in, matched
from pycomm.torch_internals import Sharded, dtensor_around, is_dtensor, local_of, version_of

_INSTEAD = (
    "FSDP2 averages gradients itself, leave pycomm.attach out; between replicas of a sharded model, "
    "pycomm.ddp.register_hsdp does, with any compression"
)


class LocalGradient:
    """Gradient of this rank's part of a DTensor, in the place of ``param.grad``.

    Args:
        param: the parameter, whose ``.grad`` is a DTensor around the local gradient.
    """

    def __init__(self, param: Sharded) -> None:
        self._param = param

    @property
    def grad(self) -> torch.Tensor | None:
        """Local gradient; assigning one makes it the part of a new DTensor, with the parameter's placements."""
        grad = self._param.grad
        return None if grad is None else local_of(grad)

    @grad.setter
    def grad(self, local: torch.Tensor | None) -> None:
        self._param.grad = None if local is None else dtensor_around(local, self._param)

    @property
    def version(self) -> int:
        """Number of writes to the gradient; those through the DTensor are counted there, others in the local one."""
        grad = self._param.grad
        assert grad is not None
        return version_of(grad) + version_of(local_of(grad))

    def match(self, name: str) -> None:
        """Lay ``.grad`` over the mesh as the parameter is; see :func:`pycomm.optim.shards.matched`.

        Raises:
            RuntimeError: the local gradient has another shape than the local parameter.
        """
        param = self._param
        grad = param.grad
        if grad is None or not is_dtensor(grad):
            return
        if grad.placements != param.placements:
            param.grad = matched(grad, param)
        local = self.grad
        assert local is not None
        if local.shape != local_of(param).shape:
            raise RuntimeError(
                f"the gradient of {name!r} has shape {list(local.shape)} on this rank, its part of the parameter "
                f"{list(local_of(param).shape)}"
            )


def check_sharding(names: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> None:
    """Raise TypeError if a DTensor is laid over ``ranks``, which gradients are averaged over, or FSDP2's.

    Args:
        names: parameters by name.
        ranks: global ranks of the process group.
    """
    for name, param in names.items():
        if is_dtensor(param):
            _check_placements(name, param, set(ranks))
    _refuse_fully_sharded(names)


def _check_placements(name: str, param: Sharded, ranks: set[int]) -> None:
    kind = type(param).__name__
    for dimension, group in dimensions_of(param):
        placement = param.placements[dimension]
        if placement.is_partial():
            raise TypeError(f"parameter {name!r} is a {kind} with the placement {placement}, wanted Shard or Replicate")
        if len(ranks & set(dist.get_process_group_ranks(group))) <= 1:
            continue
        if is_split_in(param, dimension):
            raise TypeError(
                f"parameter {name!r} is a {kind}, sharded over ranks of process_group ({placement}), of which each "
                "has another part: averages over them would mix parts. Under tensor parallelism pass "
                f'process_group=mesh["dp"], the dimension that holds replicas; {_INSTEAD}'
            )
        raise TypeError(
            f"parameter {name!r} is a {kind} whose mesh contains ranks of process_group, as replicas: DTensor itself "
            "combines gradients over its mesh, by rules that depend on the inputs' placements. Lay the model over the "
            'other dimensions alone (mesh["tp"]), and leave process_group to attach'
        )


def _refuse_fully_sharded(names: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError if a living module that was given to ``fully_shard`` has one of the parameters.

    Autograd does not see the gradients of their shards, so no hook would tell when they are there.
    """
    module: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = {id(param): name for name, param in names.items() if is_dtensor(param)}
    if not sharded or module is None:
        return
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), module.FSDPModule):
            continue
        try:
            found = next((sharded[id(p)] for p in candidate.parameters() if id(p) in sharded), None)
        except AttributeError:
            continue  # the collector is taking this module apart: it has no attributes any more
        if found is not None:
            raise TypeError(f"parameter {found!r} is a DTensor, sharded by fully_shard: {_INSTEAD}")
