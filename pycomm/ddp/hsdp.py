"""Averages between the replicas of a model that FSDP2 shards, by any compression method."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.agreement import agreed
from pycomm.collectives.broadcasting import broadcast_tensors, share_tensors
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.own_group import group_of
from pycomm.compression.base import Compression
from pycomm.ddp.comparison import PassComparison
from pycomm.ddp.registration import HookSettings, Registration, checked_settings
from pycomm.ddp.replicas import ReplicaSteps, ShardedReplicas
from pycomm.errors import attempt
from pycomm.torch_internals import local_of
from pycomm.torch_internals.wrappers import ShardedGroup, sharded_groups

Modules = dict[torch.nn.Module, tuple[list[str], ShardedGroup]]
"""Modules passed to ``fully_shard``, each with its parameters' names and torch's description of its shards."""


def register_hsdp(
    model: torch.nn.Module,
    process_group: dist.ProcessGroup | DeviceMesh,
    *,
    compression: Compression | str | None = None,
    loss_scaler: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    algorithm: str = "auto",
    per_rank: Iterable[str] = (),
    check_replicas: int = 1000,
    timeout: timedelta | float | None = None,
) -> HsdpHandle:
    """Average gradients between the replicas of a model, each of which is sharded by FSDP2.

    This is the replicate dimension of hybrid sharding::

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh["shard"])
        handle = pycomm.ddp.register_hsdp(model, mesh["replicate"], compression=pycomm.TopK(0.01))

    FSDP reduces and scatters gradients inside each replica. Then pycomm averages them over ``process_group``, by
    ``set_all_reduce_hook`` of every module that was given to ``fully_shard``. Collective over all ranks of the mesh;
    the first replica's parameters and buffers are copied to the others.

    Args:
        model: model whose modules were given to ``fully_shard`` with a mesh of the shard dimension alone.
        process_group: group, or one-dimensional ``DeviceMesh``, of the ranks with the same shard in every replica,
            including this one.
        compression, loss_scaler, algorithm, per_rank, check_replicas, timeout: as for :func:`pycomm.ddp.register`. If a
            gradient is not finite on any rank, all are NaN on all ranks after ``backward()``. DGC's ``weight_decay`` is
            refused.
        optimizer: likewise.

    Returns:
        The handle, which lives as long as ``model``, even if you do not keep it.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError, ValueError: an argument is wrong, modules replicate on their own or have a hook already, or
            the replicas' settings or parameters differ (on every rank of the group). From ``backward()``: as from
            :func:`pycomm.ddp.register`.
    """
    tuning = {"algorithm": algorithm, "per_rank": per_rank, "check_replicas": check_replicas}
    request = attempt(lambda: _checked(model, compression, loss_scaler, optimizer, **tuning))
    communicator = Communicator(process_group, timeout)
    made = [communicator]
    try:
        settings, modules = agreed(communicator.channel.all_gather_bytes, request, "register", _lines)
        communicator.all_reduce(torch.zeros(1), algorithm=algorithm)  # raises if there is no such algorithm
        tensors = [param.to_local() for _, group in modules.values() for param in group.params]  # type: ignore[attr-defined]
        broadcast_tensors(communicator, tensors, src=0)
        share_tensors(communicator, dict(model.named_buffers()), src=0)
        made.append(Communicator(next(iter(modules.values()))[1].shard_group, timeout))
        return HsdpHandle(model, modules, communicator, made[1], settings, group_of(process_group, "process_group"))
    except BaseException:
        for each in made:
            each.close()
        raise


def _checked(
    model: Any, compression: Any, loss_scaler: Any, optimizer: Any, **tuning: Any
) -> tuple[HookSettings, Modules]:
    """Return settings and modules. Raises TypeError or ValueError if an argument is wrong."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, wanted a torch.nn.Module given to fully_shard")
    settings = checked_settings(compression, loss_scaler, optimizer, **tuning)
    if getattr(settings.method, "weight_decay", 0.0):
        raise ValueError(f"{settings.method!r} of sharded parameters: leave weight decay to the optimizer")
    return settings, _modules_of(model)


def _modules_of(model: torch.nn.Module) -> Modules:
    names = {id(param): name for name, param in model.named_parameters()}
    found: Modules = {}
    for where, module in model.named_modules():
        groups = sharded_groups(module) if hasattr(module, "set_all_reduce_hook") else []
        for group in groups:
            _check_group(where or type(model).__name__, group, len(groups))
            found[module] = [names[id(param)] for param in group.params], group
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without sharded parameters, wanted one whose modules were given to "
            "fully_shard (of torch 2.6 or newer)"
        )
    covered = {name for of_module, _ in found.values() for name in of_module}
    missed = [name for name, param in model.named_parameters() if param.requires_grad and name not in covered]
    if missed:
        raise ValueError(f"parameter {missed[0]!r} is not sharded: give the model itself to fully_shard, too")
    if len({group.shard_group for _, group in found.values()}) > 1:
        raise ValueError("modules are sharded over different groups, wanted one mesh for all")
    return found


def _check_group(where: str, group: ShardedGroup, number: int) -> None:
    if number > 1:
        raise ValueError(f"module {where!r} has several meshes (shard_placement_fn), wanted one")
    if group.replicates:
        raise ValueError(
            f"module {where!r} is sharded over a mesh of two dimensions, and averages its replicas itself: give "
            'fully_shard the shard dimension alone, mesh["shard"]'
        )
    if group.hook is not None and not isinstance(group.hook, _PlainMean):
        raise ValueError(f"module {where!r} already has an all-reduce hook: take it out, or remove() its handle, first")
    if any(param.is_meta for param in group.params):
        raise ValueError(f"parameters of module {where!r} are on the meta device, wanted them initialized")


def _lines(checked: tuple[HookSettings, Modules]) -> dict[str, list[str]]:
    """Return lines that must be equal on all replicas."""
    settings, modules = checked
    lines: list[str] = []
    for names, group in modules.values():
        shapes = zip(names, group.params, group.shapes, strict=True)
        lines += [f"{name}: {list(p.shape)} as {list(shape)} {group.dtype}" for name, p, shape in shapes]
    return {"setting": settings.lines(), "parameter": lines}


class _PlainMean:
    """Hook that a handle leaves behind when it is removed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, reduced: torch.Tensor) -> None:
        dist.all_reduce(reduced, group=self._group)
        reduced /= self._group.size()


class HsdpHandle:
    """Handle of the averages between replicas. Created by :func:`pycomm.ddp.register_hsdp`; methods as HookHandle's."""

    def __init__(
        self,
        model: torch.nn.Module,
        modules: Modules,
        communicator: Communicator,
        shard_communicator: Communicator,
        settings: HookSettings,
        group: dist.ProcessGroup,
    ) -> None:
        self._shard_communicator, self._group, self._modules = shard_communicator, group, list(modules)
        params = {name: p for names, group in modules.values() for name, p in zip(names, group.params, strict=True)}
        like = local_of(next(iter(params.values())))
        communicators = [communicator, shard_communicator]
        self._registration = Registration(communicators, settings, like, {}, "another shard, or a sum")
        exchanges = self._registration.exchanges
        shards = [ShardedReplicas(i, each, names, exchanges) for i, (names, each) in enumerate(modules.values())]
        # The host sends the bits, and reads them at once.
        on_host = torch.device("cpu")
        state, whose = self._registration.state, " of the replicas"
        self._comparison = PassComparison(
            model, params, communicator, settings, on_host, state, whose, reads_late=False
        )
        steps = ReplicaSteps(shards, self._registration, self._comparison, shard_communicator)
        for module, each in zip(self._modules, shards, strict=True):
            module.set_all_reduce_hook(functools.partial(steps.average, each))  # type: ignore[operator]

    def stats(self) -> dict[str, Any]:
        """Return the counters since :func:`pycomm.ddp.register_hsdp`.

        Returns:
            ``bytes_sent`` to other replicas, ``steps``, ``wait_seconds`` (in the hooks), ``nonfinite_steps``,
            ``last_nonfinite`` (whose rank counts in the group of replicas), ``num_buckets`` (modules),
            ``transport``, and the method's own, as in ``HookHandle.stats``.
        """
        return self._registration.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that compression carries on *this* rank, to be saved by every rank of the mesh.

        As ``HookHandle.state_dict``, with tensors of the shards' shapes, and two more keys: ``shard`` and
        ``num_shards``. The keys of ``ranks`` are ranks in the group of replicas.
        """
        return {**self._registration.state_dict(), **self._own_shard}

    @property
    def _own_shard(self) -> dict[str, int]:
        return {"shard": self._shard_communicator.rank, "num_shards": self._shard_communicator.size}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], *, strict: bool = True) -> None:
        """Load state that :meth:`state_dict` returned.

        Args:
            state: this rank's own dict, or the list of the dicts of all replicas of this shard: with a different
                number of replicas, residuals and velocities are redistributed so that their sums are kept.
            strict: as for ``HookHandle.load_state_dict``.

        Raises:
            ValueError: it is of another shard or number of shards, or of another rank or world size, or method,
                names or shapes do not match.
        """
        given = [state] if isinstance(state, dict) else list(state)
        for each in given:
            for key, wanted in self._own_shard.items():
                if isinstance(each, dict) and each.get(key) != wanted:
                    raise ValueError(f"state[{key!r}] is {each.get(key)!r}, wanted {wanted}: shards do not change")
        self._registration.load_state_dict(given, strict)

    def remove(self) -> None:
        """Return to torch's plain all-reduce over the same group, and release all resources. Idempotent.

        Call it on all ranks between the same steps. Residuals are lost.
        """
        if self._registration.is_closed:
            return
        self._comparison.remove()
        for module in self._modules:
            module.set_all_reduce_hook(_PlainMean(self._group))  # type: ignore[operator]
        self._registration.close()
