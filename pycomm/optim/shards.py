"""Models split over ranks as DTensors or pipeline stages, and the messages that their steps require.

Each rank updates its own part. Norms are of whole parameters, so the squares are summed over the ranks with parts; and
all of these ranks take a step, or none does. As with DTensor's own messages, the thread that calls ``backward()``,
clips or steps sends them, in the order of the program, which is the same on all these ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pycomm.collectives.layout import to_device
from pycomm.torch_internals import Sharded, is_dtensor, local_of

Ranks = tuple[int, ...]
"""Global ranks of a group."""

_stages: WeakKeyDictionary[torch.nn.Module, dist.ProcessGroup] = WeakKeyDictionary()


def note_stages(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Note that ``module`` has this rank's stages of a model, and the other ranks of ``group`` have the others."""
    _stages[module] = group


def dimensions_of(param: Sharded) -> Iterator[tuple[int, dist.ProcessGroup]]:
    """Yield the dimensions of the mesh of ``param`` that have more than one rank, with this rank's group in each."""
    mesh = param.device_mesh
    for dimension in range(mesh.ndim):
        if mesh.size(dimension) > 1:
            yield dimension, mesh.get_group(dimension)


def is_split_in(param: Sharded, dimension: int) -> bool:
    """Return whether the ranks of a dimension of the mesh hold different parts of ``param``."""
    return not param.placements[dimension].is_replicate()


class Shards:
    """Parameters among ``params`` that are DTensors, with the groups of ranks that their parts are on.

    If ``params`` are of stages of a pipeline, the group of all its stages is known as well.
    Plain tensors are the same on all ranks of such groups, and so they are counted once. Groups are kept in the
    order of the parameters, so that all ranks of a group use them in the same order.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._groups: dict[Ranks, dist.ProcessGroup] = {}
        self._split: dict[torch.Tensor, set[Ranks]] = {}
        self._summing: dict[Ranks, dist.ProcessGroup] = {}
        self._stages: dict[Ranks, dist.ProcessGroup] = {}
        params = list(params)
        for module, group in _stages.items():
            if dist.get_world_size(group) > 1 and {id(p) for p in params} & {id(p) for p in module.parameters()}:
                self._stages[tuple(dist.get_process_group_ranks(group))] = group
        for param in params:
            if not is_dtensor(param):
                continue
            self._split[param] = set()
            for dimension, group in dimensions_of(param):
                ranks = tuple(dist.get_process_group_ranks(group))
                self._groups.setdefault(ranks, group)
                if is_split_in(param, dimension):
                    self._split[param].add(ranks)
                    self._summing.setdefault(ranks, group)

    def __bool__(self) -> bool:
        return bool(self._split or self._stages)

    def add_up(self, values: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``values``, one for each of ``params``, summed over the ranks on which their parts are.

        Collective over these ranks: one message for each group, even if none of ``params`` is split over it. Each
        rank adds the same numbers in the same order, so that all have the same bits on any backend.
        """
        for ranks, group in self._summing.items():
            mine = torch.cat([values, values.new_zeros(1)])  # never empty
            total = _from_all(mine, group).sum(0)[:-1]
            is_split = torch.tensor([ranks in self._split.get(param, ()) for param in params], dtype=torch.bool)
            values = torch.where(to_device(is_split, values.device), total, values)
        return values

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values``, of this rank's parameters, over all stages: 0-d, the same bits on all ranks.

        Collective over the ranks of the stages, if there are several.
        """
        sum_ = values.sum()
        for group in self._stages.values():
            sum_ = _from_all(sum_.view(1), group).sum()
        return sum_

    def all_agree(self, finite: torch.Tensor) -> torch.Tensor:
        """Return whether ``finite``, 0-d bool, is true on all ranks that have parts of the DTensors, or other stages.

        Collective over these ranks.
        """
        device = next((local_of(param).device for param in self._split), finite.device)
        failed = (~finite).to(device, torch.float32).view(1)
        for group in (*self._groups.values(), *self._stages.values()):
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        return failed[0] == 0.0


def _from_all(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ``values`` of all ranks of ``group``, stacked. Collective."""
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, values, group=group)
    return torch.stack(everyone)


def matched(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` with the placements of ``param``; a pending sum is reduced, as in FSDP2.

    A replicated parameter has such gradients if each rank has a part of the activations only, like the weight of a norm
    under ``SequenceParallel``. Collective over the parameter's mesh if the placements differ.
    """
    if not is_dtensor(param) or not is_dtensor(grad) or grad.placements == param.placements:
        return grad
    with torch.no_grad():
        moved: torch.Tensor = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return moved


def part_of(param: torch.Tensor) -> str:
    """Return which part of ``param`` this rank has: "0:1/2" is the second half along dimension 0; "" for the whole."""
    if not is_dtensor(param):
        return ""
    parts = []
    for dimension, group in dimensions_of(param):
        if is_split_in(param, dimension):
            placement = param.placements[dimension]
            parts.append(f"{placement.dim}:{group.rank()}/{group.size()}")
    return ",".join(parts)
