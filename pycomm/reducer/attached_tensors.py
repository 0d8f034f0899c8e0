"""Look at every tensor that ranks are about to have in common: what is sent, what is compared, and what is refused.

| tensor | what becomes of it |
|---|---|
| parameter that is averaged | plain dense memory of a dtype that gradients have, else an error; rank 0's is sent |
| frozen parameter, buffer | rank 0's is sent, bytes of any dtype; of an expanded one, the memory behind it |
| frozen parameter or buffer of several tensors, sparse, quantised | compared, if its bytes can be had; left alone |
| trainable parameter that this optimizer does not have | compared; if they differ each rank keeps its own: a warning |
| what ``ignore`` names | nothing |
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.agreement import check_same_lines
from pycomm.broadcasting import (
    OWN,
    broadcast_parts,
    broadcast_tensors,
    describe_difference,
    differing_memories,
    line_of,
)
from pycomm.communicator import Communicator
from pycomm.optim.shards import dimensions_of, is_split_in, matched
from pycomm.reducer.parameters import ParameterTable
from pycomm.tensor_memory import look_at
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


class AttachedTensors:
    """Tensors of an optimizer and its module, as one rank sees them before the ranks meet.

    Raises:
        TypeError: one of them can be neither sent nor compared yet; it is named.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        averaged = dict(table.named())
        known = {id(param) for param in averaged.values()}
        others = {name: t for name, t in module_tensors(table).items() if id(t) not in known}
        self._own = [name for name, t in others.items() if isinstance(t, torch.nn.Parameter) and t.requires_grad]
        self._memories = {name: look_at(name, t) for name, t in [*averaged.items(), *others.items()]}
        self._averaged = [line_of(name, param, self._memories[name]) for name, param in averaged.items()]
        self._others = [line_of(name, tensor, self._memories[name]) for name, tensor in others.items()]

    def make_equal(self, communicator: Communicator) -> None:
        """Send rank 0's tensors to all ranks, and compare what cannot be sent. Collective.

        Raises:
            ValueError: the ranks' tensors differ in names, order, shapes, dtypes or kinds; or contents do that cannot
                be sent. On every rank, naming the first difference.
        """
        gather = communicator.channel.all_gather_bytes
        check_same_lines(gather, self._averaged, "parameter")
        check_same_lines(gather, self._others, "parameter or buffer outside the optimizer", f"; {OWN}")
        own = dict.fromkeys(self._own)
        compared = [name for name, m in self._memories.items() if name in own or (m.parts and not m.writable)]
        differing = differing_memories(communicator, {name: self._memories[name] for name in compared})
        odd = [name for name in differing if name not in own]
        if odd:
            raise ValueError(f"{describe_difference(odd, differing[odd[0]])}; {OWN}")
        if differing:
            self._table.rank_local = frozenset(differing)
            _warn_of(list(differing))
        stepper = self._table.stepper
        masters = stepper.masters(self._table.ignored.covers)
        parts = [part for name, m in self._memories.items() if m.writable and name not in own for part in m.parts]
        broadcast_parts(communicator, parts, src=0)
        broadcast_tensors(communicator, masters, src=0)
        stepper.restore()


def module_tensors(table: ParameterTable) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the module, without what is ignored or has been found to be rank-local."""
    if table.module is None:
        return {}
    named = [*table.module.named_parameters(), *table.module.named_buffers()]
    return {name: t for name, t in named if name not in table.rank_local and not table.ignores(name, t)}


def _warn_of(names: Sequence[str]) -> None:
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    warnings.warn(
        f"parameters of the module that this optimizer does not have differ between the ranks: {shown}. Each rank "
        "keeps its own. If they are meant to differ, write tuning=pycomm.Tuning(ignore=[names or patterns]); if not, "
        "give them "
        "to the optimizer, attach theirs too, or call pycomm.broadcast_parameters(model) before",
        RuntimeWarning,
        stacklevel=6,
    )
